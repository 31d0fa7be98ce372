"""Which keys of the config take effect: one table from key path to `SupportStatus`, and what follows from it.

A key WORKS; or is IGNORED: accepted, with a note on what happens instead; or is REFUSED when it is switched on, with
the reason: it cannot be honoured without changing the training. A key whose effect depends on others has a function
`idle`, and leaves a note where it has none. Making a feature available is a change of its one line. A refused or
ignored section stands for all keys within it that have no line of their own. Every other field of the schema works.
Consulted by `load_config`; changes nothing.
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
    """Whether a key takes effect."""

    WORKS = "works"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True)
class SupportStatus:
    """Whether one key takes effect.

    Attributes:
        kind: works, ignored or refused.
        reason: ignored: what happens instead. Refused: why.
        switch: the key of a section that switches it on; without one, a section is on when it is not its default.
        fix: refused: what to do instead, where that is more than removing the key.
        warns: ignored: what the key asks for does not happen, so that its note is a warning, and is there only when it
            is on. Others leave a note whenever they are given, for information.
        idle: of a key that is on: why it has no effect in this config, or the empty string where it has one.
        depends: paths of the keys that decide on that; while one of them is "auto", there is no note.
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
    """A key that asks for something that does not happen, and without which the training is the same."""
    return SupportStatus(Kind.IGNORED, reason, switch, warns=True)


def _refused(reason: str, switch: str = "", fix: str = "") -> SupportStatus:
    return SupportStatus(Kind.REFUSED, reason, switch, fix)


def _works_at_stage_3(config: Config) -> str:
    if shard_plan(config).params:
        return ""
    return f"parameters are sharded at stage 3 only, and the stage is {config.zero_optimization.stage}"


def _no_shards_to_offload(config: Config) -> str:
    reason = _works_at_stage_3(config)
    return f"{reason}: they stay where the model is" if reason else ""


def _no_states_to_offload(config: Config) -> str:
    if shard_plan(config).optimizer:
        return ""
    return "optimizer states are sharded from stage 1 on, and the stage is 0: they stay where the model is"


def _nothing_is_chosen(config: Config) -> str:
    parts = config.data_efficiency.model_extra or {}
    if any(
        isinstance(part := parts.get(name), Mapping) and part.get("enabled")
        for name in ("data_sampling", "data_routing")
    ):
        return ""
    return "neither data_sampling nor data_routing is enabled, so the section has no effect"


def _blocks_are_not_wrapped(config: Config) -> str:
    if config.activation_checkpointing.wrap_blocks:
        return ""
    return (
        "counts for calls of zeroaccel.activations.checkpoint in the model; "
        '"wrap_blocks": true beside it recomputes the model\'s repeated blocks'
    )


def _buffer_has_no_size(config: Config) -> str:
    section = config.activation_checkpointing
    if section.wrap_blocks or section.number_checkpoints is not None:
        return _blocks_are_not_wrapped(config)
    return (
        "inputs are stored one by one because their number is unknown; set number_checkpoints, "
        'or "wrap_blocks": true to recompute the model\'s repeated blocks'
    )


def _compilation_is_disabled(config: Config) -> str:
    return "" if config.compile.compiles else "the model is not compiled because disable is true"


def _nothing_is_compiled(config: Config) -> str:
    section = config.compile
    if section.compiles:
        return ""
    off = section.enabled is False or section.disable or section.kwargs.disable
    return "nothing is compiled" + ("" if off else '; add "enabled": true beside it')


_STAGE = ("zero_optimization", "zero_optimization.stage")
_AT_STAGE_3 = SupportStatus(Kind.WORKS, idle=_works_at_stage_3, depends=_STAGE)
_OF_APEX = _ignored("zeroaccel does not use Apex; fp16 and bf16 set the precision")
_OF_FP16 = _ignored("bf16 needs no loss scale; the key belongs to fp16")

_LOSS_SCALE = (
    *("loss_scale", "initial_scale_power", "loss_scale_window"),
    *("hysteresis", "consecutive_hysteresis", "min_loss_scale"),
)

_TABLE: Mapping[str, SupportStatus] = {
    # batch sizes and the step
    "optimizer.legacy_fusion": _ignored("there is one fused update"),
    "zero_allow_untested_optimizer": _ignored(
        "an optimizer of unknown class steps on whole tensors; declare optimizer.kind for even shards"
    ),
    "zero_force_ds_cpu_optimizer": _ignored("an elementwise optimizer runs on any device as it is"),
    # reduction of gradients
    "disable_allgather": _ignored("it has no effect; updated parameters are gathered when they are used"),
    "seq_parallel_communication_data_type": _ignored(
        "gradients travel in communication_data_type, whether sequences are cut or not"
    ),
    # what a run prints
    "opt_level": _OF_APEX,
    "vocabulary_size": _ignored("the model's own sizes are used"),
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
        "the engine takes no profile; wrap a step in torch.utils.flop_counter.FlopCounterMode to count operations",
        switch="enabled",
    ),
    # precision
    "fp16.opt_level": _OF_APEX,
    "fp16.fp16_master_weights_and_grads": _refused("master weights are kept in fp32"),
    "bf16.immediate_grad_update": _ignored("the engine always adds each gradient to its sum immediately"),
    "bf16.bf16_master_weights_and_grads": _refused("master weights in bf16 are not available yet"),
    "bf16.auto_cast": _ignored("inputs of forward keep their dtype; the key belongs to fp16"),
    **{f"bf16.{key}": _OF_FP16 for key in _LOSS_SCALE},
    "bf16.opt_level": _OF_APEX,
    # ZeRO
    "zero_optimization.gather_16bit_weights_on_model_save": _ignored("save_16bit_model gathers whenever it is called"),
    "zero_optimization.ignore_unused_parameters": _ignored("a parameter without a gradient has a gradient of zero"),
    "zero_optimization.log_trace_cache_warnings": _ignored("a changed order of modules is always reported, once"),
    "zero_optimization.enable_sanity_checks": _ignored("ranks are compared at every step"),
    "zero_optimization.contiguous_gradients": _ignored("gradients always lie in one flat buffer per unit"),
    "zero_optimization.reduce_scatter": _ignored("gradients are always reduce-scattered"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _ignored("each unit is one reduce-scatter over all ranks"),
    "zero_optimization.allgather_partitions": _ignored("updated parameters are always all-gathered"),
    "zero_optimization.use_all_reduce_for_fetch_params": _ignored("parameters are always all-gathered"),
    "zero_optimization.allgather_sequential": _ignored("each unit is gathered straight into place, without copies"),
    "zero_optimization.load_from_fp32_weights": _ignored("master weights always resume from their fp32 copies"),
    "zero_optimization.elastic_checkpoint": _ignored("every checkpoint loads on any number of ranks"),
    "zero_optimization.round_robin_gradients": _ignored("every rank owns an equal part of every unit"),
    "zero_optimization.parameter_alignment": _ignored("each parameter always starts at an aligned address"),
    "zero_optimization.memory_efficient_linear": _ignored(
        "no function of torch is replaced; gathered weights are freed"
    ),
    "zero_optimization.override_module_apply": _ignored("Module.apply is not replaced"),
    "zero_optimization.pipeline_loading_checkpoint": _ignored("each rank reads only its own bytes of a checkpoint"),
    "zero_optimization.cpu_offload_use_pin_memory": _ignored("pin_memory of the offload sections decides"),
    "zero_optimization.legacy_stage1": _refused("there is one implementation of stage 1"),
    "zero_optimization.partition_stream_chunk_size": _unsupported("a parameter is sharded in one piece"),
    "zero_optimization.offload_param.device": SupportStatus(Kind.WORKS, idle=_no_shards_to_offload, depends=_STAGE),
    "zero_optimization.offload_optimizer.device": SupportStatus(Kind.WORKS, idle=_no_states_to_offload, depends=_STAGE),
    "zero_optimization.offload_optimizer.fast_init": _ignored("the file is reserved at once, without being written"),
    "zero_optimization.offload_optimizer.super_offload": _unsupported(
        "the host updates in the usual order; update_during says when"
    ),
    "zero_optimization.offload_optimizer.convert_grad_on_cpu": _ignored(
        "the update reads gradients in their own dtype"
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _ignored("only super_offload reads it"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _ignored(
        "momentum buffers are stored with the master weights, on every tier"
    ),
    "zero_optimization.zenflow": _refused("ZenFlow is not available yet"),
    "zero_optimization.zero_hpz_partition_size": _AT_STAGE_3,
    "zero_optimization.zero_quantized_weights": _AT_STAGE_3,
    "zero_optimization.zero_quantized_nontrainable_weights": _AT_STAGE_3,
    "zero_optimization.zero_quantized_gradients": _AT_STAGE_3,
    "zero_optimization.zeropp_loco_param": _refused("error feedback for quantised gradients is not available yet"),
    "zero_optimization.mics_hierarchical_params_gather": _unsupported(
        "gathers go over all shards at once; zero_hpz_partition_size keeps backward's inside a node (docs/zeropp.md)"
    ),
    "aio.single_submit": _ignored("each request is a call of its own, made by a thread"),
    "aio.use_gds": _unsupported("transfers between NVMe and GPU memory go through host memory"),
    # checkpoints
    "checkpoint.tag_validation": _ignored("the ranks always agree on the tag before anything is written"),
    "checkpoint.load_universal": _ignored("every checkpoint loads on any number of ranks"),
    "checkpoint.checkpoint_serialization": _ignored("tensors are written directly, without serialisation"),
    "checkpoint.use_node_local_storage": _unsupported(
        "every rank writes into the folder that it receives; to resume, collect all files of a checkpoint in one folder"
    ),
    "checkpoint.parallel_write": _ignored("every rank writes its own part"),
    "checkpoint.parallel_write.pipeline_stage": _ignored("every rank writes its own part"),
    "checkpoint.writer": _ignored("there is one writer; checkpoint.async_save writes in the background"),
    "activation_checkpointing.partition_activations": _ignored(
        "inputs are divided among the ranks of a tensor-parallel group, and stay whole without one"
    ),
    "activation_checkpointing.cpu_checkpointing": SupportStatus(Kind.WORKS, idle=_blocks_are_not_wrapped),
    "activation_checkpointing.contiguous_memory_optimization": SupportStatus(Kind.WORKS, idle=_buffer_has_no_size),
    # beyond sharded data parallelism
    "use_data_before_expert_parallelism": _unsupported(
        "neighbours divide experts: ParallelConfig(ep=) has one order of ranks"
    ),
    "tensor_parallel.tensor_parallel.tp_grain_size": _ignored("sizes are divided equally, or refused"),
    "tensor_parallel.tensor_parallel.mpu": _ignored("groups are made by initialize"),
    "tensor_parallel.tensor_parallel.tp_group": _ignored("groups are made by initialize"),
    "pipeline": _ignored("the arguments of PipelineModule and PipelineConfig say how a model is cut"),
    "hybrid_engine": _unsupported(
        "generation uses the engine that trains; engine.gathered() keeps its weights whole meanwhile", switch="enabled"
    ),
    "compile.deepcompile": _unsupported(
        "no compiler passes for communication run; enabled compiles the model with torch.compile"
    ),
    "compile.enabled": SupportStatus(Kind.WORKS, idle=_compilation_is_disabled),
    "compile.backend": SupportStatus(Kind.WORKS, idle=_nothing_is_compiled, depends=("compile.enabled",)),
    "compile.kwargs": SupportStatus(Kind.WORKS, idle=_nothing_is_compiled, depends=("compile.enabled",)),
    "weight_quantization": _refused("quantised weights are not available yet", switch="enabled"),
    "autotuning": _unsupported("no search is made; the run trains with the settings that are given", switch="enabled"),
    "data_efficiency": SupportStatus(
        Kind.REFUSED,
        "samples and tokens are not chosen by difficulty here",
        switch="enabled",
        fix="set enabled to false, and give the training loader a sampler that chooses",
        idle=_nothing_is_chosen,
    ),
    # left out of the format by its own makers, or never part of it
    "amp": _refused("Apex is not supported", fix="use bf16 or fp16"),
    "compression_training": _refused(
        "weights are not quantised or pruned while training here",
        fix="remove it, and compress the trained model; torch.nn.utils.prune and torch.ao.quantization work on it",
    ),
    "curriculum_learning": _refused(
        "sequences do not grow with training here", fix="remove it, and cut them where batches are made"
    ),
    "datastates_ckpt": _unsupported("checkpoints are the engine's own; checkpoint.async_save writes beside training"),
    "eigenvalue": _unsupported("no curvature is computed; DeepSpeed computes it for quantize_training only"),
    "elasticity": _refused(
        "the batch size does not follow the number of ranks", fix="set train_batch_size, and remove the section"
    ),
    "graph_harvesting": _unsupported("kernels are not captured as graphs"),
    "msamp": _refused("8-bit training is not available", fix="use bf16"),
    "nebula": _unsupported("checkpoints are the engine's own; checkpoint.async_save writes beside training"),
    "progressive_layer_drop": _refused(
        "layers are not left out while training here", fix="remove it; transformers' layerdrop does it in the model"
    ),
    "quantize_training": _refused(
        "weights are not quantised while training here", fix="remove it; torch.ao.quantization.prepare_qat does it"
    ),
    "sparse_attention": _refused(
        "there are no attention kernels here, and DeepSpeed's take effect only in models that call them",
        fix="remove it, and use torch.nn.attention.flex_attention in the model",
    ),
    "sparse_gradients": _unsupported("gradients of embeddings are reduced dense, which gives the same sums"),
}


def _statuses(
    section: type[ConfigSection], above: KeyPath = (), *, works: bool = True
) -> Iterator[tuple[str, SupportStatus]]:
    """The status of each key; `works`: keys that the table omits work, else the section around them stands for them."""
    for name, field in section.model_fields.items():
        path = (*above, name)
        status = _TABLE.get(dotted(path), SupportStatus(Kind.WORKS) if works else None)
        if status is not None:
            yield dotted(path), status
        if (nested := nested_section(field)) is not None:
            yield from _statuses(nested, path, works=status is not None and status.kind is Kind.WORKS)


KEYS: Mapping[str, SupportStatus] = dict(_statuses(Config))
"""Dotted path of a key -> its status, of all but those that a section around them stands for."""

_OFF = (False, None, "none")
_OFF_VALUES = {"autotp_size": (0, 1)}  # one rank per layer splits nothing
_OFF_TEXT = {"device": '"none"', "autotp_size": "0"}


def refusals(config: Config, unresolved: Collection[KeyPath] = ()) -> Iterator[Problem]:
    """One problem for each refused key that is switched on.

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
    """One note for each key that was given and does nothing, here or in this config.

    Args:
        written: path in the schema's names -> path as written, of every key that was given.
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
    """Whether an object with keys unknown to the schema is on: unless it, or all it is made of, says enabled: false."""
    if not section or section.get("enabled") is False:
        return False
    if "enabled" in section:
        return True
    return not all(isinstance(part, Mapping) and not _free_is_on(part) for part in section.values())
