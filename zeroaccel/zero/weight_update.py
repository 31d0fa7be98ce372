"""The boundary of a step: masters are updated, the parameters get the new weights, and resident units are gathered.

Decides when: all of it in `step()`; or masters during the backward before it, as soon as each gradient is complete; or
beside the forward and backward after it, one step late ([Note: one step late]). In each case the new weights come
into force in a `step()`, buffer by buffer in one order, as the gathers of the ranks have to. Knows no norms.

[Note: one step late] With `next_step`, `step()` number t first installs the weights that its predecessor's update has
made, then starts the update with its own gradients, and returns. So the gradients of step t are taken at the weights
after t - 2 updates rather than t - 1 (the delayed parameter update of Ren et al. 2021, "ZeRO-Offload"). `finish`
installs at once, as at the end of training and before anything is saved: from then on it is as at the start.

[Note: gradients that come twice] A parameter's gradient may arrive in two parts, for instance when two re-entrant
checkpoints recompute one block. Which do is seen in the first step, which therefore updates nothing early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.comm.collectives import Collectives
from zeroaccel.config.shard_plan import UpdateTime
from zeroaccel.errors import EngineStateError, OffloadError
from zeroaccel.zero.async_step import AsyncStep
from zeroaccel.zero.grad_reducer import GradientBuffer, GradReducer
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.placement import TierSet

__all__ = ["WeightUpdate"]

_KEY = "zero_optimization.offload_optimizer.update_during"


class WeightUpdate:
    """Takes an engine's weights from one step to the next.

    Args:
        gather_numel: elements of all-gathers in flight.
        gathers: whether masters are sharded, so that resident units have to be gathered.
        during: when masters are updated.

    Attributes:
        broken: why the weights are of no use, for people; None while they are.
    """

    def __init__(
        self,
        shard: ShardedOptimizer,
        reducer: GradReducer,
        units: Sequence[ParamUnit],
        collectives: Collectives,
        *,
        gather_numel: int,
        gathers: bool,
        during: UpdateTime = "step",
        tiers: TierSet | None = None,
    ) -> None:
        self.broken: str | None = None
        self._shard = shard
        self._reducer = reducer
        self._units = tuple(units)
        self._unit_of = {id(buffer): unit for unit in units for buffer in unit.buffers}
        self._collectives = collectives
        self._gather_numel = gather_numel
        self._gathers = gathers
        self._during = during
        self._tiers = tiers
        self._beside = None if during == "step" else AsyncStep(shard)
        self._seen_a_step = False

    @property
    def is_early(self) -> bool:
        """Whether updates with the gradients of the coming `step()` have begun."""
        return self._during == "backward" and self._beside is not None and self._beside.pending

    def begin_backward(self, agree: Callable[[], None]) -> Callable[[GradientBuffer], None] | None:
        """Before the last backward of a step: who is to be given each gradient that is complete; None for nobody.

        Args:
            agree: called before updates begin that `step()` would be too late for; raises where the ranks' optimizers
                differ. (all ranks)
        """
        if self._during != "backward" or self._beside is None:
            return None
        if not self._seen_a_step:
            self._seen_a_step = True
            return None
        agree()
        order = [held.buffer for held in self._reducer.gradients if not self._reducer.accumulates_twice(held)]
        self._beside.begin(order, 1.0)
        return self._beside.add

    def apply(self, grad_scale: float) -> None:
        """Updates with the gradients of this step, or starts to. (all ranks)

        Raises:
            OffloadError: a tier failed; on every rank.
            EngineStateError: the updates that began earlier went by other settings.
        """
        if self._during == "next_step" and self._beside is not None:
            self.finish()
            gradients = self._reducer.gradients
            self._beside.begin([held.buffer for held in gradients], grad_scale)
            for held in gradients:
                self._beside.add(held)
        else:
            assert grad_scale == 1.0 or not self.is_early, "clipped after the updates had begun"
            self._replace(grad_scale)
        self._shard.count_step()

    def finish(self) -> None:
        """Installs what an update beside has made of the weights, if there is one. (all ranks)

        Raises:
            OffloadError: a tier failed; on every rank.
        """
        if self._during == "next_step" and self._beside is not None and self._beside.pending:
            self._replace(1.0)

    def change_masters(self, call: Callable[[], object]) -> None:
        """Lets a method of the optimizer that is no step change the masters, and puts them in force. (all ranks)

        Raises:
            OffloadError: a tier failed; on every rank.
        """
        self.finish()
        self._install(lambda stepped: self._shard.change_masters(call, stepped), None, early=False)

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
        if self._beside is not None and self._beside.pending:
            raise EngineStateError(
                f'{call}: an update is under way ({_KEY} is "next_step")',
                fix="call engine.finish_update() on every rank first",
            )

    def forget(self) -> None:
        """After a backward that broke off."""
        if self.is_early and self._beside is not None:
            self._beside.drop()
            self.broken = "an update was dropped half way, so the masters are ahead of the weights"

    def close(self) -> None:
        """Installs what there is to install, unless it is of no use, and ends what runs beside. (all ranks)"""
        if self.broken is None:
            self.finish()
        if self._beside is not None:
            self._beside.close()

    def _replace(self, grad_scale: float) -> None:
        """Steps or installs buffer by buffer."""
        failure: Exception | None = None
        early = self.is_early
        changed = self._beside.changed_settings() if early and self._beside is not None else None
        if changed is not None:
            failure = EngineStateError(
                f'engine.step(): {changed} after the update had begun ({_KEY} is "backward")',
                fix='change it before backward or after step(), or set the key to "step"',
            )
        beside = self._beside if self._beside is not None and self._beside.pending else None
        gradients = self._reducer.gradients
        self._install(lambda stepped: self._shard.step(gradients, grad_scale, stepped, beside), failure, early=early)

    def _install(
        self, update: Callable[[Callable[[FlatBuffer], None]], None], failure: Exception | None, *, early: bool
    ) -> None:
        """Has masters and shards updated; a resident unit's gather starts as soon as its shards are new.

        Args:
            update: calls what it is given after each buffer.
            failure: what is to be raised afterwards on all ranks.
            early: whether updates had begun before, on ranks that may have failed since.
        """
        waiting: list[ParamUnit] = []
        left = {id(unit): sum(b.trainable for b in unit.buffers) for unit in self._units}

        def stepped(buffer: FlatBuffer) -> None:
            unit = self._unit_of[id(buffer)]
            left[id(unit)] -= 1
            if not (self._gathers and unit.persistent and left[id(unit)] == 0):
                return
            while waiting and sum(u.numel for u in waiting) + unit.numel > self._gather_numel:
                waiting.pop(0).wait()
            unit.reshard()
            unit.unshard()
            waiting.append(unit)

        try:
            update(stepped)
        except OffloadError as error:
            failure = error
        for unit in waiting:
            unit.wait()
        if early or (self._tiers is not None and self._tiers.can_fail):
            self.broken = "a step failed half way, so the weights are a mixture of old and new"
            agree_or_raise(self._collectives, failure, "offloaded update")
            self.broken = None
        if self._tiers is not None and self._tiers.can_fail:
            self._tiers.settle()
