"""Support status of the config keys: one table from key path to `SupportStatus`, with the notes and errors it causes.

A key WORKS; is IGNORED (accepted, with a note about the actual behaviour); or is REFUSED: switching it on raises an
error with the reason, because honouring it would change the training. A key whose effect depends on other keys has a
function `idle`, and a note reports when the key has no effect. To make a feature available, change its line in the
table. The line of a refused or ignored section applies to all its keys without a line. All other fields of the schema
work. `load_config` reads the table; nothing here changes the config.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from zeroaccel.config.diagnostics import KeyPath, Note, Problem, at, dotted
from zeroaccel.config.schema import Config
from zeroaccel.config.section import ConfigSection, nested_section
from zeroaccel.config.shard_plan import shard_plan


class Kind(Enum):
    """Kind of support for a key."""

    WORKS = "works"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True)
class SupportStatus:
    """Support status of one key.

    Attributes:
        kind: works, ignored or refused.
        reason: for ignored keys, the actual behaviour; for refused keys, the cause.
        switch: the key of a section that switches it on; without one, a section is on if it differs from its default.
        fix: for refused keys, a remedy other than removing the key.
        warns: for ignored keys, True if the requested behaviour is missing: the note is then a warning, and appears
            only if the key is on. Other ignored keys cause an informational note whenever they are given.
        idle: returns why a key that is on has no effect in this config, or the empty string if it has an effect.
        depends: paths of the keys that `idle` depends on; no note appears while one of them is "auto".
    """

    kind: Kind
    reason: str = ""
    switch: str = ""
    fix: str = ""
    warns: bool = False
    idle: Callable[[Config], str] | None = None
    depends: tuple[str, ...] = ()


def _ignored(instead: str) -> SupportStatus:
    return SupportStatus(Kind.IGNORED, instead)


def _unsupported(reason: str, switch: str = "") -> SupportStatus:
    """Builds the status of a key whose feature is missing, although the training is the same without it."""
    return SupportStatus(Kind.IGNORED, reason, switch, warns=True)


def _refused(reason: str, switch: str = "", fix: str = "") -> SupportStatus:
    return SupportStatus(Kind.REFUSED, reason, switch, fix)


def _works_at_stage_3(config: Config) -> str:
    if shard_plan(config).params:
        return ""
    return f"parameters are sharded at stage 3 only, and the stage is {config.zero_optimization.stage}"


def _no_shards_to_offload(config: Config) -> str:
    reason = _works_at_stage_3(config)
    return f"{reason}: they stay on the model's device" if reason else ""


def _no_states_to_offload(config: Config) -> str:
    if shard_plan(config).optimizer:
        return ""
    return "optimizer states are sharded from stage 1 on, and the stage is 0: they stay on the model's device"


def _nothing_leaves(config: Config) -> str:
    offload = config.zero_optimization.offload_optimizer
    if offload is None or offload.device == "none":
        return 'offload_optimizer.device is "none", so that all masters and states stay on the device'
    return _no_states_to_offload(config)


def _nothing_is_chosen(config: Config) -> str:
    parts = config.data_efficiency.model_extra or {}
    if any(
        isinstance(section := parts.get(name), Mapping) and section.get("enabled")
        for name in ("data_sampling", "data_routing")
    ):
        return ""
    return "neither data_sampling nor data_routing is enabled, so the section has no effect"


def _blocks_are_not_wrapped(config: Config) -> str:
    if config.activation_checkpointing.wrap_blocks:
        return ""
    return (
        "affects only calls of zeroaccel.activations.checkpoint in the model; "
        'add "wrap_blocks": true to recompute the model\'s repeated blocks'
    )


def _buffer_has_no_size(config: Config) -> str:
    section = config.activation_checkpointing
    if section.wrap_blocks or section.number_checkpoints is not None:
        return _blocks_are_not_wrapped(config)
    return (
        "the engine stores inputs one by one because their number is unknown; set number_checkpoints, "
        'or "wrap_blocks": true to recompute the model\'s repeated blocks'
    )


def _compilation_is_disabled(config: Config) -> str:
    return "" if config.compile.compiles else "the model is not compiled because disable is true"


def _nothing_is_compiled(config: Config) -> str:
    section = config.compile
    if section.compiles:
        return ""
    off = section.enabled is False or section.disable or section.kwargs.disable
    return "nothing is compiled" + ("" if off else '; add "enabled": true')


_STAGE = ("zero_optimization", "zero_optimization.stage")
_OFFLOAD = (*_STAGE, "zero_optimization.offload_optimizer", "zero_optimization.offload_optimizer.device")
_AT_STAGE_3 = SupportStatus(Kind.WORKS, idle=_works_at_stage_3, depends=_STAGE)
_OF_APEX = _ignored("zeroaccel does not use Apex; fp16 and bf16 set the precision")
_OF_FP16 = _ignored("bf16 needs no loss scale; this is a key of fp16")

_LOSS_SCALE = (
    *("loss_scale", "initial_scale_power", "loss_scale_window"),
    *("hysteresis", "consecutive_hysteresis", "min_loss_scale"),
)

_TABLE: Mapping[str, SupportStatus] = {
    # batch sizes and the step
    "optimizer.legacy_fusion": _ignored("there is only one fused update"),
    "zero_allow_untested_optimizer": _ignored(
        "an optimizer of unknown class steps on whole tensors; declare optimizer.kind for even shards"
    ),
    "zero_force_ds_cpu_optimizer": _ignored("any elementwise optimizer runs on any device"),
    # reduction of gradients
    "disable_allgather": _ignored("it has no effect; the engine gathers updated parameters when it uses them"),
    "seq_parallel_communication_data_type": _ignored(
        "the engine reduces gradients in communication_data_type, with and without sequence parallelism"
    ),
    # output of a run
    "opt_level": _OF_APEX,
    "vocabulary_size": _ignored("the engine reads the sizes from the model"),
    "comms_logger": _unsupported(
        "the engine keeps no log of collectives; pass RecordingCollectives to initialize() to count them",
        switch="enabled",
    ),
    "timers": _ignored("steps_per_print logs samples per second"),
    "comet": _unsupported(
        "zeroaccel sends no metrics to Comet; use tensorboard, csv_monitor or wandb", switch="enabled"
    ),
    "trackio": _unsupported(
        "zeroaccel sends no metrics to Trackio; use tensorboard, csv_monitor or wandb", switch="enabled"
    ),
    "flops_profiler": _unsupported(
        "the engine has no profiler; wrap a step in torch.utils.flop_counter.FlopCounterMode to count operations",
        switch="enabled",
    ),
    # precision
    "fp16.opt_level": _OF_APEX,
    "fp16.fp16_master_weights_and_grads": _refused("master weights are always fp32"),
    "bf16.immediate_grad_update": _ignored("the engine always adds each gradient to its sum immediately"),
    "bf16.bf16_master_weights_and_grads": _refused("master weights in bf16 are not available yet"),
    "bf16.auto_cast": _ignored("inputs of forward keep their dtype; this is a key of fp16"),
    **{f"bf16.{key}": _OF_FP16 for key in _LOSS_SCALE},
    "bf16.opt_level": _OF_APEX,
    # ZeRO
    "zero_optimization.gather_16bit_weights_on_model_save": _ignored("save_16bit_model always gathers the weights"),
    "zero_optimization.ignore_unused_parameters": _ignored("the engine uses zeros for a missing gradient"),
    "zero_optimization.log_trace_cache_warnings": _ignored("the engine logs the first change in the order of modules"),
    "zero_optimization.enable_sanity_checks": _ignored("the engine compares the ranks at every step"),
    "zero_optimization.contiguous_gradients": _ignored("gradients always form one flat buffer per unit"),
    "zero_optimization.reduce_scatter": _ignored("gradients are always reduce-scattered"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _ignored("each unit is one reduce-scatter over all ranks"),
    "zero_optimization.allgather_partitions": _ignored("updated parameters are always all-gathered"),
    "zero_optimization.use_all_reduce_for_fetch_params": _ignored("parameters are always all-gathered"),
    "zero_optimization.allgather_sequential": _ignored("each unit is gathered directly into place, without copies"),
    "zero_optimization.load_from_fp32_weights": _ignored("master weights always resume from their fp32 copies"),
    "zero_optimization.elastic_checkpoint": _ignored("every checkpoint loads on any number of ranks"),
    "zero_optimization.round_robin_gradients": _ignored("every rank owns an equal part of every unit"),
    "zero_optimization.parameter_alignment": _ignored("each parameter always starts at an aligned address"),
    "zero_optimization.memory_efficient_linear": _ignored(
        "the engine replaces no function of torch and frees gathered weights"
    ),
    "zero_optimization.override_module_apply": _ignored("Module.apply is not replaced"),
    "zero_optimization.pipeline_loading_checkpoint": _ignored("each rank reads only its own bytes of a checkpoint"),
    "zero_optimization.cpu_offload_use_pin_memory": _ignored("pin_memory in the offload sections takes precedence"),
    "zero_optimization.legacy_stage1": _refused("there is only one implementation of stage 1"),
    "zero_optimization.partition_stream_chunk_size": _unsupported("each parameter is sharded in one piece"),
    "zero_optimization.offload_param.device": SupportStatus(Kind.WORKS, idle=_no_shards_to_offload, depends=_STAGE),
    "zero_optimization.offload_optimizer.device": SupportStatus(Kind.WORKS, idle=_no_states_to_offload, depends=_STAGE),
    "zero_optimization.offload_optimizer.fast_init": _ignored("creating a file reserves its space without writing"),
    **{
        f"zero_optimization.offload_optimizer.{key}": SupportStatus(Kind.WORKS, idle=_nothing_leaves, depends=_OFFLOAD)
        for key in ("ratio", "device_budget")
    },
    "zero_optimization.offload_optimizer.super_offload": _unsupported(
        "the host updates in the usual order; update_during sets the time"
    ),
    "zero_optimization.offload_optimizer.convert_grad_on_cpu": _ignored(
        "the update reads gradients without conversion"
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _ignored("only super_offload reads it"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _ignored(
        "momentum buffers have the same storage as the master weights"
    ),
    "zero_optimization.zenflow": _refused("ZenFlow is not available yet"),
    "zero_optimization.zero_hpz_partition_size": _AT_STAGE_3,
    "zero_optimization.zero_quantized_weights": _AT_STAGE_3,
    "zero_optimization.zero_quantized_nontrainable_weights": _AT_STAGE_3,
    "zero_optimization.zero_quantized_gradients": _AT_STAGE_3,
    "zero_optimization.zeropp_loco_param": _refused("error feedback for quantized gradients is not available yet"),
    "zero_optimization.mics_hierarchical_params_gather": _unsupported(
        "each gather includes all shards; zero_hpz_partition_size keeps gathers of backward in a node (docs/zeropp.md)"
    ),
    "aio.single_submit": _ignored("threads always submit requests one at a time"),
    "aio.use_gds": _unsupported("transfers between NVMe and GPU memory use host memory"),
    # checkpoints
    "checkpoint.tag_validation": _ignored("the ranks always agree on the tag before writing"),
    "checkpoint.load_universal": _ignored("every checkpoint loads on any number of ranks"),
    "checkpoint.checkpoint_serialization": _ignored("tensors are written directly, without serialization"),
    "checkpoint.use_node_local_storage": _unsupported(
        "every rank writes to the folder that it receives; to resume, collect all files of a checkpoint in one folder"
    ),
    "checkpoint.parallel_write": _ignored("every rank writes its own part"),
    "checkpoint.parallel_write.pipeline_stage": _ignored("every rank writes its own part"),
    "checkpoint.writer": _ignored("there is only one writer; checkpoint.async_save writes in the background"),
    "activation_checkpointing.partition_activations": _ignored(
        "the ranks of a tensor-parallel group divide inputs, which stay whole without such a group"
    ),
    "activation_checkpointing.cpu_checkpointing": SupportStatus(Kind.WORKS, idle=_blocks_are_not_wrapped),
    "activation_checkpointing.contiguous_memory_optimization": SupportStatus(Kind.WORKS, idle=_buffer_has_no_size),
    # beyond sharded data parallelism
    "use_data_before_expert_parallelism": _unsupported(
        "adjacent ranks divide experts: ParallelConfig(ep=) has one order of ranks"
    ),
    "tensor_parallel.tensor_parallel.tp_grain_size": _ignored("a size that does not divide equally is an error"),
    "tensor_parallel.tensor_parallel.mpu": _ignored("initialize creates the groups"),
    "tensor_parallel.tensor_parallel.tp_group": _ignored("initialize creates the groups"),
    "pipeline": _ignored("the arguments of PipelineModule and PipelineConfig set how the model is split"),
    "hybrid_engine": _unsupported(
        "the training engine also generates; engine.gathered() keeps its weights whole meanwhile", switch="enabled"
    ),
    "compile.deepcompile": _unsupported(
        "zeroaccel has no compiler passes for communication; enabled compiles the model with torch.compile"
    ),
    "compile.enabled": SupportStatus(Kind.WORKS, idle=_compilation_is_disabled),
    "compile.backend": SupportStatus(Kind.WORKS, idle=_nothing_is_compiled, depends=("compile.enabled",)),
    "compile.kwargs": SupportStatus(Kind.WORKS, idle=_nothing_is_compiled, depends=("compile.enabled",)),
    "weight_quantization": _refused("quantized weights are not available yet", switch="enabled"),
    "autotuning": _unsupported("zeroaccel does not search; it trains with the given settings", switch="enabled"),
    "data_efficiency": SupportStatus(
        Kind.REFUSED,
        "zeroaccel does not select samples and tokens by difficulty",
        switch="enabled",
        fix="set enabled to false, and use a sampler that selects them in the training loader",
        idle=_nothing_is_chosen,
    ),
    # keys that DeepSpeed has removed from the format, or that were never part of it
    "amp": _refused("Apex is not supported", fix="use bf16 or fp16"),
    "compression_training": _refused(
        "zeroaccel does not quantize or prune weights during training",
        fix="remove it, and compress the trained model with torch.nn.utils.prune or torch.ao.quantization",
    ),
    "curriculum_learning": _refused(
        "sequences do not grow during training", fix="remove it, and shorten sequences where you build batches"
    ),
    "datastates_ckpt": _unsupported("not available; checkpoint.async_save writes checkpoints in the background"),
    "eigenvalue": _unsupported("zeroaccel computes no curvature; DeepSpeed uses it only for quantize_training"),
    "elasticity": _refused(
        "the batch size does not follow the number of ranks", fix="set train_batch_size, and remove the section"
    ),
    "graph_harvesting": _unsupported("zeroaccel does not capture kernels as graphs"),
    "msamp": _refused("8-bit training is not available", fix="use bf16"),
    "nebula": _unsupported("not available; checkpoint.async_save writes checkpoints in the background"),
    "progressive_layer_drop": _refused(
        "zeroaccel does not drop layers during training", fix="remove it, and set layerdrop in the transformers model"
    ),
    "quantize_training": _refused(
        "zeroaccel does not quantize weights in training", fix="remove it, and use torch.ao.quantization.prepare_qat"
    ),
    "sparse_attention": _refused(
        "zeroaccel has no attention kernels, and DeepSpeed's take effect only in models that call them",
        fix="remove it, and use torch.nn.attention.flex_attention in the model",
    ),
    "sparse_gradients": _unsupported("gradients of embeddings are reduced as dense tensors, with the same sums"),
}


def _statuses(
    section: type[ConfigSection], above: KeyPath = (), *, works: bool = True
) -> Iterator[tuple[str, SupportStatus]]:
    """Yields the status of each key; keys missing from the table work, or follow their section if not `works`."""
    for name, field in section.model_fields.items():
        path = (*above, name)
        status = _TABLE.get(dotted(path), SupportStatus(Kind.WORKS) if works else None)
        if status is not None:
            yield dotted(path), status
        if (nested := nested_section(field)) is not None:
            yield from _statuses(nested, path, works=status is not None and status.kind is Kind.WORKS)


KEYS: Mapping[str, SupportStatus] = dict(_statuses(Config))
"""Dotted path of a key -> its status, except for keys with the status of their section."""

_OFF = (False, None, "none")
_OFF_VALUES = {"autotp_size": (0, 1)}  # a size of 1 does not split layers
_OFF_TEXT = {"device": '"none"', "autotp_size": "0"}


def refusals(config: Config, unresolved: Collection[KeyPath] = ()) -> Iterator[Problem]:
    """Yields one problem for each refused key that is switched on.

    Args:
        unresolved: paths, in the schema's names, whose value is "auto".
    """
    for name, status in KEYS.items():
        path = tuple(name.split("."))
        if status.kind is not Kind.REFUSED or not _is_on(config, path, status.switch, unresolved):
            continue
        if _is_undecided(status, unresolved) or (status.idle is not None and status.idle(config)):
            continue
        off = _OFF_TEXT.get(status.switch, "false")
        fix = status.fix or (f"remove it, or set {status.switch} to {off}" if status.switch else "remove it")
        yield Problem((*path, status.switch) if status.switch else path, text=status.reason, fix=fix)


def support_notes(
    config: Config, written: Mapping[KeyPath, KeyPath], unresolved: Collection[KeyPath] = ()
) -> Iterator[Note]:
    """Yields one note for each given key that has no effect, in general or in this config.

    Args:
        written: path in the schema's names -> path as written, for every given key.
        unresolved: paths, in the schema's names, whose value is "auto".
    """
    for path in written:
        status = KEYS.get(dotted(path))
        if status is None:
            continue
        where = written.get((*path, status.switch), written[path])
        is_on = _is_on(config, path, status.switch, unresolved)
        if status.kind is Kind.IGNORED and (is_on or not (status.warns or status.switch)):
            yield Note(where, status.reason, status.warns)
        elif status.idle is None or not is_on or _is_undecided(status, unresolved):
            continue
        elif reason := status.idle(config):
            yield Note(where, reason, warns=True)


def _is_undecided(status: SupportStatus, unresolved: Collection[KeyPath]) -> bool:
    return any(tuple(name.split(".")) in unresolved for name in status.depends)


def _is_on(config: Config, path: KeyPath, switch: str, unresolved: Collection[KeyPath]) -> bool:
    owner: object = at(config, path[:-1])
    name = str(path[-1])
    if not isinstance(owner, ConfigSection):
        return False
    value = getattr(owner, name)
    if isinstance(value, ConfigSection) and switch:
        setting = getattr(value, switch)
        return setting not in _OFF and setting not in _OFF_VALUES.get(switch, ())
    if isinstance(value, Mapping):
        return (*path, "enabled") not in unresolved and _free_is_on(value)
    return value not in _OFF and value != type(owner).model_fields[name].get_default()


def _free_is_on(section: Mapping[str, object]) -> bool:
    """Returns False for an object with free keys if it is empty, or if it or all its parts set enabled to false."""
    if not section or section.get("enabled") is False:
        return False
    if "enabled" in section:
        return True
    return not all(isinstance(value, Mapping) and not _free_is_on(value) for value in section.values())
