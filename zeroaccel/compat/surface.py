"""Tables of the names that `import deepspeed` provides, each with its implementation as "module:attribute", and of the
members of DeepSpeed's engine.

One row per module; attributes are imported on first use. A target without an attribute is a module. The tables cover
the names in DeepSpeed's documentation, and those that accelerate, transformers, PEFT and TRL import. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

PACKAGE = "deepspeed"

_ENGINE = "zeroaccel.compat.deepspeed_engine"
_PIPE = "zeroaccel.compat.deepspeed_pipe"
_CALLS = "zeroaccel.compat.deepspeed_calls"
_COMMUNICATION = "zeroaccel.compat.deepspeed_comm"
_ZERO = "zeroaccel.zero"
_SHARDING = "zeroaccel.compat.deepspeed_init"
_LEAF_MODULES = "zeroaccel.compat.leaf_modules"
_SCHEDULES = "zeroaccel.optim.lr_schedules"
_OPTIMIZERS = "zeroaccel.compat.deepspeed_optimizers"
_ACCELERATOR = "zeroaccel.compat.device_accelerator"
_CHECKPOINTS = "zeroaccel.compat.deepspeed_checkpoints"
_CONFIGURATION = "zeroaccel.compat.deepspeed_config"
_SECTIONS = "zeroaccel.config.schema_zero"
_RECOMPUTATION = "zeroaccel.compat.activation_checkpointing"
_PROFILER = "zeroaccel.compat.flops_profiler"
_MEMBERS = "zeroaccel.compat.loss_scale_members"
_SEQUENCE_STATE = "zeroaccel.compat.parallel_state_sp"
_SEQUENCE_CALLS = tuple(
    f"get_sequence_{kind}_{what}" for kind in ("parallel", "data_parallel") for what in ("group", "rank", "world_size")
)


def _same(module: str, names: str) -> dict[str, str]:
    """Returns targets in `module` with the same names."""
    return {name: f"{module}:{name}" for name in names.split()}


_INIT = {
    **_same(_ZERO, "register_external_parameter"),
    "GatheredParameters": f"{_SHARDING}:DeepSpeedGatheredParameters",
    "Init": f"{_SHARDING}:DeepSpeedInit",
    "ZeroParamStatus": "zeroaccel.compat.parameters:ZeroParamStatus",
    "unregister_external_parameter": f"{_CALLS}:unregister_external_parameter",
}
_ACCESS = {
    f"safe_{verb}_{extent}_{what}": f"{_ZERO}:safe_{verb}_{extent}_{what}"
    for verb in ("get", "set")
    for extent in ("full", "local")
    for what in ("fp32_param", "grad", "optimizer_state")
} | _same(_CALLS, "safe_update_full_grad_vectorized")
_LEAVES = _same(
    _LEAF_MODULES,
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
)
PROFILED = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier "
    "batch_isend_irecv broadcast broadcast_object_list gather irecv isend monitored_barrier recv reduce reduce_scatter "
    "reduce_scatter_tensor scatter send"
)
"""Calls of torch.distributed that have the arguments prof, log_name and debug in DeepSpeed, for its comms logger."""

_COMM = (
    _same(
        "torch.distributed",
        "P2POp ProcessGroup ReduceOp destroy_process_group get_backend get_rank get_world_size is_available new_group",
    )
    | _same(
        _COMMUNICATION,
        f"{PROFILED} all_gather_coalesced all_reduce_coalesced get_all_ranks_from_group get_global_rank get_local_rank "
        "get_world_group inference_all_reduce init_distributed initialize_mesh_device is_initialized",
    )
    | _same(_CALLS, "configure log_summary")
    | dict.fromkeys(
        (
            "has_all_gather_into_tensor",
            "has_all_reduce_coalesced",
            "has_coalescing_manager",
            "has_reduce_scatter_tensor",
        ),
        f"{_CALLS}:has_coalesced",
    )
)
_LR_SCHEDULES = _same(_SCHEDULES, "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR")
_CONVERSION = _same(
    _CHECKPOINTS,
    "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
    "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
)
_LOGGING = {
    **_same(_CALLS, "log_dist log_dist_once set_log_level_from_string"),
    "logger": "zeroaccel.logs:logger",
}
_LAYERS = _same(_PIPE, "LayerSpec PipelineModule TiedLayerSpec")
_ENGINE_CLASS = {"DeepSpeedEngine": f"{_ENGINE}:DeepSpeedEngine"}
_OPTIMIZER_CLASS = {"DeepSpeedOptimizer": f"{_MEMBERS}:DeepSpeedOptimizer"}
_DEVICE = _same(_ACCELERATOR, "get_accelerator is_current_accelerator_supported set_accelerator")
_CHECKPOINTING = _same(
    _RECOMPUTATION, "checkpoint configure is_configured partition_activations_in_checkpoint reset set_num_layers"
)
_CONFIG_CLASS = {
    **_same(_CONFIGURATION, "DeepSpeedConfig"),
    "DeepSpeedConfigError": "zeroaccel.errors:ConfigError",
}
_OFFLOAD = {
    **_same(_CONFIGURATION, "DeepSpeedZeroOffloadOptimizerConfig OffloadDeviceEnum OffloadStateTypeEnum"),
    "DeepSpeedZeroOffloadParamConfig": f"{_SECTIONS}:OffloadParam",
}
_PROFILES = {"FlopsProfiler": f"{_PROFILER}:OperationProfiler"} | _same(
    _PROFILER, "duration_to_string flops_to_string get_model_profile macs_to_string number_to_string params_to_string"
)

_ELASTICITY = _same("zeroaccel.compat.deepspeed_config", "compute_elastic_config")

SURFACE: Mapping[str, Mapping[str, str]] = {
    PACKAGE: {
        **_ENGINE_CLASS,
        **_OPTIMIZER_CLASS,
        **_CONFIG_CLASS,
        **_LOGGING,
        "OnDevice": f"{_CALLS}:OnDevice",
        "PipelineEngine": f"{_ENGINE}:DeepSpeedPipelineEngine",
        "PipelineModule": f"{_PIPE}:PipelineModule",
        "add_config_arguments": f"{_CALLS}:add_config_arguments",
        "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
        "dist": "deepspeed.comm",
        "get_accelerator": f"{_ACCELERATOR}:get_accelerator",
        "init_distributed": f"{_COMMUNICATION}:init_distributed",
        "initialize": f"{_ENGINE}:initialize",
        "tp_model_init": f"{_ENGINE}:tp_model_init",
        "version": "zeroaccel.compat.finder:VERSION",
    },
    "deepspeed.accelerator": _DEVICE,
    "deepspeed.accelerator.real_accelerator": _DEVICE,
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.ds_to_universal": {
        "main": f"{_CHECKPOINTS}:to_universal",
        "parse_arguments": f"{_CHECKPOINTS}:universal_arguments",
    },
    "deepspeed.checkpoint.utils": _same(_CALLS, "clone_tensors_for_torch_save"),
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.comm": _COMM,
    "deepspeed.comm.comm": _COMM,
    "deepspeed.compression": {},
    "deepspeed.compression.helper": _same(_CALLS, "recursive_getattr recursive_setattr"),
    "deepspeed.elasticity": _ELASTICITY,
    "deepspeed.elasticity.elasticity": _ELASTICITY,
    "deepspeed.env_report": {"main": "zeroaccel.cli.compat:report"},
    "deepspeed.git_version_info": {"version": "zeroaccel.compat.finder:VERSION"},
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_NAME": f"{_COMMUNICATION}:DEEPSPEED_ENVIRONMENT_NAME",
        "main": "zeroaccel.cli.compat:main",
    },
    "deepspeed.moe": {},
    "deepspeed.moe.utils": _same(
        _CALLS, "has_moe_layers is_moe_param is_moe_param_group split_params_into_different_moe_groups_for_optimizer"
    ),
    "deepspeed.monitor": {},
    "deepspeed.monitor.monitor": _same(_CALLS, "MonitorMaster"),
    "deepspeed.ops": {},
    "deepspeed.ops.adagrad": _same(_OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adam": _same(_OPTIMIZERS, "DeepSpeedCPUAdam FusedAdam"),
    "deepspeed.ops.adam.cpu_adam": _same(_OPTIMIZERS, "DeepSpeedCPUAdam"),
    "deepspeed.ops.adam.fused_adam": _same(_OPTIMIZERS, "FusedAdam"),
    "deepspeed.ops.lion": _same(_OPTIMIZERS, "DeepSpeedCPULion FusedLion"),
    "deepspeed.pipe": _LAYERS,
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": _PROFILES,
    "deepspeed.profiling.flops_profiler.profiler": _PROFILES,
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": _OPTIMIZER_CLASS,
    "deepspeed.runtime.config": _CONFIG_CLASS,
    "deepspeed.runtime.dataloader": _same(_CALLS, "RepeatingLoader"),
    "deepspeed.runtime.engine": _ENGINE_CLASS,
    "deepspeed.runtime.lr_schedules": _LR_SCHEDULES,
    "deepspeed.runtime.pipe": _LAYERS,
    "deepspeed.runtime.pipe.module": _LAYERS,
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": _same(
        _SEQUENCE_STATE, " ".join(("initialize_sequence_parallel", *_SEQUENCE_CALLS))
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": _same(
        "zeroaccel.compat.ulysses_sp",
        "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter "
        "sequence_tiled_compute",
    ),
    "deepspeed.runtime.utils": _same(_CALLS, "clip_grad_norm_ see_memory_usage set_random_seed")
    | {"move_to_device": "zeroaccel.nested:to_device"},
    "deepspeed.runtime.zero": {**_INIT, **_same(_CALLS, "unwrap_model_for_generation")},
    "deepspeed.runtime.zero.config": {
        **_OFFLOAD,
        **_same(_CONFIGURATION, "DeepSpeedZeroConfig ZeroStageEnum"),
    },
    "deepspeed.runtime.zero.offload_config": _OFFLOAD,
    "deepspeed.runtime.zero.partition_parameters": {
        **_INIT,
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": f"{_ACCELERATOR}:get_accelerator",
        "zero_wrapper_for_fp_tensor_constructor": f"{_SHARDING}:zero_wrapper_for_fp_tensor_constructor",
    },
    "deepspeed.runtime.zero.stage3": _same(_CALLS, "unwrap_model_for_generation"),
    "deepspeed.runtime.zero.stage_1_and_2": {},
    "deepspeed.sequence": {},
    "deepspeed.sequence.linear_cross_entropy": _same(
        "zeroaccel.compat.ulysses_sp", "vocab_parallel_linear_cross_entropy"
    ),
    "deepspeed.utils": {
        **_ACCESS,
        **_LEAVES,
        **_LOGGING,
        **_same(_CALLS, "OnDevice RepeatingLoader instrument_w_nvtx"),
        "is_initialized": f"{_COMMUNICATION}:is_initialized",
    },
    "deepspeed.utils.groups": {
        **_same(_CALLS, "get_model_parallel_rank get_model_parallel_world_size"),
        **{f"{at}get_data_parallel_group": f"{_COMMUNICATION}:get_world_group" for at in ("", "_")},
        **{f"{at}get_data_parallel_rank": "torch.distributed:get_rank" for at in ("", "_")},
        **{f"{at}get_data_parallel_world_size": "torch.distributed:get_world_size" for at in ("", "_")},
        **{f"_{name}": f"{_SEQUENCE_STATE}:{name}" for name in _SEQUENCE_CALLS},
    },
    "deepspeed.utils.init_on_device": _same(_CALLS, "OnDevice"),
    "deepspeed.utils.logging": _LOGGING,
    "deepspeed.utils.nvtx": _same(_CALLS, "instrument_w_nvtx"),
    "deepspeed.utils.tensor_fragment": _ACCESS,
    "deepspeed.utils.timer": {"ThroughputTimer": f"{_CALLS}:StepThroughput"},
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": {
        **_CONVERSION,
        **_same(_CHECKPOINTS, "get_model_state_file get_optim_files main"),
    },
    "deepspeed.utils.zero_to_torch": {"main": f"{_CHECKPOINTS}:to_torch"},
    "deepspeed.zero": _INIT,
}

SCRIPTS = frozenset(
    {
        "deepspeed.checkpoint.ds_to_universal",
        "deepspeed.env_report",
        "deepspeed.launcher.runner",
        "deepspeed.utils.zero_to_fp32",
        "deepspeed.utils.zero_to_torch",
    }
)
"""Modules that `python -m` can run; it calls their `main`."""

_ESTIMATE = "`zeroaccel estimate` shows the memory that a model needs at each stage"
_TILES = "ZeRO gathers a linear layer's weights whole; tp splits them over ranks"
_INFERENCE = "to run a model that exceeds one device, prepare it without an optimizer at stage 3"
_OPTIMIZERS_THERE = "pass any elementwise optimizer of torch.optim to initialize, or name it in the config"
_NO_SEQUENCE = "zeroaccel.parallel.UlyssesAttention exchanges the heads of transformers' models"
_INSPECT = "`zeroaccel checkpoint inspect` shows the contents of a checkpoint"
_TRACKERS = (
    "set tensorboard, csv_monitor or wandb in the config; deepspeed.monitor.monitor.MonitorMaster writes to them"
)
_SEEDS = "recomputation restores torch's random states; a tensor-parallel model sets its own seeds"
_STATES = "initialize returns the optimizer that was passed in or configured"

ABSENT: Mapping[str, str] = {
    "deepspeed.DeepSpeedHybridEngine": "engine.gathered() gathers the weights for generation",
    "deepspeed.DeepSpeedTransformerConfig": _INFERENCE,
    "deepspeed.DeepSpeedTransformerLayer": _INFERENCE,
    "deepspeed.InferenceEngine": _INFERENCE,
    "deepspeed.autotuning": _ESTIMATE,
    "deepspeed.checkpoint.DeepSpeedCheckpoint": _INSPECT,
    "deepspeed.checkpoint.universal_checkpoint": "any number of ranks can resume from a checkpoint directly",
    "deepspeed.checkpointing.get_cuda_rng_tracker": _SEEDS,
    "deepspeed.checkpointing.model_parallel_cuda_manual_seed": _SEEDS,
    "deepspeed.comm.reset_log": "collectives are not logged; use torch.profiler",
    "deepspeed.comm.torch": "use torch.distributed directly",
    "deepspeed.compile": "engine.compile(backend=...) applies torch.compile to the model",
    "deepspeed.compression": "compression of a trained model is not part of zeroaccel; torch.ao quantizes and prunes",
    "deepspeed.inference": _INFERENCE,
    "deepspeed.init_inference": _INFERENCE,
    "deepspeed.linear": "PEFT's adapters over a frozen base model train unchanged",
    "deepspeed.module_inject": _INFERENCE,
    "deepspeed.moe": "expert layers train unchanged; ParallelConfig(ep=N) divides those of transformers",
    "deepspeed.monitor": _TRACKERS,
    "deepspeed.nebula": "checkpoint.async_save saves in the background",
    "deepspeed.ops.aio": "offload_param and offload_optimizer use NVMe; torch.from_file maps a file",
    "deepspeed.ops.fp_quantizer": "zero_quantized_weights and zero_quantized_gradients quantize communication",
    "deepspeed.ops.lamb": "set Lamb as the type in the config, or pass an optimizer",
    "deepspeed.ops.muon": "set Muon as the type in the config",
    "deepspeed.ops.op_builder": "zeroaccel has no compiled operators to build",
    "deepspeed.ops.sparse_attention": "torch.nn.attention.flex_attention supports sparse masks",
    "deepspeed.ops.transformer": _INFERENCE,
    "deepspeed.replace_transformer_layer": _INFERENCE,
    "deepspeed.runtime.activation_checkpointing.checkpointing.get_cuda_rng_tracker": _SEEDS,
    "deepspeed.runtime.activation_checkpointing.checkpointing.model_parallel_cuda_manual_seed": _SEEDS,
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": _STATES,
    "deepspeed.runtime.bf16_optimizer": _STATES,
    "deepspeed.runtime.checkpoint_engine": "use engine.save_checkpoint, and async_save for the background",
    "deepspeed.runtime.data_pipeline": "pass training_data to initialize, or iterate over your own loader",
    "deepspeed.runtime.dataloader": "deepspeed.initialize(training_data=...) creates a loader",
    "deepspeed.runtime.eigenvalue": "torch.func.hvp computes the products for power iterations",
    "deepspeed.runtime.fp16": _OPTIMIZERS_THERE,
    "deepspeed.runtime.hybrid_engine": "engine.gathered() gathers the weights for generation",
    "deepspeed.runtime.lr_schedules": "set the keys of scheduler.params in the config",
    "deepspeed.runtime.progressive_layer_drop": "drop layers in the model's forward",
    "deepspeed.runtime.sequence_parallel.ulysses_sp": "zeroaccel.parallel exchanges heads and cuts batches",
    "deepspeed.runtime.sparse_tensor": "the engine reduces sparse gradients as dense ones",
    "deepspeed.runtime.tensor_parallel": "set autotp_size in the config, or zeroaccel.ParallelConfig(tp=N)",
    "deepspeed.runtime.weight_quantizer": "torch.ao quantizes a trained model",
    "deepspeed.runtime.zero.TiledLinear": _TILES,
    "deepspeed.runtime.zero.TiledLinearReturnBias": _TILES,
    "deepspeed.runtime.zero.mics": "set mics_shard_size in the config of initialize (docs/zeropp.md)",
    "deepspeed.runtime.zero.stage3": _ESTIMATE,
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": _STATES,
    "deepspeed.runtime.zero.stage_1_and_2": _ESTIMATE,
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": _STATES,
    "deepspeed.runtime.zero.tiling": _TILES,
    "deepspeed.sequence": _NO_SEQUENCE,
    "deepspeed.sequence.cross_entropy": (
        "deepspeed.sequence.linear_cross_entropy has a loss whose mean is that of whole sequences"
    ),
    "deepspeed.utils.groups": "ParallelConfig(ep=N) creates the expert parallel groups, which have no names here",
    "deepspeed.utils.numa": "host updates use this rank's share of the machine's cores",
    "deepspeed.utils.timer": "time.perf_counter() measures a phase; steps_per_print logs samples per second",
    "deepspeed.zero.MiCS_Init": "use deepspeed.zero.Init and set mics_shard_size in the config (docs/zeropp.md)",
    "deepspeed.zero.TiledLinear": _TILES,
    "deepspeed.zero.TiledLinearReturnBias": _TILES,
}
"""Names of DeepSpeed that are not provided -> replacement. A module's row covers all names in the module."""

_QUESTIONS_AT_TOP = (
    "dataloader_drop_last dump_state gradient_clipping gradient_predivide_factor managed_gradient_accumulation "
    "memory_breakdown steps_per_print wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
)
_QUESTIONS_OF_ZERO = (
    "zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights"
)
_QUESTIONS_OF_ZERO_BY_SHORT_NAME = (
    "allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients "
    "elastic_checkpoint ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings "
    "max_live_parameters max_reuse_distance model_persistence_threshold module_granularity_threshold "
    "offload_optimizer offload_param overlap_comm param_persistence_threshold parameter_alignment "
    "prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory "
    "sub_group_size"
)

# Method of the engine -> config key whose value it returns. An absent section is None.
QUESTIONS: Mapping[str, str] = {
    **{key: key for key in _QUESTIONS_AT_TOP.split()},
    **{key: f"zero_optimization.{key}" for key in _QUESTIONS_OF_ZERO.split()},
    **{f"zero_{key}": f"zero_optimization.{key}" for key in _QUESTIONS_OF_ZERO_BY_SHORT_NAME.split()},
    "aio_config": "aio",
    "autotp_size": "tensor_parallel.autotp_size",
    "autotuning_enabled": "autotuning.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "bfloat16_enabled": "bf16.enabled",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
}

# Replacement -> members of DeepSpeed's engine that are not provided.
_INSTEAD: Mapping[str, str] = {
    "use torch.distributed.all_gather_object directly": "all_gather_scalar",
    "backward reduces gradients, and engine.step() the rest": "allreduce_bucket buffered_allreduce_fallback",
    "`zeroaccel estimate` shows the plans that fit": "autotuning_metric",
    "engine.optimizer is the optimizer itself": "basic_optimizer client_optimizer",
    "use engine.save_checkpoint; checkpoint.async_save saves in the background": "checkpoint_engine",
    "engine.lr_scheduler is the scheduler": "client_lr_scheduler",
    "set gradient_clipping in the config": "clip_fp32_gradients",
    "curriculum learning and data sampling belong to the loader: pass training_data, or iterate over your own loader": (
        "curriculum_learning_config curriculum_learning_enabled curriculum_scheduler data_efficiency_config "
        "data_efficiency_enabled data_sampling_config data_sampling_enabled set_custom_curriculum_learning_schedule "
        "set_data_post_process_func"
    ),
    "zeroaccel does not implement this": "eigenvalue",
    "only the engine of a deepspeed.pipe.PipelineModule has it": (
        "eval_batch is_pipe_parallel reset_activation_shape set_dataloader train_batch"
    ),
    "deepspeed.profiling.flops_profiler.FlopsProfiler(engine.module) counts operations": "flops_profiler",
    "call the model's generate, at stage 3 inside engine.gathered()": "generate",
    "progressive layer drop is not part of zeroaccel; drop layers in the model's forward": (
        "get_pld_theta progressive_layer_drop"
    ),
    "engine.sequence_group contains these ranks": "get_sequence_parallel_group seq_parallel_group",
    "checkpoints include expert layers like all others": "load_moe_state_dict",
    "pass axes of a mesh as zeroaccel.initialize(parallel=ParallelConfig(...))": "mpu",
    "random layer token drop is not part of zeroaccel; drop tokens in the model's forward": "random_ltd_enabled",
    "engine.compile(backend=...) applies torch.compile to the model": "register_compile_pass",
    "the engine reduces sparse gradients as dense ones": "sparse_allreduce",
    "time.perf_counter() measures a phase; steps_per_print logs samples per second": "timers",
    "engine.backward(loss) includes this step": "_backward_epilogue",
    "engine.backward(loss) includes this step first": "_backward_prologue",
    "deepspeed.initialize copies the parameters of rank 0 to every rank": "_broadcast_model",
    "engine.config is the config as a dict, and engine.get_batch_info() the batch sizes": "_config",
    "pass lr_scheduler to deepspeed.initialize, or a scheduler section in the config": "_configure_lr_scheduler",
    "pass optimizer to deepspeed.initialize, or an optimizer section in the config": "_configure_optimizer",
    "engine.zero_offload_optimizer() returns this section": "_do_optimizer_offload",
    "engine.save_checkpoint and engine.load_checkpoint include this": (
        "_get_all_ckpt_names _get_ckpt_name _get_optimizer_ckpt_name _get_zero_ckpt_name _load_checkpoint "
        "_load_zero_checkpoint _optimizer_has_ckpt_event_epilogue _optimizer_has_ckpt_event_prologue _save_checkpoint "
        "_save_zero_checkpoint"
    ),
    "deepspeed.utils.safe_get_full_grad reads a gradient, and safe_set_full_grad writes one": (
        "_get_gradients_for_reduction"
    ),
    "engine.get_global_grad_norm() returns the norm": "_global_grad_norm",
    "engine.is_gradient_accumulation_boundary() and set_gradient_accumulation_boundary(flag) are public": (
        "_is_gradient_accumulation_boundary"
    ),
    "engine.backward(loss, scale_wrt_gas=...) controls the division by the accumulation steps": "_scale_loss_by_gas",
    "engine.was_step_applied() returns this": "_step_applied",
    "engine.step() includes this": "_take_model_step",
    "engine.save_checkpoint writes the states of all ranks": "_zero_optimizer_state_dict",
}
ABSENT_MEMBERS: Mapping[str, str] = {name: text for text, names in _INSTEAD.items() for name in names.split()}
"""Member -> replacement."""


def nearest(name: str) -> str | None:
    """Returns the name of the surface with the same or a similar last part; one of the same module first."""
    names = [*SURFACE, *(f"{module}.{name}" for module, names in SURFACE.items() for name in names)]
    parent, _, last = name.rpartition(".")
    siblings = [candidate for candidate in names if candidate.rpartition(".")[0] == parent]
    by_last: dict[str, str] = {}
    for candidate in (*siblings, *names):
        by_last.setdefault(candidate.rpartition(".")[2], candidate)
    similar = [last] if last in by_last else get_close_matches(last, by_last, n=1, cutoff=0.75)
    return by_last[similar[0]] if similar else None
