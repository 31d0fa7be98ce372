"""Defaults of the config beside those of DeepSpeed 0.19.8: the ones that differ are listed, each with a reason."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from zeroaccel.compat.deepspeed_config import with_clipping
from zeroaccel.config.schema import Config
from zeroaccel.config.schema_zero import OffloadOptimizer, OffloadParam

# Of deepspeed 0.19.8 (PyPI), by the file of deepspeed/runtime that defines them
THEIRS: dict[str, dict[str, Any]] = {
    "constants.py": {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": None,
        "gradient_accumulation_steps": None,
        "managed_gradient_accumulation": True,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "communication_data_type": None,
        "seq_parallel_communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",
        "disable_allgather": False,
        "dump_state": False,
        "disable_python_gc": False,
        "vocabulary_size": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dataloader_drop_last": False,
        "use_data_before_expert_parallelism": False,
        "log_level": None,
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": True,
        "data_types.grad_accum_dtype": None,
        "data_types.param_dtype": None,
        "data_types.buffer_dtype": None,
        "data_types.keep_in_fp32_modules": "auto",
        "torch_autocast.enabled": False,
        "checkpoint.load_universal": False,
        "checkpoint.use_node_local_storage": False,
    },
    "precision_config.py": {
        "bf16.enabled": False,
        "bf16.immediate_grad_update": False,
        "bf16.check_grad_overflow": True,
        "bf16.bf16_master_weights_and_grads": False,
        "bf16.bf16_optimizer_states": False,
        "fp16.enabled": False,
        "fp16.auto_cast": False,
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": 16,
        "fp16.loss_scale_window": 1000,
        "fp16.hysteresis": 2,
        "fp16.consecutive_hysteresis": False,
        "fp16.min_loss_scale": 1,
        "fp16.fp16_master_weights_and_grads": False,
    },
    "zero/config.py": {
        "zero_optimization.stage": 0,
        "zero_optimization.contiguous_gradients": True,
        "zero_optimization.reduce_scatter": True,
        "zero_optimization.reduce_bucket_size": 500_000_000,
        "zero_optimization.use_multi_rank_bucket_allreduce": True,
        "zero_optimization.allgather_partitions": True,
        "zero_optimization.allgather_bucket_size": 500_000_000,
        "zero_optimization.overlap_comm": None,
        "zero_optimization.compute_grad_norm": True,
        "zero_optimization.load_from_fp32_weights": True,
        "zero_optimization.elastic_checkpoint": False,
        "zero_optimization.offload_param": None,
        "zero_optimization.offload_optimizer": None,
        "zero_optimization.zenflow": None,
        "zero_optimization.sub_group_size": 1_000_000_000,
        "zero_optimization.prefetch_bucket_size": 50_000_000,
        "zero_optimization.param_persistence_threshold": 100_000,
        "zero_optimization.model_persistence_threshold": sys.maxsize,
        "zero_optimization.max_live_parameters": 1_000_000_000,
        "zero_optimization.max_reuse_distance": 1_000_000_000,
        "zero_optimization.gather_16bit_weights_on_model_save": False,
        "zero_optimization.module_granularity_threshold": 0,
        "zero_optimization.use_all_reduce_for_fetch_params": False,
        "zero_optimization.allgather_sequential": False,
        "zero_optimization.ignore_unused_parameters": True,
        "zero_optimization.legacy_stage1": False,
        "zero_optimization.round_robin_gradients": False,
        "zero_optimization.parameter_alignment": False,
        "zero_optimization.zero_hpz_partition_size": 1,
        "zero_optimization.zero_quantized_weights": False,
        "zero_optimization.zero_quantized_nontrainable_weights": False,
        "zero_optimization.zero_quantized_gradients": False,
        "zero_optimization.memory_efficient_linear": True,
        "zero_optimization.pipeline_loading_checkpoint": False,
        "zero_optimization.override_module_apply": True,
        "zero_optimization.log_trace_cache_warnings": False,
        "zero_optimization.enable_sanity_checks": False,
        "zero_optimization.save_muon_momentum_buffer_in_memory": False,
    },
    "zero/offload_config.py": {
        "offload_param.device": "none",
        "offload_param.nvme_path": None,
        "offload_param.buffer_count": 5,
        "offload_param.buffer_size": 100_000_000,
        "offload_param.max_in_cpu": 1_000_000_000,
        "offload_param.pin_memory": True,
        "offload_optimizer.device": "none",
        "offload_optimizer.nvme_path": None,
        "offload_optimizer.buffer_count": 4,
        "offload_optimizer.pin_memory": True,
        "offload_optimizer.pipeline_read": False,
        "offload_optimizer.pipeline_write": False,
        "offload_optimizer.fast_init": False,
        "offload_optimizer.ratio": 1.0,
        "offload_optimizer.super_offload": False,
        "offload_optimizer.cpuadam_cores_perc": 0.8,
    },
    "swap_tensor/constants.py": {
        "aio.block_size": 1_048_576,
        "aio.queue_depth": 8,
        "aio.intra_op_parallelism": 1,
        "aio.single_submit": False,
        "aio.overlap_events": True,
        "aio.use_gds": False,
    },
    "activation_checkpointing/config.py": {
        "activation_checkpointing.partition_activations": False,
        "activation_checkpointing.number_checkpoints": None,
        "activation_checkpointing.contiguous_memory_optimization": False,
        "activation_checkpointing.synchronize_checkpoint_boundary": False,
        "activation_checkpointing.profile": False,
        "activation_checkpointing.cpu_checkpointing": False,
    },
}
# Key -> (our default, reason)
DIFFERENT: dict[str, tuple[Any, str]] = {
    "gradient_clipping": (0.0, "zeroaccel's own calls clip on request; `import deepspeed` clips at 1.0, with a note"),
}


def _ours(path: str) -> Any:
    roots = {"offload_param": OffloadParam(), "offload_optimizer": OffloadOptimizer()}
    first, _, rest = path.partition(".")
    value: Any = roots.get(first, Config())
    for name in (rest if first in roots else path).split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("file", THEIRS)
def test_defaults_are_those_of_deepspeed_or_listed_with_a_reason(file: str) -> None:
    differs = {path: _ours(path) for path, theirs in THEIRS[file].items() if _ours(path) != theirs}
    assert differs == {path: DIFFERENT[path][0] for path in differs if path in DIFFERENT}
    assert {path for path in DIFFERENT if path in THEIRS[file]} == set(differs)


def test_a_config_under_the_facade_clips_as_deepspeed_does() -> None:
    tree = with_clipping({"train_micro_batch_size_per_gpu": 1}).tree
    assert tree["gradient_clipping"] == THEIRS["constants.py"]["gradient_clipping"]
