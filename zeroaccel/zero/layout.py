"""Where each parameter lies in a flat buffer, and which part of it each rank keeps.

Pure arithmetic: no tensors, no process groups. A rank's shard is a list of intervals (fqn, start, length),
which is also what a checkpoint writes down, so that any other layout can be loaded from it.

Letters: `W` ranks, `N` elements of the padded flat buffer, `S = N / W` elements of one rank's shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["ALIGN_NUMEL", "FlatLayout", "Interval", "Slot", "round_up"]

ALIGN_NUMEL = 32
"""Every parameter and every shard starts at a multiple of this: 64 bytes in 16-bit types, one cache line."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in the flat buffer."""

    fqn: str
    shape: tuple[int, ...]
    start: int
    numel: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Interval:
    """A run of one parameter's elements that one rank keeps.

    `start` counts in the flattened parameter, `offset` in the rank's shard; both in elements.
    """

    fqn: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Slots in order, padded so that `world_size` equal shards cover them.

    A parameter may straddle shards; a shard may be all padding.
    """

    slots: tuple[Slot, ...]
    numel: int
    world_size: int

    @classmethod
    def build(cls, entries: Iterable[tuple[str, tuple[int, ...]]], world_size: int) -> FlatLayout:
        """Lays out (fqn, shape) entries one after the other."""
        slots, cursor = [], 0
        for fqn, shape in entries:
            numel = math.prod(shape)
            slots.append(Slot(fqn, tuple(shape), cursor, numel))
            cursor += round_up(numel, ALIGN_NUMEL)
        return cls(tuple(slots), round_up(cursor, ALIGN_NUMEL * world_size), world_size)

    @property
    def shard_numel(self) -> int:
        """`S`, the same on every rank."""
        return self.numel // self.world_size

    @property
    def used_numel(self) -> int:
        """Elements that belong to a parameter, without padding."""
        return sum(slot.numel for slot in self.slots)

    def bounds(self, rank: int) -> tuple[int, int]:
        """[start, end) of the rank's shard in the flat buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def intervals(self, rank: int) -> tuple[Interval, ...]:
        """What the rank keeps, in the order of its shard; padding is not listed."""
        low, high = self.bounds(rank)
        return tuple(
            Interval(slot.fqn, start - slot.start, end - start, start - low)
            for slot in self.slots
            for start, end in [(max(slot.start, low), min(slot.end, high))]
            if start < end
        )

    def gaps(self) -> Iterator[tuple[int, int]]:
        """[start, end) of the padding between and after the slots."""
        cursor = 0
        for slot in self.slots:
            if cursor < slot.start:
                yield cursor, slot.start
            cursor = slot.end
        if cursor < self.numel:
            yield cursor, self.numel
