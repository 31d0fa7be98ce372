"""Functions that scripts import from `accelerate.utils` and that need no accelerator; `zeroaccel.utils` offers them.

Out-of-memory searches, unwrapping, the environment, what is installed, and a launch file to begin with.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from zeroaccel.accelerate.model_saving import unwrap_model, write_object
from zeroaccel.config.launch.launch_file import FILE_NAME, user_config_folder
from zeroaccel.errors import UsageError
from zeroaccel.nested import map_leaves, map_tensors, to_device
from zeroaccel.operations import collectives_of_process
from zeroaccel.zero.engine_base import EngineBase

MODEL_NAME, SAFE_MODEL_NAME = "pytorch_model", "model"
WEIGHTS_NAME, SAFE_WEIGHTS_NAME = "pytorch_model.bin", "model.safetensors"
WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json", f"{SAFE_WEIGHTS_NAME}.index.json"

_OUT_OF_MEMORY = (" out of memory.", "CUDNN_STATUS_NOT_SUPPORTED", "DefaultCPUAllocator: can't allocate memory")
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_SWITCHES = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), 1),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), 0),
}


# -- memory


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Frees the device memory that torch caches; with `garbage_collection` also that of unreachable objects."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Frees cached memory; returns None for each argument, to drop the caller's references too."""
    released: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error says that memory was short."""
    text = str(exception.args[0]) if len(exception.args) == 1 else ""
    return isinstance(exception, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorator: calls a function with a batch size, its first parameter, and with a smaller one while memory is short.

    Make the accelerator, or call its `free_memory`, inside the function, so that nothing of the last try is left. On
    several ranks all have to run out of memory alike.

    Args:
        starting_batch_size: of the first call.
        reduce_batch_size_fn: gives the next one; by default nine tenths of the last.

    Raises:
        TypeError: the caller passes a batch size, too.
        RuntimeError: memory is short with a batch of one.

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
                f"{run.__name__}: its first parameter, {parameters[0]}, is what find_executable_batch_size finds; "
                f"call it with the other {len(parameters) - 1} only"
            )
        clear_device_cache(garbage_collection=True)
        while size > 0:
            try:
                return run(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Out of the handler, where the traceback no longer refers to the tensors of the call.
            clear_device_cache(garbage_collection=True)
            size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(size * 0.9)
        raise RuntimeError(f"{run.__name__}: memory is short with a batch of one")

    return search


# -- models and tensors


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The model inside an engine, or inside torch's data-parallel wrappers.

    Args:
        keep_fp32_wrapper: there is none.
        keep_torch_compile: False also removes the wrapper of `torch.compile(model)`.
        recursive: also take off what wraps a part of the model.
    """
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, EngineBase)
    inner: Any = model
    while isinstance(inner, wrappers):
        inner = inner.module
    if recursive:
        for name, child in list(inner.named_children()):
            setattr(inner, name, extract_model_from_parallel(child, recursive=True))
    return unwrap_model(inner, keep_torch_compile=keep_torch_compile)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `module` is what `torch.compile(model)` returned."""
    return hasattr(module, "_orig_mod")


def is_peft_model(model: nn.Module) -> bool:
    """Whether the model, inside an engine or not, is one of PEFT."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return any(kind.__module__.split(".")[0] == "peft" and kind.__name__ == "PeftModel" for kind in type(inner).__mro__)


def convert_to_fp32(tensor: Any) -> Any:
    """Nested containers with their fp16 and bf16 tensors in fp32."""
    halves = (torch.float16, torch.bfloat16)
    return map_tensors(lambda each: each.float() if each.dtype in halves else each, tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = lambda item: isinstance(item, Tensor),
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`func(leaf, *args, **kwargs)` for each leaf of nested containers that `test_type` takes; others stay.

    Raises:
        TypeError: there is another leaf, with `error_on_other_type`.
    """

    def applied(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"{getattr(func, '__name__', func)}: a leaf is of type {type(leaf).__name__}")
        return leaf

    return map_leaves(applied, data)


def send_to_device(
    tensor: Any, device: torch.device | str, non_blocking: bool = False, skip_keys: str | Iterable[str] | None = None
) -> Any:
    """Nested containers with their tensors on `device`, but for what a mapping at the top has under `skip_keys`."""
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    moved = to_device(tensor, device, non_blocking=non_blocking)
    if skipped and isinstance(tensor, Mapping):
        for key in skipped & set(tensor):
            moved[key] = tensor[key]
    return moved


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Writes an object on rank 0: by `torch.save`, or a dict of tensors as safetensors.

    Args:
        save_on_each_node: also on the first rank of every other node.

    Raises:
        CheckpointError: it cannot be written.
    """
    topology = collectives_of_process().topology
    if topology.rank == 0 or (save_on_each_node and topology.local_rank == 0):
        write_object(obj, f, safe_serialization=safe_serialization)


def wait_for_everyone() -> None:
    """A barrier. (all ranks)"""
    collectives_of_process().barrier("wait_for_everyone")


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Writes `source` into `destination`, mappings into mappings, and returns that."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def convert_bytes(size: float) -> str:
    """Bytes for people, in powers of 1024.

    Example:
        >>> convert_bytes(1536)
        '1.5 KB'
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The selected plugin of an accelerator's state.

    Raises:
        ValueError: it has none.
    """
    if state.deepspeed_plugin is None:
        raise UsageError("get_active_deepspeed_plugin", expected="an accelerator with a plugin", got=None)
    return state.deepspeed_plugin


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, which shows nothing off the first rank of each node.

    Args:
        main_process_only: False shows a bar on every rank.
    """
    bar: Any = importlib.import_module("tqdm.auto").tqdm  # only where a script shows one

    if args and isinstance(args[0], bool):
        raise UsageError("tqdm", expected="what to iterate over first", got=args[0], fix="pass main_process_only=...")
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = collectives_of_process().topology.local_rank != 0
    return bar(*args, **kwargs)


# -- the environment


def str_to_bool(value: str) -> int:
    """1 for yes, true, on and the like, 0 for no, false, off.

    Raises:
        UsageError: neither.
    """
    if value.lower() not in _SWITCHES:
        raise UsageError("str_to_bool", expected=f"one of {', '.join(_SWITCHES)}", got=value)
    return _SWITCHES[value.lower()]


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A variable of the environment as a switch."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A variable of the environment."""
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that is a number of at least 0."""
    return next((value for value in (int(os.environ.get(key, -1)) for key in env_keys) if value >= 0), default)


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Variables, by their names in capitals, in the environment inside the block; what was there comes back."""
    before = {name.upper(): os.environ.get(name.upper()) for name in variables}
    os.environ.update({name.upper(): str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """An empty environment inside the block; what was there comes back."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        _restore(before)


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Writes a launch file for this machine: one process per GPU, or one on the CPU.

    Args:
        save_location: by default the user's own file, which `zeroaccel launch` reads.

    Returns:
        The file; False where there is one already, which stays.

    Raises:
        UsageError: another precision than "no", "fp16" or "bf16", or the file cannot be written.
    """
    if mixed_precision not in ("no", "fp16", "bf16"):
        raise UsageError("write_basic_config(mixed_precision)", expected='"no", "fp16" or "bf16"', got=mixed_precision)
    path = Path(save_location) if save_location is not None else user_config_folder(os.environ) / FILE_NAME
    if path.exists():
        print(f"{path}: there is a launch file; it stays. Pass another save_location, or run `zeroaccel config`")
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
            fix="choose another place",
        ) from error
    return path


# -- what there is


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Whether an installed library's version compares so, e.g. `compare_versions("numpy", ">=", "1.26")`.

    Raises:
        UsageError: another comparison.
        PackageNotFoundError: the library is not installed.
    """
    if operation not in _COMPARISONS:
        raise UsageError("compare_versions", expected=f"one of {' '.join(_COMPARISONS)}", got=operation)
    version = library_or_version
    if isinstance(version, str) and not isinstance(version, TorchVersion):
        version = importlib.metadata.version(version)
    return _COMPARISONS[operation](TorchVersion(str(version)), requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version compares so, e.g. `is_torch_version(">=", "2.6")`."""
    return compare_versions(TorchVersion(str(torch.__version__)), operation, version)


def is_cuda_available() -> bool:
    """Whether this process can compute on CUDA devices."""
    return torch.cuda.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this process's device computes in bf16, as CPUs do."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_fp16_available() -> bool:
    """Whether this process's device computes in fp16, as CPUs do."""
    return True


def is_never_available(*args: Any, **kwargs: Any) -> bool:
    """False: for devices and libraries that training here does not use."""
    return False


PACKAGES: Mapping[str, str] = {
    "is_aim_available": "aim",
    "is_bnb_available": "bitsandbytes",
    "is_boto3_available": "boto3",
    "is_clearml_available": "clearml",
    "is_comet_ml_available": "comet_ml",
    "is_datasets_available": "datasets",
    "is_deepspeed_available": "deepspeed",
    "is_dvclive_available": "dvclive",
    "is_matplotlib_available": "matplotlib",
    "is_mlflow_available": "mlflow",
    "is_pandas_available": "pandas",
    "is_peft_available": "peft",
    "is_pytest_available": "pytest",
    "is_rich_available": "rich",
    "is_schedulefree_available": "schedulefree",
    "is_swanlab_available": "swanlab",
    "is_tensorboard_available": "tensorboard",
    "is_timm_available": "timm",
    "is_torchao_available": "torchao",
    "is_torchdata_available": "torchdata",
    "is_torchdata_stateful_dataloader_available": "torchdata",
    "is_torchvision_available": "torchvision",
    "is_trackio_available": "trackio",
    "is_transformers_available": "transformers",
    "is_triton_available": "triton",
    "is_wandb_available": "wandb",
}
"""Question of accelerate -> the package it asks for."""

_NEVER_USED = (
    "fp8 habana_gaudi1 hpu lomo megatron_lm mlu mps msamp musa neuron npu pippy sagemaker sdaa torch_xla "
    "transformer_engine transformer_engine_mxfp8 xccl xpu"
)
NEVER = frozenset(f"is_{name}_available" for name in _NEVER_USED.split())
"""Questions for what training here does not use."""


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # put into sys.modules by hand, without a spec
        return True
