"""`PartialState`, `AcceleratorState` and `GradientState`, under the same module name as in accelerate.

Without arguments, the latter two return the states of the newest `Accelerator`.
"""

from __future__ import annotations

from zeroaccel.accelerate.accelerator_state import AcceleratorState, PartialState
from zeroaccel.accelerate.kwargs_handlers import DistributedType
from zeroaccel.accelerate.prepared_optimizer import GradientState

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]


def is_initialized() -> bool:
    """Returns True if the script has made an `Accelerator`, whose state `AcceleratorState()` returns."""
    return AcceleratorState.is_there()
