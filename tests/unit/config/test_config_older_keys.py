"""Every key that DeepSpeed 0.16.9 reads from a config has an answer: it works, is noted, or is refused by name.

Newer releases have dropped or moved some of them, and public configs still have them. A value is one that differs from
the default, so that the answer is that of a key which is on.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from zeroaccel.config import load_config
from zeroaccel.errors import ConfigError

_ADAM = {"type": "Adam", "params": {"lr": 1e-3}}

TRAINED: dict[str, dict[str, Any]] = {
    "batch": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
    "reduction": {
        "communication_data_type": "fp16",
        "seq_parallel_communication_data_type": "fp32",
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "disable_allgather": True,
        "gradient_clipping": 1.0,
        "sparse_gradients": True,
        "fp32_allreduce": True,
    },
    "prints": {
        "steps_per_print": 10,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "timers": {"throughput": {"enabled": True, "synchronized": True}},
    },
    "optimizer": {
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": False},
            "legacy_fusion": True,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
    "scheduler": {
        "optimizer": _ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    },
    "fp16": {
        "fp16": {
            "enabled": True,
            "auto_cast": True,
            "loss_scale": 128,
            "initial_scale_power": 12,
            "loss_scale_window": 100,
            "hysteresis": 3,
            "consecutive_hysteresis": True,
            "min_loss_scale": 2,
        }
    },
    "bf16": {"bf16": {"enabled": True, "immediate_grad_update": True}},
    "bf16 by its older name": {"bfloat16": {"enabled": True}},
    "apex, off": {"amp": {"enabled": False, "opt_level": "O1"}},
    "other": {"dataloader_drop_last": True, "vocabulary_size": 30000, "graph_harvesting": True},
    "data types": {"data_types": {"grad_accum_dtype": "fp32"}},
    "stage 1 as a flag": {"zero_optimization": True, "allgather_size": 500000000},
    "ZeRO": {
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": False,
            "reduce_scatter": False,
            "reduce_bucket_size": 5e7,
            "use_multi_rank_bucket_allreduce": False,
            "allgather_partitions": False,
            "allgather_bucket_size": 5e7,
            "overlap_comm": True,
            "load_from_fp32_weights": False,
            "elastic_checkpoint": True,
            "cpu_offload": True,
            "cpu_offload_use_pin_memory": True,
            "ignore_unused_parameters": False,
            "round_robin_gradients": True,
        }
    },
    "stage 3": {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1e8,
            "cpu_offload_param": True,
            "offload_optimizer": {
                "device": "cpu",
                "buffer_count": 8,
                "pin_memory": True,
                "pipeline_read": True,
                "pipeline_write": True,
                "fast_init": True,
                "ratio": 0.5,
            },
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e4,
            "stage3_model_persistence_threshold": 1e6,
            "stage3_max_live_parameters": 1e8,
            "stage3_max_reuse_distance": 1e8,
            "stage3_gather_fp16_weights_on_model_save": True,
            "stage3_module_granularity_threshold": 10,
            "stage3_use_all_reduce_for_fetch_params": True,
            "mics_shard_size": 2,
            "mics_hierarchical_params_gather": True,
            "memory_efficient_linear": False,
            "pipeline_loading_checkpoint": True,
            "override_module_apply": False,
            "log_trace_cache_warnings": True,
        }
    },
    "stage 3 by its fields": {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "buffer_count": 6, "buffer_size": 1e7, "max_in_cpu": 1e8},
            "prefetch_bucket_size": 1e7,
            "param_persistence_threshold": 1e4,
            "model_persistence_threshold": 1e6,
            "max_live_parameters": 1e8,
            "max_reuse_distance": 1e8,
            "gather_16bit_weights_on_model_save": True,
            "module_granularity_threshold": 10,
            "use_all_reduce_for_fetch_params": True,
        }
    },
    "ZeRO++": {
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 2,
            "zero_quantized_weights": True,
            "zero_quantized_nontrainable_weights": True,
            "zero_quantized_gradients": True,
        }
    },
    "files": {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp", "pin_memory": True}},
        "aio": {
            "block_size": 2097152,
            "queue_depth": 16,
            "thread_count": 2,
            "intra_op_parallelism": 2,
            "single_submit": True,
            "overlap_events": False,
            "use_gds": True,
        },
    },
    "activations": {
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": True,
            "number_checkpoints": 4,
            "synchronize_checkpoint_boundary": True,
            "profile": True,
        }
    },
    "checkpoints": {
        "checkpoint": {
            "tag_validation": "FAIL",
            "load_universal": True,
            "use_node_local_storage": True,
            "parallel_write": {"pipeline_stage": True},
        },
        "nebula": {
            "enabled": True,
            "persistent_storage_path": "/tmp",
            "persistent_time_interval": 100,
            "num_of_version_in_retention": 2,
            "enable_nebula_load": True,
            "nebula_load_path": "/tmp",
        },
    },
    "metrics": {
        "tensorboard": {"enabled": False, "output_path": "runs", "job_name": "one"},
        "csv_monitor": {"enabled": False, "output_path": "runs", "job_name": "one"},
        "wandb": {"enabled": False, "group": "one", "team": "two", "project": "three"},
        "comet": {
            "enabled": True,
            "samples_log_interval": 10,
            "project": "one",
            "workspace": "two",
            "api_key": "three",
            "experiment_name": "four",
            "experiment_key": "five",
            "online": True,
            "mode": "create",
        },
    },
    "profilers": {
        "flops_profiler": {
            "enabled": True,
            "recompute_fwd_factor": 1.0,
            "profile_step": 2,
            "module_depth": 2,
            "top_modules": 3,
            "detailed": False,
            "output_file": "profile.txt",
        },
        "comms_logger": {
            "enabled": True,
            "verbose": True,
            "prof_all": False,
            "debug": True,
            "prof_ops": ["all_reduce"],
        },
        "autotuning": {
            "enabled": True,
            "fast": False,
            "results_dir": "results",
            "exps_dir": "experiments",
            "overwrite": False,
            "start_profile_step": 3,
            "end_profile_step": 5,
            "metric": "latency",
            "metric_path": "metric",
            "tuner_type": "random",
            "tuner_early_stopping": 5,
            "tuner_num_trials": 50,
            "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
            "max_train_batch_size": 64,
            "min_train_batch_size": 1,
            "max_train_micro_batch_size_per_gpu": 8,
            "min_train_micro_batch_size_per_gpu": 1,
            "num_tuning_micro_batch_sizes": 3,
            "mp_size": 1,
            "model_info": {"profile": True},
            "model_info_path": "info",
        },
    },
    "other engines": {
        "pipeline": {
            "stages": "auto",
            "partition": "best",
            "seed_layers": True,
            "activation_checkpoint_interval": 1,
            "pipe_partitioned": False,
            "grad_partitioned": False,
        },
        "hybrid_engine": {
            "enabled": True,
            "max_out_tokens": 256,
            "inference_tp_size": 2,
            "release_inference_cache": True,
            "pin_parameters": False,
            "tp_gather_partition_size": 4,
        },
        "compile": {"deepcompile": True, "offload_activation": True, "double_buffer": False, "debug_log": True},
        "tensor_parallel": {"autotp_size": 1, "tp_overlap_comm": True, "tensor_parallel": {"tp_size": 1}},
        "use_data_before_expert_parallelism": True,
    },
    "what nothing uses": {
        "eigenvalue": {
            "enabled": True,
            "max_iter": 50,
            "tol": 0.1,
            "stability": 0.1,
            "layer_name": "h",
            "layer_num": 2,
        },
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": False}, "data_routing": {"enabled": False}},
        "sparse_attention": {},
        "quantize_training": {"enabled": False, "quantize_bits": {"start_bits": 12}},
        "progressive_layer_drop": {"enabled": False, "theta": 0.5, "gamma": 0.001},
        "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen", "min_difficulty": 8},
        "elasticity": {"enabled": False, "max_train_batch_size": 64, "micro_batch_sizes": [1, 2]},
        "weight_quantization": {"enabled": False},
        "compression_training": {
            "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}
        },
    },
}
"""Name -> settings that DeepSpeed 0.16.9 trains with, and zeroaccel too."""

_NOT_READ = {"fp32_allreduce", "allgather_size"}  # of releases that are older still

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
"""(key that is named, its section): another training than the one that zeroaccel does."""


@pytest.mark.parametrize("name", TRAINED)
def test_what_older_releases_train_with_is_accepted(name: str) -> None:
    config = load_config(json.dumps(TRAINED[name]))
    unknown = [note for note in config.notes if "unknown key, which changes nothing" in note]
    assert len(unknown) == len(_NOT_READ & {*TRAINED[name]}), unknown


@pytest.mark.parametrize(("key", "section"), REFUSED)
def test_what_is_another_training_is_refused_by_name(key: str, section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({key.partition(".")[0]: section})
    assert str(caught.value).startswith(f"{key}: ")
    assert "; " in str(caught.value), "what to do"
