"""Where each parameter lies in a flat buffer, and which part of it each rank keeps.

Pure arithmetic: no tensors, no process groups. A rank's shard is a list of intervals (fqn, start, length),
which is also what a checkpoint writes down, so that any other layout can be loaded from it.

Letters: `W` ranks, `N` elements of the padded flat buffer, `S` elements of one rank's shard: `N / W` of an even layout.

[Note: owner layout] An optimizer whose rule looks at a whole tensor (its norm, its rows, its singular values) needs
tensors that are not cut. In an owner layout every parameter lies in one rank's shard, the shards follow each other in
the flat buffer and differ in size, and all else is as before: the reduce-scatter brings a gradient whole to its owner,
master and state live there, the all-gather distributes the weights. The bytes that all ranks together send stay those
of an even layout, (W-1) N per collective; one rank's part follows what it owns. (Longest processing time first, Graham
1969: a unit's largest rank has at most 4/3 of the best possible load, and never less than the largest parameter.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

__all__ = ["ALIGN_NUMEL", "FlatLayout", "Interval", "OwnerLoads", "Slot", "round_up"]

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


class OwnerLoads:
    """Deals parameters out to owners, so that the ranks own about as many elements as each other.

    Balanced within each call, which is for one unit, since its collectives end when the largest rank is through; and
    over the calls so far where that leaves a choice. Deterministic: the same calls give the same owners on every rank.

    Attributes:
        numels: elements that each rank owns so far.
    """

    def __init__(self, world_size: int) -> None:
        self.numels = [0] * world_size

    def assign(self, numels: Sequence[int]) -> list[int]:
        """The owner of each parameter of a unit, by its elements: the largest first, to the least loaded rank."""
        owners = [0] * len(numels)
        loads = [(0, total, rank) for rank, total in enumerate(self.numels)]
        heapq.heapify(loads)
        for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
            within, total, owner = loads[0]
            heapq.heapreplace(loads, (within + numels[index], total + numels[index], owner))
            owners[index] = owner
            self.numels[owner] += numels[index]
        return owners


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Slots in order, padded, and cut into one shard per rank.

    Even: the shards are equal, a parameter may straddle them, and one may be all padding. With owners: no parameter
    straddles shards, which differ in size and may be empty; see [Note: owner layout].

    Attributes:
        numel: N.
        split_sizes: S of each rank, in elements; multiples of `ALIGN_NUMEL` that add up to N.
        owners: the rank whose shard each slot lies in, where no parameter may straddle shards; empty where it may.
    """

    slots: tuple[Slot, ...]
    numel: int
    split_sizes: tuple[int, ...]
    owners: tuple[int, ...] = ()
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", (0, *accumulate(self.split_sizes)))

    @classmethod
    def build(cls, entries: Iterable[tuple[str, tuple[int, ...]]], world_size: int) -> FlatLayout:
        """Lays out (fqn, shape) entries one after the other, in equal shards."""
        slots, cursor = _slots(entries)
        numel = round_up(cursor, ALIGN_NUMEL * world_size)
        return cls(slots, numel, (numel // world_size,) * world_size)

    @classmethod
    def build_with_owners(
        cls, entries: Sequence[tuple[str, tuple[int, ...]]], owners: Sequence[int], world_size: int
    ) -> FlatLayout:
        """Lays out (fqn, shape) entries so that each lies in the shard of its owner.

        Args:
            entries: in the order of their owners.
            owners: rank of each, ascending.
        """
        assert list(owners) == sorted(owners), f"entries out of the order of their owners: {owners}"
        slots, cursor = _slots(entries)
        sizes = [0] * world_size
        for slot, owner in zip(slots, owners, strict=True):
            sizes[owner] += round_up(slot.numel, ALIGN_NUMEL)
        # So that a copy in equal parts, which fewer ranks may hold among them, needs no padding of its own.
        sizes[-1] += round_up(cursor, ALIGN_NUMEL * world_size) - cursor
        return cls(slots, sum(sizes), tuple(sizes), tuple(owners))

    @property
    def world_size(self) -> int:
        """`W`."""
        return len(self.split_sizes)

    @property
    def has_owners(self) -> bool:
        """Whether every parameter lies in one shard by intent, so that shards may differ in size."""
        return bool(self.owners)

    @property
    def uneven_sizes(self) -> tuple[int, ...]:
        """`split_sizes` as collectives take them: empty where the shards are equal."""
        return self.split_sizes if self.has_owners else ()

    def shard_numel(self, rank: int) -> int:
        """`S` of a rank."""
        return self.split_sizes[rank]

    @property
    def largest_shard_numel(self) -> int:
        """The largest `S` of any rank."""
        return max(self.split_sizes)

    @property
    def used_numel(self) -> int:
        """Elements that belong to a parameter, without padding."""
        return sum(slot.numel for slot in self.slots)

    def bounds(self, rank: int) -> tuple[int, int]:
        """[start, end) of the rank's shard in the flat buffer."""
        return self._starts[rank], self._starts[rank + 1]

    def owned(self, rank: int) -> tuple[Slot, ...]:
        """The parameters in the rank's shard of a layout with owners."""
        return tuple(slot for slot, owner in zip(self.slots, self.owners, strict=True) if owner == rank)

    def group_runs(self, param_groups: Sequence[int], rank: int) -> list[tuple[int, int, int]]:
        """(start, end, param group) of each run of one group in a rank's shard, in order and without gaps.

        A slot counts with the padding behind it, so that runs start and end at aligned places.

        Args:
            param_groups: of each slot.
        """
        low, high = self.bounds(rank)
        runs: list[tuple[int, int, int]] = []
        for index, group in enumerate(param_groups):
            following = self.slots[index + 1].start if index + 1 < len(self.slots) else self.numel
            start, end = max(self.slots[index].start, low), min(following, high)
            if start >= end:
                continue
            if runs and runs[-1][2] == group:
                runs[-1] = (runs[-1][0], end, group)
            else:
                runs.append((start, end, group))
        return runs

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


def _slots(entries: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[tuple[Slot, ...], int]:
    """(fqn, shape) entries one after the other at aligned places, and where the last one's padding ends."""
    slots, cursor = [], 0
    for fqn, shape in entries:
        numel = math.prod(shape)
        slots.append(Slot(fqn, tuple(shape), cursor, numel))
        cursor += round_up(numel, ALIGN_NUMEL)
    return tuple(slots), cursor
