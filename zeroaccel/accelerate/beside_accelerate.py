"""Makes accelerate's own functions work in a process that uses zeroaccel's `Accelerator`.

`accelerate.logging` and other functions that need the rank read accelerate's `PartialState`, so this module creates it.
`extract_model_from_parallel` removes only wrappers of known classes, so this module extends it to engines. It does not
import accelerate, and leaves modules unchanged that are loaded after the creation of an `Accelerator`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from zeroaccel.engine import EngineBase

_CALL = "extract_model_from_parallel"
_replaced: list[tuple[ModuleType, Any]] = []


def join_accelerate(*, cpu: bool) -> None:
    """Creates accelerate's `PartialState` and makes its unwrapping remove engines, if accelerate is loaded.

    Args:
        cpu: True if this process computes on the CPU.
    """
    state = sys.modules.get("accelerate.state")
    if state is not None and not state.PartialState._shared_state:
        state.PartialState(cpu=cpu)
    home = sys.modules.get("accelerate.utils.other")
    original = getattr(home, _CALL, None)
    if original is None or _replaced:
        return
    taking_engines_off = _unwrapping(original)
    # Scripts and libraries may have imported the function by name.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(_CALL) is original:
            setattr(module, _CALL, taking_engines_off)
            _replaced.append((module, original))


def leave_accelerate() -> None:
    """Restores accelerate's `extract_model_from_parallel`."""
    while _replaced:
        module, original = _replaced.pop()
        setattr(module, _CALL, original)


def _unwrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def extract_model_from_parallel(model: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model.module if isinstance(model, EngineBase) else model, *args, **kwargs)

    return extract_model_from_parallel
