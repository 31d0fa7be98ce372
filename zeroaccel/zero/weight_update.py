"""The update at the boundary of a step: masters, then weights, then gathers of persistent units.

`WeightUpdate` decides when masters are updated: all in `step()`; or during the backward before it, as soon as each
gradient is complete; or during the forward and backward after it, one step late ([Note: one step late]). In each case
the new weights take effect in a `step()`, buffer by buffer in one order, because the gathers of the ranks need one.
`AsyncStep` is the thread for updates that run outside `step()`. Neither deals with norms.

[Note: one step late] With `next_step`, `step()` number t first installs the weights from the update of its predecessor,
then starts the update with its own gradients, and returns. So the gradients of step t belong to the weights after t - 2
updates rather than t - 1 (the delayed parameter update of Ren et al. 2021, "ZeRO-Offload"). `finish` installs at once,
as at the end of training and before a save; after it, the delay starts again as in the first step.

[Note: gradients that come twice] A parameter's gradient may arrive in two parts, for instance when two re-entrant
checkpoints recompute one block. The first step detects such parameters, and therefore updates nothing early.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.comm.collectives import Collectives
from zeroaccel.config.shard_plan import UpdateTime
from zeroaccel.errors import EngineStateError, OffloadError
from zeroaccel.ops.device_threads import executor
from zeroaccel.zero.grad_reducer import GradientBuffer, GradReducer
from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer, followers
from zeroaccel.zero.storage.masters import MasterStorage
from zeroaccel.zero.storage.placement import TierSet

_KEY = "zero_optimization.offload_optimizer.update_during"


@dataclass(frozen=True)
class _Job:
    """`weights`: memory for the new weights, in the parameters' dtype; None if the masters themselves serve."""

    weights: FlatTensor | None
    done: Future[float]


class AsyncStep:
    """Updates masters on a separate thread, during forward and backward.

    Forward and backward read the old weights, so the thread writes the new ones to separate memory until `install`. A
    single thread runs the updates in the order in which they were added. `begin` copies the hyperparameters, because a
    scheduler may change them during the updates.

    For each step: 1. `begin`, 2. `add` per buffer, in the announced order, 3. `install` of each.
    Every buffer whose masters are in memory must have them apart from its parameters.
    """

    def __init__(self, optimizer: ShardedOptimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._jobs: dict[int, _Job] = {}
        self._order: tuple[FlatBuffer, ...] = ()
        self._following: Mapping[int, MasterStorage] = {}
        self._groups: list[dict[str, Any]] = []
        self._grad_scale = 1.0
        self._thread: ThreadPoolExecutor | None = None
        self._failure: Exception | None = None

    @property
    def pending(self) -> bool:
        """True if updates have been added that are not installed yet."""
        return bool(self._jobs)

    def begin(self, order: Sequence[FlatBuffer], grad_scale: float) -> None:
        """Announces the updates of a step.

        Args:
            order: the buffers that will be added, in order.
            grad_scale: factor of the gradients.
        """
        assert not self._jobs, "updates begin while others are pending"
        # A copy of the settings: the program's scheduler steps while the thread still updates.
        self._order, self._following = tuple(order), followers(order)
        self._groups = _hyperparameters(self._optimizer.optimizer.param_groups)
        self._grad_scale = grad_scale
        self._failure = None

    def add(self, gradient: GradientBuffer) -> None:
        """Starts the update of a buffer, whose reduced gradient is final."""
        assert gradient.shard is not None, f"{gradient.name} is updated without a gradient"
        if self._thread is None:
            self._thread = executor(1, "zeroaccel-update", self._device)
        weights = self._optimizer.stage_aside(gradient.buffer)
        done = self._thread.submit(self._update, gradient.buffer, gradient.shard, weights)
        self._jobs[id(gradient.buffer)] = _Job(weights, done)

    def has(self, buffer: FlatBuffer) -> bool:
        """Returns True if an update of the buffer is pending."""
        return id(buffer) in self._jobs

    def install(self, buffer: FlatBuffer) -> None:
        """Waits for the update of a buffer and puts the new weights into its shard.

        Raises:
            OffloadError: a tier failed.
        """
        # The wait is the part of the update that did not overlap with forward and backward.
        job = self._jobs.pop(id(buffer))
        begun = time.perf_counter()
        try:
            seconds = job.done.result()
        finally:
            waited = time.perf_counter() - begun
        self._optimizer.update_seconds += seconds
        self._optimizer.hidden_seconds += seconds - waited
        self._optimizer.install(buffer, job.weights)

    def wait(self) -> None:
        """Waits until the thread is idle; `install` of a buffer raises its failure."""
        for job in self._jobs.values():
            job.done.exception()
        if not self._jobs:
            self._release()

    def drop(self) -> None:
        """Waits for pending updates, and drops them."""
        self.wait()
        self._jobs.clear()
        self._release()

    def changed_settings(self) -> str | None:
        """Describes the first hyperparameter that has changed since the updates began; None if there is none."""
        now = _hyperparameters(self._optimizer.optimizer.param_groups)
        for index, (before, after) in enumerate(zip(self._groups, now, strict=True)):
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    return f"{name} of param group {index} from {before.get(name)} to {after.get(name)}"
        return None

    def close(self) -> None:
        """Drops pending updates and ends the thread."""
        self.drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _release(self) -> None:
        """Releases sub-groups that were prefetched for updates that will not run."""
        for buffer in self._order:
            buffer.masters.release()

    def _update(self, buffer: FlatBuffer, grad: Tensor, weights: FlatTensor | None) -> float:
        """Runs an update on the thread; returns its duration in seconds."""
        if self._failure is not None:  # the tier has failed: later updates would only mix more old and new
            raise self._failure
        begun = time.perf_counter()
        following = self._following.get(id(buffer))
        try:
            self._optimizer.update(
                buffer, FlatTensor(buffer.own, grad), self._grad_scale, following, weights, self._groups
            )
        except Exception as error:
            self._failure = error
            raise
        return time.perf_counter() - begun


def _hyperparameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else copy.copy(value)

    return [{name: plain(value) for name, value in group.items() if name != "params"} for group in groups]


class WeightUpdate:
    """Takes an engine's weights from one step to the next.

    Args:
        gather_numel: elements of all-gathers in flight.
        gathers: masters are sharded, so that persistent units have to be gathered.
        during: time at which masters are updated.

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
        self._unit_of = {id(buffer): unit for unit in units for buffer in unit.buffers}
        self._collectives = collectives
        self._gather_numel = gather_numel
        self._gathers = gathers
        self._during = during
        self._tiers = tiers
        self._async = AsyncStep(optimizer, collectives.topology.device)
        self._seen_a_step = False

    @property
    def is_early(self) -> bool:
        """True if updates with the gradients of the next `step()` have begun."""
        return self._during == "backward" and self._async.pending

    def begin_backward(self, agree: Callable[[], None]) -> Callable[[GradientBuffer], None] | None:
        """Returns the function to call with each complete gradient of a step's last backward, or None.

        Args:
            agree: raises if the ranks' optimizers differ; called before updates begin, since the comparison in `step()`
                would be too late. (all ranks)
        """
        if self._during != "backward":
            return None
        # The first step only detects gradients that come twice: an update with half a gradient could not be undone.
        if not self._seen_a_step:
            self._seen_a_step = True
            return None
        agree()
        order = [gradient.buffer for gradient in self._reducer.gradients if not gradient.comes_twice]
        self._async.begin(order, 1.0)
        return self._async.add

    @property
    def takes_control(self) -> bool:
        """True if `apply` accepts a control tensor, so that the device itself decides whether the update applies."""
        return self._during == "step" and self._optimizer.takes_control

    def apply(self, grad_scale: float | Tensor) -> None:
        """Updates with the gradients of this step, or starts to. (all ranks)

        Args:
            grad_scale: factor of the gradients; or, if `takes_control`, a control tensor; then call `settle` next.

        Raises:
            OffloadError: a tier failed; on every rank.
            EngineStateError: the settings have changed since an earlier update began.
        """
        if self._during == "next_step":
            # The previous step's weights first: its updates read the masters that the new ones change.
            self.finish()
            gradients = self._reducer.gradients
            assert isinstance(grad_scale, float), "updates on a thread take a number"
            self._async.begin([gradient.buffer for gradient in gradients], grad_scale)
            for gradient in gradients:
                self._async.add(gradient)
        else:
            assert not self.is_early or grad_scale == 1.0, "clipped after the updates had begun"
            self._replace(grad_scale)
        if isinstance(grad_scale, float):
            self._optimizer.count_step()

    def settle(self, *, applied: bool) -> None:
        """Counts the step of an `apply` with a control tensor if it was applied; a skipped step does not count."""
        if applied:
            self._optimizer.count_step()
        else:
            self._optimizer.take_back_step()

    def finish(self) -> None:
        """Installs the weights of an update that runs one step late, if there is one. (all ranks)

        Raises:
            OffloadError: a tier failed; on every rank.
        """
        if self._during == "next_step" and self._async.pending:
            self._replace(1.0)

    def change_masters(self, call: Callable[[], object]) -> None:
        """Runs an optimizer method other than `step` that changes the masters, and installs the weights. (all ranks)

        Raises:
            OffloadError: a tier failed; on every rank.
        """
        self.finish()
        self._install(lambda done: self._optimizer.change_masters(call, done), None, early=False)

    def require_own_step(self, call: str) -> None:
        """Raises EngineStateError if `call` would change gradients whose update has begun."""
        if self.is_early:
            raise EngineStateError(
                f'{call}: the update with these gradients has begun ({_KEY} is "backward")',
                fix='call engine.step() first, or set the key to "step"',
            )

    def require_settled(self, call: str) -> None:
        """Raises EngineStateError while masters are ahead of the weights, when `call` would see a mixture."""
        self.require_own_step(call)
        if self._async.pending:
            raise EngineStateError(
                f'{call}: an update is in progress ({_KEY} is "next_step")',
                fix="call engine.finish_update() on every rank first",
            )

    def forget(self) -> None:
        """Drops early updates after a backward that failed."""
        if self.is_early:
            # Masters of some buffers are one step ahead of the weights, and no gradients are left to complete the step.
            self._async.drop()
            self.broken = "an update was dropped half way, so the masters are ahead of the weights"

    def close(self) -> None:
        """Installs pending weights, unless they are unusable, and ends the update thread. (all ranks)"""
        if self.broken is None:
            self.finish()
        self._async.close()

    def _replace(self, grad_scale: float | Tensor) -> None:
        """Updates or installs buffer by buffer."""
        # A program may change a learning rate between backward and step, after updates have begun with the old one:
        # complete the step anyway, so that the ranks stay together, and then refuse it on all of them.
        failure: Exception | None = None
        early = self.is_early
        changed = self._async.changed_settings() if early else None
        if changed is not None:
            failure = EngineStateError(
                f'engine.step(): {changed} after the update had begun ({_KEY} is "backward")',
                fix='change it before backward or after step(), or set the key to "step"',
            )
        earlier = self._async if self._async.pending else None
        gradients = self._reducer.gradients
        self._install(lambda done: self._optimizer.step(gradients, grad_scale, done, earlier), failure, early=early)

    def _install(
        self, update: Callable[[Callable[[FlatBuffer], None]], None], failure: Exception | None, *, early: bool
    ) -> None:
        """Updates masters and shards; a persistent unit's gather starts as soon as its shards are new.

        Args:
            update: calls its argument after each buffer.
            failure: error to raise afterwards, on all ranks.
            early: updates had begun earlier, and may have failed on some ranks since.
        """
        gathering: list[ParamUnit] = []
        remaining = {id(unit): sum(b.trainable for b in unit.buffers) for unit in self._units}

        def done(buffer: FlatBuffer) -> None:
            unit = self._unit_of[id(buffer)]
            remaining[id(unit)] -= 1
            if not (self._gathers and unit.persistent and remaining[id(unit)] == 0):
                return
            # Overlaps the update of the next unit, but within `allgather_bucket_size`: receive buffers need memory too.
            while gathering and sum(u.numel for u in gathering) + unit.numel > self._gather_numel:
                gathering.pop(0).wait()
            unit.reshard()  # marks it stale; its storage stays
            unit.unshard()
            gathering.append(unit)

        try:
            update(done)
        except OffloadError as error:
            failure = error
        for unit in gathering:
            unit.wait()
        # A disk fails on one rank alone, which still joins the gathers, since the others wait there. Only now can all
        # ranks raise; until they know that none failed, the weights may be a mixture.
        if early or self._tiers.can_fail:
            # Set before the ranks agree, so that it remains if that collective itself fails.
            self.broken = "a step failed half way, so the weights are a mixture of old and new"
            agree_or_raise(self._collectives.everyone, failure, "offloaded update")
            self.broken = None
        if self._tiers.can_fail:
            self._tiers.settle()
