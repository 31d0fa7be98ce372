"""Keyword handlers and enumerations with the names of accelerate's, and how an `Accelerator` applies the handlers.

Objects of accelerate's own classes are accepted by the name of their class and read by their fields. The accelerator
applies a handler's settings, logs a note that says why a setting has no effect, or raises an error with a remedy.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.logs import log_once

_ACTIVITIES = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
_ARGUMENT = "Accelerator(kwargs_handlers)"
_NO_FP8 = 'leave it out: 8-bit training is not available; use mixed_precision="bf16"'
_REFUSED = dict.fromkeys(("FP8RecipeKwargs", "TERecipeKwargs", "AORecipeKwargs", "MSAMPRecipeKwargs"), _NO_FP8)

T = TypeVar("T")


# -- enumerations


class _TakesValues(enum.EnumMeta):
    """Lets `in` accept a value as well as a member: `"MULTI_GPU" in DistributedType`."""

    def __contains__(cls, value: object) -> bool:
        return value in {member for item in cls for member in (item, item.value)}  # type: ignore[var-annotated]


class DistributedType(str, enum.Enum, metaclass=_TakesValues):
    """Kind of a job; a member compares equal to its name, which scripts use.

    An `Accelerator` has one of NO, MULTI_CPU, MULTI_GPU and DEEPSPEED. The other members exist for scripts that compare
    with them.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    ZERO = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class _Named(str, enum.Enum, metaclass=_TakesValues):
    """Enumeration whose members print as their values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Returns all values."""
        return [str(member) for member in cls]


class PrecisionType(_Named):
    """Precisions of `Accelerator(mixed_precision)`, which rejects FP8."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(_Named):
    """Trackers of `Accelerator(log_with)`."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class DDPCommunicationHookType(_Named):
    """Gradient compressions of `DistributedDataParallelKwargs`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


def value_of(member: Any) -> Any:
    """Returns the value of an enumeration member (ours or accelerate's); returns other objects unchanged."""
    return member.value if isinstance(member, enum.Enum) else member


# -- handlers


class KwargsHandler:
    """Base class of the handlers; `to_kwargs` returns the fields that differ from the defaults."""

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields."""
        return dict(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults."""
        defaults = vars(type(self)())
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Settings of `accelerator.autocast()`; they do not affect models, whose precision the engine sets.

    Attributes:
        enabled: False computes in the dtypes of the tensors.
        cache_enabled: cache weights that were cast; None keeps torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Settings of torch's DistributedDataParallel; the engine applies only `comm_hook`.

    Attributes:
        dim, broadcast_buffers, bucket_cap_mb, check_reduction, gradient_as_bucket_view, static_graph: no effect; a note
            gives the reason. Gradients are views of flat buffers, in buckets of `reduce_bucket_size`.
        find_unused_parameters: no effect; the engine detects unused parameters without it.
        comm_hook: "fp16" or "bf16" reduces gradients in that dtype (`communication_data_type`). PowerSGD is refused.
        comm_wrapper, comm_state_option: settings of PowerSGD.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Loss scale under fp16, for an `Accelerator` without a plugin.

    Attributes:
        init_scale: initial scale, a power of two.
        growth_factor, backoff_factor: must be 2 and 0.5.
        growth_interval: number of updates without overflow after which the scale doubles.
        enabled: False keeps the scale at 1.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def settings(self) -> dict[str, int | float]:
        """Returns the equivalent keys of the config's fp16 section.

        Raises:
            ConfigError: the section has no equivalent.
        """
        if (self.growth_factor, self.backoff_factor) != (2.0, 0.5):
            raise ConfigError(
                "GradScalerKwargs(growth_factor, backoff_factor)",
                expected="2 and 0.5, the engine's fixed factors",
                got=(self.growth_factor, self.backoff_factor),
            )
        if not self.enabled:
            return {"loss_scale": 1.0}
        power = math.log2(self.init_scale) if self.init_scale >= 1 else -1.0
        if power < 0 or power != int(power):
            raise ConfigError("GradScalerKwargs(init_scale)", expected="a power of two", got=self.init_scale)
        return {"initial_scale_power": int(power), "loss_scale_window": self.growth_interval}


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Settings with which the process joins its job.

    Attributes:
        backend: process group backend; "nccl" and None select the device's backend.
        init_method: "env://", "tcp://HOST:PORT" or "file://PATH". Defaults to the launcher's variables.
        timeout: time limit of a collective. Defaults to the launcher's setting, or 600 s.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Settings of `torch.profiler.profile`.

    Attributes:
        activities: a list of "cpu" and "cuda". Defaults to "cpu" and the type of the accelerator's device.
        schedule_option: arguments of `torch.profiler.schedule`: wait, warmup, active, repeat, skip_first.
        on_trace_ready: function that receives the profiler when a trace is complete.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: arguments of `torch.profiler.profile`.
        output_trace_dir: folder for `profile_<rank>.json`, which Chrome and Perfetto can open.

    Example:
        >>> import torch
        >>> from zeroaccel import Accelerator, ProfileKwargs
        >>> accelerator = Accelerator(cpu=True)
        >>> with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
        ...     product = torch.ones(8, 8) @ torch.ones(8, 8)
        >>> "aten::mm" in {event.key for event in profiler.key_averages()}
        True
    """

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@dataclass(frozen=True)
class HandlerSettings:
    """The handlers of an accelerator, at most one of each kind.

    Attributes:
        profile: settings of `accelerator.profile()`.
        autocast: settings of `accelerator.autocast()`.
        scaler: loss scale of plain data parallelism.
        communication: dtype in which gradients are reduced; None takes it from the config.
    """

    profile: ProfileKwargs
    autocast: AutocastKwargs
    scaler: GradScalerKwargs | None
    communication: str | None


_KINDS: tuple[type[KwargsHandler], ...] = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
# Settings of DistributedDataParallel -> why they have no effect
_WITHOUT_EFFECT = {
    "find_unused_parameters": "no effect: the engine detects unused parameters without it",
    "static_graph": "no effect: the engine follows every backward anew, without the cost that a static graph saves",
    "gradient_as_bucket_view": "no effect: gradients are always views of flat buffers",
    "bucket_cap_mb": "no effect: zero_optimization.reduce_bucket_size sets the size of buckets",
    "broadcast_buffers": "no effect: each rank keeps its own buffers",
    "check_reduction": "no effect: the engine compares the order of reductions between the ranks in every step",
    "dim": "no effect: each rank computes on one device",
}


def own(kind: type[T], item: Any, where: str) -> T:
    """Returns `item` if it is an instance of `kind`, or builds one from another library's class of the same name.

    Raises:
        UsageError: its class has another name.
    """
    if isinstance(item, kind):
        return item
    if type(item).__name__ != kind.__name__:
        raise UsageError(where, expected=f"a {kind.__name__}", got=type(item).__name__)
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: value_of(getattr(item, name)) for name in names if hasattr(item, name)})


def process_group_of(handlers: Sequence[Any]) -> InitProcessGroupKwargs:
    """Returns how to join the job. Before joining, ranks cannot agree on errors, so this function raises none."""
    for handler in handlers:
        if type(handler).__name__ == InitProcessGroupKwargs.__name__:
            return own(InitProcessGroupKwargs, handler, _ARGUMENT)
    return InitProcessGroupKwargs()


def handlers_of(handlers: Sequence[Any]) -> HandlerSettings:
    """Returns the settings of the handlers; a note names each setting that has no effect.

    Raises:
        UsageError: a handler has no equivalent here, or there are two of a kind.
    """
    by_kind: dict[str, Any] = {}
    kinds = {kind.__name__: kind for kind in _KINDS}
    for handler in handlers:
        name = next((each.__name__ for each in type(handler).__mro__ if each.__name__ in kinds), type(handler).__name__)
        if name not in kinds:
            fix = _REFUSED.get(name, "write its settings into the config")
            raise UsageError(_ARGUMENT, expected=f"handlers among {', '.join(kinds)}", got=name, fix=fix)
        if name in by_kind:
            raise UsageError(_ARGUMENT, expected="one handler of a kind", got=f"two {name}")
        by_kind[name] = handler if isinstance(handler, kinds[name]) else own(kinds[name], handler, _ARGUMENT)
    return HandlerSettings(
        by_kind.get("ProfileKwargs", ProfileKwargs()),
        by_kind.get("AutocastKwargs", AutocastKwargs()),
        by_kind.get("GradScalerKwargs"),
        _communication(by_kind.get("DistributedDataParallelKwargs", DistributedDataParallelKwargs())),
    )


def _communication(handler: DistributedDataParallelKwargs) -> str | None:
    """Returns the dtype in which `comm_hook` reduces gradients; the handler's other settings have no effect."""
    changed = handler.to_kwargs()
    for name, reason in _WITHOUT_EFFECT.items():
        if name in changed:
            note(f"DistributedDataParallelKwargs({name}={changed[name]!r})", reason)
    hook, wrapper = value_of(handler.comm_hook), value_of(handler.comm_wrapper)
    if hook == "no":
        if "comm_wrapper" in changed or "comm_state_option" in changed:
            note("DistributedDataParallelKwargs(comm_wrapper, comm_state_option)", "no effect without a comm_hook")
        return None
    if hook not in ("fp16", "bf16") or wrapper not in ("no", hook):
        raise UsageError(
            "DistributedDataParallelKwargs(comm_hook, comm_wrapper)",
            expected='"no", "fp16" or "bf16"',
            got=(hook, wrapper),
            fix="remove them, or set zero_quantized_gradients in the config, which reduces gradients in 4 bits",
        )
    return str(hook)


def note(where: str, reason: str) -> None:
    """Logs once, on rank 0, that a setting has no effect, or a different effect than in accelerate."""
    log_once(logging.WARNING, f"note on {where}: {reason}")


# -- the profiler


@contextmanager
def profile(settings: Any, rank: int, device: torch.device) -> Iterator[Any]:
    """Runs torch's profiler over a block.

    Raises:
        UsageError: an activity is unknown, or the folder cannot be created; before the block runs.
    """
    settings = own(ProfileKwargs, settings, "accelerator.profile(profile_handler)")
    folder = None if settings.output_trace_dir is None else Path(settings.output_trace_dir)
    if folder is not None:
        _make(folder)
    activities = settings.activities or sorted({"cpu", device.type})
    for name in activities:
        if name not in _ACTIVITIES:
            raise UsageError("ProfileKwargs(activities)", expected='"cpu" or "cuda"', got=name)
    with torch.profiler.profile(
        activities=[_ACTIVITIES[name] for name in activities],
        schedule=torch.profiler.schedule(**settings.schedule_option) if settings.schedule_option else None,
        on_trace_ready=settings.on_trace_ready,
        record_shapes=settings.record_shapes,
        profile_memory=settings.profile_memory,
        with_stack=settings.with_stack,
        with_flops=settings.with_flops,
        with_modules=settings.with_modules,
    ) as profiler:
        yield profiler
    if folder is not None:
        profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = "ProfileKwargs(output_trace_dir)"
        raise UsageError(where, expected="a folder that can be created", got=f"{folder} ({error.strerror})") from error
