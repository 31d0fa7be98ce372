"""The update at the boundary of a step: masters, then weights, then gathers of persistent units.

`WeightUpdate` decides when masters are updated: all in `step()`; in the forward after it, unit by unit ([Note: updates
that the forward awaits]); before it, in the backward, with the forward for the rest (`early_update.py`); or during the
forward and backward after it, one step late ([Note: one step late]). In
`step()` the weights are installed buffer by buffer in one order, because the gathers of the ranks need one.
`update_thread.py` has the thread for updates that run outside `step()`. Neither deals with norms.

[Note: updates that the forward awaits] With `forward`, `step()` starts a thread with the gradients, factor and
hyperparameters of this step, and returns. The thread updates units in the order of the model, and the first use of a
unit installs its weights: the gather of a sharded unit, or the first read of a parameter on the only rank that holds
it, which shows NaN until then. Installing needs no other rank, so one rank alone may read masters (`complete`). All
calls of all ranks that need every weight call `finish`, as does the next step. Weights that several ranks hold whole
are updated in `step()`: a rank may read them alone, and the gather that they need would wait for the others.

[Note: one step late] With `next_step`, `step()` number t first installs the weights from the update of its predecessor,
then starts the update with its own gradients, and returns. So the gradients of step t belong to the weights after t - 2
updates rather than t - 1 (the delayed parameter update of Ren et al. 2021, "ZeRO-Offload"). `finish` installs at once,
as at the end of training and before a save; after it, the delay starts again as in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.environment import usable_cores
from zeroaccel.config.shard_plan import UpdateTime
from zeroaccel.errors import EngineStateError, OffloadError
from zeroaccel.logs import logger
from zeroaccel.telemetry.timeline import span
from zeroaccel.zero.early_update import EarlyUpdate
from zeroaccel.zero.grad_reducer import GradientBuffer, GradReducer
from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer, followers
from zeroaccel.zero.storage.masters import MasterStorage
from zeroaccel.zero.storage.placement import TierSet
from zeroaccel.zero.update_thread import UpdateThread

_KEY = "zero_optimization.offload_optimizer.update_during"
_MIXTURE = "a step failed half way, so the weights are a mixture of old and new"


class WeightUpdate:
    """Takes an engine's weights from one step to the next.

    Args:
        gather_numel: elements of all-gathers in flight.
        gathers: masters are sharded, so that persistent units have to be gathered.
        during: time at which masters are updated; "auto" is "forward" if that helps, else "step".

    Attributes:
        broken: reason why the weights are unusable; None while they are sound.
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        reducer: GradReducer,
        units: Sequence[ParamUnit],
        collectives: Collectives,
        *,
        gather_numel: int,
        gathers: bool,
        during: UpdateTime,
        tiers: TierSet,
    ) -> None:
        self.broken: str | None = None
        self._optimizer = optimizer
        self._reducer = reducer
        self._units = tuple(units)
        self._collectives = collectives
        self._gather_numel = gather_numel
        self._gathers = gathers
        self._tiers = tiers
        is_possible = gathers and tiers.steps_on_host and during in ("auto", "forward", "backward")
        self._awaited = [unit for unit in units if is_possible and self._may_wait(unit)]
        self._aliases = {id(buffer): buffer.num_aliases() for unit in self._awaited for buffer in _trained(unit)}
        self._during = self._resolved(during)
        self._awaits = self._during in ("forward", "backward")
        self._installs = False  # updates of the last step may be left to the forward
        self._failure: OffloadError | None = None
        self._thread = UpdateThread(optimizer, self.advance_masters, collectives.topology.device)
        self._early: EarlyUpdate | None = None
        if self._during == "backward":
            self._early = EarlyUpdate(optimizer, tiers.spares, collectives.topology.device)
        optimizer.load_kernels([(gradient, reducer.step_dtypes(gradient)) for gradient in reducer.gradients])

    @property
    def takes_control(self) -> bool:
        """True if `replace_weights` accepts a control tensor, by which the device itself decides about the update."""
        return self._during == "step" and self._optimizer.takes_control

    # -- the step

    def begin_early(self, factor: float) -> Callable[[GradientBuffer], None] | None:
        """Prepares for the last backward of a step; returns the call for each final gradient, if it is of use.

        Args:
            factor: as in `EarlyUpdate.begin`.
        """
        if self._early is None:
            return None
        add = self._early.begin(factor, [gradient.buffer for gradient in self._reducer.gradients])
        # An update that no use has awaited may still write what an early one would read.
        return add and (lambda gradient: None if self._thread.has(gradient.buffer) else add(gradient))

    def drop_early(self) -> None:
        """Drops early updates that no step has used."""
        if self._early is not None:
            self._early.drop()

    def replace_weights(self, grad_scale: float | Tensor | None) -> None:
        """Updates with the gradients of this step, or starts to. (all ranks)

        Args:
            grad_scale: factor of the gradients, for unscaling and clipping; or, if `takes_control`, a control tensor on
                the device, as in `ShardStep.step_shard`; then call `settle` next. None skips this step.

        Raises:
            OffloadError: a tier failed; on every rank. Masters and weights are a mixture of old and new.
        """
        optimizer, gradients, early = self._optimizer, self._reducer.gradients, self._early
        valid = early.judge(grad_scale, gradients) if early is not None else set()
        if grad_scale is None or self._awaits:
            self.finish()
        if grad_scale is None:
            return
        if self._during == "next_step":
            assert isinstance(grad_scale, float), "updates on a thread take a number"
            self._start_late(grad_scale)
            optimizer.count_step()
            return
        # Equal on all ranks, unlike what each has kept, because the gathers of such units are others.
        later = self._units_for_later()
        if early is not None and not early.missed:
            later = [unit for unit in later if not any(buffer.key in early.keys for buffer in _trained(unit))]
        waiting = {id(buffer) for unit in later for buffer in _trained(unit)}
        gradients = [gradient for gradient in gradients if id(gradient.buffer) not in waiting]
        gradients.sort(key=lambda gradient: not gradient.stays)  # the device updates while the host does
        buffers = [each.buffer for each in gradients]
        with self._new_weights(buffers, agrees=self._tiers.can_fail and bool(buffers)) as new:
            optimizer.begin_update()
            is_updated = False
            with new.failures():
                is_updated = not later and optimizer.step_all(gradients, grad_scale)
            following = followers(buffers)
            for gradient in gradients:
                buffer = gradient.buffer
                with new.weights_of(buffer):
                    if new.failure is not None or is_updated:
                        continue
                    if early is None or id(buffer) not in valid or not early.install(buffer):
                        # The kernel that updates masters also writes the rounded copies, with the masters in cache.
                        with optimizer.timed(), optimizer.writer.new_weights(buffer) as out:
                            groups, then = optimizer.optimizer.param_groups, following.get(id(buffer))
                            self.advance_masters(buffer, gradient.reduced(), grad_scale, then, out, groups)
        if isinstance(grad_scale, float):
            if later:
                self._start_for_forward(later, grad_scale)
            optimizer.count_step()

    def advance_masters(
        self,
        buffer: FlatBuffer,
        grad: FlatTensor,
        grad_scale: float | Tensor,
        following: MasterStorage | None,
        out: FlatTensor | None,
        groups: Sequence[dict[str, Any]],
    ) -> None:
        """Updates the masters of one buffer, sub-group by sub-group (Rajbhandari et al. 2021, "ZeRO-Infinity").

        Args:
            grad: gradient for the range of the masters.
            following: the masters that are updated next; see `followers`.
            out: receives the new weights in its dtype; None if the masters suffice.
            groups: hyperparameters by param group.
        """
        masters, optimizer = buffer.masters, self._optimizer
        with span("update", buffer.key):
            for index, sub_group in enumerate(masters.sub_groups):
                masters.swap_in(index, following, joined=optimizer.native is None)
                if optimizer.native is None:
                    assert isinstance(grad_scale, float), "a foreign optimizer takes no control tensor"
                    optimizer.step_pieces(sub_group, grad, grad_scale, out)
                else:
                    # One pass over memory per piece: the optimizer's own kernel unscales, updates and rounds.
                    for piece in sub_group:
                        group, piece_grad, step = groups[piece.group], grad[piece.range], optimizer.step_of(piece)
                        with optimizer.writer.rounded(piece, out) as rounded:
                            step(group, piece.param, piece_grad, grad_scale=grad_scale, out=rounded)
                masters.swap_out(index)

    def settle(self, *, applied: bool) -> None:
        """Counts the step of an update with a control tensor if it was applied; a skipped step does not count."""
        if applied:
            self._optimizer.count_step()
        else:
            self._optimizer.take_back_step()

    def _start_late(self, grad_scale: float) -> None:
        """Starts the update with this step's gradients after the weights of the previous step have been installed."""
        # In this order: the updates read the masters that the new ones change.
        self.finish()
        gradients = self._reducer.gradients
        self._thread.begin([gradient.buffer for gradient in gradients], grad_scale)
        for gradient in sorted(gradients, key=lambda gradient: gradient.stays):
            self._thread.add(gradient)

    # -- updates that the forward awaits

    def _resolved(self, during: UpdateTime) -> UpdateTime:
        """Returns `during`, or for "auto" the time that helps; logs why it is not the forward."""
        if during != "auto" or not self._tiers.steps_on_host:
            return "step" if during == "auto" else during
        here, optimizer = self._collectives.topology, self._optimizer
        reason = ""
        if optimizer.native is None or optimizer.is_coupled:
            reason = f"{type(optimizer.optimizer).__name__} updates in step() only"
        elif not self._awaited or self._collectives.peers is not self._collectives.job:
            reason = "weights are in files, or several ranks hold whole ones and each may read them alone"
        elif here.device.type == "cpu" and usable_cores() // here.local_world_size <= torch.get_num_threads():
            reason = "forward and backward compute on all cores"
        if reason:
            logger.info('%s is "step": %s', _KEY, reason)
        return "step" if reason else "forward"

    def _may_wait(self, unit: ParamUnit) -> bool:
        """Returns True if the forward may await the unit's update: no rank reads stale weights, or waits for others."""
        trained = _trained(unit)
        if any(buffer.masters.is_resident for buffer in trained):
            return False
        if unit.is_swapped:  # all new weights would be in memory at a time
            return False
        if not unit.persistent:
            return bool(trained) and not any(buffer.persistent for buffer in trained)
        plain = all(type(param) is nn.Parameter for buffer in trained for param in buffer.params)
        return bool(trained) and plain and self._collectives.everyone.world_size == 1

    def _units_for_later(self) -> list[ParamUnit]:
        if not self._awaits:
            return []
        # A tensor of the program that shares a parameter's memory would show the old weights, so then no use waits.
        aliases = self._aliases
        return [
            unit
            for unit in self._awaited
            if not unit.persistent or all(0 < buffer.num_aliases() <= aliases[id(buffer)] for buffer in _trained(unit))
        ]

    def _start_for_forward(self, units: Sequence[ParamUnit], grad_scale: float) -> None:
        of_buffer = {id(gradient.buffer): gradient for gradient in self._reducer.gradients}
        buffers = [buffer for unit in units for buffer in _trained(unit)]
        self._failure, self._installs = None, True
        self._thread.begin(buffers, grad_scale)
        for unit in units:
            unit.install = partial(self._install, unit)
            for buffer in _trained(unit):
                if unit.persistent:
                    buffer.hide_until(partial(self._show, unit))
                self._thread.add(of_buffer[id(buffer)], unread=True)

    def _install(self, unit: ParamUnit) -> OffloadError | None:
        """Installs the weights of a unit, on this rank alone; returns the failure, which later units have too."""
        for buffer in _trained(unit):
            if self._failure is not None or not self._thread.has(buffer):
                continue
            try:
                self._thread.install(buffer)
            except OffloadError as error:
                self._failure = error
                buffer.shard.discard()
            self._optimizer.writer.order_copies()
            if unit.persistent:
                buffer.on_read = None
                buffer.point(unsharded=True)
        return self._failure

    def _show(self, unit: ParamUnit) -> None:
        if self._install(unit) is not None:
            self.fail_update()
            raise self._failure or AssertionError("an update failed without an error")

    def fail_update(self) -> None:
        """Marks the weights as unusable if an update that the forward awaited may have failed. (all ranks)"""
        if self._installs:
            self.broken = _MIXTURE

    def complete(self) -> None:
        """Completes an update that the forward would await, on this rank alone.

        Raises:
            OffloadError: the update failed; the other ranks raise it at their next call.
        """
        if self._installs:
            for unit in self._awaited:
                self._install(unit)
            if self._failure is not None:
                raise self._failure
            self._optimizer.settle(self._optimizer.buffers)

    def forget(self) -> None:
        """Drops an update that failed, before other weights are loaded."""
        self.drop_early()
        if self._installs:
            self._thread.drop()
            self._installs = False
            for unit in self._awaited:
                unit.install = None
                if unit.persistent:
                    for buffer in _trained(unit):
                        buffer.on_read = None
                        buffer.point(unsharded=True)

    def finish(self, *, late: bool = True) -> None:
        """Completes an update that the forward awaits, and installs one that runs one step late. (all ranks)

        Args:
            late: False leaves the second kind as it is.

        Raises:
            OffloadError: a tier failed; on every rank.
        """
        if self._installs:
            # The passes agreed about the units that they used; files may fail afterwards.
            agrees = self._tiers.can_fail or any(unit.install is not None for unit in self._awaited)
            with self._new_weights((), agrees=agrees) as new:
                for unit in self._awaited:
                    new.failure = new.failure or self._install(unit)
                    unit.install = None
            self._installs = False
        if late and self._during == "next_step" and self._thread.pending:
            with self._new_weights(()) as new:
                self._optimizer.begin_update()
                for gradient in self._reducer.gradients:
                    with new.weights_of(gradient.buffer):
                        self._thread.install(gradient.buffer)

    def change_masters(self, call: Callable[[], object]) -> None:
        """Runs an optimizer method other than `step` that changes masters and states, and installs the weights.

        (all ranks)

        Args:
            call: the method, such as `eval`; called for part of the masters at a time, as `step` is.

        Raises:
            OffloadError: a tier failed; on every rank.
        """
        self.finish()
        optimizer = self._optimizer
        with self._new_weights(optimizer.buffers) as new:
            optimizer.begin_update()
            if optimizer.is_coupled:
                call()
            following = followers(optimizer.buffers)
            for buffer in optimizer.buffers:
                with new.weights_of(buffer):
                    if new.failure is None:
                        with optimizer.writer.new_weights(buffer) as out:
                            for index, sub_group in enumerate(buffer.masters.sub_groups):
                                buffer.masters.swap_in(index, following.get(id(buffer)))
                                optimizer.change_pieces(sub_group, call, out)
                                buffer.masters.swap_out(index)
            optimizer.writer.finish_host_writes()
        optimizer.change_without_pieces(call)

    def require_settled(self, call: str) -> None:
        """Raises EngineStateError while masters are ahead of the weights, when `call` would see a mixture.

        An update that the forward awaits is completed instead.
        """
        self.complete()
        if self._thread.pending:
            raise EngineStateError(
                f'{call}: an update is in progress ({_KEY} is "next_step")',
                fix="call engine.finish_update() on every rank first",
            )

    def close(self) -> None:
        """Installs pending weights, unless they are unusable, and ends the update thread. (all ranks)"""
        if self.broken is None:
            self.finish()
        self._thread.close()
        if self._early is not None:
            self._early.close()

    @contextmanager
    def _new_weights(self, buffers: Sequence[FlatBuffer], *, agrees: bool | None = None) -> Iterator[_NewWeights]:
        """Yields the gathers of one update; after the block every rank has its new weights, or raises the same error.

        Args:
            buffers: those whose masters the block updates.
            agrees: whether the ranks exchange their failures; by default if a tier can fail.
        """
        new = _NewWeights(self._units if self._gathers else (), buffers, self._optimizer, self._gather_numel)
        yield new
        with new.failures(), self._optimizer.timed():
            self._optimizer.settle(self._optimizer.buffers)
        new.wait()
        # A disk fails on one rank alone, which still joins the gathers, since the others wait there. Only now can all
        # ranks raise; until they know that none failed, the weights may be a mixture.
        if self._tiers.can_fail if agrees is None else agrees:
            # Set before the ranks agree, so that it remains if that collective itself fails.
            self.broken = _MIXTURE
            agree_or_raise(self._collectives.everyone, new.failure, "offloaded update")
            self.broken = None
            self._tiers.settle()
        elif new.failure is not None:
            raise new.failure


def _trained(unit: ParamUnit) -> list[FlatBuffer]:
    return [buffer for buffer in unit.buffers if buffer.trainable]


class _NewWeights:
    """The gathers of one update, and the first failure of a tier, which is raised after the last gather.

    A disk fails on one rank, which continues with the gathers of this step, since the other ranks join them.

    Args:
        units: those whose gathers belong to the update, if they are persistent.
        buffers: those whose masters the update changes.
        gather_numel: elements of all-gathers in flight.

    Attributes:
        failure: why the remaining buffers are not updated; None so far.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        buffers: Sequence[FlatBuffer],
        optimizer: ShardedOptimizer,
        gather_numel: int,
    ) -> None:
        self.failure: OffloadError | None = None
        self._buffers = buffers
        self._optimizer = optimizer
        self._gather_numel = gather_numel
        persistent = [unit for unit in units if unit.persistent]
        self._unit_of = {id(buffer): unit for unit in persistent for buffer in unit.buffers}
        self._remaining = {id(unit): sum(buffer.trainable for buffer in unit.buffers) for unit in persistent}
        self._gathering: list[ParamUnit] = []

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Notes the failure of a tier in the block, and drops everything that was prefetched."""
        try:
            yield
        except OffloadError as error:
            self.failure = self.failure or error
            for buffer in self._buffers:
                buffer.masters.release()

    @contextmanager
    def weights_of(self, buffer: FlatBuffer) -> Iterator[None]:
        """Runs the block that replaces a buffer's shard; starts the gather of its unit if this was the last buffer."""
        with self.failures():
            try:
                yield
            except OffloadError:
                buffer.shard.discard()
                raise
        self._optimizer.writer.order_copies()
        unit = self._unit_of.get(id(buffer))
        if unit is None:
            return
        self._remaining[id(unit)] -= 1
        if self._remaining[id(unit)]:
            return
        # Overlaps the update of the next unit, but within `allgather_bucket_size`: receive buffers need memory too.
        gathering = self._gathering
        while gathering and sum(u.numel for u in gathering) + unit.numel > self._gather_numel:
            gathering.pop(0).wait()
        unit.reshard()  # marks it stale; its storage stays
        unit.unshard()
        gathering.append(unit)

    def wait(self) -> None:
        """Waits for the gathers."""
        for unit in self._gathering:
            unit.wait()
