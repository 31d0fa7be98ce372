"""The names of `accelerate.utils`, for scripts that import them with only the package's name changed.

Each is imported from its home when it is first used. The modules of `accelerate.utils`, such as `utils.memory`, are
this one under other names. A name of accelerate that is not here raises an ImportError that says what does the same.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

from zeroaccel.accelerate.absent_names import absence

__all__ = [
    "MODEL_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "GatheredParameters",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "ZeroPlugin",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "clear_environment",
    "compare_versions",
    "concatenate",
    "convert_bytes",
    "convert_file_size_to_int",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_active_deepspeed_plugin",
    "get_int_from_env",
    "is_bf16_available",
    "is_compiled_module",
    "is_cuda_available",
    "is_fp16_available",
    "is_peft_model",
    "is_torch_version",
    "map_tensors",
    "merge_dicts",
    "pad_across_processes",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "should_reduce_batch_size",
    "str_to_bool",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]

_CALLS = "zeroaccel.accelerate.script_calls"
_KINDS = "zeroaccel.accelerate.kwargs_handlers"
_OPERATIONS = "zeroaccel.operations"
_ZERO = "zeroaccel.accelerate.zero_plugin"

_HOMES = {
    **dict.fromkeys(("GradientAccumulationPlugin", "TorchDynamoPlugin"), "zeroaccel.accelerate.accelerator_arguments"),
    **dict.fromkeys(("DummyOptim", "DummyScheduler"), "zeroaccel.accelerate.dummies"),
    **dict.fromkeys(
        (
            "AutocastKwargs",
            "DDPCommunicationHookType",
            "DistributedDataParallelKwargs",
            "DistributedType",
            "GradScalerKwargs",
            "InitProcessGroupKwargs",
            "KwargsHandler",
            "LoggerType",
            "PrecisionType",
            "ProfileKwargs",
        ),
        _KINDS,
    ),
    **dict.fromkeys(
        (
            "MODEL_NAME",
            "SAFE_MODEL_NAME",
            "SAFE_WEIGHTS_INDEX_NAME",
            "SAFE_WEIGHTS_NAME",
            "WEIGHTS_INDEX_NAME",
            "WEIGHTS_NAME",
            "clear_device_cache",
            "clear_environment",
            "compare_versions",
            "convert_bytes",
            "convert_to_fp32",
            "extract_model_from_parallel",
            "find_executable_batch_size",
            "get_active_deepspeed_plugin",
            "get_int_from_env",
            "is_bf16_available",
            "is_compiled_module",
            "is_cuda_available",
            "is_fp16_available",
            "is_peft_model",
            "is_torch_version",
            "merge_dicts",
            "parse_choice_from_env",
            "parse_flag_from_env",
            "patch_environment",
            "recursively_apply",
            "release_memory",
            "save",
            "send_to_device",
            "should_reduce_batch_size",
            "str_to_bool",
            "tqdm",
            "wait_for_everyone",
            "write_basic_config",
        ),
        _CALLS,
    ),
    **dict.fromkeys(
        (
            "broadcast",
            "broadcast_object_list",
            "concatenate",
            "gather",
            "gather_object",
            "pad_across_processes",
            "reduce",
        ),
        _OPERATIONS,
    ),
    **dict.fromkeys(("DeepSpeedPlugin", "ZeroPlugin"), _ZERO),
    **dict.fromkeys(("set_seed", "synchronize_rng_states"), "zeroaccel.seeds"),
    "DataLoaderConfiguration": "zeroaccel.data",
    "GatheredParameters": "zeroaccel.zero",
    "ProjectConfiguration": "zeroaccel.accelerate.project",
    "convert_file_size_to_int": "zeroaccel.checkpoint.weights:parse_nbytes",
    "find_batch_size": "zeroaccel.nested:batch_size_of",
    "map_tensors": "zeroaccel.nested",
}


_MODULES = (
    "constants",
    "dataclasses",
    "deepspeed",
    "environment",
    "imports",
    "memory",
    "modeling",
    "operations",
    "other",
    "random",
    "versions",
)
for _module in _MODULES:
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    home, _, attribute = _HOMES.get(name, "").partition(":")
    if home:
        value = getattr(import_module(home), attribute or name)
    elif name in _MODULES:
        value = sys.modules[__name__]
    else:
        value = _question(name)
    globals()[name] = value
    return value


def _question(name: str) -> Any:
    """`is_..._available` of accelerate; else an error that names what does the same."""
    calls = import_module(_CALLS)
    if name in calls.PACKAGES:
        return partial(calls.is_installed, calls.PACKAGES[name])
    if name in calls.NEVER:
        return calls.is_never_available
    reason = None if name.startswith("_") else absence(name, __name__, _HOMES)
    if reason is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(reason)
