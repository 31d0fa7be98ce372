"""Which keys of the config take effect: one table from key path to standing, and what follows from it.

A key WORKS, or is MOOT: accepted, with a note on what happens instead; or is REFUSED when it is switched on, with the
reason. Making a feature available is a change of its one line. A refused or moot section stands for all keys within
it that have no line of their own; a working section needs a line for each. Consulted by `load`; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from zeroaccel.config.origin import Path, dotted
from zeroaccel.config.problems import Problem
from zeroaccel.config.schema import Config
from zeroaccel.config.section import ConfigSection

__all__ = ["KEYS", "Kind", "Standing", "moot_notes", "refusals"]


class Kind(Enum):
    """What becomes of a key."""

    WORKS = "works"
    MOOT = "moot"
    REFUSED = "refused"


@dataclass(frozen=True)
class Standing:
    """What becomes of one key.

    Attributes:
        kind: works, moot or refused.
        reason: moot: what happens instead. Refused: why.
        switch: the key of a section that switches it on; without one, a section is on when it is not its default.
        fix: refused: what to do instead, where that is more than removing the key.
    """

    kind: Kind
    reason: str = ""
    switch: str = ""
    fix: str = ""


_WORKS = Standing(Kind.WORKS)


def _moot(instead: str) -> Standing:
    return Standing(Kind.MOOT, instead)


def _refused(reason: str, switch: str = "", fix: str = "") -> Standing:
    return Standing(Kind.REFUSED, reason, switch, fix)


_REMOVED = _refused("this feature is not part of zeroaccel")

KEYS: Mapping[str, Standing] = {
    # batch sizes and the step
    "train_batch_size": _WORKS,
    "train_micro_batch_size_per_gpu": _WORKS,
    "gradient_accumulation_steps": _WORKS,
    "managed_gradient_accumulation": _WORKS,
    "gradient_clipping": _WORKS,
    "data_parallel_size": _WORKS,
    "dataloader_drop_last": _WORKS,
    "optimizer": _WORKS,
    "optimizer.type": _WORKS,
    "optimizer.params": _WORKS,
    "optimizer.kind": _WORKS,
    "optimizer.legacy_fusion": _moot("there is one fused update"),
    "scheduler": _WORKS,
    "scheduler.type": _WORKS,
    "scheduler.params": _WORKS,
    "zero_allow_untested_optimizer": _moot(
        "an optimizer that is not known is tried before it is sharded; optimizer.kind declares it"
    ),
    "zero_force_ds_cpu_optimizer": _moot("an elementwise optimizer runs on any device as it is"),
    # reduction of gradients
    "communication_data_type": _WORKS,
    "prescale_gradients": _WORKS,
    "gradient_predivide_factor": _WORKS,
    "gradient_allreduce_op": _WORKS,
    "disable_allgather": _moot("it has no effect; updated parameters are gathered when they are used"),
    "seq_parallel_communication_data_type": _moot("there is no sequence parallelism; communication_data_type counts"),
    # what a run prints
    "steps_per_print": _WORKS,
    "wall_clock_breakdown": _WORKS,
    "memory_breakdown": _WORKS,
    "dump_state": _WORKS,
    "disable_python_gc": _WORKS,
    "log_level": _WORKS,
    "vocabulary_size": _moot("the model's own sizes are used"),
    **dict.fromkeys((f"tensorboard{key}" for key in ("", ".enabled", ".output_path", ".job_name")), _WORKS),
    **dict.fromkeys((f"csv_monitor{key}" for key in ("", ".enabled", ".output_path", ".job_name")), _WORKS),
    **dict.fromkeys((f"wandb{key}" for key in ("", ".enabled", ".group", ".team", ".project")), _WORKS),
    "comms_logger": _refused(
        "a log of collectives is not available yet", switch="enabled", fix="pass RecordingCollectives to initialize()"
    ),
    "timers": _moot("samples per second are part of the line of steps_per_print"),
    "comet": _refused("Comet is not available yet", switch="enabled"),
    "trackio": _refused("Trackio is not available yet", switch="enabled"),
    "flops_profiler": _refused("the profiler is not available yet", switch="enabled"),
    # precision
    "fp16": _WORKS,
    "fp16.enabled": _WORKS,
    "fp16.auto_cast": _WORKS,
    "fp16.loss_scale": _WORKS,
    "fp16.initial_scale_power": _WORKS,
    "fp16.loss_scale_window": _WORKS,
    "fp16.hysteresis": _WORKS,
    "fp16.consecutive_hysteresis": _WORKS,
    "fp16.min_loss_scale": _WORKS,
    "fp16.fp16_master_weights_and_grads": _refused("master weights are kept in fp32"),
    "bf16": _WORKS,
    "bf16.enabled": _WORKS,
    "bf16.check_grad_overflow": _WORKS,
    "bf16.immediate_grad_update": _moot("each gradient is added to its sum as soon as it is there"),
    "bf16.bf16_master_weights_and_grads": _refused("master weights in bf16 are not available yet"),
    "bf16.bf16_optimizer_states": _WORKS,
    "data_types": _WORKS,
    "data_types.grad_accum_dtype": _WORKS,
    "data_types.param_dtype": _WORKS,
    "data_types.buffer_dtype": _WORKS,
    "data_types.master_weights": _WORKS,
    "data_types.keep_in_fp32_modules": _WORKS,
    "torch_autocast": _refused(
        "autocast by the engine is not available yet", switch="enabled", fix="use bf16, or torch.autocast in the model"
    ),
    # ZeRO
    "zero_optimization": _WORKS,
    "zero_optimization.stage": _WORKS,
    "zero_optimization.reduce_bucket_size": _WORKS,
    "zero_optimization.allgather_bucket_size": _WORKS,
    "zero_optimization.overlap_comm": _WORKS,
    "zero_optimization.compute_grad_norm": _WORKS,
    "zero_optimization.sub_group_size": _WORKS,
    "zero_optimization.prefetch_bucket_size": _WORKS,
    "zero_optimization.param_persistence_threshold": _WORKS,
    "zero_optimization.model_persistence_threshold": _WORKS,
    "zero_optimization.max_live_parameters": _WORKS,
    "zero_optimization.max_reuse_distance": _WORKS,
    "zero_optimization.gather_16bit_weights_on_model_save": _moot("save_16bit_model gathers whenever it is called"),
    "zero_optimization.module_granularity_threshold": _WORKS,
    "zero_optimization.ignore_unused_parameters": _moot("a parameter without a gradient has a gradient of zero"),
    "zero_optimization.log_trace_cache_warnings": _moot("a changed order of modules is always reported, once"),
    "zero_optimization.enable_sanity_checks": _moot("ranks are compared at every step"),
    "zero_optimization.leaf_module": _WORKS,
    "zero_optimization.leaf_module.classes": _WORKS,
    "zero_optimization.leaf_module.names": _WORKS,
    "zero_optimization.leaf_module.name_suffixes": _WORKS,
    "zero_optimization.contiguous_gradients": _moot("gradients always lie in one flat buffer per unit"),
    "zero_optimization.reduce_scatter": _moot("gradients are always reduce-scattered"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _moot("each unit is one reduce-scatter over all ranks"),
    "zero_optimization.allgather_partitions": _moot("updated parameters are always all-gathered"),
    "zero_optimization.use_all_reduce_for_fetch_params": _moot("parameters are always all-gathered"),
    "zero_optimization.allgather_sequential": _moot("each unit is gathered straight into place, without copies"),
    "zero_optimization.load_from_fp32_weights": _moot("master weights always resume from their fp32 copies"),
    "zero_optimization.elastic_checkpoint": _moot("every checkpoint loads on any number of ranks"),
    "zero_optimization.round_robin_gradients": _moot("every rank owns an equal part of every unit"),
    "zero_optimization.parameter_alignment": _moot("each parameter always starts at an aligned address"),
    "zero_optimization.memory_efficient_linear": _moot("no function of torch is replaced; gathered weights are freed"),
    "zero_optimization.override_module_apply": _moot("Module.apply is not replaced"),
    "zero_optimization.pipeline_loading_checkpoint": _moot("each rank reads only its own bytes of a checkpoint"),
    "zero_optimization.cpu_offload_use_pin_memory": _moot("pin_memory of the offload sections counts"),
    "zero_optimization.legacy_stage1": _refused("there is one implementation of stage 1"),
    "zero_optimization.partition_stream_chunk_size": _refused("sharding piece by piece is not available yet"),
    "zero_optimization.offload_param": _WORKS,
    "zero_optimization.offload_param.device": _WORKS,
    "zero_optimization.offload_param.nvme_path": _WORKS,
    "zero_optimization.offload_param.buffer_count": _WORKS,
    "zero_optimization.offload_param.buffer_size": _WORKS,
    "zero_optimization.offload_param.max_in_cpu": _WORKS,
    "zero_optimization.offload_param.pin_memory": _WORKS,
    "zero_optimization.offload_optimizer": _WORKS,
    "zero_optimization.offload_optimizer.device": _WORKS,
    "zero_optimization.offload_optimizer.nvme_path": _WORKS,
    "zero_optimization.offload_optimizer.buffer_count": _WORKS,
    "zero_optimization.offload_optimizer.pin_memory": _WORKS,
    "zero_optimization.offload_optimizer.pipeline_read": _WORKS,
    "zero_optimization.offload_optimizer.pipeline_write": _WORKS,
    "zero_optimization.offload_optimizer.fast_init": _moot("the file is reserved at once, without being written"),
    "zero_optimization.offload_optimizer.update_during": _WORKS,
    "zero_optimization.offload_optimizer.ratio": _WORKS,
    "zero_optimization.offload_optimizer.super_offload": _refused("scheduling for such machines is not available yet"),
    "zero_optimization.offload_optimizer.convert_grad_on_cpu": _moot("the update reads gradients in their own dtype"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _moot("it is read with super_offload only"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _moot(
        "states that have an owner lie with its masters, on every tier"
    ),
    "zero_optimization.zenflow": _refused("ZenFlow is not available yet"),
    "zero_optimization.zero_hpz_partition_size": _WORKS,
    "zero_optimization.zero_quantized_weights": _WORKS,
    "zero_optimization.zero_quantized_nontrainable_weights": _WORKS,
    "zero_optimization.zero_quantized_gradients": _WORKS,
    "zero_optimization.zeropp": _WORKS,
    "zero_optimization.zeropp.node_size": _WORKS,
    "zero_optimization.zeropp.quantize_gradients_on_one_node": _WORKS,
    "zero_optimization.zeropp.watch_interval": _WORKS,
    "zero_optimization.zeropp_loco_param": _refused("error feedback for quantised gradients is not available yet"),
    "zero_optimization.mics_shard_size": _WORKS,
    "zero_optimization.mics_hierarchical_params_gather": _refused(
        "gathering within the node first is not available yet", fix="zero_hpz_partition_size keeps backward inside it"
    ),
    "aio": _WORKS,
    "aio.block_size": _WORKS,
    "aio.queue_depth": _WORKS,
    "aio.intra_op_parallelism": _WORKS,
    "aio.single_submit": _moot("each request is a call of its own, made by a thread"),
    "aio.overlap_events": _WORKS,
    "aio.use_gds": _refused("transfers between NVMe and GPU memory are not available; they go through host memory"),
    "aio.checksum": _WORKS,
    # checkpoints
    "checkpoint": _WORKS,
    "checkpoint.async_save": _WORKS,
    "checkpoint.staging_nbytes": _WORKS,
    "checkpoint.keep_last": _WORKS,
    "checkpoint.save_random_state": _WORKS,
    "checkpoint.tag_validation": _moot("the ranks always agree on the tag before anything is written"),
    "checkpoint.load_universal": _moot("every checkpoint loads on any number of ranks"),
    "checkpoint.checkpoint_serialization": _moot("tensors are written as they are, without serialisation"),
    "checkpoint.use_node_local_storage": _refused("checkpoints in folders of the nodes are not available yet"),
    "checkpoint.parallel_write": _moot("every rank writes its own part"),
    "checkpoint.parallel_write.pipeline_stage": _refused("there is no pipeline parallelism"),
    "checkpoint.writer": _refused("there is one way of writing"),
    "activation_checkpointing": _WORKS,
    "activation_checkpointing.wrap_blocks": _WORKS,
    "activation_checkpointing.number_checkpoints": _WORKS,
    "activation_checkpointing.partition_activations": _WORKS,
    "activation_checkpointing.cpu_checkpointing": _WORKS,
    "activation_checkpointing.contiguous_memory_optimization": _WORKS,
    "activation_checkpointing.synchronize_checkpoint_boundary": _WORKS,
    "activation_checkpointing.profile": _WORKS,
    # beyond sharded data parallelism
    "sequence_parallel_size": _refused("sequence parallelism is not available yet"),
    "use_data_before_expert_parallelism": _refused("expert parallelism is not available yet"),
    "expert_parallel": _refused("expert parallelism is not available yet", switch="enabled"),
    "tensor_parallel": _refused("tensor parallelism is not available", switch="autotp_size"),
    "tensor_parallel.tensor_parallel.tp_size": _refused("tensor parallelism is not available"),
    "pipeline": _refused("pipeline parallelism is not available"),
    "hybrid_engine": _refused("the hybrid engine is not available", switch="enabled"),
    "compile": _refused(
        "compiler passes for communication are not available", switch="deepcompile", fix="use torch.compile per block"
    ),
    "weight_quantization": _refused("quantised weights are not available yet", switch="enabled"),
    "autotuning": _refused("the search for settings is not available", switch="enabled"),
    "data_efficiency": _refused("the choice of samples and tokens is not available", switch="enabled"),
    # left out of the format by its own makers, or never part of it
    "amp": _refused("Apex is not supported", fix="use bf16 or fp16"),
    "compression_training": _REMOVED,
    "curriculum_learning": _REMOVED,
    "datastates_ckpt": _REMOVED,
    "eigenvalue": _REMOVED,
    "elasticity": _refused(
        "the batch size does not follow the number of ranks", fix="set train_batch_size, and remove the section"
    ),
    "graph_harvesting": _REMOVED,
    "msamp": _refused("8-bit training is not available", fix="use bf16"),
    "nebula": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "quantize_training": _REMOVED,
    "sparse_attention": _REMOVED,
    "sparse_gradients": _REMOVED,
}
"""Dotted path of a key -> its standing."""

_OFF = (False, None, "none")
_OFF_TEXT = {"device": '"none"', "autotp_size": "0"}


def refusals(config: Config) -> Iterator[Problem]:
    """One problem for each refused key that is switched on."""
    for name, standing in KEYS.items():
        if standing.kind is not Kind.REFUSED:
            continue
        path = tuple(name.split("."))
        owner: object = config
        for part in path[:-1]:
            owner = getattr(owner, part)
        if isinstance(owner, ConfigSection) and _is_on(owner, path[-1], standing.switch):
            off = _OFF_TEXT.get(standing.switch, "false")
            fix = standing.fix or (f"remove it, or set {standing.switch} to {off}" if standing.switch else "remove it")
            yield Problem((*path, standing.switch) if standing.switch else path, text=standing.reason, fix=fix)


def moot_notes(given: Mapping[Path, Path]) -> Iterator[str]:
    """One line for each moot key that was given.

    Args:
        given: path in the schema's names -> path as written, of every key that was given.
    """
    for path, written in given.items():
        standing = KEYS.get(dotted(path))
        if standing is not None and standing.kind is Kind.MOOT:
            yield f"{dotted(written)}: {standing.reason}"


def _is_on(owner: ConfigSection, name: str, switch: str) -> bool:
    value = getattr(owner, name)
    if isinstance(value, ConfigSection) and switch:
        return getattr(value, switch) not in _OFF
    if isinstance(value, Mapping):
        return _free_is_on(value)
    return value not in (False, None) and value != type(owner).model_fields[name].get_default()


def _free_is_on(section: Mapping[str, object]) -> bool:
    """Whether an object with keys unknown to the schema is on: unless it, or all it is made of, says enabled: false."""
    if not section or section.get("enabled") is False:
        return False
    if "enabled" in section:
        return True
    return not all(isinstance(part, Mapping) and not _free_is_on(part) for part in section.values())
