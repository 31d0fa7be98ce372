"""Arguments of `Accelerator`: checks them, combines them with the launcher's settings, and records their sources.

`AcceleratorArguments` has the arguments as data, and `ResolvedArguments` the result. The functions read accumulation,
precision, plugins, loaders and `torch.compile` before there is a model. They accept plugins of accelerate's own
classes; a field that has no effect is logged in a note or raises an error.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zeroaccel.accelerate.accelerator_state import PartialState
from zeroaccel.accelerate.kwargs_handlers import (
    HandlerSettings,
    KwargsHandler,
    handlers_of,
    note,
    own,
    process_group_of,
    value_of,
)
from zeroaccel.accelerate.prepared_optimizer import GradientState
from zeroaccel.accelerate.project import ProjectConfiguration, project_of
from zeroaccel.accelerate.zero_plugin import ZeroPlugin, gather_facts
from zeroaccel.config import Fact, Facts
from zeroaccel.config.launch.launch_sources import LaunchedSettings
from zeroaccel.config.parallel import ParallelConfig, PipelineConfig, with_config_axes
from zeroaccel.data import DataLoaderConfiguration
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.setup.job import Compilation
from zeroaccel.zero.compiled import backend_named

_SHARED_GENERATORS = ("torch", "cuda", "numpy", "python")
_COMPILE_OPTIONS = ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")
_PRECISIONS: dict[str, Literal["fp32", "fp16", "bf16"]] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


# -- accumulation, precision, plugins


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings of gradient accumulation.

    Attributes:
        num_steps: micro-steps per optimizer step; None takes it from the config or the launcher.
        adjust_scheduler: no effect, kept for scripts that read it; schedulers count optimizer steps.
        sync_with_dataloader: end the accumulation at the last batch of a loader, even if it is incomplete.
        sync_each_batch: reduce gradients in every micro-step, also at stages 0 and 1: less memory, more traffic.

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
    """Returns the micro-steps per optimizer step from the number or the plugin.

    Raises:
        UsageError: both set it.
        ConfigError: the value is not an integer of at least 1.
    """
    argument = "Accelerator(gradient_accumulation_steps"
    if plugin is not None and plugin.num_steps is not None:
        if steps is not None:
            raise UsageError(
                "Accelerator(gradient_accumulation_steps, gradient_accumulation_plugin)",
                expected="one of the two",
                fix="remove gradient_accumulation_steps, or num_steps of the plugin",
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
    """Returns the precision that the argument or the launcher sets; None if neither sets one.

    Raises:
        ConfigError: the precision is unknown, or the two differ.
    """
    facts = []
    if argument is not None:
        facts.append(_precision_fact(argument, f"Accelerator(mixed_precision={argument!r})", explicit=True))
    if settings.mixed_precision is not None:
        source = sources["mixed_precision"]
        # Launchers export "no" even if the user has set nothing, so a "no" from the environment is not explicit.
        explicit = settings.mixed_precision != "no" or not source.startswith(("env", "default"))
        facts.append(_precision_fact(settings.mixed_precision, source, explicit=explicit))
    return gather_facts(*facts).precision


def _precision_fact(name: str, source: str, *, explicit: bool) -> Facts:
    key = str(value_of(name)).lower()
    if key not in _PRECISIONS:
        fix = "8-bit training is not available; use bf16" if key == "fp8" else ""
        raise ConfigError(f"{source}: mixed_precision", expected='"no", "fp16" or "bf16"', got=name, fix=fix)
    return Facts(precision=Fact(_PRECISIONS[key], source, explicit))


def plugins_of(arguments: Sequence[Any], settings: LaunchedSettings) -> dict[str, ZeroPlugin]:
    """Returns the plugins by name: those of the only argument, or a default plugin if the launcher requests ZeRO.

    Args:
        arguments: a `ZeroPlugin`, a DeepSpeed or FSDP plugin of accelerate, or a mapping of them, each; None if unset.

    Raises:
        ConfigError: several arguments are set, a mapping is empty, or an object is not a plugin.
    """
    present = [value for value in arguments if value is not None]
    if len(present) > 1:
        raise ConfigError(
            "Accelerator(deepspeed_plugin, deepspeed_plugins, fsdp_plugin, zero_plugin)",
            expected="one of them",
            got=len(present),
        )
    if not present:
        zero = settings.use_zero or settings.deepspeed_config_file is not None or settings.zero_stage is not None
        return {"default": ZeroPlugin()} if zero else {}
    plugins = dict(present[0]) if isinstance(present[0], Mapping) else {"default": present[0]}
    if not plugins:
        raise ConfigError("Accelerator(deepspeed_plugins)", expected="at least one plugin", got={})
    return {name: _plugin(name, plugin) for name, plugin in plugins.items()}


def _plugin(name: str, plugin: Any) -> ZeroPlugin:
    """Returns a plugin as a `ZeroPlugin`, converted from accelerate's classes.

    Raises:
        ConfigError: the object is not a plugin, or its sharding strategy has no equivalent.
    """
    if isinstance(plugin, ZeroPlugin):
        return plugin
    convert = {"DeepSpeedPlugin": _of_deepspeed, "FullyShardedDataParallelPlugin": _of_fsdp}.get(type(plugin).__name__)
    if convert is None:
        raise ConfigError(f"Accelerator: plugin {name!r}", expected="a ZeroPlugin", got=type(plugin).__name__)
    return convert(plugin)


def _of_deepspeed(plugin: Any) -> ZeroPlugin:
    """Converts accelerate's DeepSpeed plugin, whose config already includes its arguments and launcher settings."""
    config = copy.deepcopy(dict(plugin.deepspeed_config))
    if config.get("steps_per_print") == math.inf:  # accelerate's value for "never"
        del config["steps_per_print"]
    for section in ("offload_optimizer", "offload_param"):
        place = config.get("zero_optimization", {}).get(section)
        if isinstance(place, dict) and place.get("nvme_path") in (None, "none"):
            place.pop("nvme_path", None)
    return ZeroPlugin(
        config,
        is_train_batch_min=plugin.is_train_batch_min,
        zero3_init_flag=plugin.zero3_init_flag,
        transformer_moe_cls_names=plugin.transformer_moe_cls_names,
        enable_msamp=plugin.enable_msamp,
    )


_STAGE_OF_STRATEGY = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
_FSDP = "FullyShardedDataParallelPlugin"
_REST_OF_FSDP = (
    "its settings of units, prefetching, state dicts and dtypes have no effect; use the config's zero_optimization "
    "section and Accelerator(mixed_precision)"
)


def _of_fsdp(plugin: Any) -> ZeroPlugin:
    """Converts accelerate's FSDP plugin to the stage that shards the same tensors, with its CPU offload."""
    reshards = getattr(plugin, "reshard_after_forward", None)
    strategy = getattr(plugin, "sharding_strategy", None)
    if strategy is None:
        strategy = reshards
    name = {True: "FULL_SHARD", False: "SHARD_GRAD_OP", None: "FULL_SHARD"}.get(strategy)
    name = name or str(getattr(strategy, "name", strategy)).upper()
    if name not in _STAGE_OF_STRATEGY:
        raise ConfigError(
            f"{_FSDP}(sharding_strategy)",
            expected=", ".join(_STAGE_OF_STRATEGY),
            got=name,
            fix='to shard within groups and replicate between them, use ZeroPlugin({"zero_optimization": {"stage": 3, '
            '"mics_shard_size": RANKS}})',
        )
    if getattr(plugin, "activation_checkpointing", None):
        note(f"{_FSDP}(activation_checkpointing=True)", "no effect; use zeroaccel.activations or that of the model")
    offload = getattr(plugin, "cpu_offload", None)
    offloads = bool(getattr(offload, "offload_params", offload))  # FSDP2's policy has no such field
    note(_FSDP, f"it is converted to ZeroPlugin(zero_stage={_STAGE_OF_STRATEGY[name]}); {_REST_OF_FSDP}")
    device = "cpu" if offloads else None
    return ZeroPlugin(
        zero_stage=_STAGE_OF_STRATEGY[name],
        offload_optimizer_device=device,
        offload_param_device=device if name == "FULL_SHARD" else None,
    )


def parallel_of(parallelism_config: Any, settings: LaunchedSettings) -> ParallelConfig:
    """Returns the mesh of the argument (ours or accelerate's class), or the launcher's mesh if it is None.

    Raises:
        UsageError: the argument is of another class, or has an axis that is not available.
    """
    where = "Accelerator(parallelism_config)"
    if parallelism_config is None:
        return settings.parallel or ParallelConfig()
    if settings.parallel is not None:
        note(where, "it overrides the parallel sizes of the launch")
    return ParallelConfig.of(parallelism_config, where)


def refuse_other_parallelism(**arguments: Any) -> None:
    """Refuses plugins that split a model differently from ZeRO; plugins whose parallel sizes are all 1 pass.

    Raises:
        UsageError: a plugin splits the model.
    """
    for name, plugin in arguments.items():
        sizes = {
            key: getattr(plugin, key)
            for key in ("tp_size", "tp_degree", "pp_degree")
            if isinstance(getattr(plugin, key, None), int)
        }
        if plugin is not None and (not sizes or any(size > 1 for size in sizes.values())):
            raise UsageError(
                f"Accelerator({name})",
                expected="no plugin: ZeRO and parallelism_config split models",
                got=type(plugin).__name__,
                fix=_INSTEAD_OF[name],
            )


_INSTEAD_OF = {
    "megatron_lm_plugin": "remove it, and choose a ZeRO stage that fits; `zeroaccel estimate` shows which",
    "torch_tp_plugin": "remove it, and pass parallelism_config=ParallelConfig(tp=N)",
}


def apply_handlers(handlers: HandlerSettings, plugins: Mapping[str, ZeroPlugin], fallback: ZeroPlugin) -> None:
    """Writes the handlers' loss scale and communication dtype into the config of plain data parallelism.

    With plugins, their configs set both, as in accelerate, and a note says that the handler has no effect.
    """
    if handlers.scaler is not None:
        if plugins:
            note("GradScalerKwargs", "no effect: the fp16 section of the config sets the loss scale")
        else:
            for key, value in handlers.scaler.settings().items():
                fallback.prescribe(f"fp16.{key}", value, f"GradScalerKwargs({handlers.scaler.to_kwargs()})")
            fallback.prescribe("fp16.enabled", "auto", "default")
    if handlers.communication is not None:
        if plugins:
            note("DistributedDataParallelKwargs(comm_hook)", "no effect: the config's communication_data_type applies")
        else:
            source = f"DistributedDataParallelKwargs(comm_hook={handlers.communication!r})"
            fallback.prescribe("communication_data_type", handlers.communication, source)


# -- loaders


def loader_settings_of(
    configuration: DataLoaderConfiguration | Any, split_batches: bool | None
) -> DataLoaderConfiguration:
    """Returns how loaders are sharded, from the configuration (ours or accelerate's class) or `split_batches`.

    Raises:
        UsageError: the two differ.
    """
    where = "Accelerator(dataloader_config)"
    settings = (
        DataLoaderConfiguration() if configuration is None else own(DataLoaderConfiguration, configuration, where)
    )
    if split_batches is None or split_batches == settings.split_batches:
        return settings
    if configuration is not None:
        raise UsageError(
            "Accelerator(split_batches, dataloader_config)", expected="one of them", fix="set it in dataloader_config"
        )
    return replace(settings, split_batches=bool(split_batches))


def rng_types_of(types: Sequence[Any] | None) -> tuple[str, ...]:
    """Returns the names of the random generators that are synchronized with rank 0 at the start of each epoch.

    Raises:
        UsageError: a name is unknown.
    """
    names = [str(value_of(each)) for each in types or ()]
    for name in names:
        if name not in (*_SHARED_GENERATORS, "generator"):
            expected = f"types among generator, {', '.join(_SHARED_GENERATORS)}"
            raise UsageError("Accelerator(rng_types)", expected=expected, got=name)
    return tuple(name for name in names if name != "generator")  # all ranks share the sample order anyway


# -- torch.compile


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile` for the models of an accelerator.

    Attributes:
        backend: `torch.compile` backend; "no" disables compilation, None takes the launcher's backend.
        mode, fullgraph, dynamic, options, disable: arguments of `torch.compile`.
        use_regional_compilation: compile each repeated block by itself.
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None


def compilation_of(
    backend: str | None,
    settings: LaunchedSettings,
    sources: dict[str, str],
    plugin: TorchDynamoPlugin | Any = None,
) -> Compilation | None:
    """Returns how models are compiled; None if they are not.

    Args:
        backend: argument of `Accelerator`, which takes precedence over the launcher's.
        plugin: argument of `Accelerator`, ours or accelerate's class; fields that are None take the launcher's value.

    Raises:
        UsageError: both a backend and a plugin were passed, or the plugin is of another class.
        ConfigError: the backend is unknown, or options of compilation are set without a backend.
    """
    argument = "Accelerator(dynamo_backend)"
    code = TorchDynamoPlugin(value_of(backend))
    if plugin is not None:
        if backend is not None:
            raise UsageError("Accelerator(dynamo_backend, dynamo_plugin)", expected="one of them")
        code = own(TorchDynamoPlugin, plugin, "Accelerator(dynamo_plugin)")
        argument = "Accelerator(dynamo_plugin)"
    name = code.backend if code.backend is not None else settings.dynamo_backend
    if name is None:
        if options := [option for option in _COMPILE_OPTIONS if getattr(settings, option)]:
            where = ", ".join(sources.get(option, option) for option in options)
            fix = "add --dynamo_backend inductor"
            raise ConfigError(f"{where}: options of torch.compile", expected="a backend", fix=fix)
        return None
    if name.lower() == "no" or code.disable:
        return None
    source = argument if code.backend is not None else sources.get("dynamo_backend", "the launcher")
    regional = code.use_regional_compilation
    return Compilation(
        backend_named(name, source),
        # "default" is torch's name for no mode, with which options may be combined.
        settings.dynamo_mode if code.mode is None else None if code.mode == "default" else code.mode,
        bool(settings.dynamo_use_fullgraph if code.fullgraph is None else code.fullgraph),
        settings.dynamo_use_dynamic if code.dynamic is None else code.dynamic,
        bool(settings.dynamo_use_regional_compilation if regional is None else regional),
        code.options,
    )


# -- all arguments


@dataclass(frozen=True)
class AcceleratorArguments:
    """The arguments of `Accelerator`, which documents them, before anything is looked up or decided."""

    device_placement: bool = True
    split_batches: bool | None = None
    mixed_precision: str | None = None
    gradient_accumulation_steps: int | None = None
    cpu: bool = False
    dataloader_config: DataLoaderConfiguration | None = None
    deepspeed_plugin: ZeroPlugin | Mapping[str, ZeroPlugin] | None = None
    fsdp_plugin: Any = None
    torch_tp_plugin: Any = None
    megatron_lm_plugin: Any = None
    rng_types: Sequence[Any] | None = None
    log_with: Any = None
    project_dir: str | os.PathLike[str] | None = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    kwargs_handlers: Sequence[Any] | None = None
    dynamo_backend: str | None = None
    dynamo_plugin: Any = None
    deepspeed_plugins: ZeroPlugin | Mapping[str, ZeroPlugin] | None = None
    parallelism_config: Any = None
    zero_plugin: ZeroPlugin | Mapping[str, ZeroPlugin] | None = None
    pipeline: PipelineConfig | None = None
    scheduler_counts_processes: bool = False

    def join(self, settings: LaunchedSettings) -> PartialState:
        """Joins the job. (all ranks)"""
        joining = process_group_of(self.kwargs_handlers or ())
        return PartialState(
            self.cpu or bool(settings.use_cpu),
            backend=joining.backend,
            init_method=joining.init_method,
            timeout=joining.timeout,
            debug=bool(settings.debug),
        )

    def resolve(self, settings: LaunchedSettings, sources: dict[str, str], world_size: int) -> ResolvedArguments:
        """Checks the arguments, and combines them with the launcher's settings. No collectives.

        Raises:
            ConfigError, UsageError: an argument is wrong, or contradicts another one, the launcher or the config.
        """
        handlers = handlers_of(self.kwargs_handlers or ())
        refuse_other_parallelism(torch_tp_plugin=self.torch_tp_plugin, megatron_lm_plugin=self.megatron_lm_plugin)
        accumulation = GradientAccumulationPlugin()
        if self.gradient_accumulation_plugin is not None:
            where = "Accelerator(gradient_accumulation_plugin)"
            accumulation = own(GradientAccumulationPlugin, self.gradient_accumulation_plugin, where)
        facts = Facts(
            accumulation=accumulation_of(self.gradient_accumulation_steps, accumulation),
            precision=precision_of(self.mixed_precision, settings, sources),
        )
        asked = [self.deepspeed_plugin, self.deepspeed_plugins, self.fsdp_plugin, self.zero_plugin]
        plugins = plugins_of(asked, settings)
        mesh = parallel_of(self.parallelism_config, settings)
        # A stage 0 plugin is created only if nothing requests ZeRO: it would contradict a launch that does.
        fallback = next(iter(plugins.values())) if plugins else ZeroPlugin(zero_stage=0)
        mesh = (with_config_axes(fallback.document(), mesh) or mesh).resolve(world_size)
        apply_handlers(handlers, plugins, fallback)
        project = self.project_config
        if project is not None:
            project = own(ProjectConfiguration, project, "Accelerator(project_config)")
        log_with = self.log_with
        return ResolvedArguments(
            arguments=self,
            handlers=handlers,
            accumulation=accumulation,
            facts=facts,
            plugins=plugins,
            fallback=fallback,
            mesh=mesh,
            compilation=compilation_of(self.dynamo_backend, settings, sources, self.dynamo_plugin),
            loaders=loader_settings_of(self.dataloader_config, self.split_batches),
            rng_types=rng_types_of(self.rng_types),
            project=project_of(self.project_dir, project),
            log_with=[value_of(item) for item in log_with]
            if isinstance(log_with, (list, tuple))
            else value_of(log_with),
        )


@dataclass(frozen=True)
class ResolvedArguments:
    """The arguments of an accelerator, checked and combined with the launcher's settings.

    Attributes:
        arguments: the arguments as the script passed them.
        handlers: the handlers, at most one of each kind.
        accumulation: settings of gradient accumulation.
        facts: values that fill "auto" in configs, with their sources.
        plugins: the plugins by name; empty for plain data parallelism.
        fallback: the first plugin, or the plugin of plain data parallelism.
        mesh: the resolved mesh of the processes.
        compilation: how models are compiled; None if they are not.
        loaders: how loaders are sharded over the ranks.
        rng_types: random generators that are synchronized with rank 0 at the start of each epoch.
        project: folders of states and tracker files.
        log_with: names and instances of trackers.
    """

    arguments: AcceleratorArguments
    handlers: HandlerSettings
    accumulation: GradientAccumulationPlugin
    facts: Facts
    plugins: dict[str, ZeroPlugin]
    fallback: ZeroPlugin
    mesh: ParallelConfig
    compilation: Compilation | None
    loaders: DataLoaderConfiguration
    rng_types: tuple[str, ...]
    project: ProjectConfiguration
    log_with: Any

    def gradient_state(self, num_steps: int) -> GradientState:
        """Returns the position at the start of an accumulation of `num_steps` micro-steps."""
        return GradientState(
            num_steps,
            adjust_scheduler=self.accumulation.adjust_scheduler,
            sync_with_dataloader=self.accumulation.sync_with_dataloader,
            sync_each_batch=self.accumulation.sync_each_batch,
            shared_generators=self.rng_types,
        )
