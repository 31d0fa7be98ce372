"""What DeepSpeed's engine is asked about its config, and the members that zeroaccel's does not have. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

_ZERO = "zero_optimization"

# Method of the engine -> the key that it answers. An absent section is None.
QUESTIONS: Mapping[str, str] = {
    "aio_config": "aio",
    "autotp_size": "tensor_parallel.autotp_size",
    "autotuning_enabled": "autotuning.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "bfloat16_enabled": "bf16.enabled",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "is_sanity_checks_enabled": f"{_ZERO}.enable_sanity_checks",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "steps_per_print": "steps_per_print",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allgather_bucket_size": f"{_ZERO}.allgather_bucket_size",
    "zero_allgather_partitions": f"{_ZERO}.allgather_partitions",
    "zero_allgather_sequential": f"{_ZERO}.allgather_sequential",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_compute_grad_norm": f"{_ZERO}.compute_grad_norm",
    "zero_contiguous_gradients": f"{_ZERO}.contiguous_gradients",
    "zero_elastic_checkpoint": f"{_ZERO}.elastic_checkpoint",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_hpz_partition_size": f"{_ZERO}.zero_hpz_partition_size",
    "zero_ignore_unused_parameters": f"{_ZERO}.ignore_unused_parameters",
    "zero_legacy_stage1": f"{_ZERO}.legacy_stage1",
    "zero_load_from_fp32_weights": f"{_ZERO}.load_from_fp32_weights",
    "zero_log_trace_cache_warnings": f"{_ZERO}.log_trace_cache_warnings",
    "zero_max_live_parameters": f"{_ZERO}.max_live_parameters",
    "zero_max_reuse_distance": f"{_ZERO}.max_reuse_distance",
    "zero_model_persistence_threshold": f"{_ZERO}.model_persistence_threshold",
    "zero_module_granularity_threshold": f"{_ZERO}.module_granularity_threshold",
    "zero_multi_rank_bucket_allreduce": f"{_ZERO}.use_multi_rank_bucket_allreduce",
    "zero_offload_optimizer": f"{_ZERO}.offload_optimizer",
    "zero_offload_param": f"{_ZERO}.offload_param",
    "zero_overlap_comm": f"{_ZERO}.overlap_comm",
    "zero_param_persistence_threshold": f"{_ZERO}.param_persistence_threshold",
    "zero_parameter_alignment": f"{_ZERO}.parameter_alignment",
    "zero_prefetch_bucket_size": f"{_ZERO}.prefetch_bucket_size",
    "zero_quantized_gradients": f"{_ZERO}.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": f"{_ZERO}.zero_quantized_nontrainable_weights",
    "zero_quantized_weights": f"{_ZERO}.zero_quantized_weights",
    "zero_reduce_bucket_size": f"{_ZERO}.reduce_bucket_size",
    "zero_reduce_scatter": f"{_ZERO}.reduce_scatter",
    "zero_round_robin_gradients": f"{_ZERO}.round_robin_gradients",
    "zero_save_muon_momentum_buffer_in_memory": f"{_ZERO}.save_muon_momentum_buffer_in_memory",
    "zero_sub_group_size": f"{_ZERO}.sub_group_size",
}

_PIPELINE = "the engine of a deepspeed.pipe.PipelineModule has it"
_DATA = "curriculum learning and data sampling are the loader's: pass training_data, or loop over a loader of your own"
_REDUCTION = "gradients are reduced during backward, and by engine.step()"
_ONE_OPTIMIZER = "engine.optimizer is the optimizer itself"
_COMPILER = "engine.compile(backend=...) is torch.compile of the model"

# Members of DeepSpeed's engine that are not here -> what does the same.
ABSENT_MEMBERS: Mapping[str, str] = {
    "all_gather_scalar": "torch.distributed.all_gather_object does it",
    "allreduce_bucket": _REDUCTION,
    "autotuning_metric": "`zeroaccel estimate` tells what fits",
    "basic_optimizer": _ONE_OPTIMIZER,
    "buffered_allreduce_fallback": _REDUCTION,
    "checkpoint_engine": "engine.save_checkpoint saves, and checkpoint.async_save in the background",
    "client_lr_scheduler": "engine.lr_scheduler is the scheduler",
    "client_optimizer": _ONE_OPTIMIZER,
    "clip_fp32_gradients": "set gradient_clipping in the config",
    "curriculum_learning_config": _DATA,
    "curriculum_learning_enabled": _DATA,
    "curriculum_scheduler": _DATA,
    "data_efficiency_config": _DATA,
    "data_efficiency_enabled": _DATA,
    "data_sampling_config": _DATA,
    "data_sampling_enabled": _DATA,
    "eigenvalue": "it is not part of zeroaccel",
    "eval_batch": _PIPELINE,
    "flops_profiler": "deepspeed.profiling.flops_profiler.FlopsProfiler(engine.module) counts operations",
    "generate": "the model generates, inside engine.gathered() at stage 3",
    "get_pld_theta": "progressive layer drop is not part of zeroaccel; drop layers in the model's forward",
    "get_sequence_parallel_group": "engine.sequence_group has the ranks of a sequence",
    "is_pipe_parallel": _PIPELINE,
    "load_moe_state_dict": "expert layers are saved and loaded as any others",
    "mpu": "axes of a mesh are ParallelConfig of zeroaccel.initialize(parallel=...)",
    "progressive_layer_drop": "progressive layer drop is not part of zeroaccel; drop layers in the model's forward",
    "random_ltd_enabled": "random layer token drop is not part of zeroaccel; drop tokens in the model's forward",
    "register_compile_pass": _COMPILER,
    "reset_activation_shape": _PIPELINE,
    "seq_parallel_group": "engine.sequence_group has the ranks of a sequence",
    "set_custom_curriculum_learning_schedule": _DATA,
    "set_data_post_process_func": _DATA,
    "set_dataloader": _PIPELINE,
    "sparse_allreduce": "a sparse gradient is reduced as a dense one",
    "train_batch": _PIPELINE,
}

_BOUNDARY = "engine.is_gradient_accumulation_boundary() and set_gradient_accumulation_boundary(flag) are public"
_CHECKPOINTS = "engine.save_checkpoint and engine.load_checkpoint do all of it"
_SETTINGS = "engine.config is the config as a dict, and engine.get_batch_info() the batch sizes"
_GRADIENTS = "deepspeed.utils.safe_get_full_grad reads a gradient, and safe_set_full_grad writes one"

# Private members of DeepSpeed's engine that programs read -> what is public instead.
PRIVATE_MEMBERS: Mapping[str, str] = {
    "_backward_epilogue": "engine.backward(loss) ends with it",
    "_backward_prologue": "engine.backward(loss) begins with it",
    "_broadcast_model": "deepspeed.initialize gives every rank the parameters of rank 0",
    "_config": _SETTINGS,
    "_configure_lr_scheduler": "pass lr_scheduler to deepspeed.initialize, or a scheduler section in the config",
    "_configure_optimizer": "pass optimizer to deepspeed.initialize, or an optimizer section in the config",
    "_do_optimizer_offload": "engine.zero_offload_optimizer() is the section that says so",
    "_get_all_ckpt_names": _CHECKPOINTS,
    "_get_ckpt_name": _CHECKPOINTS,
    "_get_gradients_for_reduction": _GRADIENTS,
    "_get_optimizer_ckpt_name": _CHECKPOINTS,
    "_get_zero_ckpt_name": _CHECKPOINTS,
    "_global_grad_norm": "engine.get_global_grad_norm() is the norm",
    "_is_gradient_accumulation_boundary": _BOUNDARY,
    "_load_checkpoint": _CHECKPOINTS,
    "_load_zero_checkpoint": _CHECKPOINTS,
    "_optimizer_has_ckpt_event_epilogue": _CHECKPOINTS,
    "_optimizer_has_ckpt_event_prologue": _CHECKPOINTS,
    "_save_checkpoint": _CHECKPOINTS,
    "_save_zero_checkpoint": _CHECKPOINTS,
    "_scale_loss_by_gas": "engine.backward(loss, scale_wrt_gas=...) divides by the accumulation steps or does not",
    "_step_applied": "engine.was_step_applied() says so",
    "_take_model_step": "engine.step() does it",
    "_zero_optimizer_state_dict": "engine.save_checkpoint writes the states of all ranks",
}
