"""What the arguments of `Accelerator` mean beside the launcher's settings, each checked and with its source.

Accumulation, precision, plugins, `torch.compile` and the profiler: the plugin and kwargs classes of accelerate that
work here, and the functions that read them before there is a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zeroaccel.accelerate.zero_plugin import ZeroPlugin, gather_facts
from zeroaccel.activations import repeated_blocks
from zeroaccel.config import Fact, Facts
from zeroaccel.config.launch.launch_sources import LaunchedSettings
from zeroaccel.errors import ConfigError, UsageError

# kwargs handlers of accelerate that have no work here -> what to do instead
_INSTEAD_OF = {
    "AutocastKwargs": "pass it to accelerator.autocast(...)",
    "DistributedDataParallelKwargs": "leave it out: parameters that a step does not use are noticed without it",
    "FP8RecipeKwargs": 'leave it out: there is no 8-bit training; use mixed_precision="bf16"',
    "GradScalerKwargs": "set loss_scale, initial_scale_power and the like in the config's fp16 section",
    "InitProcessGroupKwargs": "start with `zeroaccel launch --timeout SECONDS`, or make the process group before",
}
_COMPILE_OPTIONS = ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")
_PRECISIONS: dict[str, Literal["fp32", "fp16", "bf16"]] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
_ACTIVITIES = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}


# -- accumulation, precision, plugins


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Attributes:
        num_steps: micro-steps per optimizer step; None leaves it to the config or the launcher.
        adjust_scheduler: for scripts that read it; schedulers count optimizer steps.
        sync_with_dataloader: the last batch of a loader ends the accumulation, full or not.
        sync_each_batch: reduce gradients in every micro-step also at stages 0 and 1: less memory, more traffic.

    Example:
        >>> from zeroaccel import Accelerator, GradientAccumulationPlugin
        >>> plugin = GradientAccumulationPlugin(num_steps=8, sync_with_dataloader=False)
        >>> Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps
        8
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


def accumulation_of(steps: int | None, plugin: GradientAccumulationPlugin | None) -> Fact[int] | None:
    """Micro-steps per optimizer step, from the number or the plugin.

    Raises:
        UsageError: both are there.
        ConfigError: not an integer of at least 1.
    """
    argument = "Accelerator(gradient_accumulation_steps"
    if plugin is not None and plugin.num_steps is not None:
        if steps is not None:
            raise UsageError(
                "Accelerator(gradient_accumulation_steps, gradient_accumulation_plugin)",
                expected="one of the two",
                fix="leave the number out",
            )
        steps, argument = plugin.num_steps, "GradientAccumulationPlugin(num_steps"
    if steps is None:
        return None
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"{argument})", expected="a whole number of at least 1", got=steps)
    return Fact(steps, f"{argument}={steps})")


def precision_of(
    argument: str | None, settings: LaunchedSettings, sources: Mapping[str, str]
) -> Fact[Literal["fp32", "fp16", "bf16"]] | None:
    """The precision that argument and launcher agree on; None where neither says one.

    Raises:
        ConfigError: there is no such precision, or the two differ.
    """
    facts = []
    if argument is not None:
        facts.append(_precision_fact(argument, f"Accelerator(mixed_precision={argument!r})", explicit=True))
    if settings.mixed_precision is not None:
        source = sources["mixed_precision"]
        # Launchers export "no" also where the user has set nothing, so a "no" from there is no decision.
        explicit = settings.mixed_precision != "no" or not source.startswith(("env", "default"))
        facts.append(_precision_fact(settings.mixed_precision, source, explicit=explicit))
    return gather_facts(*facts).precision


def _precision_fact(name: str, source: str, *, explicit: bool) -> Facts:
    key = str(name).lower()
    if key not in _PRECISIONS:
        fix = "there is no 8-bit training; use bf16" if key == "fp8" else ""
        raise ConfigError(f"{source}: mixed_precision", expected='"no", "fp16" or "bf16"', got=name, fix=fix)
    return Facts(precision=Fact(_PRECISIONS[key], source, explicit))


def plugins_of(
    arguments: Sequence[ZeroPlugin | Mapping[str, ZeroPlugin] | None], settings: LaunchedSettings
) -> dict[str, ZeroPlugin]:
    """The plugins by name: those of the one argument that is there, or one if the launcher asks for ZeRO.

    Raises:
        ConfigError: several arguments, none in a mapping, or something else than a plugin.
    """
    present = [value for value in arguments if value is not None]
    if len(present) > 1:
        raise ConfigError(
            "Accelerator(deepspeed_plugin, deepspeed_plugins, zero_plugin)", expected="one of them", got=len(present)
        )
    if not present:
        zero = settings.use_zero or settings.deepspeed_config_file is not None or settings.zero_stage is not None
        return {"default": ZeroPlugin()} if zero else {}
    plugins = dict(present[0]) if isinstance(present[0], Mapping) else {"default": present[0]}
    for name, plugin in plugins.items():
        if not isinstance(plugin, ZeroPlugin):
            raise ConfigError(f"Accelerator: plugin {name!r}", expected="a ZeroPlugin", got=type(plugin).__name__)
    if not plugins:
        raise ConfigError("Accelerator(deepspeed_plugins)", expected="at least one plugin", got={})
    return plugins


# -- torch.compile


@dataclass(frozen=True)
class Compilation:
    """Arguments of `torch.compile`.

    Attributes:
        regional: compile each repeated block by itself, where there are any, rather than the model.
    """

    backend: str
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    regional: bool = False

    def apply(self, model: nn.Module) -> None:
        """Marks the model, or its blocks, to be compiled at the first forward.

        To be called before the engine is made: its hooks stay out of graphs only where they find a module compiled.
        """
        blocks = [block for _, block in repeated_blocks(model)] if self.regional else []
        for module in blocks or [model]:
            module.compile(backend=self.backend, mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic)


def compilation_of(backend: str | None, settings: LaunchedSettings, sources: dict[str, str]) -> Compilation | None:
    """How models are compiled; None for not at all.

    Args:
        backend: the `Accelerator`'s own argument, which precedes the launcher's.

    Raises:
        ConfigError: there is no such backend, or there are options of compilation without a backend.
    """
    name = backend if backend is not None else settings.dynamo_backend
    if name is None:
        if options := [option for option in _COMPILE_OPTIONS if getattr(settings, option)]:
            where = ", ".join(sources.get(option, option) for option in options)
            fix = "add --dynamo_backend inductor"
            raise ConfigError(f"{where}: says how to compile", expected="a backend", fix=fix)
        return None
    if name.lower() == "no":
        return None
    if name.lower() not in torch.compiler.list_backends(exclude_tags=()):
        source = "Accelerator(dynamo_backend)" if backend is not None else sources.get("dynamo_backend", "the launcher")
        usual = ", ".join(["no", "eager", "aot_eager", *torch.compiler.list_backends()])
        raise ConfigError(source, expected=f"a backend of torch.compile ({usual})", got=name)
    return Compilation(
        name.lower(),
        settings.dynamo_mode,
        bool(settings.dynamo_use_fullgraph),
        settings.dynamo_use_dynamic,
        bool(settings.dynamo_use_regional_compilation),
    )


# -- the profiler


@dataclass
class ProfileKwargs:
    """Settings of torch.profiler.profile.

    Attributes:
        activities: "cpu", "cuda"; by default those of the device.
        schedule_option: arguments of torch.profiler.schedule: wait, warmup, active, repeat, skip_first.
        on_trace_ready: called with the profiler when a trace is complete.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: as of torch.
        output_trace_dir: folder for `profile_<rank>.json`, which Chrome and Perfetto read.

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


def profile_settings_of(handlers: Sequence[Any]) -> ProfileKwargs:
    """The last `ProfileKwargs` among the kwargs handlers, or the default.

    Raises:
        UsageError: another handler.
    """
    settings = ProfileKwargs()
    for handler in handlers:
        if not isinstance(handler, ProfileKwargs):
            name = type(handler).__name__
            fix = _INSTEAD_OF.get(name, "set what it says in the config")
            raise UsageError("Accelerator(kwargs_handlers)", expected="a ProfileKwargs", got=name, fix=fix)
        settings = handler
    return settings


@contextmanager
def profile(settings: ProfileKwargs, rank: int, device: torch.device) -> Iterator[Any]:
    """torch's profiler, running.

    Raises:
        UsageError: an unknown activity, or a folder that cannot be made; before anything runs.
    """
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
        raise UsageError(where, expected="a folder that can be made", got=f"{folder} ({error.strerror})") from error
