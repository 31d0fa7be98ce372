"""What DeepSpeed's engine is asked about its config, and the members that zeroaccel's does not have. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

_TOP = (
    "dataloader_drop_last dump_state gradient_clipping gradient_predivide_factor managed_gradient_accumulation "
    "memory_breakdown steps_per_print wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
)
_ZERO = "zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights"
_ZERO_SHORT = (
    "allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients "
    "elastic_checkpoint ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings "
    "max_live_parameters max_reuse_distance model_persistence_threshold module_granularity_threshold "
    "offload_optimizer offload_param overlap_comm param_persistence_threshold parameter_alignment "
    "prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory "
    "sub_group_size"
)

# Method of the engine -> the key that it answers. An absent section is None.
QUESTIONS: Mapping[str, str] = {
    **{key: key for key in _TOP.split()},
    **{key: f"zero_optimization.{key}" for key in _ZERO.split()},
    **{f"zero_{key}": f"zero_optimization.{key}" for key in _ZERO_SHORT.split()},
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

# What does the same -> members of DeepSpeed's engine that are not here.
_INSTEAD: Mapping[str, str] = {
    "torch.distributed.all_gather_object does it": "all_gather_scalar",
    "gradients are reduced during backward, and by engine.step()": "allreduce_bucket buffered_allreduce_fallback",
    "`zeroaccel estimate` tells what fits": "autotuning_metric",
    "engine.optimizer is the optimizer itself": "basic_optimizer client_optimizer",
    "engine.save_checkpoint saves, and checkpoint.async_save in the background": "checkpoint_engine",
    "engine.lr_scheduler is the scheduler": "client_lr_scheduler",
    "set gradient_clipping in the config": "clip_fp32_gradients",
    "curriculum learning and data sampling are the loader's: pass training_data, or loop over a loader of your own": (
        "curriculum_learning_config curriculum_learning_enabled curriculum_scheduler data_efficiency_config "
        "data_efficiency_enabled data_sampling_config data_sampling_enabled set_custom_curriculum_learning_schedule "
        "set_data_post_process_func"
    ),
    "it is not part of zeroaccel": "eigenvalue",
    "the engine of a deepspeed.pipe.PipelineModule has it": (
        "eval_batch is_pipe_parallel reset_activation_shape set_dataloader train_batch"
    ),
    "deepspeed.profiling.flops_profiler.FlopsProfiler(engine.module) counts operations": "flops_profiler",
    "the model generates, inside engine.gathered() at stage 3": "generate",
    "progressive layer drop is not part of zeroaccel; drop layers in the model's forward": (
        "get_pld_theta progressive_layer_drop"
    ),
    "engine.sequence_group has the ranks of a sequence": "get_sequence_parallel_group seq_parallel_group",
    "expert layers are saved and loaded as any others": "load_moe_state_dict",
    "axes of a mesh are ParallelConfig of zeroaccel.initialize(parallel=...)": "mpu",
    "random layer token drop is not part of zeroaccel; drop tokens in the model's forward": "random_ltd_enabled",
    "engine.compile(backend=...) is torch.compile of the model": "register_compile_pass",
    "a sparse gradient is reduced as a dense one": "sparse_allreduce",
    "time.perf_counter() times a phase; steps_per_print logs samples per second": "timers",
    "engine.backward(loss) ends with it": "_backward_epilogue",
    "engine.backward(loss) begins with it": "_backward_prologue",
    "deepspeed.initialize gives every rank the parameters of rank 0": "_broadcast_model",
    "engine.config is the config as a dict, and engine.get_batch_info() the batch sizes": "_config",
    "pass lr_scheduler to deepspeed.initialize, or a scheduler section in the config": "_configure_lr_scheduler",
    "pass optimizer to deepspeed.initialize, or an optimizer section in the config": "_configure_optimizer",
    "engine.zero_offload_optimizer() is the section that says so": "_do_optimizer_offload",
    "engine.save_checkpoint and engine.load_checkpoint do all of it": (
        "_get_all_ckpt_names _get_ckpt_name _get_optimizer_ckpt_name _get_zero_ckpt_name _load_checkpoint "
        "_load_zero_checkpoint _optimizer_has_ckpt_event_epilogue _optimizer_has_ckpt_event_prologue _save_checkpoint "
        "_save_zero_checkpoint"
    ),
    "deepspeed.utils.safe_get_full_grad reads a gradient, and safe_set_full_grad writes one": (
        "_get_gradients_for_reduction"
    ),
    "engine.get_global_grad_norm() is the norm": "_global_grad_norm",
    "engine.is_gradient_accumulation_boundary() and set_gradient_accumulation_boundary(flag) are public": (
        "_is_gradient_accumulation_boundary"
    ),
    "engine.backward(loss, scale_wrt_gas=...) divides by the accumulation steps or does not": "_scale_loss_by_gas",
    "engine.was_step_applied() says so": "_step_applied",
    "engine.step() does it": "_take_model_step",
    "engine.save_checkpoint writes the states of all ranks": "_zero_optimizer_state_dict",
}
ABSENT_MEMBERS: Mapping[str, str] = {name: text for text, names in _INSTEAD.items() for name in names.split()}
"""Member -> what does the same."""
