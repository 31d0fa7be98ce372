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
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroaccel.errors import EngineStateError
from zeroaccel.ops.device_kernels import DeviceKernels, kernels_for, load_kernels
from zeroaccel.ops.moments import exponents_name
from zeroaccel.ops.shard_step import ManyStep, ShardOptimizer, ShardStep, TensorStep
from zeroaccel.optim.optimizer_kinds import OptimizerKind, OptimizerKinds, StepCounters, batches, restricted
from zeroaccel.telemetry.timeline import span
from zeroaccel.zero.grad_reducer import GradientBuffer
from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.module_copies import LiveHook
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.storage.copy_stream import CopyStream
from zeroaccel.zero.storage.masters import MasterPiece, MasterStorage
from zeroaccel.zero.weight_writer import WeightWriter


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
    """The optimizer on this rank's masters, with the calls that step it.

    Args:
        optimizer: over the model's parameters; this class replaces those in `param_groups` with the pieces.
        kinds: tensors that its rules need; buffers of per-tensor groups have owner layouts.
        groups: id(parameter) -> index of its param group, taken before the parameters were sharded.
        buffers: every trainable buffer, in a fixed order.
        sub_group_numel: elements of fp32 gradients at a time for optimizers without their own kernel.
        copies: moves weights to the device from masters in host memory; None if both are in the same memory.

    Attributes:
        buffers: every trainable buffer, as passed in.
        native: the optimizer, if it has a kernel that steps one piece at a time; else None.
        is_coupled: its rule sums over parameters, so that it steps all of them at once.
        writer: writes new weights to the shards.
        update_seconds, hidden_seconds: duration of all updates so far, in total and during other work.
        early_numel, kept_numel: elements that `EarlyUpdate` has updated so far, and those of them that it kept.
        spare_nbytes: bytes of its spare memory.
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
        self.early_numel = self.kept_numel = self.spare_nbytes = 0
        self.native = optimizer if isinstance(optimizer, ShardStep) else None
        self.is_coupled = OptimizerKind.COUPLED in kinds.groups
        self.writer = WeightWriter(copies)
        self._counters: StepCounters | None = None
        self._settled_seconds = 0.0
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
                param = params[first.fqn]
                if self.kinds.groups[piece.group] is not OptimizerKind.ELEMENTWISE:
                    made = self.optimizer.state.get(param, {})
                    piece.constructed = {key: made[key] for key in made if not isinstance(made[key], Tensor)}
                pieces[piece.group].append((order[id(param)], piece))
        for group, of_group in zip(self.optimizer.param_groups, pieces, strict=True):
            group["params"] = [piece.param for _, piece in sorted(of_group, key=lambda item: item[0])]

    def guard(self, complete: Callable[[], object]) -> Callable[[], None]:
        """Makes a program's `optimizer.step()` an error: the engine has taken the gradients off the parameters.

        Args:
            complete: called before the program reads or loads a state dict.

        Returns:
            The function that undoes this.
        """

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not self.is_stepping:
                raise EngineStateError(
                    "optimizer.step(): the engine steps it, with gradients that it keeps", fix="call engine.step()"
                )

        hook, undo = LiveHook(lambda *_: complete()), ExitStack()
        undo.callback(self.optimizer.register_step_pre_hook(LiveHook(before)).remove)
        undo.callback(self.optimizer.register_state_dict_pre_hook(hook).remove)
        undo.callback(self.optimizer.register_load_state_dict_pre_hook(hook).remove)
        return undo.close

    @property
    def takes_control(self) -> bool:
        """True if the device may decide about an update while it runs; False for an optimizer with its own code, and in
        host memory.
        """
        return isinstance(self.optimizer, ShardOptimizer) and not self.is_coupled and not self.writer.crosses

    def take_back_step(self) -> None:
        """Undoes the optimizer's count of an update that the device did not apply."""
        assert isinstance(self.optimizer, ShardOptimizer), "only a native optimizer is updated unseen"
        self.optimizer.undo_count([piece.param for buffer in self.buffers for piece in buffer.masters.pieces])

    def load_kernels(self, gradients: Sequence[tuple[GradientBuffer, set[torch.dtype]]]) -> None:
        """Loads the kernels of the updates on a device, by updates of parameters outside the model.

        Args:
            gradients: with the dtypes in which they may reach the optimizer.
        """
        kinds = {
            (piece.param.device, piece.group, dtype, gradient.buffer.dtype): None
            for gradient, dtypes in gradients
            for piece in gradient.buffer.masters.pieces
            for dtype in sorted(dtypes, key=str)
        }
        for kind in kinds:
            load_kernels(kind[0], partial(self._update_apart, *kind))

    def _update_apart(self, device: torch.device, group: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        optimizer, settings, kernels = self.optimizer, self.optimizer.param_groups[group], kernels_for(device)
        param = torch.zeros(2 * settings.get("heads", 1), 16, device=device)  # a matrix for each head
        grad, out = [torch.zeros(param.numel(), dtype=each, device=device) for each in (dtype, out_dtype)]
        try:
            if isinstance(optimizer, ShardOptimizer):
                optimizer.step_shard(settings, param, grad, grad_scale=1.0, out=out)
            elif isinstance(optimizer, ManyStep) and kernels is not None:
                optimizer.step_many(settings, [TensorStep(param, grad, out)], grad_scale=1.0, kernels=kernels)
        finally:
            optimizer.state.pop(param, None)  # also of a kernel that does not compile: checkpoints have all states

    # -- updates that call the optimizer's own code; `weight_update.py` has the loop for native kernels

    def begin_update(self) -> None:
        """Prepares for an update of all masters: nothing may still copy them, and counters advance once."""
        self._counters = None
        self.writer.await_copies()

    def step_pieces(
        self, pieces: Sequence[MasterPiece], grad: FlatTensor, grad_scale: float, out: FlatTensor | None
    ) -> None:
        """Calls the optimizer's own `step` on batches of pieces; only one batch at a time has fp32 gradients.

        Args:
            grad: gradient for the range of the masters.
            out: receives the new weights in its dtype; None if the masters suffice.
        """
        # It would step all of `param_groups`: `restricted` hides the other pieces, `_call_again` restores counters.
        for batch in batches(pieces, self._sub_group_numel, lambda piece: piece.range.numel):
            for piece in batch:
                _set_grad(piece, grad, grad_scale)
            with restricted(self.optimizer, [piece.param for piece in batch]):
                self._call_again(self._call_step)
            for piece in batch:
                self.writer.take(piece, out)

    def step_of(self, piece: MasterPiece) -> Callable[..., None]:
        """Returns the native optimizer's `step_shard` for a piece that is in memory."""
        assert self.native is not None, "an optimizer without its own kernel"
        step: Callable[..., None] = self.native.step_shard
        return step if piece.parts is None else partial(step, parts=piece.parts)

    def step_all(self, gradients: Sequence[GradientBuffer], grad_scale: float | Tensor) -> bool:
        """Updates the masters and weights of all buffers in one call, if the rule needs it or kernels support it.

        Returns:
            False, without an update, if the buffers can be updated one by one.
        """
        kernels = None if self.is_coupled else self._kernels_for_many()
        if not self.is_coupled and kernels is None:
            return False
        assert isinstance(grad_scale, float), "only an elementwise optimizer takes a control tensor"
        with self.timed(), span("update", "all units"):
            if kernels is None:
                self._step_coupled(gradients, grad_scale)
            else:
                self._step_many(gradients, grad_scale, kernels)
        return True

    def _kernels_for_many(self) -> DeviceKernels | None:
        """Returns kernels that step the tensors of all buffers in few launches; None if they cannot be used."""
        if self.writer.crosses or not isinstance(self.optimizer, ManyStep):
            return None
        masters = [buffer.masters.as_weights(torch.float32) for buffer in self.buffers]
        first = next(iter(masters), None)
        return None if first is None or any(each is None for each in masters) else kernels_for(first.device)

    def _step_many(self, gradients: Sequence[GradientBuffer], grad_scale: float, kernels: DeviceKernels) -> None:
        """Calls an optimizer of whole tensors once per param group, with the tensors of all buffers."""
        assert isinstance(self.optimizer, ManyStep), "`_kernels_for_many` checks the class"
        steps: list[list[TensorStep]] = [[] for _ in self.optimizer.param_groups]
        with ExitStack() as written:
            for gradient in gradients:
                out = written.enter_context(self.writer.new_weights(gradient.buffer))
                grad = gradient.reduced()
                for piece in gradient.buffer.masters.pieces:
                    piece_out = None if out is None else out[piece.range]
                    steps[piece.group].append(TensorStep(piece.param, grad[piece.range], piece_out))
            for group, own_steps in zip(self.optimizer.param_groups, steps, strict=True):
                self.optimizer.step_many(group, own_steps, grad_scale=grad_scale, kernels=kernels)

    def _step_coupled(self, gradients: Sequence[GradientBuffer], grad_scale: float) -> None:
        """Calls a coupled optimizer once with all pieces, which all have fp32 gradients at the same time."""
        # Its rule sums over parameters, so all pieces need gradients before the step. Masters are in memory, because
        # such an optimizer is refused with states in files.
        for gradient in gradients:
            for piece in gradient.buffer.masters.pieces:
                _set_grad(piece, gradient.reduced(), grad_scale)
        self._call_step()
        for gradient in gradients:
            with self.writer.new_weights(gradient.buffer) as out:
                for piece in gradient.buffer.masters.pieces:
                    self.writer.take(piece, out)
        self.writer.finish_host_writes()

    def change_pieces(self, pieces: Sequence[MasterPiece], call: Callable[[], object], out: FlatTensor | None) -> None:
        """Runs a method of the optimizer other than `step` on the pieces that are in memory.

        A coupled optimizer has run it already, on all of them.
        """
        if pieces and not self.is_coupled:
            with restricted(self.optimizer, [piece.param for piece in pieces]):
                self._call_again(call)
        for piece in pieces:
            self.writer.take(piece, out)

    def change_without_pieces(self, call: Callable[[], object]) -> None:
        """Runs a method of the optimizer that no `change_pieces` has run, because this rank owns nothing."""
        if self._counters is None and not self.is_coupled:
            with restricted(self.optimizer, ()):
                call()

    def count_step(self) -> None:
        """Makes the optimizer, its schedulers and its hooks count a step that did not call the optimizer's `step`."""
        if self.native is not None:
            self._call_step()  # no parameter has a gradient
        else:
            self.change_without_pieces(self._call_step)

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

    # -- time

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds of all updates so far: in total, waiting for a tier, and during other work; then `early_numel` and
        `kept_numel`.
        """
        waited = self._settled_seconds + sum(buffer.masters.waited_seconds for buffer in self.buffers)
        return self.update_seconds, waited, self.hidden_seconds, self.early_numel, self.kept_numel

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the block as time of updates."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.update_seconds += time.perf_counter() - begun

    def settle(self, buffers: Sequence[FlatBuffer]) -> None:
        """Waits until the stores of weights, masters and states are complete. Raises OffloadError if one failed."""
        begun = time.perf_counter()
        try:
            self.writer.leave_host_writes()
            for buffer in buffers:
                buffer.shard.settle()
                buffer.masters.settle()
        finally:
            self._settled_seconds += time.perf_counter() - begun

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

    def nbytes(self, *, resident_only: bool = False) -> int:
        """Returns the bytes in memory of masters that are not the parameters themselves, of states and of spares.

        Args:
            resident_only: those that stay on the device, while the config offloads the others.
        """
        buffers = [buffer for buffer in self.buffers if buffer.masters.is_resident or not resident_only]
        masters = sum(tensor.nbytes for buffer in buffers for tensor in buffer.masters.tensors())
        params = [piece.param for buffer in buffers for piece in buffer.masters.pieces]
        states = sum(
            value.numel() * value.itemsize
            for state in [self.optimizer.state.get(param, {}) for param in params]
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0 and any(value.stride())  # a stand-in has no strides
        )
        return masters + states + (0 if resident_only else self.spare_nbytes)


def _set_grad(piece: MasterPiece, grad: FlatTensor, grad_scale: float) -> None:
    scaled = grad[piece.range].to(torch.float32, copy=True).mul_(grad_scale)
    piece.param.grad = scaled.view(piece.param.shape)
