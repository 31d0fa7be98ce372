"""The optimizer over fp32 masters: a class of `torch.optim` updates this rank's part of them.

Classes that need a closure or sparse gradients are refused before (`optim/optimizer_kinds.py`).

A buffer's masters are cut into pieces (`storage/masters.py`): one per run of parameters of one param group for an
elementwise rule, one per parameter, in its shape, for a rule that needs full tensors (`OptimizerKind`). The
optimizer's `param_groups` keep their dictionaries (so schedulers and loggers that refer to them still work); only
their `params` become the pieces. The storages decide where masters, states and weights live.

[Note: equal pieces] A replicated optimizer (nothing sharded) steps W pieces of S elements, a sharded one steps one of
them. So every kernel sees vectors of the same length with the same contents, and even an implementation whose vector
tail rounds differently gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroaccel.errors import OffloadError
from zeroaccel.ops.device_kernels import DeviceKernels, kernels_for
from zeroaccel.ops.moments import exponents_name
from zeroaccel.ops.shard_step import ManyStep, ShardOptimizer, ShardStep, TensorStep
from zeroaccel.optim.optimizer_kinds import OptimizerKind, OptimizerKinds, StepCounters, batches, restricted
from zeroaccel.telemetry.timeline import span
from zeroaccel.zero.grad_reducer import GradientBuffer
from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.storage.copy_stream import CopyStream
from zeroaccel.zero.storage.masters import MasterPiece, MasterStorage


class EarlierUpdates(Protocol):
    """Updates that began before the step to which they belong; see `AsyncStep`."""

    def has(self, buffer: FlatBuffer) -> bool:
        """Returns True if this buffer has such an update that is not installed yet."""

    def install(self, buffer: FlatBuffer) -> None:
        """Waits for the update, and installs the new weights. Raises OffloadError if a tier failed."""

    def wait(self) -> None:
        """Waits until all updates are done."""


def followers(buffers: Sequence[FlatBuffer]) -> dict[int, MasterStorage]:
    """Returns id(buffer) -> the masters that are stepped next, so that a tier can swap them in meanwhile."""
    next_of: dict[int, MasterStorage] = {}
    following: MasterStorage | None = None
    for buffer in reversed(buffers):
        if following is not None:
            next_of[id(buffer)] = following
        if buffer.masters.pieces:  # an owner layout leaves some ranks without pieces
            following = buffer.masters
    return next_of


class ShardedOptimizer:
    """Steps the optimizer on this rank's masters and writes the new weights to the parameters' shards.

    Args:
        optimizer: over the model's parameters; this class replaces those in `param_groups` with the pieces.
        kinds: tensors that its rules need; buffers of per-tensor groups have owner layouts.
        groups: id(parameter) -> index of its param group, taken before the parameters were sharded.
        buffers: every trainable buffer, in a fixed order.
        sub_group_numel: elements of fp32 gradients at a time for optimizers without their own kernel.
        copies: moves weights to the device from masters in host memory; None if both are in the same memory.

    Attributes:
        buffers: every trainable buffer, as passed in.
        update_seconds, hidden_seconds: duration of all updates so far, in total and during other work.
        group_of: fqn -> index of its param group, for every trainable parameter.
        is_stepping: True within a call of the optimizer's own `step`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kinds: OptimizerKinds,
        groups: Mapping[int, int],
        buffers: Sequence[FlatBuffer],
        *,
        sub_group_numel: int = 1_000_000_000,
        copies: CopyStream | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.kinds = kinds
        self.buffers = tuple(buffers)
        self.is_stepping = False
        self.update_seconds = self.hidden_seconds = 0.0
        self._calls_together = OptimizerKind.COUPLED in kinds.groups
        self._counters: StepCounters | None = None
        self._settled_seconds = 0.0
        self._copies = copies
        self._writes_host = False  # copies of new weights to host memory are in progress
        self._sub_group_numel = sub_group_numel
        self.group_of = {
            slot.fqn: groups[id(param)]
            for buffer in buffers
            for slot, param in zip(buffer.layout.slots, buffer.params, strict=True)
        }
        self._point_groups()
        # Adagrad's constructor makes states for the model's parameters; the pieces need new ones.
        makes_states = bool(optimizer.state)
        optimizer.state.clear()
        for buffer in buffers:
            buffer.masters.bind(optimizer, makes_states=makes_states)

    def _point_groups(self) -> None:
        """Replaces the model's parameters in the param groups with the pieces, in the order of those parameters.

        The order decides the bits of a rule that sums over several parameters.
        """
        order = {
            id(param): place for group in self.optimizer.param_groups for place, param in enumerate(group["params"])
        }
        pieces: list[list[tuple[int, MasterPiece]]] = [[] for _ in self.optimizer.param_groups]
        # Schedulers, loggers and the program itself refer to the group dictionaries: keep them, and change their lists.
        # Pieces follow the order of the program's parameters, while buffers are sorted by unit, dtype and group.
        for buffer in self.buffers:
            params = {slot.fqn: param for slot, param in zip(buffer.layout.slots, buffer.params, strict=True)}
            for piece in buffer.masters.pieces:
                first, _ = next(buffer.layout.slots_in(piece.range, padded=True))
                pieces[piece.group].append((order[id(params[first.fqn])], piece))
        for group, own in zip(self.optimizer.param_groups, pieces, strict=True):
            group["params"] = [piece.param for _, piece in sorted(own, key=lambda item: item[0])]

    @property
    def takes_control(self) -> bool:
        """True if the device may decide about an update while it runs; False for an optimizer with its own code, and in
        host memory.
        """
        return isinstance(self.optimizer, ShardOptimizer) and not self._calls_together and self._copies is None

    def take_back_step(self) -> None:
        """Undoes the optimizer's count of an update that the device did not apply."""
        assert isinstance(self.optimizer, ShardOptimizer), "only a native optimizer is updated unseen"
        self.optimizer.undo_count([piece.param for buffer in self.buffers for piece in buffer.masters.pieces])

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds of all updates so far: in total, waiting for a tier, and during other work."""
        waited = self._settled_seconds + sum(buffer.masters.waited_seconds for buffer in self.buffers)
        return self.update_seconds, waited, self.hidden_seconds

    def step(
        self,
        gradients: Sequence[GradientBuffer],
        grad_scale: float | Tensor,
        done: Callable[[FlatBuffer], None] = lambda buffer: None,
        earlier: EarlierUpdates | None = None,
    ) -> None:
        """Updates all masters, and the weights of the parameters.

        Args:
            gradients: the reduced gradients of every buffer.
            grad_scale: factor of the gradients, for unscaling and clipping; or, if `takes_control`, a control tensor on
                the device, as in `ShardStep.step_shard`.
            done: called after each buffer, so that its gather can start while the next one is updated.
            earlier: updates of some buffers that are done or in progress; this method ignores the gradients of these.

        Raises:
            OffloadError: a tier failed. `done` has still been called for every buffer, since the other ranks join its
                gathers; masters and parameters are a mixture of old and new.
        """
        self._counters = None
        self._await_copies()
        if self._calls_together:
            assert isinstance(grad_scale, float), "a coupled optimizer takes no control tensor"
            with self._timed(), span("update", "all units"):
                self._step_together(gradients, grad_scale, done)
            return
        if (kernels := self._kernels_for_many()) is not None:
            assert isinstance(grad_scale, float), "an optimizer of whole tensors takes no control tensor"
            with self._timed(), span("update", "all units"):
                self._step_many(gradients, grad_scale, done, kernels)
            return

        own = [gradient.buffer for gradient in gradients if earlier is None or not earlier.has(gradient.buffer)]
        following = followers(own)
        failure: OffloadError | None = None
        for gradient in gradients:
            buffer = gradient.buffer
            try:
                if earlier is not None and earlier.has(buffer):
                    earlier.install(buffer)
                elif failure is None:
                    if earlier is not None:
                        earlier.wait()  # one update at a time on the tiers
                    # The kernel that updates masters also writes the rounded copies, with the masters in cache.
                    with self._timed(), self._new_weights(buffer) as out:
                        groups, next_masters = self.optimizer.param_groups, following.get(id(buffer))
                        self.update(buffer, _reduced(gradient), grad_scale, next_masters, out, groups)
            except OffloadError as error:
                # The other ranks continue with the gathers of this step: so does this one, and raises after the last.
                failure = failure or error
                _break_off(buffer, own)
            self._finish(buffer, done)
        try:
            with self._timed():
                self._settle([gradient.buffer for gradient in gradients])
        except OffloadError as error:
            failure = failure or error
        if failure is not None:
            raise failure

    def update(
        self,
        buffer: FlatBuffer,
        grad: FlatTensor,
        grad_scale: float | Tensor,
        following: MasterStorage | None,
        out: FlatTensor | None,
        groups: Sequence[dict[str, Any]],
    ) -> None:
        """Updates the masters of one buffer.

        Args:
            grad: gradient for the range of the masters.
            following: the masters that are updated next; see `followers`.
            out: receives the new weights in its dtype; None if the masters suffice.
            groups: hyperparameters by param group.
        """
        with span("update", buffer.key):
            for pieces in buffer.masters.update_chunks(following):
                if isinstance(self.optimizer, ShardStep):
                    # One pass over memory per piece: the optimizer's own kernel unscales, updates and rounds.
                    for piece in pieces:
                        own, part = groups[piece.group], grad[piece.range]
                        step: Callable[..., None] = self.optimizer.step_shard
                        if piece.parts is not None:
                            step = partial(step, parts=piece.parts)
                        with self._rounded(piece, out) as rounded:
                            step(own, piece.param, part, grad_scale=grad_scale, out=rounded)
                else:
                    assert isinstance(grad_scale, float), "a foreign optimizer takes no control tensor"
                    self._step_generic(pieces, grad, grad_scale, out)

    def _step_generic(
        self, pieces: Sequence[MasterPiece], grad: FlatTensor, grad_scale: float, out: FlatTensor | None
    ) -> None:
        """Calls the optimizer's own `step` on batches of pieces; only one batch at a time has fp32 gradients."""
        # It would step all of `param_groups`: `restricted` hides the other pieces, `_call_again` restores counters.
        for batch in batches(pieces, self._sub_group_numel, lambda piece: piece.range.numel):
            for piece in batch:
                _set_grad(piece, grad, grad_scale)
            with restricted(self.optimizer, [piece.param for piece in batch]):
                self._call_again(self._call_step)
            for piece in batch:
                self._take_weights(piece, out)

    def _kernels_for_many(self) -> DeviceKernels | None:
        """Returns kernels that step the tensors of all buffers in few launches; None if they cannot be used."""
        if self._copies is not None or not isinstance(self.optimizer, ManyStep):
            return None
        masters = [buffer.masters.as_weights(torch.float32) for buffer in self.buffers]
        first = next(iter(masters), None)
        return None if first is None or any(each is None for each in masters) else kernels_for(first.device)

    def _step_many(
        self,
        gradients: Sequence[GradientBuffer],
        grad_scale: float,
        done: Callable[[FlatBuffer], None],
        kernels: DeviceKernels,
    ) -> None:
        """Calls an optimizer of whole tensors once per param group, with the tensors of all buffers."""
        assert isinstance(self.optimizer, ManyStep), "`_kernels_for_many` checks the class"
        steps: list[list[TensorStep]] = [[] for _ in self.optimizer.param_groups]
        with ExitStack() as written:
            for gradient in gradients:
                out, grad = written.enter_context(self._new_weights(gradient.buffer)), _reduced(gradient)
                for piece in gradient.buffer.masters.pieces:
                    own = None if out is None else out[piece.range]
                    steps[piece.group].append(TensorStep(piece.param, grad[piece.range], own))
            for group, own_steps in zip(self.optimizer.param_groups, steps, strict=True):
                self.optimizer.step_many(group, own_steps, grad_scale=grad_scale, kernels=kernels)
        for gradient in gradients:
            self._finish(gradient.buffer, done)

    def _step_together(
        self, gradients: Sequence[GradientBuffer], grad_scale: float, done: Callable[[FlatBuffer], None]
    ) -> None:
        """Calls a coupled optimizer once with all pieces, which all have fp32 gradients at the same time."""
        # Its rule sums over parameters, so all pieces need gradients before the step. Masters are in memory, because
        # such an optimizer is refused with states in files.
        for gradient in gradients:
            for piece in gradient.buffer.masters.pieces:
                _set_grad(piece, _reduced(gradient), grad_scale)
        self._call_step()
        for gradient in gradients:
            buffer = gradient.buffer
            with self._new_weights(buffer) as out:
                for piece in buffer.masters.pieces:
                    self._take_weights(piece, out)
            self._finish(buffer, done)
        self._finish_host_writes()

    def change_masters(self, call: Callable[[], object], done: Callable[[FlatBuffer], None]) -> None:
        """Runs a method of the optimizer other than `step`, such as `eval`, that changes masters and states.

        Args:
            call: the method; called for part of the masters at a time, as `step` is.
            done: called after each buffer, whose shard then has the new weights.

        Raises:
            OffloadError: a tier failed. `done` has still been called for every buffer; masters and parameters are a
                mixture of old and new.
        """
        self._counters = None
        self._await_copies()
        if self._calls_together:
            call()
        following = followers(self.buffers)
        failure: OffloadError | None = None
        for buffer in self.buffers:
            try:
                if failure is None:
                    self._change_buffer(buffer, call, following.get(id(buffer)))
            except OffloadError as error:
                failure = error
                _break_off(buffer, self.buffers)
            self._finish(buffer, done)
        self._finish_host_writes()
        if failure is not None:
            raise failure
        if self._counters is None and not self._calls_together:  # this rank owns nothing
            with restricted(self.optimizer, ()):
                call()

    def _change_buffer(self, buffer: FlatBuffer, call: Callable[[], object], following: MasterStorage | None) -> None:
        with self._new_weights(buffer) as out:
            for pieces in buffer.masters.chunks(following):
                if pieces and not self._calls_together:
                    with restricted(self.optimizer, [piece.param for piece in pieces]):
                        self._call_again(call)
                for piece in pieces:
                    self._take_weights(piece, out)

    def count_step(self) -> None:
        """Makes the optimizer, its schedulers and its hooks count a step that did not call the optimizer's `step`."""
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
        """Calls one of the several calls of a step; see [Note: several calls per step] of `optimizer_kinds.py`."""
        if self._counters is None:
            self._counters = StepCounters(self.optimizer)
        else:
            self._counters.restore()
        call()

    # -- new weights

    def stage_aside(self, buffer: FlatBuffer) -> FlatTensor | None:
        """Returns host memory for new weights while the old ones are in use; None if the masters themselves serve."""
        if buffer.masters.as_weights(buffer.dtype) is not None:
            return None
        pinned = self._copies is not None and self._copies.pinned
        return FlatTensor(buffer.own, torch.empty(buffer.own.numel, dtype=buffer.dtype, pin_memory=pinned))

    def install(self, buffer: FlatBuffer, weights: FlatTensor | None) -> None:
        """Copies weights that `update` wrote to `stage_aside` into the shard."""
        new = buffer.masters.as_weights(buffer.dtype) if weights is None else weights.values
        with self._new_weights(buffer) as staged:
            assert new is not None and staged is not None, "masters that are the weights that forward computes with"
            target = staged[buffer.masters.range]
            if target.device == new.device or target.device.type == "cpu":
                target.copy_(new)
            else:
                self._copy_stream().to_device(target, new)

    @contextmanager
    def _new_weights(self, buffer: FlatBuffer) -> Iterator[FlatTensor | None]:
        """Yields memory for the rounded masters, which the block fills; None if the masters are the weights.

        After the block they are the weights, or on their way there, and marked if the engine marks changes.
        """
        out = buffer.masters.stage_weights()
        if out is None:
            yield None
            return
        own, before = buffer.own & buffer.masters.range, None
        if buffer.changed is not None and buffer.dtype.itemsize == 2:
            before = buffer.shard.read(own).clone()  # for a staged tier, its current content
        yield out
        if buffer.changed is not None and before is not None:
            self._finish_host_writes()
            if self._copies is not None:
                self._copies.wait()
            buffer.changed.compare(before.to(out[own].device), out[own])
        if buffer.shard.is_swapped:  # they go to a file next
            self._finish_host_writes()
        buffer.shard.commit()

    @contextmanager
    def _rounded(self, piece: MasterPiece, out: FlatTensor | None) -> Iterator[Tensor | None]:
        """Yields memory on the masters' device for a piece's part of `out`; copies its values to `out` afterwards."""
        if out is None:
            yield None
            return
        target, device = out[piece.range], piece.param.device
        if target.device == device:
            yield target
        elif target.device.type == "cpu":  # masters on the device, shards on the host
            staged = torch.empty_like(target, device=device)
            yield staged
            self._copy_stream().write_host(target, staged)
            self._writes_host = True
        else:
            # The copy runs on its own stream beside the update of the next piece: each piece needs a separate buffer,
            # and the allocator of pinned memory keeps it until the copy is done.
            staged = torch.empty(target.shape, dtype=target.dtype, pin_memory=self._copy_stream().pinned)
            yield staged
            self._copy_stream().to_device(target, staged)

    def _take_weights(self, piece: MasterPiece, out: FlatTensor | None) -> None:
        """Drops the gradient after the optimizer's own `step`, and rounds the masters into `out`."""
        piece.param.grad = None
        with self._rounded(piece, out) as rounded:
            if rounded is not None:
                rounded.copy_(piece.param.detach().flatten())

    def _await_copies(self) -> None:
        """Waits, before masters change, for copies to the device: masters in host memory may be the copied weights.

        For example, the host may have issued a forward between backward and step that the device has not reached.
        """
        if self._copies is not None:
            self._copies.finish_reads()

    def _copy_stream(self) -> CopyStream:
        assert self._copies is not None, "masters in another memory than the parameters, but no stream to copy them"
        return self._copies

    def _finish_host_writes(self) -> None:
        if self._writes_host:
            self._copy_stream().finish()
            self._writes_host = False

    def _finish(self, buffer: FlatBuffer, done: Callable[[FlatBuffer], None]) -> None:
        if self._copies is not None:
            self._copies.wait()  # the gather that `done` may start reads the new weights
        done(buffer)

    def _settle(self, buffers: Sequence[FlatBuffer]) -> None:
        begun = time.perf_counter()
        try:
            self._writes_host = False  # shards in host memory arrive later; see `CopyStream.finish_writes`
            for buffer in buffers:
                buffer.shard.settle()
                buffer.masters.settle()
        finally:
            self._settled_seconds += time.perf_counter() - begun

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.update_seconds += time.perf_counter() - begun

    # -- states and bytes

    def state_of(self, piece: MasterPiece) -> tuple[list[str], dict[str, Any]]:
        """Returns (names of states with one value per element, the other states); both empty before a step.

        Read the values through the masters, in one form however the optimizer stores them.
        """
        state: Mapping[str, Any] = self.optimizer.state.get(piece.param, {})
        inner = self.optimizer
        hidden = {exponents_name(name) for name in inner.moments} if isinstance(inner, ShardOptimizer) else set()
        names = [
            name
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == piece.param.shape and (value.dim() > 0 or name != "step")
        ]  # for a parameter without dimensions, a step count looks like a value per element
        return names, {name: value for name, value in state.items() if name not in hidden and name not in names}

    def nbytes(self) -> int:
        """Returns the bytes in memory of masters that are not the parameters themselves, and of optimizer states."""
        masters = sum(tensor.nbytes for buffer in self.buffers for tensor in buffer.masters.tensors())
        states = sum(
            value.numel() * value.itemsize
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0 and any(value.stride())  # a stand-in has no strides
        )
        return masters + states


def _reduced(gradient: GradientBuffer) -> FlatTensor:
    """Returns the reduced gradient for the step: of all elements if the optimizer is replicated, else of the shard."""
    if gradient.full is not None:
        return FlatTensor(gradient.buffer.layout.range, gradient.full)
    assert gradient.shard is not None, f"{gradient.name} is stepped without a gradient"
    return FlatTensor(gradient.buffer.own, gradient.shard)


def _set_grad(piece: MasterPiece, grad: FlatTensor, grad_scale: float) -> None:
    scaled = grad[piece.range].to(torch.float32, copy=True).mul_(grad_scale)
    piece.param.grad = scaled.view(piece.param.shape)


def _break_off(buffer: FlatBuffer, others: Sequence[FlatBuffer]) -> None:
    """Discards everything staged or prefetched, after a tier has failed."""
    buffer.shard.discard()
    for other in others:
        other.masters.release()
