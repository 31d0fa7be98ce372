"""Several calls of an optimizer's `step()` that make one step, each with a part of the parameters.

[Note: several calls per step] A step calls `optimizer.step()` once per buffer, so that one buffer's gradients at a time
are in fp32 and one sub-group at a time is in memory. What a class counts per call (a `group["step"]`, an attribute) is
set back before each call but the first: every call sees the numbers that the step began with, and the last
one leaves them as one call would. A coupled rule, which looks at all parameters at once, gets one call with all.

Knows nothing of shards; `sharded_optimizer.py` decides what is stepped when.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["StepCounters", "batches", "restricted"]

_T = TypeVar("_T")

_PLAIN = (bool, int, float, complex, str, type(None))


class StepCounters:
    """Entries of param groups, and attributes, that are plain values: as they are now, until `restore`.

    An entry that is no number, text or tensor, nor made of such (a module, a random generator), is left alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, _entries(group)) for group in optimizer.param_groups
        ]
        self._kept.append((vars(optimizer), _entries(vars(optimizer))))

    def restore(self) -> None:
        """Sets all of it back. A tensor keeps its identity: a scheduler may hold it."""
        for entries, kept in self._kept:
            for name in [name for name in _entries(entries) if name not in kept]:
                del entries[name]
            for name, value in kept.items():
                now = entries.get(name)
                if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
                    now.copy_(value)
                elif type(now) is not type(value) or not isinstance(value, _PLAIN) or now != value:
                    entries[name] = copy.deepcopy(value)


def _entries(source: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in source.items() if _is_counted(name) and _is_plain(value)}


def _is_counted(name: str) -> bool:
    """Not what is the engine's to change, nor torch's dictionaries of hooks, whose identity their handles know."""
    return name not in ("params", "state", "param_groups", "defaults") and not name.startswith("_optimizer_")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(_is_plain(item) for item in value)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))


@contextmanager
def restricted(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Lets `optimizer.step` see only these of its parameters, in their groups and in the order there."""
    before = [group["params"] for group in optimizer.param_groups]
    chosen = {id(param) for param in params}
    try:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        yield
    finally:
        for group, params_before in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params_before


def batches(items: Iterable[_T], limit_numel: int, numel_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Consecutive items of at most `limit_numel` elements together; a larger one goes alone."""
    batch: list[_T] = []
    total = 0
    for item in items:
        numel = numel_of(item)
        if batch and total + numel > limit_numel:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += numel
    if batch:
        yield batch
