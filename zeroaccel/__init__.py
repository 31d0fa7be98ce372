"""zeroaccel: ZeRO stages 0 to 3 on torch.distributed, without DeepSpeed and without a compiler."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroaccel.accelerator import Accelerator as Accelerator
    from zeroaccel.accelerator import GradientAccumulationPlugin as GradientAccumulationPlugin
    from zeroaccel.assembly import initialize as initialize
    from zeroaccel.data import DataLoaderConfiguration as DataLoaderConfiguration
    from zeroaccel.data import skip_first_batches as skip_first_batches
    from zeroaccel.launchers import debug_launcher as debug_launcher
    from zeroaccel.launchers import notebook_launcher as notebook_launcher
    from zeroaccel.ops.coupled import CoupledOptimizer as CoupledOptimizer
    from zeroaccel.ops.coupled import Reductions as Reductions
    from zeroaccel.placeholders import DummyOptim as DummyOptim
    from zeroaccel.placeholders import DummyScheduler as DummyScheduler
    from zeroaccel.plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from zeroaccel.plugin import ZeroPlugin as ZeroPlugin
    from zeroaccel.profiling import ProfileKwargs as ProfileKwargs
    from zeroaccel.project import ProjectConfiguration as ProjectConfiguration
    from zeroaccel.seeds import set_seed as set_seed
    from zeroaccel.state import DistributedType as DistributedType
    from zeroaccel.state import PartialState as PartialState
    from zeroaccel.trackers import GeneralTracker as GeneralTracker
    from zeroaccel.zero.engine import Engine as Engine

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
    "Accelerator": "zeroaccel.accelerator",
    "CoupledOptimizer": "zeroaccel.ops.coupled",
    "DataLoaderConfiguration": "zeroaccel.data",
    "DeepSpeedPlugin": "zeroaccel.plugin",
    "DistributedType": "zeroaccel.state",
    "DummyOptim": "zeroaccel.placeholders",
    "DummyScheduler": "zeroaccel.placeholders",
    "Engine": "zeroaccel.zero.engine",
    "GeneralTracker": "zeroaccel.trackers",
    "GradientAccumulationPlugin": "zeroaccel.accelerator",
    "PartialState": "zeroaccel.state",
    "ProfileKwargs": "zeroaccel.profiling",
    "ProjectConfiguration": "zeroaccel.project",
    "Reductions": "zeroaccel.ops.coupled",
    "ZeroPlugin": "zeroaccel.plugin",
    "debug_launcher": "zeroaccel.launchers",
    "initialize": "zeroaccel.assembly",
    "notebook_launcher": "zeroaccel.launchers",
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
