"""Functions and small classes of DeepSpeed's utility modules that need no engine.

Some have no task here: each does nothing, or returns the only possible answer. Collectives are not logged; only a mesh
divides layers and experts, whatever parameters or groups are marked; and the engine detects parameters that are read
outside their modules.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroaccel.compat.deepspeed_comm import NO_LOG
from zeroaccel.compat.device_accelerator import get_accelerator
from zeroaccel.config import Config, load_config
from zeroaccel.engine import EngineBase
from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once, logger, set_log_level
from zeroaccel.nested import map_tensors
from zeroaccel.seeds import set_seed
from zeroaccel.telemetry.step_report import memory_now
from zeroaccel.telemetry.trackers import Monitors, build_monitors
from zeroaccel.zero import GatheredParameters, safe_get_full_grad, safe_set_full_grad

P = ParamSpec("P")
R = TypeVar("R")
_GIB = 1 << 30

# -- arguments, containers and log lines


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "config of the engine")
    group.add_argument("--deepspeed", action="store_true", help="no effect; the script calls deepspeed.initialize")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="DeepSpeed-format JSON")
    return parser


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copies nested containers to `device`; each tensor of the copy has storage of its own size.

    Names that share a tensor, such as tied weights, share one in the copy too, so that it is saved once.
    """
    clones: dict[Any, Tensor] = {}

    def cloned(tensor: Tensor) -> Tensor:
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in clones:
            clones[key] = tensor.detach().clone().to(device)
        return clones[key]

    return map_tensors(cloned, item)


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Returns the submodule or parameter with a dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Replaces the submodule or parameter with a dotted name."""
    parent, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, last, module)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the given ranks; on all ranks for None or [-1]."""
    if not {_rank(), -1}.isdisjoint([-1] if ranks is None else ranks):
        logger.log(level, "%s", message)


def log_dist_once(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs like `log_dist`, but each message only once."""
    if not {_rank(), -1}.isdisjoint([-1] if ranks is None else ranks):
        log_once(level, message)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of zeroaccel's logger, or of `custom_logger`, by a name such as "info"."""
    if custom_logger is None:
        set_log_level(log_level_str)
    else:
        custom_logger.setLevel(log_level_str.upper())


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Wraps `func` in an NVTX range of its name if CUDA is available; otherwise returns `func` unchanged."""
    if not torch.cuda.is_available():
        return func

    @functools.wraps(func)
    def in_range(*args: P.args, **kwargs: P.kwargs) -> R:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return in_range


# -- memory and throughput


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints `message` and the memory in use, in GiB, on rank 0; does nothing without `force`.

    MA and CA are the memory that torch has allocated and reserved on the device; on the CPU, the memory of this
    process. The machine's memory follows. Resets the peak.
    """
    if not force or _rank() != 0:
        return
    gc.collect()  # excludes tensors that await collection
    accelerator = get_accelerator()
    on_device = torch.cuda.is_available()
    used = memory_now(torch.device(accelerator.current_device_name()))
    reserved, peak_reserved = accelerator.memory_reserved(), accelerator.max_memory_reserved()
    print(message)
    print(
        f"MA {used.current / _GIB:.2f} GB  Max_MA {used.peak / _GIB:.2f} GB  "
        f"CA {(reserved if on_device else used.current) / _GIB:.2f} GB  "
        f"Max_CA {(peak_reserved if on_device else used.peak) / _GIB:.2f} GB"
    )
    machine = psutil.virtual_memory()
    print(
        f"CPU Virtual Memory:  used = {(machine.total - machine.available) / _GIB:.2f} GB, percent = {machine.percent}%"
    )
    accelerator.reset_peak_memory_stats()


class StepThroughput:
    """Samples per second of a script's own loop: `start()` before and `stop(global_step=True)` after each step.

    Args:
        config: ignored, unless it is a number: older releases pass `batch_size` here.
        batch_size: samples per step over all ranks.
        start_step: first step that counts.
        steps_per_output: interval of log lines in steps; None for no log lines.
        monitor_memory: add the device's memory to the lines.
        logging_fn: function that receives the lines; by default the logger.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.batch_size = max(1, config if isinstance(config, int) else batch_size)
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._monitor_memory = monitor_memory
        self._log = logging_fn or log_dist
        self._begun: float | None = None

    def update_epoch_count(self) -> None:
        """Counts an epoch, and resets the count of micro-steps."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begins a step."""
        get_accelerator().synchronize()
        self._begun = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Ends a micro-step, with `global_step` also a step; does nothing without a preceding `start`."""
        if self._begun is None:
            return
        get_accelerator().synchronize()
        seconds, self._begun = time.perf_counter() - self._begun, None
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.global_step_count >= self.start_step:
            self.total_elapsed_time += seconds
        every = self.steps_per_output
        if global_step and report_speed and every and self.global_step_count % every == 0:
            memory = _memory_line() if self._monitor_memory else ""
            self._log(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"samples/sec={self.avg_samples_per_sec():.2f}{memory}"
            )

    def avg_samples_per_sec(self) -> float:
        """Returns samples per second since `start_step`; -inf before it."""
        steps = self.global_step_count - self.start_step + 1
        if steps < 1 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time


def _memory_line() -> str:
    device = get_accelerator()
    return (
        f" | mem_allocated: {device.memory_allocated() / _GIB:.4f} GB"
        f" | max_mem_allocated: {device.max_memory_allocated() / _GIB:.4f} GB"
    )


# -- models and gradients


def set_random_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators."""
    set_seed(int(seed))


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0, mpu: Any = None
) -> Tensor:
    """Clips with `torch.nn.utils.clip_grad_norm_`, for parameters without an engine; engines clip by their config.

    Raises:
        UsageError: an `mpu` is passed.
    """
    if mpu is not None:
        raise UsageError("deepspeed.runtime.utils.clip_grad_norm_(mpu)", expected="None", got=type(mpu).__name__)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replaces the reduced gradient of each parameter by `update_func(gradient, parameter)`. (all ranks)

    Skips parameters without a gradient. All ranks must compute the same values.
    """
    for param in params:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


@contextmanager
def unwrap_model_for_generation(model: EngineBase) -> Iterator[EngineBase]:
    """Gathers all parameters of the engine, so that its model generates without a gather per module. (all ranks)"""
    with GatheredParameters(model.module.parameters()):
        yield model


class OnDevice:
    """Context in which new modules have floating-point tensors in `dtype`, and all tensors on `device`.

    Args:
        dtype: dtype of floating-point tensors made by torch's factories, whatever dtype is requested.
        device: "meta" creates no values.
        enabled: False disables the context.

    Example:
        >>> import torch
        >>> with OnDevice(dtype=torch.bfloat16, device="meta"):
        ...     layer = torch.nn.Linear(2, 2)
        >>> layer.weight.dtype, layer.weight.device.type
        (torch.bfloat16, 'meta')
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._contexts = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._contexts.enter_context(torch.device(self.device))
            self._contexts.enter_context(_FloatsOf(self.dtype))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.close()


_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.rand, torch.randn})


class _FloatsOf(TorchFunctionMode):
    """Converts floating-point results of torch's factories to one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FACTORIES and result.is_floating_point() and result.itemsize > 1:  # 8 bits are codes
            return result.to(self._dtype)
        return result


# -- data


class RepeatingLoader:
    """Repeats a loader's batches without end: after the last batch, a new iteration starts.

    Args:
        loader: any object with `__iter__`.

    Example:
        >>> batches = RepeatingLoader([1, 2])
        >>> [next(batches) for _ in range(5)]
        [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

    def __len__(self) -> int:
        """Number of batches per iteration, if the loader has a length."""
        return len(self.loader)


# -- events


class MonitorMaster:
    """Writes to the TensorBoard, CSV and wandb monitors that a config enables, on rank 0.

    Args:
        monitor_config: `DeepSpeedConfig(...).monitor_config`, a config in the format of `deepspeed.initialize`, or the
            monitors of an engine; None for no monitors.

    Attributes:
        enabled: True if there is a monitor.
    """

    def __init__(self, monitor_config: Mapping[str, Any] | Config | Monitors | None) -> None:
        if isinstance(monitor_config, (Mapping, Config)):
            monitor_config = build_monitors(load_config(monitor_config, unknown_keys="lenient"), _rank())
        self._sink = monitor_config
        self.enabled = self._sink is not None and len(self._sink) > 0

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None:
        """Writes (name, value, samples so far) events, and flushes the monitors."""
        if self._sink is not None and self.enabled:
            self._sink.write(event_list)
            self._sink.flush()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Does nothing; warns if logging of collectives is requested, since zeroaccel does not log them."""
    if enabled or prof_all or prof_ops:
        log_once(logging.WARNING, NO_LOG)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Warns that no collective was logged; with `return_dict`, returns a summary without entries."""
    log_once(logging.WARNING, NO_LOG)
    return {"summary": {}, "straggler_analysis": None} if return_dict else None


def has_coalesced() -> bool:
    """Returns True: the installed torch has the collectives that DeepSpeed tests for."""
    return True


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, like `register_external_parameter`: the engine detects parameters read outside their module."""


def get_model_parallel_rank() -> int:
    """Returns 0: a model split over ranks needs a mesh, which has its own ranks."""
    return 0


def get_model_parallel_world_size() -> int:
    """Returns 1."""
    return 1


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Returns (False, 0): no layer is DeepSpeed's MoE. Experts divided by `expert_parallel` do not count."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """True if DeepSpeed would reduce the gradient among some ranks only: `param.allreduce` is False."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """True if a param group is marked as one of experts."""
    return bool(param_group.get("moe", False))


def check_expert_marks(model: nn.Module) -> None:
    """Refuses parameters that only some ranks would reduce: here all ranks have the values of rank 0.

    Raises:
        UsageError: a parameter is marked as an expert on some ranks (`param.allreduce` is False).
    """
    for name, param in model.named_parameters():
        if is_moe_param(param):
            raise UsageError(
                f"deepspeed.initialize: parameter {name}",
                expected="a parameter with the same values on all ranks",
                got="allreduce=False, the mark of expert-parallel layers",
                fix='remove the mark; to divide experts of transformers, set "expert_parallel": {"enabled": true, '
                '"autoep_size": N}',
            )


def note_expert_groups(optimizer: Any) -> None:
    """Logs that marks of param groups have no effect."""
    if any(map(is_moe_param_group, getattr(optimizer, "param_groups", ()))):
        log_once(logging.INFO, "param group: moe has no effect; expert_parallel in the config divides experts")


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: int | float = 178_956_971
) -> list[dict[str, Any]]:
    """Returns the param groups as a list, undivided, since all ranks hold all parameters.

    Args:
        param_groups: one param group or several; "params" may be any iterable of parameters.
        max_group_size: no effect.

    Raises:
        UsageError: a parameter is marked as an expert on some ranks (`param.allreduce` is False).
    """
    several = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    groups = [{**group, "params": list(group["params"])} for group in several]
    for number, group in enumerate(groups):
        if any(map(is_moe_param, group["params"])):
            raise UsageError(
                f"split_params_into_different_moe_groups_for_optimizer, group {number}",
                expected="parameters whose gradients all ranks reduce",
                got="one with allreduce=False, the mark of expert-parallel layers",
                fix="remove the mark: expert layers train without it",
            )
    return groups
