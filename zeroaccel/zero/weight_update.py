"""The boundary of a step: masters are updated, the parameters get the new weights, persistent units are gathered.

`WeightUpdate` decides when masters are updated: all in `step()`; or during the backward before it, as soon as each
gradient is complete; or during the forward and backward after it, one step late ([Note: one step late]). In each case
the new weights come into force in a `step()`, buffer by buffer in one order, as the gathers of the ranks have to.
`AsyncStep` is the thread of updates that run outside of `step()`. Neither knows of norms.

[Note: one step late] With `next_step`, `step()` number t first installs the weights that its predecessor's update has
made, then starts the update with its own gradients, and returns. So the gradients of step t are taken at the weights
after t - 2 updates rather than t - 1 (the delayed parameter update of Ren et al. 2021, "ZeRO-Offload").
`finish` installs at once, as at the end of training and before anything is saved: from then on it is as at the start.

[Note: gradients that come twice] A parameter's gradient may arrive in two parts, for instance when two re-entrant
checkpoints recompute one block. Which do is seen in the first step, which therefore updates nothing early.
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
    """`weights`: what the update writes, in the parameters' dtype; None where the masters do as well."""

    weights: FlatTensor | None
    done: Future[float]


class AsyncStep:
    """Updates of masters on a thread of their own, during forward and backward.

    Those read the old weights, so the new ones are written to memory of their own until `install`. One thread, so that
    updates run in the order in which they were added. Hyperparameters are copied when a batch of updates begins: a
    scheduler may change them meanwhile.

    Life of a step's updates: 1. `begin`, 2. `add` per buffer, in the order that was announced, 3. `install` of each.
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
        """Whether updates have been added that are not installed yet."""
        return bool(self._jobs)

    def begin(self, order: Sequence[FlatBuffer], grad_scale: float) -> None:
        """Announces the updates of a step.

        Args:
            order: of the buffers that will be added.
            grad_scale: multiplied into the gradients.
        """
        assert not self._jobs, "updates begin while others are pending"
        # A copy of the settings: the program's scheduler steps while the thread still updates.
        self._order, self._following = tuple(order), followers(order)
        self._groups = _hyperparameters(self._optimizer.optimizer.param_groups)
        self._grad_scale = grad_scale
        self._failure = None

    def add(self, gradient: GradientBuffer) -> None:
        """Starts the update of a buffer, whose reduced gradient does not change any more."""
        assert gradient.shard is not None, f"{gradient.name} is updated without a gradient"
        if self._thread is None:
            self._thread = executor(1, "zeroaccel-update", self._device)
        weights = self._optimizer.stage_aside(gradient.buffer)
        done = self._thread.submit(self._update, gradient.buffer, gradient.shard, weights)
        self._jobs[id(gradient.buffer)] = _Job(weights, done)

    def has(self, buffer: FlatBuffer) -> bool:
        """Whether an update of it is pending."""
        return id(buffer) in self._jobs

    def install(self, buffer: FlatBuffer) -> None:
        """Waits for the update of a buffer and puts the new weights into its shard.

        Raises:
            OffloadError: a tier failed.
        """
        # Waiting is the part of the update that forward and backward did not hide.
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
        """Returns when the thread has nothing to do; a failure is raised by the `install` of its buffer."""
        for job in self._jobs.values():
            job.done.exception()
        if not self._jobs:
            self._release()

    def drop(self) -> None:
        """Drops what is pending, once it is done."""
        self.wait()
        self._jobs.clear()
        self._release()

    def changed_settings(self) -> str | None:
        """The first hyperparameter that is another than when the updates began, in words; None if there is none."""
        now = _hyperparameters(self._optimizer.optimizer.param_groups)
        for index, (before, after) in enumerate(zip(self._groups, now, strict=True)):
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    return f"{name} of param group {index} from {before.get(name)} to {after.get(name)}"
        return None

    def close(self) -> None:
        """Ends the thread."""
        self.drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _release(self) -> None:
        """Gives up sub-groups that were prefetched for updates that do not come."""
        for buffer in self._order:
            buffer.masters.release()

    def _update(self, buffer: FlatBuffer, grad: Tensor, weights: FlatTensor | None) -> float:
        """Updates on the thread; the seconds that it took."""
        if self._failure is not None:  # the tier is at fault: later updates would only mix more old and new
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
        gathers: whether masters are sharded, so that persistent units have to be gathered.
        during: when masters are updated.

    Attributes:
        broken: why the weights are of no use, in words; None while they are sound.
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
        """Whether updates with the gradients of the coming `step()` have begun."""
        return self._during == "backward" and self._async.pending

    def begin_backward(self, agree: Callable[[], None]) -> Callable[[GradientBuffer], None] | None:
        """Before the last backward of a step: what is to be called with each complete gradient; None for nothing.

        Args:
            agree: raises where the ranks' optimizers differ; called before updates begin, since their comparison in
                `step()` would be too late. (all ranks)
        """
        if self._during != "backward":
            return None
        # The first step only watches which gradients come twice: an update of half a gradient could not be undone.
        if not self._seen_a_step:
            self._seen_a_step = True
            return None
        agree()
        order = [gradient.buffer for gradient in self._reducer.gradients if not gradient.comes_twice]
        self._async.begin(order, 1.0)
        return self._async.add

    @property
    def takes_control(self) -> bool:
        """Whether `apply` takes a control tensor, so that the device decides by itself whether the update applies."""
        return self._during == "step" and self._optimizer.takes_control

    def apply(self, grad_scale: float | Tensor) -> None:
        """Updates with the gradients of this step, or starts to. (all ranks)

        Args:
            grad_scale: multiplied into the gradients; or a control tensor, where `takes_control`; `settle`
                comes after that.

        Raises:
            OffloadError: a tier failed; on every rank.
            EngineStateError: the updates that began earlier went by other settings.
        """
        if self._during == "next_step":
            # The weights of the step before first: its updates read the same masters that these are about to change.
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
        """After an `apply` with a control tensor, when the outcome is known: a skipped step does not count."""
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
        """Lets a method of the optimizer that is no step change the masters, and puts them in force. (all ranks)

        Raises:
            OffloadError: a tier failed; on every rank.
        """
        self.finish()
        self._install(lambda done: self._optimizer.change_masters(call, done), None, early=False)

    def require_own_step(self, call: str) -> None:
        """Raises EngineStateError where `call` would change gradients whose update has begun."""
        if self.is_early:
            raise EngineStateError(
                f'{call}: the update with these gradients has begun ({_KEY} is "backward")',
                fix='call engine.step() first, or set the key to "step"',
            )

    def require_settled(self, call: str) -> None:
        """Raises EngineStateError while masters are ahead of the weights, where `call` would meet a mixture."""
        self.require_own_step(call)
        if self._async.pending:
            raise EngineStateError(
                f'{call}: an update is under way ({_KEY} is "next_step")',
                fix="call engine.finish_update() on every rank first",
            )

    def forget(self) -> None:
        """After a backward that broke off."""
        if self.is_early:
            # Masters of some buffers are a step further than the weights, and no gradients are left to finish it with.
            self._async.drop()
            self.broken = "an update was dropped half way, so the masters are ahead of the weights"

    def close(self) -> None:
        """Installs pending weights, unless they are of no use, and ends the thread of updates. (all ranks)"""
        if self.broken is None:
            self.finish()
        self._async.close()

    def _replace(self, grad_scale: float | Tensor) -> None:
        """Steps or installs buffer by buffer."""
        # A program may change a learning rate between backward and step. Updates that have begun went by the old one:
        # the step is carried out all the same, so that the ranks stay together, and then refused on all of them.
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
        """Has masters and shards updated; a persistent unit's gather starts as soon as its shards are new.

        Args:
            update: calls its argument after each buffer.
            failure: is raised afterwards, on all ranks.
            early: whether updates had begun before, on ranks that may have failed since.
        """
        gathering: list[ParamUnit] = []
        remaining = {id(unit): sum(b.trainable for b in unit.buffers) for unit in self._units}

        def done(buffer: FlatBuffer) -> None:
            unit = self._unit_of[id(buffer)]
            remaining[id(unit)] -= 1
            if not (self._gathers and unit.persistent and remaining[id(unit)] == 0):
                return
            # Behind the update of the next unit, but within `allgather_bucket_size`: receive buffers are memory too.
            while gathering and sum(u.numel for u in gathering) + unit.numel > self._gather_numel:
                gathering.pop(0).wait()
            unit.reshard()  # says that it is stale; its storage stays
            unit.unshard()
            gathering.append(unit)

        try:
            update(done)
        except OffloadError as error:
            failure = error
        for unit in gathering:
            unit.wait()
        # A disk fails on one rank alone, which has come along this far since the others wait in the same gathers. Only
        # now can all raise; and until they know that none failed, the weights may be a mixture.
        if early or self._tiers.can_fail:
            # Set before the ranks agree, so that it stays where that collective itself fails.
            self.broken = "a step failed half way, so the weights are a mixture of old and new"
            agree_or_raise(self._collectives.everyone, failure, "offloaded update")
            self.broken = None
        if self._tiers.can_fail:
            self._tiers.settle()
