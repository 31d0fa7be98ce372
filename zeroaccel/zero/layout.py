"""Ranges of a flat buffer: the place of each parameter, the shard of each rank, and their intersections.

Index arithmetic; only `whole_of` and `holders` take collectives. Everything that is cut (shards, param groups,
sub-groups, ranges that a checkpoint saves and loads, ranges that `safe_get_full_*` reads) is a `FlatRange` of one
buffer, cut by intersection.

Letters: `W` ranks, `N` elements of the padded flat buffer, `S` elements of one rank's shard: `N / W` in an even layout.

[Note: owner layout] An optimizer whose rule needs a full tensor (its norm, its rows, its singular values) needs tensors
that are not cut. In an owner layout every parameter lies in one rank's shard, and the shards follow each other in the
flat buffer and differ in size. The rest stays the same: the reduce-scatter brings a full gradient to its owner, master
and state live there, the all-gather distributes the weights. All ranks together send the bytes of an even layout,
(W-1) N per collective; one rank's part depends on the parameters that it owns. (Longest processing time first, Graham
1969: a unit's largest rank has at most 4/3 of the best possible load, and never less than the largest parameter.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zeroaccel.comm.collectives import Collectives

ALIGN_NUMEL = 32
"""Every parameter and every shard starts at a multiple of this: 64 bytes in 16-bit types, one cache line."""


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements [start, end) of a flat buffer; false if it is empty.

    Example:
        >>> shard, parameter = FlatRange(64, 128), FlatRange(96, 200)
        >>> shard & parameter
        FlatRange(start=96, end=128)
        >>> (shard & parameter).at(shard.start)  # the same elements, relative to the shard's first
        slice(32, 64, None)
    """

    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements in the range."""
        return self.end - self.start

    def __bool__(self) -> bool:
        return self.end > self.start

    def __contains__(self, element: int) -> bool:
        return self.start <= element < self.end

    def __and__(self, other: FlatRange) -> FlatRange:
        """Returns the elements in both; an empty range, not before the start of either, if there are none."""
        start = max(self.start, other.start)
        return FlatRange(start, max(start, min(self.end, other.end)))

    def at(self, origin: int) -> slice:
        """Returns the slice of these elements in a tensor whose first element is element `origin` of the buffer."""
        return slice(self.start - origin, self.end - origin)


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """The values of a range, (range.numel,); index it by ranges of the same buffer inside that range."""

    range: FlatRange
    values: Tensor

    def __getitem__(self, interval: FlatRange) -> Tensor:
        return self.values[interval.at(self.range.start)]


@dataclass(frozen=True, slots=True)
class Split:
    """A cut of a parameter by an axis of the mesh: along one dim into equal parts, one per rank of the axis.

    Attributes:
        parts: number of parts.
        index: index of this rank's part.
        blocks: number of equal blocks along the dim that are cut separately, such as the queries, keys and values of
            one layer: each part has its share of every block.
        in_data_group: the ranks with the other parts see different samples (`ep`), so that the part is sharded over a
            subset of the data group; otherwise (`tp`) over all of it.

    Example:
        >>> split = Split(dim=1, parts=2, index=1)
        >>> split.part(torch.arange(8).view(2, 4)).tolist()
        [[2, 3], [6, 7]]
        >>> split.whole_shape((2, 2))
        (2, 4)
        >>> Split(dim=0, parts=2, index=1, blocks=3).part(torch.arange(6)).tolist()
        [1, 3, 5]
    """

    dim: int
    parts: int
    index: int
    blocks: int = 1
    in_data_group: bool = False

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the parameter, from that of a part."""
        return tuple(size * self.parts if dim == self.dim else size for dim, size in enumerate(shape))

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a part, from that of the parameter."""
        return tuple(size // self.parts if dim == self.dim else size for dim, size in enumerate(whole))

    def part(self, whole: Tensor) -> Tensor:
        """Returns this rank's part: a view, or a copy if there are several blocks."""
        blocks: Tensor = whole.unflatten(self.dim, (self.blocks, self.parts, -1)).select(self.dim + 1, self.index)
        return blocks.flatten(self.dim, self.dim + 1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the parameter from the parts of all ranks, in rank order."""
        blocks: list[Tensor] = [rank_values.unflatten(self.dim, (self.blocks, -1)) for rank_values in parts]
        return torch.stack(blocks, self.dim + 1).flatten(self.dim, self.dim + 2)

    def runs(self, shape: Sequence[int], span: FlatRange) -> Iterator[tuple[int, FlatRange]]:
        """Maps elements of a part to the parameter, both flattened in row-major order, by contiguous runs.

        Args:
            shape: shape of the part.
            span: range of elements of the flattened part.

        Yields:
            The first element of a run in the parameter, and the run's range in the part.

        Example:
            >>> list(Split(dim=1, parts=2, index=1).runs((2, 2), FlatRange(1, 4)))
            [(3, FlatRange(start=1, end=2)), (6, FlatRange(start=2, end=4))]
        """
        run = math.prod(shape[self.dim :]) // self.blocks
        while span:
            row, first = divmod(span.start, run)
            run_range = FlatRange(span.start, min(span.end, (row + 1) * run))
            yield (row * self.parts + self.index) * run + first, run_range
            span = FlatRange(run_range.end, span.end)


@dataclass(frozen=True, slots=True)
class Slot:
    """The range of one parameter in the flat buffer.

    Attributes:
        shape: shape of this rank's part, if the parameter is split.
        split: its split by an axis of the mesh; None if every rank has all of it.
    """

    fqn: str
    shape: tuple[int, ...]
    start: int
    numel: int
    split: Split | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter in the model."""
        return self.shape if self.split is None else self.split.whole_shape(self.shape)

    @property
    def whole_numel(self) -> int:
        """Number of elements of the whole parameter in the model."""
        return math.prod(self.whole_shape)

    def runs(self, span: FlatRange) -> Iterator[tuple[int, FlatRange]]:
        """Maps elements of the slot to the whole, flattened parameter, by contiguous runs.

        Args:
            span: range of the flat buffer, within the slot.

        Yields:
            The first element of a run in the parameter, and the run's range in the flat buffer.
        """
        if self.split is None:
            yield span.start - self.start, span
            return
        for first, elements in self.split.runs(self.shape, FlatRange(span.start - self.start, span.end - self.start)):
            yield first, FlatRange(self.start + elements.start, self.start + elements.end)

    @property
    def end(self) -> int:
        """Index one past the last element."""
        return self.start + self.numel

    @property
    def range(self) -> FlatRange:
        """Range of its elements, without the padding after them."""
        return FlatRange(self.start, self.end)


class OwnerLoads:
    """Assigns parameters to owner ranks so that the ranks own about the same number of elements.

    Balances within each call, which is for one unit, because a unit's collectives end when the rank with the largest
    shard finishes; then over all calls so far. Deterministic: the same calls give the same owners on every rank.

    Attributes:
        numels: number of elements that each rank owns so far.
    """

    def __init__(self, world_size: int) -> None:
        self.numels = [0] * world_size

    def assign(self, numels: Sequence[int]) -> list[int]:
        """Returns the owner of each parameter of a unit: assigns the largest first, to the least loaded rank."""
        owners = [0] * len(numels)
        # Ordered by (load within this unit, load over all units, rank): the second decides between ranks with equal
        # loads in the unit, so that units of a single parameter rotate over the ranks instead of all going to rank 0.
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

    In an even layout the shards are equal, a parameter may straddle them, and a shard may be all padding. With owners
    no parameter straddles shards, which differ in size and may be empty; see [Note: owner layout].

    Attributes:
        numel: N.
        split_sizes: S of each rank, in elements; multiples of `ALIGN_NUMEL` that add up to N.
        owners: the rank whose shard has each slot, if no parameter may straddle shards; empty in an even layout.
    """

    slots: tuple[Slot, ...]
    numel: int
    split_sizes: tuple[int, ...]
    owners: tuple[int, ...] = ()
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", (0, *accumulate(self.split_sizes)))

    @classmethod
    def build(
        cls,
        entries: Iterable[tuple[str, tuple[int, ...]]],
        world_size: int,
        splits: Mapping[str, Split] | None = None,
        align_numel: int = ALIGN_NUMEL,
    ) -> FlatLayout:
        """Lays out (fqn, shape) entries one after the other, in equal shards.

        Args:
            splits: splits of the entries that are parts of parameters, by fqn.
            align_numel: alignment of parameters and shards, a multiple of `ALIGN_NUMEL`.
        """
        slots, cursor = _slots(entries, splits, align_numel)
        numel = round_up(cursor, align_numel * world_size)
        return cls(slots, numel, (numel // world_size,) * world_size)

    @classmethod
    def build_with_owners(
        cls, entries: Sequence[tuple[str, tuple[int, ...]]], owners: Sequence[int], world_size: int
    ) -> FlatLayout:
        """Lays out (fqn, shape) entries so that each lies in the shard of its owner.

        Args:
            entries: entries in the order of their owners.
            owners: owner rank of each entry, ascending.
        """
        assert list(owners) == sorted(owners), f"entries out of the order of their owners: {owners}"
        slots, cursor = _slots(entries)
        sizes = [0] * world_size
        for slot, owner in zip(slots, owners, strict=True):
            sizes[owner] += round_up(slot.numel, ALIGN_NUMEL)
        # N is a multiple of W here too, so that the secondary copy (hpZ), cut into equal parts over fewer ranks, needs
        # no extra padding.
        sizes[-1] += round_up(cursor, ALIGN_NUMEL * world_size) - cursor
        return cls(slots, sum(sizes), tuple(sizes), tuple(owners))

    def renamed(self, names: Sequence[str]) -> FlatLayout:
        """Returns the same layout with other fqns."""
        slots = tuple(replace(slot, fqn=name) for slot, name in zip(self.slots, names, strict=True))
        return replace(self, slots=slots)

    @property
    def world_size(self) -> int:
        """Number of ranks, `W`."""
        return len(self.split_sizes)

    @property
    def has_owners(self) -> bool:
        """True if every parameter lies in one shard by design, so that shards may differ in size."""
        return bool(self.owners)

    @property
    def uneven_sizes(self) -> tuple[int, ...]:
        """`split_sizes` for collectives: empty if the shards are equal."""
        return self.split_sizes if self.has_owners else ()

    def shard_numel(self, rank: int) -> int:
        """Returns `S` of a rank."""
        return self.split_sizes[rank]

    @property
    def largest_shard_numel(self) -> int:
        """The largest `S` of any rank."""
        return max(self.split_sizes)

    @property
    def range(self) -> FlatRange:
        """Range of all N elements."""
        return FlatRange(0, self.numel)

    def shard(self, rank: int) -> FlatRange:
        """Returns the range of a rank's S elements."""
        return FlatRange(self._starts[rank], self._starts[rank + 1])

    def padded(self, index: int) -> FlatRange:
        """Returns the range of a slot and the padding after it, up to the next slot or the end of the buffer."""
        following = self.slots[index + 1].start if index + 1 < len(self.slots) else self.numel
        return FlatRange(self.slots[index].start, following)

    def slots_in(self, within: FlatRange, *, padded: bool = False) -> Iterator[tuple[Slot, FlatRange]]:
        """Yields every slot that has elements in a range, with the range of those elements, in order.

        Args:
            padded: count a slot's padding as its own, so that the ranges leave no gaps.
        """
        for index, slot in enumerate(self.slots):
            overlap = (self.padded(index) if padded else slot.range) & within
            if overlap:
                yield slot, overlap

    def group_runs(self, param_groups: Sequence[int], rank: int) -> list[tuple[FlatRange, int]]:
        """Returns (range, param group) of each run of one group in a rank's shard, in order and without gaps.

        A slot includes the padding after it, so that runs start and end at aligned places.

        Args:
            param_groups: param group of each slot.
        """
        shard = self.shard(rank)
        runs: list[tuple[FlatRange, int]] = []
        for index, group in enumerate(param_groups):
            overlap = self.padded(index) & shard
            if not overlap:
                continue
            # Neighbours of one group become one run, including the padding between them: one kernel call and one tensor
            # per state instead of one per parameter. Nothing reads the padding after an update.
            if runs and runs[-1][1] == group:
                runs[-1] = FlatRange(runs[-1][0].start, overlap.end), group
            else:
                runs.append((overlap, group))
        return runs

    def padding(self) -> Iterator[FlatRange]:
        """Yields the ranges between and after the slots, which belong to no parameter."""
        cursor = 0
        for slot in self.slots:
            if cursor < slot.start:
                yield FlatRange(cursor, slot.start)
            cursor = slot.end
        if cursor < self.numel:
            yield FlatRange(cursor, self.numel)


def _slots(
    entries: Iterable[tuple[str, tuple[int, ...]]],
    splits: Mapping[str, Split] | None = None,
    align_numel: int = ALIGN_NUMEL,
) -> tuple[tuple[Slot, ...], int]:
    """Places (fqn, shape) entries one after the other at aligned starts; returns the slots and their padded end."""
    slots, cursor = [], 0
    for fqn, shape in entries:
        numel = math.prod(shape)
        slots.append(Slot(fqn, tuple(shape), cursor, numel, (splits or {}).get(fqn)))
        cursor += round_up(numel, align_numel)
    return tuple(slots), cursor


def holders(split: Split | None, collectives: Collectives) -> Collectives:
    """Returns the collectives over the data ranks with the same part, which shard it and average its gradients."""
    if split is None or not split.in_data_group:
        return collectives
    assert collectives.part_holders is not None, "ranks of a data group have different parts, but no group for them"
    return collectives.part_holders


def whole_of(slot: Slot, values: Tensor, collectives: Collectives) -> Tensor:
    """Returns the full parameter from this rank's part; the part itself if it is not split. (all ranks with a part)

    Args:
        values: this rank's part, in the slot's shape.
    """
    if slot.split is None:
        return values
    parts = holders(slot.split, collectives).parts
    assert parts is not None, f"{slot.fqn} is split, but no group with the other parts is known"
    rows = values.new_empty(parts.world_size * values.numel())
    parts.all_gather(rows, values.contiguous().view(-1), f"join {slot.fqn}").wait()
    return slot.split.join([row.view(slot.shape) for row in rows.view(parts.world_size, -1)])
