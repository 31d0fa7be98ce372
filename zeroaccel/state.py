"""`PartialState`, `AcceleratorState` and `GradientState`, where scripts for accelerate import them from.

Without arguments the latter two are those of the newest `Accelerator`.
"""

from __future__ import annotations

from zeroaccel.accelerate.accelerator_state import AcceleratorState, PartialState
from zeroaccel.accelerate.kwargs_handlers import DistributedType
from zeroaccel.accelerate.prepared_optimizer import GradientState

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]


def is_initialized() -> bool:
    """Whether an `Accelerator` has been made, so that `AcceleratorState()` is its state."""
    return AcceleratorState.is_there()
