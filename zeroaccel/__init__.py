"""zeroaccel: ZeRO stages 0 to 3 on torch.distributed, without DeepSpeed and without a compiler."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroaccel.accelerate.absent_names import ABSENT, ABSENT_MODULES, AbsentModule, absence

if TYPE_CHECKING:
    from zeroaccel.accelerate.accelerator import Accelerator
    from zeroaccel.accelerate.accelerator_arguments import GradientAccumulationPlugin
    from zeroaccel.accelerate.accelerator_state import PartialState
    from zeroaccel.accelerate.dummies import DummyOptim, DummyScheduler
    from zeroaccel.accelerate.kwargs_handlers import (
        AutocastKwargs,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        DistributedType,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from zeroaccel.accelerate.launchers import debug_launcher, notebook_launcher
    from zeroaccel.accelerate.project import ProjectConfiguration
    from zeroaccel.accelerate.script_calls import find_executable_batch_size
    from zeroaccel.accelerate.zero_plugin import DeepSpeedPlugin, ZeroPlugin
    from zeroaccel.config.parallel import ParallelConfig, PipelineConfig
    from zeroaccel.data import DataLoaderConfiguration, skip_first_batches
    from zeroaccel.engine import Engine
    from zeroaccel.errors import (
        CheckpointError,
        CollectiveError,
        ConfigError,
        EngineStateError,
        OffloadError,
        Preempted,
        UsageError,
        ZeroAccelError,
    )
    from zeroaccel.initialization import initialize
    from zeroaccel.seeds import set_seed, synchronize_rng_states
    from zeroaccel.telemetry.trackers import GeneralTracker
    from zeroaccel.zero import GatheredParameters, Init

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "Engine",
    "EngineStateError",
    "GatheredParameters",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "Init",
    "InitProcessGroupKwargs",
    "OffloadError",
    "ParallelConfig",
    "PartialState",
    "PipelineConfig",
    "Preempted",
    "ProfileKwargs",
    "ProjectConfiguration",
    "UsageError",
    "ZeroAccelError",
    "ZeroPlugin",
    "__version__",
    "debug_launcher",
    "find_executable_batch_size",
    "initialize",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
]
__version__ = "0.2.0"

# Module -> its public names, imported on first use, so that the command line starts without torch.
_PROVIDES = {
    "accelerate.accelerator": "Accelerator",
    "accelerate.accelerator_arguments": "GradientAccumulationPlugin",
    "accelerate.accelerator_state": "PartialState",
    "accelerate.dummies": "DummyOptim DummyScheduler",
    "accelerate.kwargs_handlers": "AutocastKwargs DDPCommunicationHookType DistributedDataParallelKwargs "
    "DistributedType GradScalerKwargs InitProcessGroupKwargs ProfileKwargs",
    "accelerate.launchers": "debug_launcher notebook_launcher",
    "accelerate.project": "ProjectConfiguration",
    "accelerate.script_calls": "find_executable_batch_size",
    "accelerate.zero_plugin": "DeepSpeedPlugin ZeroPlugin",
    "config.parallel": "ParallelConfig PipelineConfig",
    "data": "DataLoaderConfiguration skip_first_batches",
    "errors": "CheckpointError CollectiveError ConfigError EngineStateError OffloadError Preempted UsageError "
    "ZeroAccelError",
    "initialization": "initialize",
    "seeds": "set_seed synchronize_rng_states",
    "telemetry.trackers": "GeneralTracker",
    "zero": "GatheredParameters Init",
    "engine": "Engine",
}
_PACKAGES = ("checkpoint", "rollout", "zero")  # available without an explicit import, like deepspeed.zero
_HOMES = {name: f"zeroaccel.{module}" for module, names in _PROVIDES.items() for name in names.split()}


for _name, _reason in ABSENT_MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = AbsentModule(f"{__name__}.{_name}", _reason)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"zeroaccel.{name}")
    if name not in _HOMES:
        if name in ABSENT:
            raise ImportError(absence(name, "zeroaccel", _HOMES))
        raise AttributeError(f"module 'zeroaccel' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
