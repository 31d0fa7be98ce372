"""Marks changed 16-bit weights: one bit per element of this rank's shard of a flat buffer.

Marking is off until `engine.mark_changes()` gives each `FlatBuffer` its `ChangedBits`. A step compares the weights
before and after it; a write from outside marks all elements that it writes. Marks accumulate over steps until `clear`.
Weights of other sizes have no bits: they always count as changed. `rollout/` sends the marked weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zeroaccel.ops.changed import mark_changed
from zeroaccel.zero.layout import FlatRange

_TILE_NBYTES = 1 << 20  # bytes of bits to examine at a time


class ChangedBits:
    """The bits of one rank's shard, allocated when the first element changes.

    Args:
        shard: range of the shard in the buffer, S elements.
        has_bits: False for elements without bits, which always count as changed.

    Attributes:
        shard: range of the shard, as passed in.
        bits: (S / 8 rounded up,) uint8; bit i % 8 of byte i // 8 marks element i. None if no element has changed.
    """

    def __init__(self, shard: FlatRange, device: torch.device, *, has_bits: bool) -> None:
        self.shard = shard
        self.bits: Tensor | None = None
        self._device = device
        self._has_bits = has_bits

    def compare(self, before: Tensor, after: Tensor) -> None:
        """Marks elements that differ.

        Args:
            before, after: (S,) with 16-bit elements, on one device.
        """
        if self._has_bits:
            mark_changed(before, after, self._made())

    def add(self, interval: FlatRange) -> None:
        """Marks a range of the buffer."""
        interval = interval & self.shard
        if interval and self._has_bits:
            marks = torch.zeros(8 * self._made().numel(), dtype=torch.bool, device=self._device)
            marks[interval.at(self.shard.start)] = True
            self._made().bitwise_or_(_packed(marks))

    def clear(self) -> None:
        """Removes all marks."""
        self.bits = None

    def positions(self, read: Callable[[Tensor], Tensor] = lambda bits: bits) -> Tensor | None:
        """Returns (n,) int64, the marked elements in ascending order from 0 at the shard's start; None if all are.

        Args:
            read: returns the bits in the memory in which to search them.
        """
        if not self._has_bits:
            return None
        if self.bits is None:
            return torch.empty(0, dtype=torch.int64)
        bits, found = read(self.bits), []
        shifts = torch.arange(8, device=bits.device)
        for first in range(0, bits.numel(), _TILE_NBYTES):
            tile = bits[first : first + _TILE_NBYTES]
            places = tile.nonzero().view(-1)
            marked = ((tile[places].view(-1, 1) >> shifts) & 1).bool()
            found.append(((places + first).view(-1, 1) * 8 + shifts)[marked])
        return torch.cat(found)

    def _made(self) -> Tensor:
        if self.bits is None:
            self.bits = torch.zeros(-(-self.shard.numel // 8), dtype=torch.uint8, device=self._device)
        return self.bits


def _packed(marks: Tensor) -> Tensor:
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=marks.device)
    return (marks.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
