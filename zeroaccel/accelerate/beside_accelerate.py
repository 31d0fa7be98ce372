"""Calls of an accelerate that is imported beside: they work with an `Accelerator` of ours in the same process.

`accelerate.logging` and everything else there that asks which process this is needs accelerate's own `PartialState`;
`extract_model_from_parallel` knows the wrappers that it takes off by their classes, to which an engine does not belong.
Nothing of accelerate is imported here: what is not loaded when an `Accelerator` is made stays as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from zeroaccel.zero.engine_base import EngineBase

_CALL = "extract_model_from_parallel"
_replaced: list[tuple[ModuleType, Any]] = []


def join_accelerate(*, cpu: bool) -> None:
    """Tells accelerate, where it is loaded, which process this is, and makes its unwrapping take off engines.

    Args:
        cpu: this process computes on the CPU.
    """
    state = sys.modules.get("accelerate.state")
    if state is not None and not state.PartialState._shared_state:
        state.PartialState(cpu=cpu)
    home = sys.modules.get("accelerate.utils.other")
    original = getattr(home, _CALL, None)
    if original is None or _replaced:
        return
    taking_engines_off = _unwrapping(original)
    # Scripts and libraries have imported the function by name.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(_CALL) is original:
            setattr(module, _CALL, taking_engines_off)
            _replaced.append((module, original))


def leave_accelerate() -> None:
    """Restores the function."""
    while _replaced:
        module, original = _replaced.pop()
        setattr(module, _CALL, original)


def _unwrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def extract_model_from_parallel(model: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model.module if isinstance(model, EngineBase) else model, *args, **kwargs)

    return extract_model_from_parallel
