"""What a loop may do to the gradients of a step before it happens: take their norm, scale them, cut them.

A mixin of the engine, whose gradients they are; the norm taken here is the one that `step()` goes by, so that it
is computed once. Nothing here clips by itself: `gradient_clipping` of the config is `step()`'s own.
"""

from __future__ import annotations

import math
from typing import Protocol, cast

from zeroaccel.comm.agree import disagreement_report
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import CollectiveError, EngineStateError
from zeroaccel.optim.rank_facts import HyperparameterCheck
from zeroaccel.zero.coordinator import ParamCoordinator
from zeroaccel.zero.grad_reducer import GradReducer, GradStats, examine
from zeroaccel.zero.precision import LossScale
from zeroaccel.zero.weight_update import WeightUpdate

__all__ = ["GradientAccess"]


class _Parts(Protocol):
    """What the engine has."""

    collectives: Collectives
    global_steps: int
    loss_scale: LossScale
    _hyperparameters: HyperparameterCheck | None
    _reducer: GradReducer
    _residency: ParamCoordinator
    _weights: WeightUpdate | None
    _health: GradStats | None
    _asked_factor: float
    _backwards: int

    def _check_usable(self) -> None: ...
    def _note(self, phase: str) -> None: ...
    def _require_own_gradients(self, call: str) -> None: ...
    def _require_optimizer(self, call: str) -> object: ...
    def _complete_gradients(self) -> None: ...
    def _drop_gradients(self) -> None: ...
    def _finish_gradients(self, *, norm: bool) -> GradStats: ...


class GradientAccess:
    """Between the last backward of a step and the `step()` at its boundary."""

    @property
    def _parts(self) -> _Parts:
        return cast(_Parts, self)

    def gradient_norm(self) -> float:
        """The global L2 norm of the gradients that the coming `step()` will use, unscaled and unclipped. (all ranks)

        Between the last backward and the `step()` of a boundary; inf where they are not finite.

        Raises:
            EngineStateError: there are no gradients yet.
            CollectiveError, UsageError: as `step()`, which compares the ranks by the same collective.
        """
        self._require_gradients("gradient_norm")
        health = self._parts._finish_gradients(norm=True)
        return health.norm / self._parts.loss_scale.value if health.finite else math.inf

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients of the coming `step()` by this; `gradient_clipping` may still clip more."""
        self._require_gradients("scale_gradients")
        if factor != 1.0:
            self._parts._require_own_gradients("scale_gradients")
        self._parts._asked_factor = float(factor)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Cuts every element of the reduced gradients to [-clip_value, clip_value]. (all ranks)

        Raises:
            EngineStateError: there are no gradients yet, or their norm was taken before.
        """
        self._require_gradients("clip_grad_value_")
        self._parts._require_own_gradients("clip_grad_value_")
        parts = self._parts
        if parts._health is not None:
            raise EngineStateError("engine.clip_grad_value_()", expected="to come before the norm is taken")
        parts._complete_gradients()
        limit = float(clip_value) * parts.loss_scale.value
        for held in parts._reducer.gradients:
            grad = held.shard if held.full is None else held.full
            if grad is not None:
                grad.clamp_(-limit, limit)

    def _finish_gradients(self, *, norm: bool) -> GradStats:
        """Completes the reductions of this step, looks at what came of them, and compares the ranks. (all ranks)

        Once a step: again it returns what was found.
        """
        parts = self._parts
        if parts._health is not None:
            return parts._health
        parts._complete_gradients()
        ranks, history = parts.collectives, parts.collectives.flight_recorder.digest()
        shards = [(held.shard, held.buffer) for held in parts._reducer.gradients if held.shard is not None]
        counted = [
            shard for shard, buffer in shards if ranks.replica == 0 and (ranks.is_first_data_group or buffer.is_split)
        ]
        check = parts._hyperparameters
        # What an update in backward went by was compared before it, and is held against what it is now after it.
        began = parts._weights is not None and parts._weights.is_early
        settings = 0 if check is None or began else check.digest()
        health = examine(
            [shard for shard, _ in shards], counted, ranks.job, history=history, settings=settings, norm=norm
        )
        if not health.agreed:
            raise CollectiveError(disagreement_report(ranks))
        if not health.alike and check is not None:
            parts._drop_gradients()  # a program that catches it goes on with the next forward
            parts._backwards = 0
            check.refuse(parts.global_steps)
        parts._health = health
        return health

    def _complete_gradients(self) -> None:
        self._parts._note("step")
        self._parts._residency.end_step()
        self._parts._reducer.finish()

    def _compare_hyperparameters(self) -> None:
        """Before updates that begin earlier than `step()`. (all ranks)"""
        if self._parts._hyperparameters is not None:
            self._parts._hyperparameters.compare(self._parts.global_steps)

    def _require_gradients(self, call: str) -> None:
        self._parts._require_optimizer(call)
        self._parts._check_usable()
        if self._parts._backwards == 0:
            raise EngineStateError(
                f"engine.{call}()", expected="a backward before it", fix="call it between backward and step()"
            )
