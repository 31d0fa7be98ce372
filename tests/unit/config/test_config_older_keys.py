"""Every key that DeepSpeed 0.16.9 reads from a config has an answer: it works, is noted, or is refused by name.

Newer releases have dropped or moved some of them, and public configs still have them. Each value here differs from the
default, so that the key is on.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.refusals import table
from zeroaccel.config import load_config
from zeroaccel.errors import ConfigError

TRAINED = dict(
    table("""
batch
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
reduction
    {"communication_data_type": "fp16", "seq_parallel_communication_data_type": "fp32", "prescale_gradients": true,
    "gradient_predivide_factor": 2.0, "disable_allgather": true, "gradient_clipping": 1.0, "sparse_gradients": true,
    "fp32_allreduce": true}
prints
    {"steps_per_print": 10, "wall_clock_breakdown": true, "memory_breakdown": true, "dump_state": true,
    "timers": {"throughput": {"enabled": true, "synchronized": true}}}
optimizer
    {"optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": true, "adam_w_mode": false},
    "legacy_fusion": true}, "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false}
scheduler
    {"optimizer": {"type": "Adam", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR",
    "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 10}}}
fp16
    {"fp16": {"enabled": true, "auto_cast": true, "loss_scale": 128, "initial_scale_power": 12,
    "loss_scale_window": 100, "hysteresis": 3, "consecutive_hysteresis": true, "min_loss_scale": 2}}
bf16
    {"bf16": {"enabled": true, "immediate_grad_update": true}}
bf16 by its older name
    {"bfloat16": {"enabled": true}}
apex, off
    {"amp": {"enabled": false, "opt_level": "O1"}}
other
    {"dataloader_drop_last": true, "vocabulary_size": 30000, "graph_harvesting": true}
data types
    {"data_types": {"grad_accum_dtype": "fp32"}}
stage 1 as a flag
    {"zero_optimization": true, "allgather_size": 500000000}
ZeRO
    {"zero_optimization": {"stage": 2, "contiguous_gradients": false, "reduce_scatter": false,
    "reduce_bucket_size": 50000000.0, "use_multi_rank_bucket_allreduce": false, "allgather_partitions": false,
    "allgather_bucket_size": 50000000.0, "overlap_comm": true, "load_from_fp32_weights": false,
    "elastic_checkpoint": true, "cpu_offload": true, "cpu_offload_use_pin_memory": true,
    "ignore_unused_parameters": false, "round_robin_gradients": true}}
stage 3
    {"zero_optimization": {"stage": 3, "sub_group_size": 100000000.0, "cpu_offload_param": true,
    "offload_optimizer": {"device": "cpu", "buffer_count": 8, "pin_memory": true, "pipeline_read": true,
    "pipeline_write": true, "fast_init": true, "ratio": 0.5}, "stage3_prefetch_bucket_size": 10000000.0,
    "stage3_param_persistence_threshold": 10000.0, "stage3_model_persistence_threshold": 1000000.0,
    "stage3_max_live_parameters": 100000000.0, "stage3_max_reuse_distance": 100000000.0,
    "stage3_gather_fp16_weights_on_model_save": true, "stage3_module_granularity_threshold": 10,
    "stage3_use_all_reduce_for_fetch_params": true, "mics_shard_size": 2, "mics_hierarchical_params_gather": true,
    "memory_efficient_linear": false, "pipeline_loading_checkpoint": true, "override_module_apply": false,
    "log_trace_cache_warnings": true}}
stage 3 by its fields
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "buffer_count": 6,
    "buffer_size": 10000000.0, "max_in_cpu": 100000000.0}, "prefetch_bucket_size": 10000000.0,
    "param_persistence_threshold": 10000.0, "model_persistence_threshold": 1000000.0,
    "max_live_parameters": 100000000.0, "max_reuse_distance": 100000000.0,
    "gather_16bit_weights_on_model_save": true, "module_granularity_threshold": 10,
    "use_all_reduce_for_fetch_params": true}}
ZeRO++
    {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": true,
    "zero_quantized_nontrainable_weights": true, "zero_quantized_gradients": true}}
files
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp",
    "pin_memory": true}}, "aio": {"block_size": 2097152, "queue_depth": 16, "thread_count": 2,
    "intra_op_parallelism": 2, "single_submit": true, "overlap_events": false, "use_gds": true}}
activations
    {"activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true,
    "contiguous_memory_optimization": true, "number_checkpoints": 4, "synchronize_checkpoint_boundary": true,
    "profile": true}}
checkpoints
    {"checkpoint": {"tag_validation": "FAIL", "load_universal": true, "use_node_local_storage": true,
    "parallel_write": {"pipeline_stage": true}}, "nebula": {"enabled": true, "persistent_storage_path": "/tmp",
    "persistent_time_interval": 100, "num_of_version_in_retention": 2, "enable_nebula_load": true,
    "nebula_load_path": "/tmp"}}
metrics
    {"tensorboard": {"enabled": false, "output_path": "runs", "job_name": "one"}, "csv_monitor": {"enabled": false,
    "output_path": "runs", "job_name": "one"}, "wandb": {"enabled": false, "group": "one", "team": "two",
    "project": "three"}, "comet": {"enabled": true, "samples_log_interval": 10, "project": "one",
    "workspace": "two", "api_key": "three", "experiment_name": "four", "experiment_key": "five", "online": true,
    "mode": "create"}}
profilers
    {"flops_profiler": {"enabled": true, "recompute_fwd_factor": 1.0, "profile_step": 2, "module_depth": 2,
    "top_modules": 3, "detailed": false, "output_file": "profile.txt"}, "comms_logger": {"enabled": true,
    "verbose": true, "prof_all": false, "debug": true, "prof_ops": ["all_reduce"]}, "autotuning": {"enabled": true,
    "fast": false, "results_dir": "results", "exps_dir": "experiments", "overwrite": false, "start_profile_step": 3,
    "end_profile_step": 5, "metric": "latency", "metric_path": "metric", "tuner_type": "random",
    "tuner_early_stopping": 5, "tuner_num_trials": 50,
    "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"}, "max_train_batch_size": 64,
    "min_train_batch_size": 1, "max_train_micro_batch_size_per_gpu": 8, "min_train_micro_batch_size_per_gpu": 1,
    "num_tuning_micro_batch_sizes": 3, "mp_size": 1, "model_info": {"profile": true}, "model_info_path": "info"}}
other engines
    {"pipeline": {"stages": "auto", "partition": "best", "seed_layers": true, "activation_checkpoint_interval": 1,
    "pipe_partitioned": false, "grad_partitioned": false}, "hybrid_engine": {"enabled": true, "max_out_tokens": 256,
    "inference_tp_size": 2, "release_inference_cache": true, "pin_parameters": false,
    "tp_gather_partition_size": 4}, "compile": {"deepcompile": true, "offload_activation": true,
    "double_buffer": false, "debug_log": true}, "tensor_parallel": {"autotp_size": 1, "tp_overlap_comm": true,
    "tensor_parallel": {"tp_size": 1}}, "use_data_before_expert_parallelism": true}
what nothing uses
    {"eigenvalue": {"enabled": true, "max_iter": 50, "tol": 0.1, "stability": 0.1, "layer_name": "h",
    "layer_num": 2}, "data_efficiency": {"enabled": true, "data_sampling": {"enabled": false},
    "data_routing": {"enabled": false}}, "sparse_attention": {}, "quantize_training": {"enabled": false,
    "quantize_bits": {"start_bits": 12}}, "progressive_layer_drop": {"enabled": false, "theta": 0.5,
    "gamma": 0.001}, "curriculum_learning": {"enabled": false, "curriculum_type": "seqlen", "min_difficulty": 8},
    "elasticity": {"enabled": false, "max_train_batch_size": 64, "micro_batch_sizes": [1, 2]},
    "weight_quantization": {"enabled": false},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": false},
    "different_groups": {}}}}
""")
)
"""Name -> settings with which DeepSpeed 0.16.9 and zeroaccel train."""

_NOT_READ = {"fp32_allreduce", "allgather_size"}  # keys of even older releases

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("amp", {"enabled": True, "opt_level": "O1"}),
    ("fp16.fp16_master_weights_and_grads", {"enabled": True, "fp16_master_weights_and_grads": True}),
    ("sparse_attention", {"mode": "fixed", "block": 16, "num_local_blocks": 4, "attention": "bidirectional"}),
    ("progressive_layer_drop", {"enabled": True, "theta": 0.5, "gamma": 0.001}),
    ("curriculum_learning", {"enabled": True, "curriculum_type": "seqlen", "max_difficulty": 1024}),
    ("data_efficiency.enabled", {"enabled": True, "data_sampling": {"enabled": True}}),
    ("compression_training", {"layer_reduction": {"enabled": True, "keep_number_layer": 6}}),
    ("quantize_training", {"enabled": True, "quantize_groups": 8}),
    ("weight_quantization.enabled", {"quantized_initialization": {"num_bits": 4, "group_size": 64}}),
    ("elasticity", {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [1, 2]}),
    ("optimizer.type", {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 100}}),
    ("optimizer.type", {"type": "OneBitLamb", "params": {"lr": 1e-3}}),
    ("optimizer.type", {"type": "ZeroOneAdam", "params": {"lr": 1e-3}}),
    ("zero_optimization.legacy_stage1", {"stage": 1, "legacy_stage1": True}),
    ("zero_optimization.zeropp_loco_param", {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}),
]
"""(key in the message, its section): training methods that zeroaccel does not have."""


@pytest.mark.parametrize("name", TRAINED)
def test_keys_of_older_releases_that_train_are_accepted(name: str) -> None:
    config = load_config(TRAINED[name])
    unknown = [note for note in config.notes if "unknown key, which changes nothing" in note]
    assert len(unknown) == len(_NOT_READ & {*json.loads(TRAINED[name])}), unknown


@pytest.mark.parametrize(("key", "section"), REFUSED)
def test_keys_of_another_training_are_refused_by_name(key: str, section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({key.partition(".")[0]: section})
    assert str(caught.value).startswith(f"{key}: ")
    assert "; " in str(caught.value), "the message has no remedy"
