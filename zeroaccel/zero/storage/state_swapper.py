"""Masters and optimizer states that are not in memory between steps: brought sub-group by sub-group.

A sub-group is a run of one buffer's shard, the unit of what is fetched, stepped and stored. All its tensors lie in one
slab, one key of a tier:

    [ master: L fp32 | first state: L elements | second state | ... ]

or, where masters are split into weights and residuals, with those in place of the master (`residual_masters.py`).

While it is away, masters and states show one NaN in their true shapes, as sharded parameters do. What a state holds
besides one number per element (a step count, factored moments, a preconditioner) stays in memory. Knows nothing of
gradients; `sharded_optimizer.py` steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroaccel.errors import UsageError
from zeroaccel.offload.tier import ElementRange, Fetch, Tier, TierElements, TierRange
from zeroaccel.optim.optimizer_kinds import renew_state
from zeroaccel.zero.layout import ALIGN_NUMEL, round_up
from zeroaccel.zero.storage.residual_masters import ResidualMasters, SplitRange, Weights, split_nbytes

__all__ = [
    "SPLIT_SUB_GROUP_NUMEL",
    "SUB_GROUP_NUMEL",
    "StateTier",
    "SubGroup",
    "TieredPiece",
    "cut_sub_groups",
    "pack_sub_groups",
    "slab_nbytes",
]

SUB_GROUP_NUMEL = 1 << 23
"""Elements of a sub-group, whatever more `sub_group_size` allows: 32 MiB per fp32 tensor keep any disk busy."""

SPLIT_SUB_GROUP_NUMEL = 1 << 20
"""As many at most in host memory where masters are split: 4 MiB of joined masters stay in the cores' caches."""

_GRAIN_NUMEL = 64  # sub-groups are multiples of it, so that every tensor of a slab starts on a cache line


@dataclass(frozen=True)
class TieredPiece:
    """A run of one param group, or a whole parameter, within a sub-group; places are elements of the flat buffer.

    Attributes:
        shape: of its master: (end - start,), or that of the parameter.
    """

    start: int
    end: int
    group: int
    shape: tuple[int, ...]


@dataclass(eq=False)
class SubGroup:
    """A run of a buffer's shard.

    Attributes:
        key: its slab in the tier.
        pieces: what it is made of, in order and without gaps.
        states: name -> dtype of the states its param groups keep per element.
        masters: per piece the optimizer's parameter; set by `ShardedOptimizer`.
        is_split: whether masters are kept as residuals of the weights.
        weights: of its buffer; set by `ShardedOptimizer` where masters are split.
        has_states: whether the states in the slab are any: before the first step there are none.
    """

    key: str
    pieces: tuple[TieredPiece, ...]
    states: Mapping[str, torch.dtype]
    masters: list[nn.Parameter] = field(default_factory=list)
    has_states: bool = False
    is_split: bool = False
    weights: Weights | None = None

    @property
    def start(self) -> int:
        """First element in the flat buffer."""
        return self.pieces[0].start

    @property
    def end(self) -> int:
        """One past the last, and past the padding behind it."""
        return round_up(self.pieces[-1].end, ALIGN_NUMEL)

    @property
    def numel(self) -> int:
        """L."""
        return self.end - self.start

    @property
    def master_nbytes(self) -> int:
        """Bytes of a slab up to its states."""
        return split_nbytes(self.numel) if self.is_split else 4 * self.numel

    @property
    def split_masters(self) -> ResidualMasters | None:
        """How to reach the masters, where they are split."""
        if not self.is_split:
            return None
        assert self.weights is not None, f"{self.key}: residuals without weights"
        return ResidualMasters(self.start, self.numel, self.weights)


def slab_nbytes(group: SubGroup) -> int:
    """Bytes of the master and all states."""
    return group.master_nbytes + group.numel * sum(dtype.itemsize for dtype in group.states.values())


def cut_sub_groups(
    key: str,
    runs: Sequence[tuple[int, int, int]],
    states: Sequence[Mapping[str, torch.dtype]],
    limit_numel: int,
    *,
    starts: Collection[int] = (),
    is_split: bool = False,
) -> list[SubGroup]:
    """Sub-groups of at most `limit_numel` elements over the runs of a shard.

    Args:
        key: of the buffer; sub-groups are `key/0`, `key/1`, ...
        runs: (start, end, param group) in order and without gaps.
        states: per param group what it keeps per element.
        starts: places, multiples of `ALIGN_NUMEL`, at which another sub-group begins whatever room is left.
        is_split: of the sub-groups.
    """
    limit = max(min(limit_numel, SUB_GROUP_NUMEL) // _GRAIN_NUMEL, 1) * _GRAIN_NUMEL
    cuts: list[list[TieredPiece]] = []
    room = 0
    ordered = sorted(starts)
    for start, end, group in runs:
        while start < end:
            following = bisect_right(ordered, start)
            if room == 0 or (following and ordered[following - 1] == start):
                cuts.append([])
                room = limit
            stop = min(end, start + room, *ordered[following : following + 1])
            cuts[-1].append(TieredPiece(start, stop, group, (stop - start,)))
            room -= stop - start
            start = stop
    return [
        _sub_group(f"{key}/{index}", pieces, [states[piece.group] for piece in pieces], is_split=is_split)
        for index, pieces in enumerate(cuts)
    ]


def pack_sub_groups(
    key: str,
    pieces: Sequence[TieredPiece],
    states: Sequence[Mapping[str, torch.dtype]],
    limit_numel: int,
    *,
    is_split: bool = False,
) -> list[SubGroup]:
    """Sub-groups of whole parameters, of at most `limit_numel` elements together; a larger parameter goes alone.

    Args:
        key: as of `cut_sub_groups`.
        pieces: in order.
        states: of each piece what its optimizer keeps per element.
    """
    limit = min(limit_numel, SUB_GROUP_NUMEL)
    found: list[SubGroup] = []
    begin = 0
    for index in range(1, len(pieces) + 1):
        if index == len(pieces) or pieces[index].end - pieces[begin].start > limit:
            made = f"{key}/{len(found)}"
            found.append(_sub_group(made, pieces[begin:index], states[begin:index], is_split=is_split))
            begin = index
    return found


def _sub_group(
    key: str, pieces: Sequence[TieredPiece], states: Sequence[Mapping[str, torch.dtype]], *, is_split: bool
) -> SubGroup:
    names: dict[str, torch.dtype] = {}
    for of_piece in states:
        names.update(of_piece)
    return SubGroup(key, tuple(pieces), names, is_split=is_split)


class StateTier:
    """The masters and states of one rank in a tier.

    1. `adopt` each sub-group's first master. 2. At every step, per sub-group: `fetch`, `attach`, the optimizer steps,
    `detach`. 3. A checkpoint reads what is `stored`.

    Args:
        tier: with one key per sub-group, of `slab_nbytes`.
        sub_groups: key of a buffer -> its sub-groups.
        pipeline_read: fetch the next sub-group while one is stepped.
        pipeline_write: go on while one is written back.

    Attributes:
        renews: whether the optimizer's constructor makes states, so that those of a sub-group are made on its arrival.
    """

    def __init__(
        self,
        tier: Tier,
        sub_groups: Mapping[str, Sequence[SubGroup]],
        *,
        pipeline_read: bool = False,
        pipeline_write: bool = False,
    ) -> None:
        self.tier = tier
        self.sub_groups = {key: tuple(groups) for key, groups in sub_groups.items()}
        self.pipeline_read = pipeline_read
        self.pipeline_write = pipeline_write
        self.renews = False
        self._joined = torch.empty(0)  # the masters of the attached sub-group, where they are split
        self._attached: SubGroup | None = None

    def adopt(self, key: str, master: Tensor, origin: int) -> None:
        """Stores the first master of a buffer.

        Args:
            master: (S,) any floating dtype; converted to fp32 sub-group by sub-group.
            origin: of the shard in the flat buffer.
        """
        for group in self.sub_groups[key]:
            slab = self.tier.take(group.key)
            values = master[group.start - origin : group.end - origin]
            if group.is_split:
                ResidualMasters(group.start, group.numel, _no_weights).write(slab, values.float().contiguous())
            else:
                _part(slab, 0, group.numel, torch.float32).copy_(values)
            self.tier.store(group.key, slab, group.master_nbytes)

    def fetch(self, group: SubGroup) -> Fetch:
        """Starts to bring what there is of a sub-group."""
        return self.tier.fetch(group.key, None if group.has_states else group.master_nbytes)

    def attach(self, group: SubGroup, slab: Tensor, optimizer: Optimizer) -> None:
        """Points masters and states at their places in the slab; makes the states that a constructor makes."""
        whole = self._join(group, slab)
        for piece, master in zip(group.pieces, group.masters, strict=True):
            place = piece.start - group.start
            master.data = whole[place : place + piece.end - piece.start].view(piece.shape)
            if group.has_states:
                for name, value in self._elements(optimizer, master):
                    held = self._place(group, slab, name, place, value.numel())
                    optimizer.state[master][name] = held.view(piece.shape)
        if self.renews and not group.has_states:
            _begin_states(group, optimizer)

    def detach(self, group: SubGroup, slab: Tensor, optimizer: Optimizer) -> None:
        """Sends a stepped sub-group back; its masters and states show NaN again.

        Raises:
            UsageError: the optimizer made a state that it did not make when it was tried.
        """
        for piece, master in zip(group.pieces, group.masters, strict=True):
            for name, value in self._elements(optimizer, master):
                if group.states.get(name) != value.dtype:
                    raise UsageError(
                        f"optimizer {type(optimizer).__name__}, state {name!r}",
                        expected=f"the states it had at its first step: {sorted(group.states)}",
                        got=f"one of {value.dtype}",
                        fix='do not change what it keeps during training, or set offload_optimizer.device to "cpu"',
                    )
                place = self._place(group, slab, name, piece.start - group.start, value.numel()).view(piece.shape)
                if value.data_ptr() != place.data_ptr():  # made by this step
                    place.copy_(value)
        if self._attached is group and (masters := group.split_masters) is not None:
            masters.write(slab, self._joined[: group.numel])
        self.put_away(group, optimizer)
        group.has_states = bool(group.states) and any(optimizer.state.get(master) for master in group.masters)
        self.store(group, slab)

    def store(self, group: SubGroup, slab: Tensor) -> None:
        """Sends a slab back as it is."""
        self.tier.store(group.key, slab, None if group.has_states else group.master_nbytes)
        if not self.pipeline_write:
            self.tier.settle()

    def put_away(self, group: SubGroup, optimizer: Optimizer) -> None:
        """Shows NaN for what is away."""
        self._attached = None
        for master in group.masters:
            for name, value in self._elements(optimizer, master):
                optimizer.state[master][name] = _absent(value.shape, value.dtype)
            master.data = _absent(master.shape, torch.float32)

    def settle(self) -> None:
        """Returns when everything is stored; raises OffloadError if something could not be."""
        self.tier.settle()

    def stored(self, groups: Sequence[SubGroup], name: str | None, start: int, end: int) -> TierElements:
        """Elements [start, end) of a state, or of the master (None), as they are in the tier.

        Args:
            groups: of one buffer; places count in its flat buffer.
        """
        dtype = torch.float32
        ranges: list[ElementRange] = []
        for group, low, high in _overlaps(groups, start, end):
            if name is None and (masters := group.split_masters) is not None:
                ranges.append(SplitRange(self.tier, group.key, masters, low - group.start, high - low))
                continue
            dtype = torch.float32 if name is None else group.states[name]
            offset = (0 if name is None else self._offset(group, name)) + (low - group.start) * dtype.itemsize
            ranges.append(TierRange(self.tier, group.key, offset, high - low, dtype))
        return TierElements(tuple(ranges), dtype)

    def replace_states(
        self, group: SubGroup, optimizer: Optimizer, found: Mapping[nn.Parameter, dict[str, object]]
    ) -> None:
        """Gives a sub-group other states, one dictionary per master, or none.

        Raises:
            UsageError: the optimizer does not keep such states.
        """
        slab = self.fetch(group).wait()
        for master in group.masters:
            optimizer.state.pop(master, None)
            if found.get(master):
                optimizer.state[master] = dict(found[master])
        self.detach(group, slab, optimizer)

    @contextmanager
    def changing(self, group: SubGroup) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """((L,) the master, name -> (L,) the state), stored as they are left; not if the block raises.

        Where masters are split, the block makes the weights those to which it leaves the masters.

        Raises:
            OffloadError: they cannot be read back.
        """
        slab = self.fetch(group).wait()
        try:
            places = {name: self._place(group, slab, name, 0, group.numel) for name in group.states}
            masters = group.split_masters
            if masters is None:
                yield _part(slab, 0, group.numel, torch.float32), places
            else:
                whole = torch.empty(group.numel)
                masters.read(slab, whole)
                yield whole, places
                masters.write(slab, whole)
        except BaseException:
            self.tier.release(slab)
            raise
        self.store(group, slab)

    def change(self, groups: Sequence[SubGroup], name: str | None, start: int, values: Tensor) -> None:
        """Replaces elements of a state, or of the master (None), from `start` on; returns when they are stored.

        Where masters are split, the weights are the caller's to change.

        Raises:
            OffloadError: they cannot be read back or stored.
        """
        for group, low, high in _overlaps(groups, start, start + values.numel()):
            if name is None and (masters := group.split_masters) is not None:
                slab = self.fetch(group).wait()
                masters.write(slab, values[low - start : high - start].float().contiguous(), low - group.start)
                self.store(group, slab)
                continue
            with self.changing(group) as (master, states):
                target = master if name is None else states[name]
                target[low - group.start : high - group.start].copy_(values[low - start : high - start])
        self.tier.settle()

    def _join(self, group: SubGroup, slab: Tensor) -> Tensor:
        """(L,) the masters of an attached sub-group."""
        self._attached = group
        masters = group.split_masters
        if masters is None:
            return _part(slab, 0, group.numel, torch.float32)
        if self._joined.numel() < group.numel:
            self._joined = torch.empty(group.numel)
        whole = self._joined[: group.numel]
        masters.read(slab, whole)
        return whole

    def _offset(self, group: SubGroup, name: str) -> int:
        offset = group.master_nbytes
        for other, dtype in group.states.items():
            if other == name:
                return offset
            offset += dtype.itemsize * group.numel
        raise KeyError(name)

    def _place(self, group: SubGroup, slab: Tensor, name: str, first: int, length: int) -> Tensor:
        dtype = group.states[name]
        return _part(slab, self._offset(group, name) + first * dtype.itemsize, length, dtype)

    @staticmethod
    def _elements(optimizer: Optimizer, master: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """The states of a piece that have one value per element."""
        state = optimizer.state.get(master)
        for name, value in list(state.items()) if state else ():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == master.shape:
                yield name, value


def _no_weights(start: int, end: int) -> Tensor:
    raise AssertionError("weights are not there before their buffer is")


def _overlaps(groups: Sequence[SubGroup], start: int, end: int) -> Iterator[tuple[SubGroup, int, int]]:
    for group in groups:
        low, high = max(group.start, start), min(group.end, end)
        if low < high:
            yield group, low, high


def _begin_states(group: SubGroup, optimizer: Optimizer) -> None:
    before, params = dict(optimizer.state), [held["params"] for held in optimizer.param_groups]
    try:
        for index, held in enumerate(optimizer.param_groups):
            held["params"] = [m for m, p in zip(group.masters, group.pieces, strict=True) if p.group == index]
        renew_state(optimizer)
    finally:
        for held, kept in zip(optimizer.param_groups, params, strict=True):
            held["params"] = kept
    for master, state in before.items():
        optimizer.state.setdefault(master, state)


def _part(slab: Tensor, offset: int, length: int, dtype: torch.dtype) -> Tensor:
    return slab[offset : offset + length * dtype.itemsize].view(dtype)


def _absent(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype).expand(shape)
