"""The names of `accelerate.utils`, for scripts that import them with only the package's name changed.

Each name is imported from its module on first use. Names that do not concern an engine come from accelerate, which must
be installed for them. The modules of `accelerate.utils`, such as `utils.memory`, are aliases of this one. A name of
accelerate that is missing here raises an ImportError that names the replacement.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from zeroaccel.accelerate.absent_names import absence

# Module -> the names that it provides; "name=attribute" if the attribute has a different name.
_PROVIDES = {
    "accelerate.utils": "MODEL_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME "
    "WEIGHTS_NAME "
    "clear_environment compare_versions convert_bytes convert_to_fp32 get_int_from_env is_bf16_available "
    "is_compiled_module is_cuda_available is_fp16_available is_torch_version merge_dicts parse_choice_from_env "
    "parse_flag_from_env patch_environment recursively_apply release_memory send_to_device str_to_bool",
    "zeroaccel.accelerate.accelerator_arguments": "GradientAccumulationPlugin TorchDynamoPlugin",
    "zeroaccel.accelerate.prepared_optimizer": "DummyOptim DummyScheduler",
    "zeroaccel.accelerate.kwargs_handlers": "AutocastKwargs DDPCommunicationHookType DistributedDataParallelKwargs "
    "DistributedType GradScalerKwargs InitProcessGroupKwargs KwargsHandler LoggerType PrecisionType ProfileKwargs",
    "zeroaccel.accelerate.project": "ProjectConfiguration",
    "zeroaccel.accelerate.script_calls": "clear_device_cache extract_model_from_parallel find_executable_batch_size "
    "get_active_deepspeed_plugin is_peft_model save should_reduce_batch_size tqdm wait_for_everyone write_basic_config",
    "zeroaccel.accelerate.zero_plugin": "DeepSpeedPlugin ZeroPlugin",
    "zeroaccel.checkpoint.weights": "convert_file_size_to_int=parse_nbytes",
    "zeroaccel.data": "DataLoaderConfiguration",
    "zeroaccel.nested": "find_batch_size=batch_size_of map_tensors",
    "zeroaccel.operations": "broadcast broadcast_object_list concatenate gather gather_object "
    "pad_across_processes reduce",
    "zeroaccel.seeds": "set_seed synchronize_rng_states",
    "zeroaccel.zero": "GatheredParameters",
}
_HOMES = {
    name.partition("=")[0]: (module, name.rpartition("=")[2])
    for module, names in _PROVIDES.items()
    for name in names.split()
}
__all__ = sorted(_HOMES)

_MODULES = {"constants", "dataclasses", "deepspeed", "environment", "imports", "memory", "modeling", "operations"}
_MODULES |= {"other", "random", "versions"}
for _module in _MODULES:
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = _provided(*_HOMES[name])
    elif name in _MODULES:
        value = sys.modules[__name__]
    elif name.startswith("is_") and name.endswith("_available"):
        value = _provided("accelerate.utils", name)
    elif reason := None if name.startswith("_") else absence(name, __name__, _HOMES):
        raise ImportError(reason)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _provided(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "accelerate":
            raise ImportError(f"{__name__}.{name} comes from accelerate: pip install accelerate") from error
        raise
