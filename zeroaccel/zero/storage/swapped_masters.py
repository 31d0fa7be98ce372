"""Masters and optimizer states that are in a tier between steps: swapped in sub-group by sub-group (ZeRO-Infinity).

A sub-group is a run of one buffer's shard, the unit of reading, stepping and writing back. All its tensors are in one
state buffer, under one key of a tier, so that a step reads and writes sequentially:

    [ master: L fp32                          | first state: L elements | second state | ... ]    SwappedMasters
    [ residuals: L int16 | ties: L bits | pad | first state: L elements | second state | ... ]    ResidualMasters

Moments in 8-bit blocks are two states each: codes, and exponents with an element per block.

While a sub-group is swapped out, NaN stand-ins of the same shapes replace its pieces and states, so that the
optimizer's own dictionaries stay valid. State values that are not one number per element (a step count, factored
moments, a preconditioner) stay in memory.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroaccel.errors import OffloadError, UsageError
from zeroaccel.offload.tier import Fetch, StoredElements, Tier
from zeroaccel.ops.device_values import begin_together
from zeroaccel.ops.moments import decode, exponents_name, to_format
from zeroaccel.ops.residual import SplitMasters, join, split, ties_nbytes
from zeroaccel.ops.shard_step import ShardOptimizer
from zeroaccel.ops.updates import BLOCK_NUMEL
from zeroaccel.telemetry.timeline import span
from zeroaccel.zero.layout import ALIGN_NUMEL, FlatRange, round_up
from zeroaccel.zero.storage.masters import MasterPiece, MasterPlace, MasterStorage, make_states, stand_in
from zeroaccel.zero.storage.shards import Elements, FillRange

SUB_GROUP_NUMEL = 1 << 23
"""Maximum number of elements of a sub-group, even if `sub_group_size` is larger: 32 MiB per fp32 tensor saturate a
disk."""

RESIDUAL_SUB_GROUP_NUMEL = 1 << 20
"""The same maximum for residual masters in host memory and optimizers without kernels: 4 MiB of joined masters stay in
the cores' caches."""

_GRAIN_NUMEL = 64  # sub-groups have a multiple of this size, so that each tensor of a state buffer starts a cache line
_LINE_NBYTES = 64


def fp32_nbytes(numel: int) -> int:
    """Returns the number of bytes of `numel` fp32 masters."""
    return 4 * numel


def residual_nbytes(numel: int) -> int:
    """Returns the bytes of residuals and ties for `numel` masters, with the padding before the states."""
    return -(-(2 * numel + ties_nbytes(numel)) // _LINE_NBYTES) * _LINE_NBYTES


@dataclass(frozen=True)
class StateFormat:
    """The format of a state in a state buffer.

    Attributes:
        dtype: dtype of its values.
        per: number of masters per value: 1, or `BLOCK_NUMEL` for the exponents of 8-bit blocks.
    """

    dtype: torch.dtype
    per: int = 1

    def nbytes(self, numel: int) -> int:
        """Returns the bytes of the state for `numel` masters, which fill cache lines."""
        return round_up(-(-numel // self.per) * self.dtype.itemsize, _LINE_NBYTES)

    def part(self, within: slice) -> slice:
        """Returns the values of the masters `within`; a part starts at a block."""
        return slice(within.start // self.per, -(-within.stop // self.per))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the state has for a parameter of `shape`."""
        return shape if self.per == 1 else (-(-math.prod(shape) // self.per),)


def state_formats(optimizer: Optimizer, states: Mapping[str, torch.dtype]) -> dict[str, StateFormat]:
    """Returns name -> format of states with one value per element, and of the exponents of those in 8-bit blocks."""
    formats: dict[str, StateFormat] = {}
    for name, dtype in states.items():
        formats[name] = StateFormat(dtype)
        if isinstance(optimizer, ShardOptimizer) and name in optimizer.moments and dtype is torch.uint8:
            formats[exponents_name(name)] = StateFormat(torch.uint8, BLOCK_NUMEL)
    return formats


@dataclass(eq=False)
class SubGroup:
    """A run of a buffer's shard; L is its `range.numel`.

    Attributes:
        key: key of its state buffer in the tier.
        pieces: its pieces, in order and without gaps.
        states: name -> format of the states that its param groups keep.
        master_nbytes: bytes of the state buffer before the states.
        has_states: True once the state buffer contains states: before the first step there are none.
    """

    key: str
    pieces: tuple[MasterPiece, ...]
    states: Mapping[str, StateFormat]
    master_nbytes: int
    has_states: bool = False

    @property
    def range(self) -> FlatRange:
        """Elements of the sub-group, including the padding after the last piece."""
        return FlatRange(self.pieces[0].range.start, round_up(self.pieces[-1].range.end, ALIGN_NUMEL))

    @property
    def nbytes(self) -> int:
        """Number of bytes of the masters and all states."""
        return self.master_nbytes + sum(state.nbytes(self.range.numel) for state in self.states.values())

    @property
    def filled_nbytes(self) -> int | None:
        """Number of bytes of the state buffer that have values so far; None for all."""
        return None if self.has_states else self.master_nbytes

    def masters(self, buffer: Tensor) -> Tensor:
        """Returns the masters, (L,) fp32, at the start of the state buffer."""
        return buffer[: 4 * self.range.numel].view(torch.float32)

    def state(self, buffer: Tensor, name: str) -> Tensor:
        """Returns a state in the state buffer, (L / per,)."""
        state, offset = self.states[name], self.offset(name)
        count = -(-self.range.numel // state.per)
        return buffer[offset : offset + count * state.dtype.itemsize].view(state.dtype)

    def state_of(self, buffer: Tensor, name: str, piece: MasterPiece) -> Tensor:
        """Returns a piece's part of a state in the state buffer, in its shape."""
        state = self.states[name]
        elements = state.part(piece.range.at(self.range.start))
        return self.state(buffer, name)[elements].view(state.shape(piece.shape))

    def offset(self, name: str) -> int:
        """Returns the offset of a state in bytes."""
        offset = self.master_nbytes
        for other, state in self.states.items():
            if other == name:
                return offset
            offset += state.nbytes(self.range.numel)
        raise KeyError(name)


def cut_sub_groups(
    key: str,
    runs: Sequence[tuple[FlatRange, int]],
    states: Sequence[Mapping[str, StateFormat]],
    limit_numel: int,
    *,
    starts: Collection[int] = (),
    master_nbytes: Callable[[int], int] = fp32_nbytes,
) -> list[SubGroup]:
    """Divides the runs of a shard into sub-groups of at most `limit_numel` elements.

    Args:
        key: key of the buffer; those of sub-groups are `key/0`, `key/1`, ...
        runs: (range, param group) in order and without gaps.
        states: for each param group, name -> format of its states.
        starts: elements, multiples of `ALIGN_NUMEL`, at which a new sub-group begins even if the last one has room.
        master_nbytes: number of masters -> their bytes in the state buffer.
    """
    # Runs fill a sub-group one by one; a run of one param group may be cut, because its rule is elementwise.
    limit = max(min(limit_numel, SUB_GROUP_NUMEL) // _GRAIN_NUMEL, 1) * _GRAIN_NUMEL
    cuts: list[list[MasterPiece]] = []
    room = 0
    ordered = sorted(starts)
    for run, group in runs:
        start = run.start
        while start < run.end:
            following = bisect_right(ordered, start)
            if room == 0 or (following and ordered[following - 1] == start):
                cuts.append([])
                room = limit
            stop = min(run.end, start + room, *ordered[following : following + 1])
            cuts[-1].append(MasterPiece(FlatRange(start, stop), group, (stop - start,)))
            room -= stop - start
            start = stop
    return [
        _sub_group(f"{key}/{index}", pieces, [states[piece.group] for piece in pieces], master_nbytes)
        for index, pieces in enumerate(cuts)
    ]


def pack_sub_groups(
    key: str,
    pieces: Sequence[MasterPiece],
    states: Sequence[Mapping[str, StateFormat]],
    limit_numel: int,
    *,
    master_nbytes: Callable[[int], int] = fp32_nbytes,
) -> list[SubGroup]:
    """Packs full parameters into sub-groups of at most `limit_numel` elements; a larger parameter gets its own.

    Args:
        key, master_nbytes: see `cut_sub_groups`.
        pieces: the parameters in order.
        states: for each piece, name -> format of its states.
    """
    # Tensors must stay whole here, so a tensor above the limit exceeds it.
    limit = min(limit_numel, SUB_GROUP_NUMEL)
    packed: list[SubGroup] = []
    begin = 0
    for index in range(1, len(pieces) + 1):
        if index == len(pieces) or pieces[index].range.end - pieces[begin].range.start > limit:
            name = f"{key}/{len(packed)}"
            packed.append(_sub_group(name, pieces[begin:index], states[begin:index], master_nbytes))
            begin = index
    return packed


def _sub_group(
    key: str,
    pieces: Sequence[MasterPiece],
    states: Sequence[Mapping[str, StateFormat]],
    master_nbytes: Callable[[int], int],
) -> SubGroup:
    names: dict[str, StateFormat] = {}
    for of_piece in states:
        names.update(of_piece)
    group = SubGroup(key, tuple(pieces), names, 0)
    group.master_nbytes = master_nbytes(group.range.numel)
    return group


class StateSwapper:
    """The tier of one rank's masters and states, with its pipelining; shared by all `SwappedMasters` of the rank.

    Args:
        tier: tier with one key of `SubGroup.nbytes` bytes per sub-group.
        sub_groups: key of a buffer -> its sub-groups.
        pipeline_read: read the next sub-group while the optimizer steps one.
        pipeline_write: continue while a sub-group is written back.
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
        self._scratch = torch.empty(0)

    def fetch(self, group: SubGroup) -> Fetch:
        """Starts to read the bytes of a sub-group that have values."""
        return self.tier.fetch(group.key, group.filled_nbytes)

    def store(self, group: SubGroup, buffer: Tensor) -> None:
        """Stores a state buffer in the tier."""
        self.tier.store(group.key, buffer, group.filled_nbytes)
        if not self.pipeline_write:
            self.tier.settle()

    def scratch(self, numel: int) -> Tensor:
        """Returns memory, (numel,) fp32, for the masters of the one sub-group that is in memory."""
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(0)  # frees the old one before the new one is allocated
            self._scratch = torch.empty(numel)
        return self._scratch[:numel]


class SwappedMasters(MasterStorage):
    """Masters and states of one buffer in a tier; a sub-group is in host memory only while the optimizer steps it.

    Args:
        swapper: has the sub-groups, with their pieces, under `place.key`.
    """

    def __init__(self, place: MasterPlace, swapper: StateSwapper) -> None:
        super().__init__(place)
        self._key = place.key
        self._swapper = swapper
        self._groups = swapper.sub_groups[place.key]
        self._ahead: Fetch | None = None
        self._swapped_in: tuple[Tensor, Tensor | None] | None = None  # state buffer and joined masters of a sub-group
        self.pieces = tuple(piece for group in self._groups for piece in group.pieces)

    def initialize(self, source: Tensor) -> None:
        tier = self._swapper.tier
        for group in self._groups:  # one at a time: memory never holds an fp32 copy of the whole shard
            buffer = tier.take(group.key)
            self._write_masters(group, buffer, source[group.range.at(self.range.start)])
            tier.store(group.key, buffer, group.master_nbytes)

    # -- a step

    def prefetch(self) -> None:
        if self._swapper.pipeline_read and self._ahead is None and self._groups:
            self._ahead = self._swapper.fetch(self._groups[0])

    def release(self) -> None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            with suppress(OffloadError):  # the step has failed already; a lasting fault fails the next fetch too
                self._swapper.tier.release(ahead.wait())

    @property
    def sub_groups(self) -> Sequence[Sequence[MasterPiece]]:
        return [group.pieces for group in self._groups]

    def swap_in(self, index: int, following: MasterStorage | None = None, *, joined: bool = True) -> None:
        group = self._groups[index]
        fetch, self._ahead = self._ahead or self._swapper.fetch(group), None
        with self._waiting():
            buffer = fetch.wait()
        # One sub-group ahead, across buffers too: the disk reads while the cores update.
        if index + 1 < len(self._groups) and self._swapper.pipeline_read:
            self._ahead = self._swapper.fetch(self._groups[index + 1])
        elif index + 1 == len(self._groups) and following is not None:
            following.prefetch()
        masters = self._unpack(group, buffer) if joined or not self._takes_parts else None
        self._attach(group, buffer, masters)
        self._swapped_in = buffer, masters

    def swap_out(self, index: int) -> None:
        assert self._swapped_in is not None, f"{self._key}: swapped out before it was swapped in"
        (buffer, masters), self._swapped_in = self._swapped_in, None
        # With `pipeline_write`, the store continues in the background during the step of the next sub-group.
        with self._waiting():
            if masters is not None:
                self._pack(self._groups[index], buffer, masters)
            self._store(self._groups[index], buffer)

    def settle(self) -> None:
        self._swapper.tier.settle()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            with span("copy", self._key, "wait for a tier"):
                yield
        finally:
            self.waited_seconds += time.perf_counter() - begun

    def _attach(self, group: SubGroup, buffer: Tensor, masters: Tensor | None) -> None:
        """Points pieces and states at their memory; creates states that the optimizer's constructor creates.

        Args:
            masters: (L,) fp32; None to point the pieces at the parts of the masters.
        """
        state = self._optimizer.state
        # The parameters stay the objects that the optimizer's groups and state refer to; only their data is replaced.
        in_parts = self._parts(group, buffer) if masters is None else None
        for piece in group.pieces:
            elements = piece.range.at(group.range.start)
            if masters is not None:
                piece.param.data = masters[elements].view(piece.shape)
            elif in_parts is not None:
                piece.parts = in_parts.cut(elements)
            if group.has_states:
                for name, _ in _element_states(self._optimizer, piece, group):
                    state[piece.param][name] = group.state_of(buffer, name, piece)
        if self._makes_states and not group.has_states:
            make_states(self._optimizer, group.pieces)

    def _store(self, group: SubGroup, buffer: Tensor) -> None:
        """Stores the state buffer, and replaces pieces and states by stand-ins.

        Raises:
            UsageError: the optimizer has created a state that the trial step did not create.
        """
        # The tier reserved space for the states of a trial step, so a state that appears later has no space.
        optimizer = self._optimizer
        for piece in group.pieces:
            for name, value in _element_states(optimizer, piece, group):
                if name not in group.states or group.states[name].dtype != value.dtype:
                    raise UsageError(
                        f"optimizer {type(optimizer).__name__}, state {name!r}",
                        expected=f"the states it had at its first step: {sorted(group.states)}",
                        got=f"one of {value.dtype}",
                        fix='keep the same states during training, or set offload_optimizer.device to "cpu"',
                    )
                place = group.state_of(buffer, name, piece)
                if not begin_together(value, place):  # this step created the state
                    place.copy_(value)
        for piece in group.pieces:
            for name, value in _element_states(optimizer, piece, group):
                optimizer.state[piece.param][name] = stand_in(value.shape, value.dtype)
            piece.param.data, piece.parts = stand_in(piece.shape), None
        group.has_states = bool(group.states) and any(optimizer.state.get(piece.param) for piece in group.pieces)
        self._swapper.store(group, buffer)

    # -- the format of masters in a state buffer

    @property
    def _takes_parts(self) -> bool:
        """True if the optimizer's kernel joins masters that are stored in parts."""
        return False

    def _parts(self, group: SubGroup, buffer: Tensor) -> SplitMasters | None:
        """Returns the masters of a sub-group in parts; None if they are stored as fp32."""
        return None

    def _unpack(self, group: SubGroup, buffer: Tensor) -> Tensor:
        """Returns the masters of a sub-group in memory, (L,) fp32."""
        return group.masters(buffer)

    def _pack(self, group: SubGroup, buffer: Tensor, masters: Tensor) -> None:
        """Writes the masters that `_unpack` returned back into the state buffer, unless they are views of it."""

    def _write_masters(self, group: SubGroup, buffer: Tensor, values: Tensor, first: int = 0) -> None:
        """Replaces masters, starting at element `first` of the sub-group."""
        group.masters(buffer)[first : first + values.numel()].copy_(values)

    def _stored_masters(self, group: SubGroup, interval: FlatRange) -> StoredElements:
        start = 4 * (interval.start - group.range.start)
        return StoredElements.under(self._swapper.tier, group.key, start, interval.numel, torch.float32)

    # -- ranges

    def elements(self, interval: FlatRange, state: str | None = None) -> Elements:
        if state is not None and (values_here := self._in_memory(interval, state)) is not None:
            return values_here
        ranges: list[StoredElements] = []
        for group in self._groups:
            both = group.range & interval
            if both:
                ranges.append(self._stored_masters(group, both) if state is None else self._stored(group, both, state))
        return StoredElements.joined(ranges, ranges[0].dtype if ranges else torch.float32)

    def _stored(self, group: SubGroup, interval: FlatRange, state: str) -> StoredElements:
        """Returns the values of a state, those of 8-bit blocks as bfloat16, which has them exactly."""
        tier, origin, dtype = self._swapper.tier, interval.start - group.range.start, group.states[state].dtype
        start, exponents = group.offset(state), exponents_name(state)
        if exponents not in group.states:
            return StoredElements.under(tier, group.key, start + origin * dtype.itemsize, interval.numel, dtype)
        optimizer, exponents_start = self._optimizer, group.offset(exponents)
        assert isinstance(optimizer, ShardOptimizer), "only native optimizers have moments in blocks"
        signed = optimizer.moments[state]

        def read(first: int, count: int) -> Tensor:
            low, high = origin + first, origin + first + count
            begin, end = low // BLOCK_NUMEL * BLOCK_NUMEL, round_up(high, BLOCK_NUMEL)  # L is a multiple of a block
            codes = tier.read(group.key, start + begin, end - begin)
            scales = tier.read(group.key, exponents_start + begin // BLOCK_NUMEL, (end - begin) // BLOCK_NUMEL)
            return decode(codes, scales, signed=signed)[low - begin : high - begin].to(torch.bfloat16)

        return StoredElements(interval.numel, torch.bfloat16, read)

    def write(self, interval: FlatRange, values: Tensor, state: str | None = None) -> None:
        if state is not None and (values_here := self._in_memory(interval, state)) is not None:
            values_here.copy_(values)
            return
        for group in self._groups:
            both = group.range & interval
            if not both:
                continue
            # A tier stores a key only as a whole, so each range needs a read and a write of its sub-group.
            buffer = self._swapper.fetch(group).wait()
            new, first = values[both.at(interval.start)], both.start - group.range.start
            if state is None:
                self._write_masters(group, buffer, new, first)
            else:
                group.state(buffer, state)[first : first + both.numel].copy_(new)
            self._swapper.store(group, buffer)
        self._swapper.tier.settle()

    def _in_memory(self, interval: FlatRange, state: str) -> Tensor | None:
        """Returns the state of a 0-dimensional parameter, (1,): it looks like a counter, and so stays in memory."""
        for piece in self.pieces:
            if not piece.shape and interval.start in piece.range:
                value: Tensor = self._optimizer.state[piece.param][state]
                return value.detach().view(-1)
        return None

    # -- loading

    def load(self, fill: FillRange, flush: Callable[[], None]) -> None:
        # One sub-group at a time: read, fill, round into the weights, write back. This needs neither memory for all
        # masters nor a second pass over the disk.
        staged = self.shard.stage()
        try:
            for group in self._groups:
                buffer = self._swapper.fetch(group).wait()
                try:
                    masters = self._unpack(group, buffer)
                    fill(group.range, masters)
                    flush()
                    staged[group.range].copy_(masters)
                    self._pack(group, buffer, masters)
                except BaseException:  # a damaged checkpoint: earlier sub-groups have new values, this one the old
                    self._swapper.tier.release(buffer)
                    raise
                self._swapper.store(group, buffer)
        except BaseException:
            self.shard.discard()
            raise
        self.shard.commit()

    def publish(self) -> None:
        return None  # `load` has written the weights while the masters were in memory

    def load_states(self, state_of: Callable[[MasterPiece], dict[str, Any]], flush: Callable[[], None]) -> None:
        state = self._optimizer.state
        for group in self._groups:
            # Create all entries before `flush` fills them, so that one pass over the checkpoint serves the sub-group.
            loaded = [(piece, state_of(piece)) for piece in group.pieces]
            flush()
            buffer = self._swapper.fetch(group).wait()
            for piece, entries in loaded:
                state.pop(piece.param, None)
                if entries:
                    state[piece.param] = self._in_formats(group, entries)
            self._store(group, buffer)

    def _in_formats(self, group: SubGroup, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state entries of one piece in the formats of the state buffer."""
        converted: dict[str, Any] = {}
        for name, value in entries.items():
            state = group.states.get(name)
            if exponents_name(name) in group.states:
                assert isinstance(self._optimizer, ShardOptimizer), "only native optimizers have moments in blocks"
                signed = self._optimizer.moments[name]
                converted.update(to_format(value, name, torch.uint8, signed=signed))
            elif state is not None and isinstance(value, Tensor) and value.dim() > 0:
                converted[name] = value.to(state.dtype)
            else:
                converted[name] = value
        return converted


class ResidualMasters(SwappedMasters):
    """Masters of bfloat16 weights, stored as rounding residuals: 17 bits in addition to the 16 (`ops/residual.py`).

    The weight itself is the other part of each master: masters are read before weights change, and written with them.
    """

    reads_weights = True

    @property
    def _takes_parts(self) -> bool:
        return isinstance(self._optimizer, ShardOptimizer)

    def _parts(self, group: SubGroup, buffer: Tensor) -> SplitMasters:
        return SplitMasters(self.shard.read(group.range), *_residuals(group, buffer))

    def _unpack(self, group: SubGroup, buffer: Tensor) -> Tensor:
        residuals, ties = _residuals(group, buffer)
        masters = self._swapper.scratch(group.range.numel)
        join(self.shard.read(group.range), residuals, ties, masters)
        return masters

    def _pack(self, group: SubGroup, buffer: Tensor, masters: Tensor) -> None:
        self._write_masters(group, buffer, masters)

    def _write_masters(self, group: SubGroup, buffer: Tensor, values: Tensor, first: int = 0) -> None:
        if values.dtype is torch.bfloat16 and values.numel() == group.range.numel:
            buffer[: group.master_nbytes].zero_()  # weights without a rest, such as those of `zero.Init`
            return
        residuals, ties = _residuals(group, buffer)
        split(values.to("cpu", torch.float32).contiguous(), residuals[first : first + values.numel()], ties, first)

    def _stored_masters(self, group: SubGroup, interval: FlatRange) -> StoredElements:
        tier, numel = self._swapper.tier, group.range.numel

        def read(first: int, count: int) -> Tensor:
            # The bits of ties may begin within a byte: the last argument of `join` is the first bit's position.
            now = FlatRange(interval.start + first, interval.start + first + count)
            low, high = now.start - group.range.start, now.end - group.range.start
            residuals = tier.read(group.key, 2 * low, 2 * count).view(torch.int16)
            ties = tier.read(group.key, 2 * numel + low // 8, ties_nbytes(high) - low // 8)
            masters = torch.empty(count)
            join(self.shard.read(now), residuals, ties, masters, low % 8)
            return masters

        return StoredElements(interval.numel, torch.float32, read)


def _residuals(group: SubGroup, buffer: Tensor) -> tuple[Tensor, Tensor]:
    end = 2 * group.range.numel
    return buffer[:end].view(torch.int16), buffer[end : end + ties_nbytes(group.range.numel)]


def _element_states(optimizer: Optimizer, piece: MasterPiece, group: SubGroup) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of the piece's states that have one value per element or block."""
    state = optimizer.state.get(piece.param)
    for name, value in list(state.items()) if state else ():
        per = group.states[name].per if name in group.states else 1
        if isinstance(value, Tensor) and value.dim() > 0 and (per > 1 or value.shape == piece.param.shape):
            yield name, value
