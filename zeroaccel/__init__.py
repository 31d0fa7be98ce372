"""zeroaccel: ZeRO stages 0 to 3 on torch.distributed, without DeepSpeed and without a compiler."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroaccel.accelerate.absent_names import ABSENT, ABSENT_MODULES, AbsentModule, absence

# The public names. Type checkers read these imports; `__getattr__` runs each one at the first use of its name, so that
# the command line starts without torch.
if TYPE_CHECKING:
    from zeroaccel.accelerate.accelerator import Accelerator as Accelerator
    from zeroaccel.accelerate.accelerator_arguments import GradientAccumulationPlugin as GradientAccumulationPlugin
    from zeroaccel.accelerate.accelerator_state import PartialState as PartialState
    from zeroaccel.accelerate.kwargs_handlers import AutocastKwargs as AutocastKwargs
    from zeroaccel.accelerate.kwargs_handlers import DDPCommunicationHookType as DDPCommunicationHookType
    from zeroaccel.accelerate.kwargs_handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from zeroaccel.accelerate.kwargs_handlers import DistributedType as DistributedType
    from zeroaccel.accelerate.kwargs_handlers import GradScalerKwargs as GradScalerKwargs
    from zeroaccel.accelerate.kwargs_handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from zeroaccel.accelerate.kwargs_handlers import ProfileKwargs as ProfileKwargs
    from zeroaccel.accelerate.prepared_optimizer import DummyOptim as DummyOptim
    from zeroaccel.accelerate.prepared_optimizer import DummyScheduler as DummyScheduler
    from zeroaccel.accelerate.project import ProjectConfiguration as ProjectConfiguration
    from zeroaccel.accelerate.script_calls import debug_launcher as debug_launcher
    from zeroaccel.accelerate.script_calls import find_executable_batch_size as find_executable_batch_size
    from zeroaccel.accelerate.script_calls import notebook_launcher as notebook_launcher
    from zeroaccel.accelerate.zero_plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from zeroaccel.accelerate.zero_plugin import ZeroPlugin as ZeroPlugin
    from zeroaccel.config.parallel import ParallelConfig as ParallelConfig
    from zeroaccel.config.parallel import PipelineConfig as PipelineConfig
    from zeroaccel.data import DataLoaderConfiguration as DataLoaderConfiguration
    from zeroaccel.data import skip_first_batches as skip_first_batches
    from zeroaccel.engine import Engine as Engine
    from zeroaccel.errors import CheckpointError as CheckpointError
    from zeroaccel.errors import CollectiveError as CollectiveError
    from zeroaccel.errors import ConfigError as ConfigError
    from zeroaccel.errors import EngineStateError as EngineStateError
    from zeroaccel.errors import OffloadError as OffloadError
    from zeroaccel.errors import Preempted as Preempted
    from zeroaccel.errors import UsageError as UsageError
    from zeroaccel.errors import ZeroAccelError as ZeroAccelError
    from zeroaccel.initialization import initialize as initialize
    from zeroaccel.seeds import set_seed as set_seed
    from zeroaccel.seeds import synchronize_rng_states as synchronize_rng_states
    from zeroaccel.telemetry.trackers import GeneralTracker as GeneralTracker
    from zeroaccel.zero import GatheredParameters as GatheredParameters
    from zeroaccel.zero import Init as Init

__version__ = "1.0.0"


def _homes() -> dict[str, str]:
    """Returns public name -> its module, from the imports for type checkers in this file."""
    loader: Any = __spec__.loader
    source = loader.get_source(__name__)
    if source is None:
        raise ImportError("zeroaccel: its source files are missing; install it with them, not only as compiled files")
    return {name: module for module, name in re.findall(r"^    from (\S+) import (\w+) as \2$", source, re.MULTILINE)}


_HOMES = _homes()
__all__ = sorted((*_HOMES, "__version__"))
_PACKAGES = ("checkpoint", "rollout", "zero")  # available without an explicit import, like deepspeed.zero


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
