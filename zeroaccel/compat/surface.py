"""Table of the names that `import deepspeed` provides, each with the "module:attribute" that implements it.

One row per module; attributes are imported when they are first used. These are the names that accelerate, transformers,
PEFT and TRL import, and that scripts written for DeepSpeed commonly use. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

PACKAGE = "deepspeed"

_ENGINE = "zeroaccel.compat.deepspeed_engine"
_COMMUNICATION = "zeroaccel.compat.deepspeed_comm"
_ZERO = "zeroaccel.zero"
_SHARDING = "zeroaccel.compat.deepspeed_init"
_SCHEDULES = "zeroaccel.optim.lr_schedules"
_OPTIMIZERS = "zeroaccel.compat.deepspeed_optimizers"
_ACCELERATOR = "zeroaccel.compat.device_accelerator"
_CONSOLIDATION = "zeroaccel.checkpoint.consolidate"

_INIT = {
    "GatheredParameters": f"{_ZERO}:GatheredParameters",
    "Init": f"{_SHARDING}:DeepSpeedInit",
    "ZeroParamStatus": "zeroaccel.compat.parameters:ZeroParamStatus",
    "register_external_parameter": f"{_ZERO}:register_external_parameter",
}
_ACCESS = {
    f"safe_{verb}_{part}_{what}": f"{_ZERO}:safe_{verb}_{part}_{what}"
    for verb in ("get", "set")
    for part in ("full", "local")
    for what in ("fp32_param", "grad", "optimizer_state")
}
_LEAVES = {
    name: f"zeroaccel.compat.parameters:{name}"
    for name in ("get_z3_leaf_modules", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module")
}
_COMM = {
    name: f"torch.distributed:{name}"
    for name in (
        "ReduceOp",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "destroy_process_group",
        "gather",
        "get_backend",
        "get_rank",
        "get_world_size",
        "irecv",
        "is_available",
        "isend",
        "monitored_barrier",
        "new_group",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    )
} | {name: f"{_COMMUNICATION}:{name}" for name in ("get_local_rank", "init_distributed", "is_initialized")}
_LR_SCHEDULES = {
    name: f"{_SCHEDULES}:{name}"
    for name in ("LRRangeTest", "OneCycle", "VALID_LR_SCHEDULES", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
}
_CONVERSION = {
    name: f"{_CONSOLIDATION}:{name}"
    for name in (
        "convert_zero_checkpoint_to_fp32_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
    )
}
_LOGGING = {"log_dist": f"{_ENGINE}:log_dist", "logger": "zeroaccel.logs:logger"}
_ENGINE_CLASS = {"DeepSpeedEngine": f"{_ENGINE}:DeepSpeedEngine"}

SURFACE: Mapping[str, Mapping[str, str]] = {
    PACKAGE: {
        **_ENGINE_CLASS,
        "get_accelerator": f"{_ACCELERATOR}:get_accelerator",
        "init_distributed": f"{_COMMUNICATION}:init_distributed",
        "initialize": f"{_ENGINE}:initialize",
        **_LOGGING,
        "add_config_arguments": f"{_ENGINE}:add_config_arguments",
    },
    "deepspeed.accelerator": {"get_accelerator": f"{_ACCELERATOR}:get_accelerator"},
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {
        "clone_tensors_for_torch_save": f"{_ENGINE}:clone_tensors_for_torch_save",
    },
    "deepspeed.comm": _COMM,
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": f"{_COMMUNICATION}:DEEPSPEED_ENVIRONMENT_NAME"},
    "deepspeed.ops": {},
    "deepspeed.ops.adagrad": {"DeepSpeedCPUAdagrad": f"{_OPTIMIZERS}:DeepSpeedCPUAdagrad"},
    "deepspeed.ops.adam": {
        "DeepSpeedCPUAdam": f"{_OPTIMIZERS}:DeepSpeedCPUAdam",
        "FusedAdam": f"{_OPTIMIZERS}:FusedAdam",
    },
    "deepspeed.ops.lion": {
        "DeepSpeedCPULion": f"{_OPTIMIZERS}:DeepSpeedCPULion",
        "FusedLion": f"{_OPTIMIZERS}:FusedLion",
    },
    "deepspeed.runtime": {},
    "deepspeed.runtime.engine": _ENGINE_CLASS,
    "deepspeed.runtime.lr_schedules": _LR_SCHEDULES,
    "deepspeed.runtime.utils": {"move_to_device": f"{_ENGINE}:move_to_device"},
    "deepspeed.runtime.zero": _INIT,
    "deepspeed.runtime.zero.partition_parameters": {
        **_INIT,
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": f"{_ACCELERATOR}:get_accelerator",
        "zero_wrapper_for_fp_tensor_constructor": f"{_SHARDING}:zero_wrapper_for_fp_tensor_constructor",
    },
    "deepspeed.utils": {
        **_ACCESS,
        **_LEAVES,
        **_LOGGING,
        "is_initialized": f"{_COMMUNICATION}:is_initialized",
    },
    "deepspeed.utils.logging": _LOGGING,
    "deepspeed.utils.zero_to_fp32": _CONVERSION,
    "deepspeed.zero": _INIT,
}

_CONFIG = "zeroaccel.config.load_config reads and checks a config"
_ESTIMATE = "`zeroaccel estimate` tells what a model needs at each stage"
_INFERENCE = "to run a model that does not fit, prepare it without an optimizer at stage 3"
_PIPELINE = "pipeline parallelism is torch.distributed.pipelining's"
_OPTIMIZERS_THERE = "any elementwise optimizer of torch.optim can be given to initialize, or named in the config"

ABSENT: Mapping[str, str] = {
    "deepspeed.DeepSpeedConfig": _CONFIG,
    "deepspeed.PipelineModule": _PIPELINE,
    "deepspeed.autotuning": _ESTIMATE,
    "deepspeed.checkpointing": "use zeroaccel.activations.checkpoint, or the config's activation_checkpointing section",
    "deepspeed.elasticity": "a checkpoint is resumed from by any number of ranks as it is",
    "deepspeed.inference": _INFERENCE,
    "deepspeed.init_inference": _INFERENCE,
    "deepspeed.linear": "PEFT's adapters over a frozen base train as they are",
    "deepspeed.module_inject": _INFERENCE,
    "deepspeed.moe": "expert layers of a model train as they are; name them in leaf_module.classes at stage 3",
    "deepspeed.monitor": "name tensorboard, csv_monitor or wandb in the config",
    "deepspeed.ops.lamb": _OPTIMIZERS_THERE,
    "deepspeed.ops.op_builder": "nothing is compiled, so there is nothing to build",
    "deepspeed.pipe": _PIPELINE,
    "deepspeed.profiling": "torch.profiler measures a step",
    "deepspeed.runtime.activation_checkpointing": "use zeroaccel.activations.checkpoint",
    "deepspeed.runtime.config": _CONFIG,
    "deepspeed.runtime.dataloader": "deepspeed.initialize(training_data=...) makes a loader",
    "deepspeed.runtime.fp16": _OPTIMIZERS_THERE,
    "deepspeed.runtime.hybrid_engine": "engine.gathered() makes the weights whole to generate with them",
    "deepspeed.runtime.pipe": _PIPELINE,
    "deepspeed.runtime.sequence_parallel": "sequence parallelism is not part of zeroaccel; use sp_size 1",
    "deepspeed.runtime.zero.stage3": _ESTIMATE,
    "deepspeed.runtime.zero.stage_1_and_2": _ESTIMATE,
    "deepspeed.sequence": "sequence parallelism is not part of zeroaccel",
    "deepspeed.tp_model_init": "tensor parallelism is torch.distributed.tensor.parallel's; use autotp_size 1",
    "deepspeed.utils.groups": "sequence and expert parallel groups are not part of zeroaccel",
    "deepspeed.zero.MiCS_Init": "use deepspeed.zero.Init; mics_shard_size in the config of initialize counts as ever",
}
"""Names of DeepSpeed that are not provided -> what does the same."""


def nearest(name: str) -> str | None:
    """The name of the surface whose last part is that of `name`, or reads like it; one of the same module first."""
    names = [*SURFACE, *(f"{module}.{name}" for module, names in SURFACE.items() for name in names)]
    parent, _, last = name.rpartition(".")
    siblings = [candidate for candidate in names if candidate.rpartition(".")[0] == parent]
    by_last: dict[str, str] = {}
    for candidate in (*siblings, *names):
        by_last.setdefault(candidate.rpartition(".")[2], candidate)
    similar = [last] if last in by_last else get_close_matches(last, by_last, n=1, cutoff=0.75)
    return by_last[similar[0]] if similar else None
