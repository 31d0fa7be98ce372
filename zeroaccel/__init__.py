"""zeroaccel: ZeRO stages 0 to 3 on torch.distributed, without DeepSpeed and without a compiler."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroaccel.accelerate.accelerator import Accelerator
    from zeroaccel.accelerate.accelerator_arguments import GradientAccumulationPlugin, ProfileKwargs
    from zeroaccel.accelerate.accelerator_state import DistributedType, PartialState
    from zeroaccel.accelerate.dummies import DummyOptim, DummyScheduler
    from zeroaccel.accelerate.launchers import debug_launcher, notebook_launcher
    from zeroaccel.accelerate.project import ProjectConfiguration
    from zeroaccel.accelerate.zero_plugin import DeepSpeedPlugin, ZeroPlugin
    from zeroaccel.data import DataLoaderConfiguration, skip_first_batches
    from zeroaccel.initialization import initialize
    from zeroaccel.ops.coupled import CoupledOptimizer, Reductions
    from zeroaccel.seeds import set_seed
    from zeroaccel.telemetry.trackers import GeneralTracker
    from zeroaccel.zero.engine import Engine

__all__ = [
    "Accelerator",
    "CoupledOptimizer",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "Engine",
    "GeneralTracker",
    "GradientAccumulationPlugin",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Reductions",
    "ZeroPlugin",
    "__version__",
    "debug_launcher",
    "initialize",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
]
__version__ = "0.1.0"

_HOMES = {
    "Accelerator": "zeroaccel.accelerate.accelerator",
    "CoupledOptimizer": "zeroaccel.ops.coupled",
    "DataLoaderConfiguration": "zeroaccel.data",
    "DeepSpeedPlugin": "zeroaccel.accelerate.zero_plugin",
    "DistributedType": "zeroaccel.accelerate.accelerator_state",
    "DummyOptim": "zeroaccel.accelerate.dummies",
    "DummyScheduler": "zeroaccel.accelerate.dummies",
    "Engine": "zeroaccel.zero.engine",
    "GeneralTracker": "zeroaccel.telemetry.trackers",
    "GradientAccumulationPlugin": "zeroaccel.accelerate.accelerator_arguments",
    "PartialState": "zeroaccel.accelerate.accelerator_state",
    "ProfileKwargs": "zeroaccel.accelerate.accelerator_arguments",
    "ProjectConfiguration": "zeroaccel.accelerate.project",
    "Reductions": "zeroaccel.ops.coupled",
    "ZeroPlugin": "zeroaccel.accelerate.zero_plugin",
    "debug_launcher": "zeroaccel.accelerate.launchers",
    "initialize": "zeroaccel.initialization",
    "notebook_launcher": "zeroaccel.accelerate.launchers",
    "set_seed": "zeroaccel.seeds",
    "skip_first_batches": "zeroaccel.data",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line can import the package without importing torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'zeroaccel' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
