"""What an optimizer counts per call of `step()`, so that several calls can make one step.

See [Note: several calls per step] of `optimizer_shard.py`. Takes and sets back; when, the caller decides.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["StepCounters"]

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
