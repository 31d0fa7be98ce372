"""The optimizer over fp32 masters: any `torch.optim` class steps on what this rank has of them.

A buffer's shard is cut into pieces: one per run of parameters of one param group for an elementwise rule, one per
parameter, in its shape, for a rule that looks at whole tensors (`OptimizerKind`). The optimizer's `param_groups` keep
their dictionaries (schedulers and loggers that hold them go on working); only their `params` become the pieces.

[Note: equal pieces] A replicated optimizer (nothing sharded) steps W pieces of S elements where a sharded one steps
one of them, so that every kernel sees vectors of the same length with the same contents, and even an implementation
whose vector tail rounds differently gives the same bits.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroaccel.errors import OffloadError
from zeroaccel.offload.tier import Fetch, TierElements
from zeroaccel.ops.shard_step import ShardOptimizer, ShardStep
from zeroaccel.optim.optimizer_kinds import (
    OptimizerKind,
    OptimizerKinds,
    StepCounters,
    batches,
    renew_state,
    restricted,
)
from zeroaccel.zero.grad_reducer import GradientBuffer
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.storage.copy_stream import CopyStream
from zeroaccel.zero.storage.state_swapper import StateTier, SubGroup

__all__ = ["Piece", "ShardedOptimizer"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of one buffer's master that one param group updates.

    Attributes:
        master: (L,) fp32 leaf, a view into the buffer's master; of the parameter's shape for an optimizer that is
            not elementwise. NaN while its sub-group is away.
        start, end: its place in the flat buffer, in elements.
        sub_group: what it is fetched with; None where masters are in memory.
    """

    buffer: FlatBuffer
    master: nn.Parameter
    start: int
    end: int
    group: int
    sub_group: SubGroup | None = None


class EarlierUpdates(Protocol):
    """Updates that began before the step they are for; see `async_step.py`."""

    def has(self, buffer: FlatBuffer) -> bool:
        """Whether this buffer is among them, and not installed yet."""

    def install(self, buffer: FlatBuffer) -> None:
        """Waits for it, and puts the new weights in force. Raises OffloadError if a tier failed."""

    def wait(self) -> None:
        """Returns when all are done."""


class ShardedOptimizer:
    """Steps the optimizer on this rank's masters and writes the new weights to the parameters' shards.

    Args:
        optimizer: over the model's parameters; its `param_groups` are pointed at the pieces.
        kinds: what its rules look at; buffers of per-tensor groups have owner layouts.
        groups: id(parameter) -> index of its param group, taken before the parameters were sharded.
        buffers: every trainable buffer, in a fixed order.
        replicated: every rank steps everything (stage 0) instead of its shard.
        sub_group_numel: fp32 gradients made at a time for optimizers without a kernel of their own, in elements.
        states: the tier of masters and states, where they are not in memory.
        keys: id(buffer) -> its key in `states`.
        copies: moves weights to the device from masters in host memory, where the two are not one.

    Attributes:
        pieces: id(buffer) -> its pieces that this rank steps.
        states: as given.
        update_seconds, waited_seconds, hidden_seconds: of all steps so far: in all, of it for a tier, and of it beside
            other work.
        group_of: fqn -> index of its param group, of every trainable parameter.
        is_stepping: within a call of the optimizer's own `step`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kinds: OptimizerKinds,
        groups: Mapping[int, int],
        buffers: Sequence[FlatBuffer],
        *,
        replicated: bool,
        sub_group_numel: int = 1_000_000_000,
        states: StateTier | None = None,
        keys: Mapping[int, str] | None = None,
        copies: CopyStream | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.kinds = kinds
        self._calls_together = OptimizerKind.COUPLED in kinds.groups
        self._counters: StepCounters | None = None
        self.is_stepping = False
        self.states = states
        self.update_seconds = self.waited_seconds = self.hidden_seconds = 0.0
        self._copies = copies
        self._sub_group_numel = sub_group_numel
        self._buffers = {id(buffer): buffer for buffer in buffers}
        self.pieces: dict[int, list[Piece]] = {key: [] for key in self._buffers}
        self._sub_groups: dict[int, tuple[SubGroup, ...]] = {}
        self.group_of = {
            slot.fqn: groups[id(param)]
            for buffer in buffers
            for slot, param in zip(buffer.layout.slots, buffer.params, strict=True)
        }
        for buffer in buffers:
            if states is not None and keys is not None:
                self._add_tiered(buffer, states.sub_groups[keys[id(buffer)]])
                continue
            by_parameter = buffer.layout.has_owners or (self._calls_together and replicated)
            cut = _by_parameter if by_parameter else _by_run
            for start, end, shape, group in cut(buffer, groups, replicated=replicated):
                self._add(buffer, start, end, shape, group, replicated=replicated)
        self._point_groups()
        if optimizer.state and states is not None:
            states.renews = True
            optimizer.state.clear()
        elif optimizer.state:
            renew_state(optimizer)

    def _point_groups(self) -> None:
        """Replaces the model's parameters in the param groups by the pieces, in the order of those parameters.

        A rule that sums over several parameters gives the bits of that order.
        """
        places = {
            id(param): place for held in self.optimizer.param_groups for place, param in enumerate(held["params"])
        }
        first_of: dict[int, int] = {}
        for cut in self.pieces.values():
            for piece in cut:
                first_of[id(piece.master)] = places[id(piece.buffer.params[_first_slot(piece)])]
        for index, held in enumerate(self.optimizer.param_groups):
            masters = [p.master for cut in self.pieces.values() for p in cut if p.group == index]
            held["params"] = sorted(masters, key=lambda master: first_of[id(master)])

    def _add(
        self, buffer: FlatBuffer, start: int, end: int, shape: tuple[int, ...], group: int, *, replicated: bool
    ) -> None:
        assert buffer.master is not None, f"a trainable buffer without a master: {buffer.layout.slots[0].fqn}"
        origin = 0 if replicated else buffer.layout.bounds(buffer.rank)[0]
        master = nn.Parameter(buffer.master[start - origin : end - origin].view(shape))
        self.pieces[id(buffer)].append(Piece(buffer, master, start, end, group))

    def _add_tiered(self, buffer: FlatBuffer, sub_groups: Sequence[SubGroup]) -> None:
        self._sub_groups[id(buffer)] = tuple(sub_groups)
        for sub_group in sub_groups:
            if sub_group.is_split:
                sub_group.weights = buffer.stored_shard
            for run in sub_group.pieces:
                master = nn.Parameter(torch.full((), math.nan).expand(run.shape))
                sub_group.masters.append(master)
                self.pieces[id(buffer)].append(Piece(buffer, master, run.start, run.end, run.group, sub_group))

    def step(
        self,
        gradients: Sequence[GradientBuffer],
        grad_scale: float,
        done: Callable[[FlatBuffer], None] = lambda buffer: None,
        beside: EarlierUpdates | None = None,
    ) -> None:
        """One update of all masters and of the parameters' own copies.

        Args:
            gradients: the reduced gradients of every buffer.
            grad_scale: unscaling and clipping, multiplied into the gradients.
            done: called after each buffer, so that its gather can start while the next is stepped.
            beside: has updated some buffers already, or is about to; their gradients are not looked at.

        Raises:
            OffloadError: a tier failed. `done` has been called for every buffer all the same, since the other ranks
                are on their way to its gathers; masters and parameters are a mixture of old and new.
        """
        self._counters = None
        if self._calls_together:
            with self._timed():
                self._step_together(gradients, grad_scale, done)
        else:
            self._step_in_turn(gradients, grad_scale, done, beside)

    def _step_in_turn(
        self,
        gradients: Sequence[GradientBuffer],
        grad_scale: float,
        done: Callable[[FlatBuffer], None],
        beside: EarlierUpdates | None,
    ) -> None:
        failure: OffloadError | None = None
        arrivals = self.arrivals([held.buffer for held in gradients if beside is None or not beside.has(held.buffer)])
        for held in gradients:
            try:
                if beside is not None and beside.has(held.buffer):
                    beside.install(held.buffer)
                elif failure is None:
                    if beside is not None:
                        beside.wait()  # one at a time at the tiers
                    with self._timed():
                        self._step_buffer(held, grad_scale, arrivals)
            except OffloadError as error:
                failure = failure or error
                arrivals.close()
                if held.buffer.home is not None:
                    held.buffer.home.abandon()
            if self._copies is not None:
                self._copies.wait()
            done(held.buffer)
        try:
            with self._timed(), self._waiting():
                for home in [held.buffer.home for held in gradients if held.buffer.home is not None][:1]:
                    home.tier.settle()
                if self.states is not None:
                    self.states.settle()
        except OffloadError as error:
            failure = failure or error
        if failure is not None:
            raise failure

    def count_step(self) -> None:
        """Lets the optimizer, its schedulers and its hooks take note of a step in which its `step` was not called."""
        if isinstance(self.optimizer, ShardStep):
            self._call_step()  # no parameter has a gradient
        elif not self._calls_together and self._counters is None:  # this rank owns nothing
            with restricted(self.optimizer, ()):
                self._call_step()

    def _call_step(self) -> None:
        self.is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self.is_stepping = False

    def _call_again(self, call: Callable[[], object]) -> None:
        """One of the calls of one step; see [Note: several calls per step] of `optimizer_kinds.py`."""
        if self._counters is None:
            self._counters = StepCounters(self.optimizer)
        else:
            self._counters.restore()
        call()

    def change_masters(self, call: Callable[[], object], done: Callable[[FlatBuffer], None]) -> None:
        """Lets a method of the optimizer that is no step, such as its `eval`, change masters and states.

        Args:
            call: the method; called for a part of the masters at a time, as `step` is.
            done: called after each buffer, whose shard has the new weights.

        Raises:
            OffloadError: a tier failed. `done` has been called for every buffer all the same; masters and parameters
                are a mixture of old and new.
        """
        self._counters = None
        if self._calls_together:
            call()
        failure: OffloadError | None = None
        arrivals = self.arrivals(list(self._buffers.values()))
        for buffer in self._buffers.values():
            try:
                if failure is None:
                    self._change_buffer(buffer, call, arrivals)
            except OffloadError as error:
                failure = error
                arrivals.close()
                if buffer.home is not None:
                    buffer.home.abandon()
            if self._copies is not None:
                self._copies.wait()
            done(buffer)
        if failure is not None:
            raise failure
        if self._counters is None and not self._calls_together:  # this rank owns nothing
            with restricted(self.optimizer, ()):
                call()

    def _change_buffer(self, buffer: FlatBuffer, call: Callable[[], object], arrivals: Generator[Tensor]) -> None:
        targets = self._targets(buffer)
        for sub_group, pieces in self._cut(buffer):
            with self._here(sub_group, arrivals):
                if pieces and not self._calls_together:
                    with restricted(self.optimizer, [piece.master for piece in pieces]):
                        self._call_again(call)
                for piece in pieces:
                    self._finish_piece(piece, targets)
        if buffer.home is not None:
            buffer.home.commit()

    @contextmanager
    def _here(self, sub_group: SubGroup | None, arrivals: Generator[Tensor]) -> Iterator[None]:
        """Has a sub-group's masters and states in memory; there is nothing to do where they always are."""
        if sub_group is None or self.states is None:
            yield
            return
        slab = next(arrivals)
        self.states.attach(sub_group, slab, self.optimizer)
        yield
        with self._waiting():
            self.states.detach(sub_group, slab, self.optimizer)

    def _step_together(
        self, gradients: Sequence[GradientBuffer], grad_scale: float, done: Callable[[FlatBuffer], None]
    ) -> None:
        """One call of a coupled optimizer with all pieces: all gradients are in fp32 at once."""
        for held in gradients:
            grad, origin = self._gradient(held)
            for piece in self.pieces[id(held.buffer)]:
                _lay_gradient(piece, grad, origin, grad_scale)
        self._call_step()
        for held in gradients:
            targets = self._targets(held.buffer)
            for piece in self.pieces[id(held.buffer)]:
                self._finish_piece(piece, targets)
            if held.buffer.home is not None:
                held.buffer.home.commit()
            if self._copies is not None:
                self._copies.wait()
            done(held.buffer)

    @staticmethod
    def _gradient(held: GradientBuffer) -> tuple[Tensor, int]:
        """(the reduced gradient to step with, the place of its first element in the flat buffer)."""
        if held.full is not None:
            return held.full, 0
        assert held.shard is not None, f"{held.name} is stepped without a gradient"
        return held.shard, held.buffer.layout.bounds(held.buffer.rank)[0]

    def _step_buffer(self, held: GradientBuffer, grad_scale: float, arrivals: Generator[Tensor]) -> None:
        grad, _ = self._gradient(held)
        targets = self._targets(held.buffer)
        self.update(held.buffer, grad, grad_scale, arrivals, targets, self.optimizer.param_groups)
        if held.buffer.home is not None:
            held.buffer.home.commit()

    def update(
        self,
        buffer: FlatBuffer,
        grad: Tensor,
        grad_scale: float,
        arrivals: Generator[Tensor],
        targets: Tensor | None,
        groups: Sequence[dict[str, Any]],
    ) -> None:
        """Updates the masters of one buffer.

        Args:
            grad: (S,), or (N,) where masters are whole.
            arrivals: of `arrivals`, of an order in which this buffer is next.
            targets: (S,) or (N,), gets the new weights in its dtype; None where the masters are enough.
            groups: the hyperparameters, by param group.
        """
        origin = buffer.layout.bounds(buffer.rank)[0] if grad.numel() != buffer.layout.numel else 0
        for sub_group, pieces in self._cut(buffer):
            with self._here(sub_group, arrivals):
                if isinstance(self.optimizer, ShardStep):
                    self._step_native(self.optimizer, pieces, grad, origin, grad_scale, targets, groups)
                else:
                    self._step_generic(pieces, grad, origin, grad_scale, targets)

    def staging(self, buffer: FlatBuffer) -> Tensor | None:
        """(S,) host memory for new weights beside the old ones; None where the masters do as well."""
        if buffer.master is not None and buffer.master.dtype is buffer.dtype:
            return None
        pinned = self._copies is not None and self._copies.pinned
        return torch.empty(buffer.layout.shard_numel(buffer.rank), dtype=buffer.dtype, pin_memory=pinned)

    def install(self, buffer: FlatBuffer, weights: Tensor | None) -> None:
        """Puts weights that `update` wrote to `staging` into the shard."""
        new = buffer.master if weights is None else weights
        target = self._targets(buffer)
        assert new is not None and target is not None, "masters that are not apart from the parameters"
        if target.device == new.device or target.device.type == "cpu":
            target.copy_(new)
        else:
            assert self._copies is not None, "masters in another memory than the parameters, and nobody to copy"
            self._copies.to_device(target, new)
        if buffer.home is not None:
            buffer.home.commit()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.update_seconds += time.perf_counter() - begun

    def _cut(self, buffer: FlatBuffer) -> Iterator[tuple[SubGroup | None, Sequence[Piece]]]:
        """The pieces of a buffer, by what they are fetched with."""
        pieces = self.pieces[id(buffer)]
        if self.states is None:
            yield None, pieces
            return
        cursor = 0
        for sub_group in self._sub_groups[id(buffer)]:
            count = len(sub_group.pieces)
            yield sub_group, pieces[cursor : cursor + count]
            cursor += count

    def arrivals(self, buffers: Sequence[FlatBuffer]) -> Generator[Tensor]:
        """The slabs of all sub-groups of buffers, in order; the next is under way while one is stepped."""
        states = self.states
        if states is None:
            return
        order = [sub_group for buffer in buffers for sub_group in self._sub_groups[id(buffer)]]
        ahead: Fetch | None = None
        try:
            for index, sub_group in enumerate(order):
                fetch, ahead = ahead or states.fetch(sub_group), None
                with self._waiting():
                    slab = fetch.wait()
                if states.pipeline_read and index + 1 < len(order):
                    ahead = states.fetch(order[index + 1])
                yield slab
        finally:
            if ahead is not None:  # the step broke off
                with suppress(OffloadError):
                    states.tier.release(ahead.wait())

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - begun

    def _targets(self, buffer: FlatBuffer) -> Tensor | None:
        """(S,) or (N,): where the new weights go besides the master; None where the parameters are the master."""
        if buffer.home is not None:
            return buffer.home.open()
        if not buffer.master_is_apart:
            return None
        whole = buffer.master is not None and buffer.master_is_replicated
        return buffer.full if whole and buffer.resident else buffer.shard

    @contextmanager
    def _target(self, piece: Piece, targets: Tensor | None) -> Iterator[Tensor | None]:
        """A piece's part of the new weights, in the memory of its master; it is where it belongs afterwards."""
        if targets is None:
            yield None
            return
        whole = targets.numel() == piece.buffer.layout.numel
        origin = 0 if whole else piece.buffer.layout.bounds(piece.buffer.rank)[0]
        part = targets[piece.start - origin : piece.end - origin]
        if part.device == piece.master.device:
            yield part
            return
        assert self._copies is not None, "masters in another memory than the parameters, and nobody to copy"
        if part.device.type == "cpu":  # masters on the device, shards on the host
            staged = torch.empty_like(part, device=piece.master.device)
            yield staged
            part.copy_(staged)
            return
        staged = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._copies.pinned)
        yield staged
        self._copies.to_device(part, staged)

    def _step_native(
        self,
        kernel: ShardStep,
        pieces: Sequence[Piece],
        grad: Tensor,
        origin: int,
        grad_scale: float,
        targets: Tensor | None,
        groups: Sequence[dict[str, Any]],
    ) -> None:
        for piece in pieces:
            group = groups[piece.group]
            part = grad[piece.start - origin : piece.end - origin]
            with self._target(piece, targets) as out:
                kernel.step_shard(group, piece.master, part, grad_scale=grad_scale, out=out)

    def _step_generic(
        self, pieces: Sequence[Piece], grad: Tensor, origin: int, grad_scale: float, targets: Tensor | None
    ) -> None:
        for batch in batches(pieces, self._sub_group_numel, lambda piece: piece.master.numel()):
            for piece in batch:
                _lay_gradient(piece, grad, origin, grad_scale)
            with restricted(self.optimizer, [piece.master for piece in batch]):
                self._call_again(self._call_step)
            for piece in batch:
                self._finish_piece(piece, targets)

    def _finish_piece(self, piece: Piece, targets: Tensor | None) -> None:
        piece.master.grad = None
        with self._target(piece, targets) as out:
            if out is not None:
                out.copy_(piece.master.detach().flatten())

    def is_away(self, buffer: FlatBuffer) -> bool:
        """Whether a buffer's masters and states are in a tier, where only `stored` and `change` reach them."""
        return id(buffer) in self._sub_groups

    def splits_masters(self, buffer: FlatBuffer) -> bool:
        """Whether its masters are kept as residuals of the weights, and cannot be told without those."""
        return any(sub_group.is_split for sub_group in self._sub_groups.get(id(buffer), ()))

    def stored(self, buffer: FlatBuffer, name: str | None, start: int, end: int) -> TierElements:
        """See `StateTier.stored`; for a buffer that is away."""
        assert self.states is not None, "nothing is away"
        return self.states.stored(self._sub_groups[id(buffer)], name, start, end)

    def change(self, buffer: FlatBuffer, name: str | None, start: int, values: Tensor) -> None:
        """See `StateTier.change`; for a buffer that is away."""
        assert self.states is not None, "nothing is away"
        self.states.change(self._sub_groups[id(buffer)], name, start, values)

    def sub_groups(self, buffer: FlatBuffer) -> Sequence[SubGroup]:
        """The sub-groups of a buffer that is away."""
        return self._sub_groups[id(buffer)]

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """The optimizer's state of a piece, tensors of elements with one number per element; empty before a step."""
        state: dict[str, Any] = self.optimizer.state.get(piece.master, {})
        return self.optimizer.portable(state) if isinstance(self.optimizer, ShardOptimizer) else state

    def nbytes(self) -> int:
        """Bytes in memory of masters that are not the parameters themselves, and of the optimizer's state tensors."""
        masters = sum(
            piece.master.numel() * 4
            for pieces in self.pieces.values()
            for piece in pieces
            if piece.buffer.master is not None and piece.buffer.master_is_apart
        )
        states = sum(
            value.numel() * value.itemsize
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0 and value.stride() != (0,)
        )
        return masters + states


def _by_run(
    buffer: FlatBuffer, groups: Mapping[int, int], *, replicated: bool
) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
    """(start, end, shape, param group) of each run of one group inside each shard that this rank steps."""
    of_slots = [groups[id(param)] for param in buffer.params]
    for rank in range(buffer.layout.world_size) if replicated else (buffer.rank,):
        for start, end, group in buffer.layout.group_runs(of_slots, rank):
            yield start, end, (end - start,), group


def _by_parameter(
    buffer: FlatBuffer, groups: Mapping[int, int], *, replicated: bool
) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
    """Whole parameters in their own shapes, of this rank's shard or all of them, for rules that look at the shape."""
    layout = buffer.layout
    for index, (slot, param) in enumerate(zip(layout.slots, buffer.params, strict=True)):
        if slot.numel and (replicated or layout.owners[index] == buffer.rank):  # norms of nothing divide by zero
            yield slot.start, slot.end, slot.shape, groups[id(param)]


def _first_slot(piece: Piece) -> int:
    """Index of the first parameter that a piece has elements, or padding, of."""
    starts = [slot.start for slot in piece.buffer.layout.slots]
    return max(bisect.bisect_right(starts, piece.start) - 1, 0)


def _lay_gradient(piece: Piece, grad: Tensor, origin: int, grad_scale: float) -> None:
    part = grad[piece.start - origin : piece.end - origin].to(torch.float32, copy=True)
    piece.master.grad = part.mul_(grad_scale).view(piece.master.shape)
