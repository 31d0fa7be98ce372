"""Names of other launchers that zeroaccel translates, drops with a reason, or refuses: keys of files, and flags.

Data only, without imports of the package, for the flags of the launch (`zeroaccel.cli.launch.foreign_flags`) and for
`launch_foreign`, which translates files.
"""

from __future__ import annotations

from collections.abc import Mapping

FSDP_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
FSDP_NUMBERS = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}
FSDP_STRATEGY, FSDP_RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
_BLOCKS = "because zeroaccel finds the repeated blocks of a model"
_PREFETCH = "because stage3_prefetch_bucket_size in the JSON config controls prefetching"
# FSDP settings without a counterpart -> the reason why none is needed.
FSDP_LEFT_OUT: Mapping[str, str] = {
    "fsdp_auto_wrap_policy": _BLOCKS,
    "fsdp_transformer_layer_cls_to_wrap": _BLOCKS,
    "fsdp_min_num_params": _BLOCKS,
    "fsdp_backward_prefetch": _PREFETCH,
    "fsdp_backward_prefetch_policy": _PREFETCH,
    "fsdp_forward_prefetch": _PREFETCH,
    "fsdp_use_orig_params": "because parameters always keep their names and shapes",
    "fsdp_sync_module_states": "because the engine always uses the weights of rank 0",
    "fsdp_activation_checkpointing": "because activation_checkpointing.wrap_blocks in the JSON config, or "
    "transformers' model.activation_checkpointing_enable(), sets recomputation",
    "fsdp_activation_checkpointing_offload": "because activation_checkpointing in the JSON config offloads",
    "fsdp_version": "because there is only one engine",
    "fsdp_ignored_modules": "because the engine shards every module",
}
_AT_STAGE_3 = ("fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type")
FSDP_KEYS: tuple[str, ...] = (FSDP_STRATEGY, FSDP_RESHARD, "fsdp_offload_params", *_AT_STAGE_3, *FSDP_LEFT_OUT)
"""Known settings of FSDP, each also a flag of accelerate's launcher."""


OTHER_AXES: Mapping[str, str] = {
    "cp_size": "",
    "cp_backend": "",
    "cp_comm_strategy": "",
    "sp_backend": "the only method of sequence parallelism is DeepSpeed's (Ulysses)",
}
"""Settings of accelerate's mesh that are not available here -> reason for refusing a size above 1, or ""."""
CONTEXT, CONTEXT_IS_SP = "cp_size", "is sp_size here: ranks that share a sequence exchange heads of attention"
"""accelerate's second name for ranks that share a sequence."""
LIKE_GPU = ("MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")
_TPU = "because it is a setting for TPUs"
# Key -> reason why accelerate ignores it on a machine without TPUs, as a launch here does.
IDLE_KEYS: Mapping[str, str] = {
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_env": _TPU,
    "tpu_vm": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "commands": _TPU,
    "command_file": _TPU,
    "downcast_bf16": _TPU,
    "main_training_function": f"{_TPU}; the launcher runs scripts as they are",
    "ipex_config": "because zeroaccel does not use that library",
    "ipex_plugin_kwargs": "because zeroaccel does not use that library",
}
SAYS_NOTHING: tuple[object, ...] = (None, {}, [], "", False, "no", "main", "NO")
# Section -> the values of distributed_type that use it.
KINDS_OF_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "fsdp_config": ("FSDP",),
    "tp_config": ("TP",),
    "megatron_lm_config": ("MEGATRON_LM",),
}
JSON_KEYS = (
    "zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "train_batch_size", "steps_per_print",
    "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "activation_checkpointing",
    "zero_allow_untested_optimizer",
)  # fmt: skip

MPI_LAUNCHERS = ("openmpi", "mpich", "impi", "mvapich")
"""DeepSpeed's MPI launchers for the machines of a hostfile, replaced by ssh here."""
