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
    from zeroaccel.initialization import initialize
    from zeroaccel.ops.coupled import CoupledOptimizer, Reductions
    from zeroaccel.seeds import set_seed, synchronize_rng_states
    from zeroaccel.telemetry.trackers import GeneralTracker
    from zeroaccel.zero.engine import Engine

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "CoupledOptimizer",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "Engine",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ParallelConfig",
    "PartialState",
    "PipelineConfig",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Reductions",
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

_HOMES = {
    **dict.fromkeys(
        (
            "AutocastKwargs",
            "DDPCommunicationHookType",
            "DistributedDataParallelKwargs",
            "DistributedType",
            "GradScalerKwargs",
            "InitProcessGroupKwargs",
            "ProfileKwargs",
        ),
        "zeroaccel.accelerate.kwargs_handlers",
    ),
    "Accelerator": "zeroaccel.accelerate.accelerator",
    "CoupledOptimizer": "zeroaccel.ops.coupled",
    "DataLoaderConfiguration": "zeroaccel.data",
    "DeepSpeedPlugin": "zeroaccel.accelerate.zero_plugin",
    "DummyOptim": "zeroaccel.accelerate.dummies",
    "DummyScheduler": "zeroaccel.accelerate.dummies",
    "Engine": "zeroaccel.zero.engine",
    "GeneralTracker": "zeroaccel.telemetry.trackers",
    "GradientAccumulationPlugin": "zeroaccel.accelerate.accelerator_arguments",
    "ParallelConfig": "zeroaccel.config.parallel",
    "PartialState": "zeroaccel.accelerate.accelerator_state",
    "PipelineConfig": "zeroaccel.config.parallel",
    "ProjectConfiguration": "zeroaccel.accelerate.project",
    "Reductions": "zeroaccel.ops.coupled",
    "ZeroPlugin": "zeroaccel.accelerate.zero_plugin",
    "debug_launcher": "zeroaccel.accelerate.launchers",
    "initialize": "zeroaccel.initialization",
    "notebook_launcher": "zeroaccel.accelerate.launchers",
    "find_executable_batch_size": "zeroaccel.accelerate.script_calls",
    "set_seed": "zeroaccel.seeds",
    "synchronize_rng_states": "zeroaccel.seeds",
    "skip_first_batches": "zeroaccel.data",
}


for _name, _reason in ABSENT_MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = AbsentModule(f"{__name__}.{_name}", _reason)


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line can import the package without importing torch.
    if name not in _HOMES:
        if name in ABSENT:
            raise ImportError(absence(name, "zeroaccel", _HOMES))
        raise AttributeError(f"module 'zeroaccel' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
