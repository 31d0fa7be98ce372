"""Functions that scripts import from accelerate and that need no accelerator; `zeroaccel.utils` exports most of them.

Batch-size search, unwrapping, saving, progress bars, a default launch file, and launchers that run a function on
several processes of this machine, from a notebook or for tests.

A launcher forks the processes, so they can run functions of a notebook. The first process that fails ends the others,
and the caller gets its traceback. Use `zeroaccel launch` for scripts.

[Note: CUDA and forks] After a process has called the CUDA driver, even for the number of devices, processes forked from
it cannot use CUDA. So the launcher counts the devices in a forked process that ends at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import inspect
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.multiprocessing.spawn import start_processes

from zeroaccel.accelerate.model_saving import unwrap_model, write_object
from zeroaccel.comm.topology import destroy
from zeroaccel.config.launch.launch_file import FILE_NAME, user_config_folder
from zeroaccel.engine import EngineBase
from zeroaccel.errors import ConfigError, EngineStateError, UsageError
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


_PRECISIONS = ("no", "fp16", "bf16")


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Runs `function(*args)` on `num_processes` ranks on the CPU with gloo, and waits for all of them.

    Raises:
        ProcessRaisedException: a rank failed; the message has its traceback.
        EngineStateError: this process has already joined a job.
        ConfigError: `num_processes` is below 1, or the system cannot fork.
    """
    _launch(function, args, num_processes, {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""})


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
) -> None:
    """Runs `function(*args)` on all GPUs of this machine, or on `num_processes` processes, and waits for them.

    Args:
        num_processes: number of processes on this machine. Defaults to one per GPU; without a GPU, the function runs in
            this process.
        mixed_precision: "no", "fp16" or "bf16", for an `Accelerator` that does not set it.
        use_port: port of the rendezvous. Defaults to a free port; several nodes need the same one.
        master_addr, node_rank, num_nodes: address of the first node, rank of this node and number of nodes.

    Raises:
        ProcessRaisedException: a rank failed; the message has its traceback.
        EngineStateError: this process already uses CUDA or a process group, which forked processes cannot share.
        ConfigError: an argument is out of range.

    Example:
        A cell of a notebook on a machine with two GPUs::

            def train():
                accelerator = zeroaccel.Accelerator()
                ...

            zeroaccel.notebook_launcher(train)
    """
    _check_arguments(mixed_precision, use_port, node_rank, num_nodes)
    devices = _visible_devices()
    if num_processes is None:
        num_processes = max(1, devices.count)
    variables = {"ACCELERATE_MIXED_PRECISION": mixed_precision}
    on_devices = devices.count >= num_processes
    if not on_devices:
        variables |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    if num_processes * num_nodes == 1:
        with _set(variables):
            function(*args)
        return
    if on_devices and not devices.work_in_forks and not torch.cuda.is_initialized():  # `_launch` refuses that one
        raise EngineStateError(
            f"launching {getattr(function, '__name__', function)}: this process has called the CUDA driver, for example"
            " with torch.cuda.is_available(), so forked processes cannot use CUDA",
            fix="restart the notebook and call CUDA only inside the launched function, or set"
            " PYTORCH_NVML_BASED_CUDA_CHECK=1 before importing torch",
        )
    place = {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(use_port if use_port is not None else _free_port()),
        "GROUP_RANK": str(node_rank),
    }
    _launch(function, args, num_processes, variables | place, num_nodes)


def _check_arguments(mixed_precision: str, use_port: int | str | None, node_rank: int, num_nodes: int) -> None:
    if mixed_precision not in _PRECISIONS:
        raise ConfigError("notebook_launcher(mixed_precision)", expected=", ".join(_PRECISIONS), got=mixed_precision)
    if not 0 <= node_rank < num_nodes:
        raise ConfigError("notebook_launcher(node_rank)", expected=f"0 to {num_nodes - 1}", got=node_rank)
    if num_nodes > 1 and use_port is None:
        raise ConfigError("notebook_launcher(use_port)", expected="the same port on all nodes", got=None)


def _launch(
    function: Callable[..., Any],
    args: Sequence[Any],
    num_processes: int,
    variables: Mapping[str, str],
    num_nodes: int = 1,
) -> None:
    where = f"launching {getattr(function, '__name__', function)}"
    if num_processes < 1:
        raise ConfigError(f"{where}: num_processes", expected="at least 1", got=num_processes)
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(where, expected="a system that can fork", fix="start a script with `zeroaccel launch`")
    if dist.is_initialized():
        raise EngineStateError(
            f"{where}: this process has already joined a job",
            fix="restart the notebook, and create Accelerator() only inside the launched function",
        )
    if torch.cuda.is_initialized():
        raise EngineStateError(
            f"{where}: this process uses CUDA, so forked processes cannot use it",
            fix="restart the notebook, and use CUDA only inside the launched function",
        )
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_processes * num_nodes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    start_processes(_rank_main, (function, tuple(args), shared | dict(variables)), num_processes, start_method="fork")


@dataclass(frozen=True)
class _VisibleDevices:
    """Number of CUDA devices that this process sees; `work_in_forks` is True if forked processes can use them."""

    count: int
    work_in_forks: bool


def _visible_devices() -> _VisibleDevices:
    """Counts the devices in a forked process; see [Note: CUDA and forks]."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return _VisibleDevices(torch.cuda.device_count(), work_in_forks=False)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_device_count, args=(sender,))
    process.start()
    sender.close()
    try:
        count: int | None = receiver.recv()
    except EOFError:  # the driver ended the process
        count = 0
    process.join()
    if count is None:  # this process already uses the driver, so it can call it for the count
        return _VisibleDevices(torch.cuda.device_count(), work_in_forks=False)
    return _VisibleDevices(count, work_in_forks=True)


def _send_device_count(sender: Connection) -> None:
    """Sends the number of devices from a forked process; None if it cannot use CUDA."""
    sender.send(None if torch.cuda._is_in_bad_fork() else torch.cuda.device_count())
    sender.close()


def _rank_main(index: int, function: Callable[..., Any], args: tuple[Any, ...], shared: Mapping[str, str]) -> None:
    first = int(shared["GROUP_RANK"]) * int(shared["LOCAL_WORLD_SIZE"])
    os.environ.update(shared, RANK=str(first + index), LOCAL_RANK=str(index), FORK_LAUNCHED="1")
    # A fork does not copy the parent's threads; a thread pool of torch with several threads would wait for them.
    torch.set_num_threads(1)
    function(*args)
    destroy()


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
