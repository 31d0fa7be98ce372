"""Copies and pickles of an engine's model: ordinary modules without hooks, which refuse values that were sharded.

`LiveHook` wraps every hook that the engine registers, so that `copy.deepcopy` and `pickle` leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroaccel.errors import EngineStateError
from zeroaccel.zero.param_unit import ParamUnit, ShardState


def reads_nan(call: str, fqn: str) -> EngineStateError:
    """Returns the error for a call that would read the values of a sharded parameter."""
    return EngineStateError(
        f"{call}: {fqn} is sharded, and reads as NaN",
        fix="read it inside engine.gathered(), or save with the checkpoint calls",
    )


class LiveHook:
    """A module hook that copies and pickles of the module leave out.

    Args:
        unit: unit of a hook before forward: a copy made while it is sharded refuses calls.
    """

    def __init__(self, function: Callable[..., Any], unit: ParamUnit | None = None) -> None:
        self._function = function
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        if self._unit is not None and self._unit.state is ShardState.SHARDED:
            return _UnfilledCopy, (next(self._unit.fqns()),)
        return _Detached, ()


class _UnfilledCopy:
    """A hook of a copy of sharded parameters: it refuses forwards until they have values."""

    def __init__(self, fqn: str) -> None:
        self._fqn = fqn
        self._has_values = False

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Raises EngineStateError if all values of a parameter of the module are NaN, as in a sharded parameter."""
        if self._has_values:
            return
        with torch._C.DisableTorchFunctionSubclass():  # a `ShardedParameter` would refuse to be read
            numbers = (p.detach() for p in module.parameters() if p.is_floating_point() and p.numel() and not p.is_meta)
            is_empty = any(bool(values.isnan().all()) for values in numbers)
        if is_empty:
            raise EngineStateError(
                f"forward of a copied {type(module).__name__}: {self._fqn} was sharded when it was copied, and is NaN",
                expected="a copy of whole parameters",
                fix="copy inside zero.GatheredParameters(model.parameters()) or engine.gathered(), "
                "or load a state dict into the copy",
            )
        self._has_values = True


class _Detached:
    """The replacement of a hook in the copy."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""
