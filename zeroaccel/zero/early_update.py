"""`EarlyUpdate`: masters updated during the last backward of a step, before it is known whether the step clips.

[Note: early updates] As soon as a buffer has its reduced gradient, a thread updates its masters and states out of
place, into spare memory, with the factor of a step that neither clips nor overflows. The old ones stay current, so
every call sees them. `step()` knows the real factor. If it is the same, and gradient, masters, states and
hyperparameters are those that the thread read, then spare and old memory exchange their roles: the bits are those of
an update in `step()`, by the same kernel. Otherwise the result is dropped, and `weight_update.py` updates the old
masters as usual. Nothing here communicates: `keys` and `missed` are equal on all ranks, the kept buffers may differ.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from zeroaccel.errors import OffloadError
from zeroaccel.logs import log_once, logger
from zeroaccel.ops.shard_step import ShardOptimizer
from zeroaccel.telemetry.timeline import span
from zeroaccel.zero.grad_reducer import GradientBuffer
from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.masters import MasterStorage, SeparateMasters
from zeroaccel.zero.update_thread import UpdateThread, hyperparameters

WINDOW = 32  # early updates
MOST_DROPPED = 8  # of a window
_KEY = "zero_optimization.offload_optimizer.update_during"


class _Spare:
    """The spare memory of one buffer.

    1. `fill` when the gradient is known, 2. `exchange` after the update, if `is_current`.

    Attributes:
        masters: (range.numel,) the new masters after an update.
        states: for each piece, its new state after an update.
        sources: for each piece, its part of `masters`, and the tensors from which the update reads, as in
            `ShardOptimizer.step_shard`.
        is_exchanged: True after `exchange`.
    """

    def __init__(self, buffer: FlatBuffer, optimizer: ShardOptimizer) -> None:
        self.storage = cast(SeparateMasters, buffer.masters)  # `TierSet.spares` has no buffer with others
        self.masters = self.storage.spare()
        self.states: list[dict[str, Any]] = [{} for _ in buffer.masters.pieces]
        self.sources: list[tuple[Tensor, dict[int, Tensor]]] = []
        self.is_exchanged = False
        self._optimizer = optimizer
        self._seen: list[tuple[object, object]] = []

    def fill(self, gradient: GradientBuffer) -> None:
        """Prepares for an update with this gradient."""
        self._seen = self._facts(gradient)
        memory = self._optimizer.host_memory or (lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
        spare = FlatTensor(self.storage.range, self.masters)
        self.sources, self.is_exchanged = [], False
        for index, piece in enumerate(self.storage.pieces):
            param, before, new = spare[piece.range].view(piece.shape), self.states[index], {}
            sources = {id(param): piece.param.detach()}
            for name, value in self._optimizer.state.get(piece.param, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    buffer = before.get(name)
                    if not isinstance(buffer, Tensor) or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                        buffer = memory(value.shape, value.dtype)
                    sources[id(buffer)], value = value, buffer
                new[name] = value
            self.states[index] = new
            self.sources.append((param, sources))

    def is_current(self, gradient: GradientBuffer) -> bool:
        """Returns True if the tensors that the update has read are still the same, with the same values."""
        facts = self._facts(gradient)
        pairs = zip(facts, self._seen, strict=False)
        return len(facts) == len(self._seen) and all(a is b and m == n for (a, m), (b, n) in pairs)

    def _facts(self, gradient: GradientBuffer) -> list[tuple[object, object]]:
        # torch counts writes, `MasterStorage.load` its own. Weights that are the masters have counters of their own.
        tensors = [gradient.shard, self.storage.as_weights(torch.float32)]
        facts: list[object] = [param._version for param in gradient.buffer.params if gradient.buffer.persistent]
        for piece in self.storage.pieces:
            facts += [fact for item in self._optimizer.state.get(piece.param, {}).items() for fact in item]
        return [(f, f._version) if isinstance(f, Tensor) else (None, f) for f in (*tensors, *facts)]

    def exchange(self) -> None:
        """Makes the new masters and states the current ones."""
        self.is_exchanged = True
        self.masters = self.storage.exchange(self.masters)
        for index, piece in enumerate(self.storage.pieces):
            if new := self.states[index]:
                state = self._optimizer.state[piece.param]
                self.states[index] = dict(state)
                state.clear()
                state.update(new)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the spare memory."""
        tensors = [value for state in self.states for value in state.values() if isinstance(value, Tensor)]
        return self.masters.nbytes + sum(tensor.nbytes for tensor in tensors)


class EarlyUpdate:
    """The early updates of one engine; see [Note: early updates].

    In each step: 1. `begin` before its last backward, 2. `add` for each final gradient, 3. `judge`, when the factor is
    known, 4. `install` of the buffers that it returned. `drop` at any time.

    Args:
        keys: keys of the buffers that may have spare memory, equal on all ranks.

    Attributes:
        keys: as passed in; empty while too many of the last steps have missed.
        missed: True if the last step had another factor than its early updates.
    """

    def __init__(self, optimizer: ShardedOptimizer, keys: Collection[str], device: torch.device) -> None:
        assert isinstance(optimizer.optimizer, ShardOptimizer), "only native elementwise optimizers update out of place"
        self._owner, self._optimizer = optimizer, optimizer.optimizer
        self.keys, self.missed = keys, False
        self._planned = keys
        self._spares: dict[int, _Spare] = {}
        self._thread = UpdateThread(optimizer, self._advance, device)
        self._twin = optimizer.optimizer
        self._factor, self._groups = 1.0, hyperparameters(())
        self._misses: deque[bool] = deque(maxlen=WINDOW)
        self._drops: deque[bool] = deque(maxlen=WINDOW)
        self._is_off = False  # on this rank

    def begin(self, factor: float, buffers: Sequence[FlatBuffer]) -> Callable[[GradientBuffer], None] | None:
        """Prepares for the last backward of a step; returns `add`, or None if early updates are off.

        Args:
            factor: factor of the gradients if the step neither clips nor skips.
            buffers: the buffers in the order of their gradients.
        """
        self.drop()
        self._factor = factor
        misses, paused = sum(self._misses), not self.keys
        self.keys = () if misses > MOST_DROPPED and len(self._misses) == WINDOW else self._planned
        if self._planned and paused is bool(self.keys):
            change = "continue" if paused else "pause, and the next forward updates,"
            reason = f"since {misses} of the last {WINDOW} steps clipped or overflowed"
            log_once(logging.INFO if paused else logging.WARNING, f'{_KEY}: updates in "backward" {change} {reason}')
        if self._is_off or not self.keys:
            self._spares.clear()
            self._owner.spare_nbytes = 0
            return None
        # States of its own: no call sees them. The rest is the optimizer's, whatever the program has replaced there.
        self._twin = object.__new__(type(self._optimizer))
        vars(self._twin).update(vars(self._optimizer), state=defaultdict(dict), _new_states=set())
        self._groups = hyperparameters(self._optimizer.param_groups)
        self._thread.begin(buffers, factor)
        return self.add

    def add(self, gradient: GradientBuffer) -> None:
        """Starts the update of a buffer, if it has spare memory."""
        buffer = gradient.buffer
        if self._is_off or buffer.key not in self.keys or gradient.stays or self._thread.has(buffer):
            return
        try:
            if id(buffer) not in self._spares:
                self._spares[id(buffer)] = _Spare(buffer, self._optimizer)
            self._spares[id(buffer)].fill(gradient)
        except (MemoryError, RuntimeError) as error:  # on this rank alone, in the middle of a backward
            self._end(f"no spare memory ({error}); set spare_budget to fewer bytes")
            return
        self._owner.early_numel += buffer.own.numel
        self._thread.add(gradient)

    def _advance(
        self,
        buffer: FlatBuffer,
        grad: FlatTensor,
        grad_scale: float,
        following: MasterStorage | None,
        out: FlatTensor | None,
        groups: Sequence[dict[str, Any]],
    ) -> None:
        spare = self._spares[id(buffer)]
        with span("update", buffer.key):
            for piece, new, (param, sources) in zip(buffer.masters.pieces, spare.states, spare.sources, strict=True):
                self._twin.state[param] = new
                target = None if out is None else out[piece.range]
                group, piece_grad = groups[piece.group], grad[piece.range]
                self._twin.step_shard(group, param, piece_grad, grad_scale=grad_scale, out=target, sources=sources)

    def judge(self, factor: float | Tensor | None, gradients: Sequence[GradientBuffer]) -> set[int]:
        """Returns the ids of the buffers whose early updates are those of this step, and drops the others.

        Args:
            factor: factor of the gradients; None if the step is skipped.
        """
        self.missed = isinstance(factor, Tensor) or factor != self._factor
        self._misses.append(self.missed)
        begun = [gradient for gradient in gradients if self._thread.has(gradient.buffer)]
        if not begun:
            return set()
        now, used = hyperparameters(self._optimizer.param_groups), self._optimizer.defaults
        same = [all(old[name] == new[name] for name in used) for old, new in zip(self._groups, now, strict=True)]
        valid = {
            id(gradient.buffer)
            for gradient in begun
            if not self.missed
            and all(same[piece.group] for piece in gradient.buffer.masters.pieces)
            and self._spares[id(gradient.buffer)].is_current(gradient)
        }
        self._owner.spare_nbytes = sum(spare.nbytes for spare in self._spares.values())
        self._thread.drop(keep=valid)
        if not self.missed:
            self._count(dropped=len(valid) < len(begun))
        return valid

    def install(self, buffer: FlatBuffer) -> bool:
        """Makes the early update of a buffer the current values and weights; False if it failed, and changed nothing.

        Raises:
            OffloadError: a tier failed.
        """
        spare = self._spares[id(buffer)]
        try:
            self._thread.install(buffer, spare.exchange)
        except OffloadError as error:
            if spare.is_exchanged:  # a tier failed
                raise
            log_once(logging.WARNING, f'{_KEY} "backward": {error}; step() updates from the old values')
            self._count(dropped=True)
            return False
        self._owner.kept_numel += buffer.own.numel
        return True

    def drop(self) -> None:
        """Drops early updates that no step has used."""
        if self._thread.pending:
            self._thread.drop()
            self._count(dropped=True)

    def close(self) -> None:
        """Drops early updates and ends the thread."""
        self._thread.close()
        self._spares.clear()

    def _count(self, *, dropped: bool) -> None:
        self._drops.append(dropped)
        if sum(self._drops) > MOST_DROPPED and len(self._drops) == WINDOW:
            self._end(
                f"{sum(self._drops)} of the last {WINDOW} were dropped, because the program changed rates or values"
                " between backward and step(); change them before the backward"
            )

    def _end(self, reason: str) -> None:
        if not self._is_off:
            logger.warning('%s: updates in "backward" end here: %s', _KEY, reason)
        self._is_off = True
