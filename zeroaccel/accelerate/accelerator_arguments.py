"""What the arguments of `Accelerator` mean beside the launcher's settings, each checked and with its source.

Accumulation, precision, plugins, loaders and `torch.compile`: the functions that read them before there is a model.
Plugins of accelerate's own classes count as ours do; what has no meaning here is named in a note, or refused.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zeroaccel.accelerate.kwargs_handlers import HandlerSettings, KwargsHandler, note, own, value_of
from zeroaccel.accelerate.zero_plugin import ZeroPlugin, gather_facts
from zeroaccel.config import Fact, Facts
from zeroaccel.config.launch.launch_sources import LaunchedSettings
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.data import DataLoaderConfiguration
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.setup.compilation import Compilation
from zeroaccel.zero.compiled import backend_named

_SHARED_GENERATORS = ("torch", "cuda", "numpy", "python")
_COMPILE_OPTIONS = ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")
_PRECISIONS: dict[str, Literal["fp32", "fp16", "bf16"]] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


# -- accumulation, precision, plugins


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
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
    key = str(value_of(name)).lower()
    if key not in _PRECISIONS:
        fix = "8-bit training is not available; use bf16" if key == "fp8" else ""
        raise ConfigError(f"{source}: mixed_precision", expected='"no", "fp16" or "bf16"', got=name, fix=fix)
    return Facts(precision=Fact(_PRECISIONS[key], source, explicit))


def plugins_of(arguments: Sequence[Any], settings: LaunchedSettings) -> dict[str, ZeroPlugin]:
    """The plugins by name: those of the one argument that is there, or one if the launcher asks for ZeRO.

    Args:
        arguments: plugins of ours, of accelerate for DeepSpeed or for FSDP, and mappings of them; None for none.

    Raises:
        ConfigError: several arguments, none in a mapping, or something else than a plugin.
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
    """A plugin as ours.

    Raises:
        ConfigError: it is none, or asks for what ZeRO does not do.
    """
    if isinstance(plugin, ZeroPlugin):
        return plugin
    convert = {"DeepSpeedPlugin": _of_deepspeed, "FullyShardedDataParallelPlugin": _of_fsdp}.get(type(plugin).__name__)
    if convert is None:
        raise ConfigError(f"Accelerator: plugin {name!r}", expected="a ZeroPlugin", got=type(plugin).__name__)
    return convert(plugin)


def _of_deepspeed(plugin: Any) -> ZeroPlugin:
    """accelerate's plugin for DeepSpeed, whose config has what its arguments and the launcher said."""
    config = copy.deepcopy(dict(plugin.deepspeed_config))
    if config.get("steps_per_print") == math.inf:  # as accelerate writes "never"
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
    "units, prefetching, state dicts and the dtypes of a module are the engine's: see the config's zero_optimization "
    "section, and Accelerator(mixed_precision)"
)


def _of_fsdp(plugin: Any) -> ZeroPlugin:
    """The stage that shards what FSDP's strategy shards, with its offload."""
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
            fix='for shards in groups with replicas, use ZeroPlugin({"zero_optimization": {"stage": 3, '
            '"mics_shard_size": RANKS}})',
        )
    if getattr(plugin, "activation_checkpointing", None):
        note(f"{_FSDP}(activation_checkpointing=True)", "call zeroaccel.activations' or the model's own checkpointing")
    offload = getattr(plugin, "cpu_offload", None)
    offloads = bool(getattr(offload, "offload_params", offload))  # FSDP2's policy has no such field
    note(_FSDP, f"{_REST_OF_FSDP}; it becomes ZeroPlugin(zero_stage={_STAGE_OF_STRATEGY[name]})")
    device = "cpu" if offloads else None
    return ZeroPlugin(
        zero_stage=_STAGE_OF_STRATEGY[name],
        offload_optimizer_device=device,
        offload_param_device=device if name == "FULL_SHARD" else None,
    )


def parallel_of(parallelism_config: Any, settings: LaunchedSettings) -> ParallelConfig:
    """The mesh of the argument, ours or accelerate's, else of the launcher.

    Raises:
        UsageError: it is neither, or has an axis that is not available here.
    """
    where = "Accelerator(parallelism_config)"
    if parallelism_config is None:
        return settings.parallel or ParallelConfig()
    if settings.parallel is not None:
        note(where, "takes precedence over the sizes of the launch")
    return ParallelConfig.of(parallelism_config, where)


def refuse_other_parallelism(**arguments: Any) -> None:
    """Plugins that split a model otherwise than ZeRO; those that say "do not" pass.

    Raises:
        UsageError: one that splits.
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
                expected="nothing: models are split by ZeRO and parallelism_config",
                got=type(plugin).__name__,
                fix=_INSTEAD_OF[name],
            )


_INSTEAD_OF = {
    "megatron_lm_plugin": "leave it out, and choose a stage that fits: `zeroaccel estimate` tells",
    "torch_tp_plugin": "leave it out, and pass parallelism_config=ParallelConfig(tp=N)",
}


def apply_handlers(handlers: HandlerSettings, plugins: Mapping[str, ZeroPlugin], fallback: ZeroPlugin) -> None:
    """Writes what handlers say of precision and communication into the config of plain data parallelism.

    A plugin's config says these itself, as with accelerate, where a note tells that the handler changes nothing.
    """
    if handlers.scaler is not None:
        if plugins:
            note("GradScalerKwargs", "the fp16 section of the config sets the loss scale")
        else:
            for key, value in handlers.scaler.settings().items():
                fallback.prescribe(f"fp16.{key}", value, f"GradScalerKwargs({handlers.scaler.to_kwargs()})")
            fallback.prescribe("fp16.enabled", "auto", "default")
    if handlers.communication is not None:
        if plugins:
            note("DistributedDataParallelKwargs(comm_hook)", "communication_data_type of the config sets the dtype")
        else:
            source = f"DistributedDataParallelKwargs(comm_hook={handlers.communication!r})"
            fallback.prescribe("communication_data_type", handlers.communication, source)


# -- loaders


def loader_settings_of(
    configuration: DataLoaderConfiguration | Any, split_batches: bool | None
) -> DataLoaderConfiguration:
    """How loaders are sharded, ours or accelerate's, with the older argument.

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
            "Accelerator(split_batches, dataloader_config)", expected="one of them", fix="leave split_batches out"
        )
    return replace(settings, split_batches=bool(split_batches))


def rng_types_of(types: Sequence[Any] | None) -> tuple[str, ...]:
    """Random generators, by name, that are made rank 0's at the start of each epoch.

    Raises:
        UsageError: a generator that there is none of.
    """
    names = [str(value_of(each)) for each in types or ()]
    for name in names:
        if name not in (*_SHARED_GENERATORS, "generator"):
            expected = f"types among generator, {', '.join(_SHARED_GENERATORS)}"
            raise UsageError("Accelerator(rng_types)", expected=expected, got=name)
    return tuple(name for name in names if name != "generator")  # the order of samples is common in any case


# -- torch.compile


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile` for the models of an accelerator.

    Attributes:
        backend: of `torch.compile`; "no" compiles nothing, None takes the launcher's.
        mode, fullgraph, dynamic, options, disable: as of torch.
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
    """How models are compiled; None for not at all.

    Args:
        backend: the `Accelerator`'s own argument, which precedes the launcher's.
        plugin: its plugin, ours or accelerate's; what it leaves open the launcher says.

    Raises:
        UsageError: a backend and a plugin, or something else than a plugin.
        ConfigError: there is no such backend, or there are options of compilation without a backend.
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
            raise ConfigError(f"{where}: says how to compile", expected="a backend", fix=fix)
        return None
    if name.lower() == "no" or code.disable:
        return None
    source = argument if code.backend is not None else sources.get("dynamo_backend", "the launcher")
    regional = code.use_regional_compilation
    return Compilation(
        backend_named(name, source),
        # "default" is torch's word for none, beside which options may be given.
        settings.dynamo_mode if code.mode is None else None if code.mode == "default" else code.mode,
        bool(settings.dynamo_use_fullgraph if code.fullgraph is None else code.fullgraph),
        settings.dynamo_use_dynamic if code.dynamic is None else code.dynamic,
        bool(settings.dynamo_use_regional_compilation if regional is None else regional),
        code.options,
    )
