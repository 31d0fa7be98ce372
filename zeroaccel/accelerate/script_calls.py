"""Functions that scripts import from `accelerate.utils` and that need no accelerator; `zeroaccel.utils` exports them.

Batch-size search, unwrapping, saving, progress bars, and a default launch file.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from zeroaccel.accelerate.model_saving import unwrap_model, write_object
from zeroaccel.config.launch.launch_file import FILE_NAME, user_config_folder
from zeroaccel.engine import EngineBase
from zeroaccel.errors import UsageError
from zeroaccel.operations import collectives_of_process

_OUT_OF_MEMORY = (" out of memory.", "CUDNN_STATUS_NOT_SUPPORTED", "DefaultCPUAllocator: can't allocate memory")


# -- memory


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Frees the device memory that torch caches; with `garbage_collection` also the memory of unreachable objects."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def should_reduce_batch_size(exception: Exception) -> bool:
    """Returns True if an error reports that memory ran out."""
    text = str(exception.args[0]) if len(exception.args) == 1 else ""
    return isinstance(exception, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorates a function to call it with a batch size as first argument, and with smaller ones if memory runs out.

    Create the accelerator inside the function, or call its `free_memory` there, to free the memory of the last attempt.
    With several ranks, all must run out of memory at the same size.

    Args:
        starting_batch_size: batch size of the first call.
        reduce_batch_size_fn: returns the next batch size. Defaults to nine tenths of the last.

    Raises:
        TypeError: the caller also passes a batch size.
        RuntimeError: memory runs out even with a batch size of 1.

    Example:
        >>> from zeroaccel.utils import find_executable_batch_size
        >>> @find_executable_batch_size(starting_batch_size=8)
        ... def train(batch_size, epochs):
        ...     if batch_size > 6:
        ...         raise RuntimeError("CUDA out of memory.")
        ...     return batch_size, epochs
        >>> train(3)
        (6, 3)
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    run = function
    size = starting_batch_size

    @functools.wraps(run)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        parameters = list(inspect.signature(run).parameters)
        if len(parameters) < len(args) + 1:
            raise TypeError(
                f"{run.__name__}: find_executable_batch_size passes the first parameter, {parameters[0]}; "
                f"call it with the other {len(parameters) - 1} only"
            )
        clear_device_cache(garbage_collection=True)
        while size > 0:
            try:
                return run(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Outside the handler, because its traceback refers to the tensors of the call.
            clear_device_cache(garbage_collection=True)
            size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(size * 0.9)
        raise RuntimeError(f"{run.__name__}: out of memory even with a batch size of 1")

    return search


# -- models and tensors


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Returns the model inside an engine or inside torch's data-parallel wrappers.

    Args:
        keep_fp32_wrapper: no effect; the engine adds no such wrapper.
        keep_torch_compile: False also removes the wrapper of `torch.compile(model)`.
        recursive: also remove the wrappers of submodules.
    """
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, EngineBase)
    inner: Any = model
    while isinstance(inner, wrappers):
        inner = inner.module
    if recursive:
        for name, child in list(inner.named_children()):
            setattr(inner, name, extract_model_from_parallel(child, recursive=True))
    return unwrap_model(inner, keep_torch_compile=keep_torch_compile)


def is_peft_model(model: nn.Module) -> bool:
    """Returns True if the model, with or without an engine, is a PEFT model."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return any(kind.__module__.split(".")[0] == "peft" and kind.__name__ == "PeftModel" for kind in type(inner).__mro__)


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Writes an object on rank 0, with `torch.save` or, for a dict of tensors, as safetensors.

    Args:
        save_on_each_node: also write it on the first rank of every other node.

    Raises:
        CheckpointError: the file cannot be written.
    """
    topology = collectives_of_process().topology
    if topology.rank == 0 or (save_on_each_node and topology.local_rank == 0):
        write_object(obj, f, safe_serialization=safe_serialization)


def wait_for_everyone() -> None:
    """Waits until all ranks have called it. (all ranks)"""
    collectives_of_process().barrier("wait_for_everyone")


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Returns the selected plugin of an accelerator's state.

    Raises:
        ValueError: the accelerator has no plugin.
    """
    if state.deepspeed_plugin is None:
        raise UsageError("get_active_deepspeed_plugin", expected="an accelerator with a plugin", got=None)
    return state.deepspeed_plugin


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Returns a `tqdm.auto.tqdm` that shows its bar only on the first rank of each node.

    Args:
        main_process_only: False shows a bar on every rank.
    """
    bar: Any = importlib.import_module("tqdm.auto").tqdm  # imported only if a script shows a bar

    if args and isinstance(args[0], bool):
        raise UsageError("tqdm", expected="an iterable first", got=args[0], fix="pass main_process_only=...")
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = collectives_of_process().topology.local_rank != 0
    return bar(*args, **kwargs)


# -- the environment


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Writes a launch file for this machine: one process per GPU, or one on the CPU.

    Args:
        save_location: path of the file. Defaults to the user's launch file, which `zeroaccel launch` reads.

    Returns:
        The path of the file; False if it already exists, and it is then left unchanged.

    Raises:
        UsageError: the precision is not "no", "fp16" or "bf16", or the file cannot be written.
    """
    if mixed_precision not in ("no", "fp16", "bf16"):
        raise UsageError("write_basic_config(mixed_precision)", expected='"no", "fp16" or "bf16"', got=mixed_precision)
    path = Path(save_location) if save_location is not None else user_config_folder(os.environ) / FILE_NAME
    if path.exists():
        print(f"{path}: the launch file exists and was kept. Pass another save_location, or run `zeroaccel config`")
        return False
    devices = torch.cuda.device_count()
    settings = {"mixed_precision": mixed_precision, "num_processes": max(1, devices), "use_cpu": devices == 0}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            "write_basic_config(save_location)",
            expected="a file that can be written",
            got=f"{path} ({error.strerror})",
            fix="choose another path",
        ) from error
    return path
