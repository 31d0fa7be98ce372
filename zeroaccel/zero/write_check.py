"""Notices that somebody wrote to a whole parameter: a hash of its bytes before and after.

Told by `full_params.py` which parameters are looked at, by how many at a time, and when a write was announced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroaccel.zero.layout import ALIGN_NUMEL, round_up
from zeroaccel.zero.param_unit import FlatBuffer

__all__ = ["WriteDetector", "fingerprint"]

_WORDS = 1 << 18  # hashed at a time


@dataclass
class _Watched:
    readers: int = 0
    writers: int = 0
    print: int = 0


class WriteDetector:
    """What parameters looked like when they were first looked at; of those that are whole now."""

    def __init__(self) -> None:
        self._watched: dict[tuple[int, int], _Watched] = {}

    def enter(self, buffer: FlatBuffer, index: int, *, writes: bool) -> None:
        """Somebody looks at a parameter; `writes`: and may change it."""
        key = id(buffer), index
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _Watched()
        if not writes and not watched.readers:
            watched.print = _print(buffer, index)
        watched.readers += not writes
        watched.writers += writes

    def changed(self, buffer: FlatBuffer, index: int) -> bool:
        """Whether it was written since then, though nobody who may do so is there."""
        watched = self._watched[id(buffer), index]
        return not watched.writers and watched.print != _print(buffer, index)

    def renew(self, buffer: FlatBuffer, index: int) -> None:
        """Its values have changed as they may."""
        watched = self._watched[id(buffer), index]
        if watched.readers:
            watched.print = _print(buffer, index)

    def leave(self, buffer: FlatBuffer, index: int, *, writes: bool) -> None:
        """Takes one `enter` back."""
        watched = self._watched[id(buffer), index]
        watched.readers -= not writes
        watched.writers -= writes
        if not (watched.readers or watched.writers):
            del self._watched[id(buffer), index]


def _print(buffer: FlatBuffer, index: int) -> int:
    slot = buffer.layout.slots[index]
    return fingerprint(buffer.full[slot.start : slot.start + round_up(slot.numel, ALIGN_NUMEL)])


def fingerprint(data: Tensor) -> int:
    """A hash of the bits and their order; any single changed 8 bytes changes it, and so does nearly anything else.

    Args:
        data: (n,) contiguous, of a multiple of 8 bytes.
    """
    words = data.detach().view(torch.uint8).view(torch.int64)
    if not words.numel():
        return 0
    weights = torch.arange(1, 2 * min(words.numel(), _WORDS) + 1, 2, device=data.device)  # odd, so each one counts
    total = 0
    for number, start in enumerate(range(0, words.numel(), _WORDS)):
        part = words[start : start + _WORDS]
        total += (2 * number + 1) * int((part * weights[: part.numel()]).sum().item())
    return total & (1 << 64) - 1
