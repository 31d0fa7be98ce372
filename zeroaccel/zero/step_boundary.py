"""The boundary of a step: examines the gradients, compares the ranks, and decides about the update.

`grad_norm.py` has the arithmetic and decides what stays on the device, `weight_update.py` has the update itself. The
engine handles the loss scale, schedulers and counters.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroaccel.comm.agree import disagreement_report
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.stop_notice import stop_notice
from zeroaccel.errors import CollectiveError, listed
from zeroaccel.logs import log_once, logger
from zeroaccel.ops.reductions import load_kernels_of_norms
from zeroaccel.optim.rank_facts import HyperparameterCheck
from zeroaccel.telemetry.timeline import named_range
from zeroaccel.zero.grad_norm import (
    DeviceStats,
    FactorRule,
    GradCheck,
    GradStats,
    RankDigests,
    check_on_device,
    join_facts_on_device,
    join_facts_on_host,
    stats_on_host,
)
from zeroaccel.zero.grad_reducer import GradientBuffer, GradReducer
from zeroaccel.zero.weight_update import WeightUpdate

_DIFFERING_ORDER = (
    "the ranks launch gathers and reductions in different orders, as far as their computation differs: the results are"
    " equal, but a rank that waits for its whole device in the middle of a step can deadlock with another; torch waits"
    " so when it retries an allocation. Leave more device memory free (a smaller stage3_max_live_parameters or batch),"
    " and call no torch.cuda.synchronize() or empty_cache() between forward and step()"
)


@dataclass(frozen=True)
class StepOutcome:
    """The norms of one step's gradients, which may be on the device: the host waits for those that it reads.

    Attributes:
        check: the statistics.
        loss_scale: of the step's backwards.
        names: the unit of each gradient.
    """

    check: GradCheck
    loss_scale: float
    names: tuple[str, ...]

    def norm(self) -> float | None:
        """Returns the norm, unscaled and unclipped; inf if a gradient is not finite, None if it was not computed."""
        return self.check.read().unscaled_norm(self.loss_scale)

    def unit_norms(self) -> dict[str, float]:
        """Returns the norm of each unit, unscaled and unclipped; empty unless the boundary `takes_norms`."""
        squares: dict[str, float] = {}
        for name, norm in zip(self.names, self.check.read_norms(), strict=False):
            squares[name] = squares.get(name, 0.0) + (norm / self.loss_scale) ** 2
        return {name: math.sqrt(square) for name, square in squares.items()}


class StepBoundary:
    """Decides whether one engine's gradients update the weights, and by which factor.

    Order in a step: 1. `take_stats`, once its reductions are complete, 2. `decide`, 3. `conclude` after the update, if
    there was one, 4. `clear`. A program may read the statistics in between.

    Args:
        hyperparameters: compares the optimizer's hyperparameters over the ranks.
        drop: drops the gradients of a refused step, so that a program that catches the error can continue.

    Attributes:
        check: statistics of the gradients for the next update; None before they are complete.
        factor: an upper bound of the clipping factor of the next update, set by the program.
        sends_stop: True if the ranks tell each other that one of them was asked to stop.
        takes_norms: True if each step computes the norm of every gradient of a unit too, with the same collectives.
    """

    def __init__(
        self,
        reducer: GradReducer,
        weights: WeightUpdate,
        hyperparameters: HyperparameterCheck,
        collectives: Collectives,
        drop: Callable[[], None],
    ) -> None:
        self.check: GradCheck | None = None
        self.factor = 1.0
        self.sends_stop = self.takes_norms = False
        self._reducer = reducer
        self._weights = weights
        self._hyperparameters = hyperparameters
        self._collectives = collectives
        # If masters are on an accelerator, so are the gradients that update them.
        self._checks_on_device = reducer.device.type != "cpu" and not reducer.leaves_device
        self._drop = drop
        dtypes = {torch.float32, *(gradients.comm_dtype for gradients in reducer.gradients)}
        load_kernels_of_norms(dtypes, reducer.device)
        self._last: tuple[GradCheck, float] | None = None  # with its loss scale
        self._unverified: deque[tuple[int, DeviceStats]] = deque()  # steps that continued without a comparison of ranks
        self._examined = 0  # of `GradReducer.changes`, at the last `take_stats`
        self._before: GradCheck | None = None  # of the step before the last call of `stops`

    @property
    def is_examined(self) -> bool:
        """True if `check` is of the present gradients: the program has changed none since."""
        return self.check is not None and self._examined == self._reducer.changes

    @property
    def outcome(self) -> StepOutcome | None:
        """The norms at the last update; None before the first."""
        if self._last is None:
            return None
        return StepOutcome(*self._last, tuple(gradients.name for gradients in self._reducer.gradients))

    @property
    def is_known_late(self) -> bool:
        """True if the host would wait for the device to read the outcome of the last step."""
        return self._checks_on_device

    @property
    def grad_norm(self) -> float | None:
        """Gradient norm at the last update, unscaled and unclipped; None before the first, or if not computed."""
        if self._last is None:
            return None
        check, scale = self._last
        return check.read().unscaled_norm(scale)

    def join_facts(self, largest: Tensor) -> Tensor:
        """Returns the facts of all ranks for gradients that go to the host, so that the host waits once for both.

        Args:
            largest: as in `grad_norm.join_facts_on_device`.
        """
        return join_facts_on_device(largest, self._digests(), self._collectives)

    def take_stats(self, *, norm: bool) -> GradCheck:
        """Examines complete gradients and compares the ranks; once per step. (all ranks)"""
        ranks, self._examined = self._collectives, self._reducer.changes
        gradients, device = self._reducer.gradients, self._reducer.device

        def counts(gradient: GradientBuffer) -> bool:
            # Gradients that several ranks hold, on replicas or along another mesh axis, count once in the norm.
            is_first = ranks.replica == 0 and (ranks.is_first_data_group or gradient.buffer.is_split)
            return is_first and gradient.shard is not None

        counted = [gradient if counts(gradient) else None for gradient in gradients]
        facts, norms = self._reducer.facts, self.takes_norms
        with named_range("norm"):
            if self._checks_on_device:
                shards = [g.shard for g in gradients if g.shard is not None]
                in_norm = [None if g is None else g.shard for g in counted]
                self.check = check_on_device(
                    shards, in_norm, ranks, device=device, digests=self._digests(), norm=norm, norms=norms
                )
            else:
                apart = {
                    index: g.shard
                    for index, g in enumerate(gradients)
                    if g.shard is not None and g.shard.device.type != "cpu" and g.examined is None
                }
                if facts is None:
                    there = [g for index, g in enumerate(gradients) if g.shard is not None and index not in apart]
                    largest = max((g.largest() for g in there), default=0.0)
                    facts = join_facts_on_host(largest, self._digests(), ranks, device, list(apart.values()))
                sums = [None if g is None or i in apart else g.square_sums for i, g in enumerate(counted)]
                resident = {index: shard for index, shard in apart.items() if counted[index] is not None}
                self.check = stats_on_host(facts, sums, ranks, device, norm=norm, norms=norms, resident=resident)
                if norm:
                    self._reducer.expect_largest(float(facts[0]))
        return self.check

    def read(self, check: GradCheck, step: int) -> GradStats:
        """Returns the statistics of ranks that agree; the host may wait for them.

        Args:
            step: the number of the step, from 0.

        Raises:
            CollectiveError: the ranks issued different collectives.
            UsageError: the ranks' optimizers have different settings. The gradients are dropped.
        """
        stats = check.read()
        if not stats.same_history:
            raise CollectiveError(self._disagreement())
        if not stats.same_settings:
            self._drop()
            self._hyperparameters.refuse(step)
        if not stats.same_order and self._reducer.device.type != "cpu":
            log_once(logging.WARNING, _DIFFERING_ORDER)
        return stats

    def _disagreement(self) -> str:
        """Reports how the ranks desynced; if stages have separate histories, for the first stage that did."""
        ranks = self._collectives
        report = disagreement_report(ranks.peers)
        if ranks.peers is ranks.job:
            return report
        histories = ranks.peers.gather_objects(ranks.flight_recorder.digest(), "whose histories differ")
        reports = ranks.job.gather_objects(report if len(set(histories)) > 1 else "", "where the stages desynced")
        return next(filter(None, reports), report)

    def verify_earlier_steps(self, *, wait: bool = False) -> None:
        """Raises if the ranks differed in an earlier step that went on unverified; the device skipped its update.

        Args:
            wait: also check steps that the device has not reached yet.
        """
        while self._unverified and (wait or self._unverified[0][1].is_ready()):
            step, check = self._unverified.popleft()
            self.read(check, step)

    def stops(self, step: int) -> bool:
        """Returns True if a rank was asked to stop, the same on all ranks; once after each step.

        On a device this is the result of the previous step, since the host would have to wait for this one's.

        Raises:
            CollectiveError, UsageError: as `read`, for that step.
        """
        check = self._last[0] if self._last is not None else None
        if self._checks_on_device:
            self._before, check = check, self._before
            step -= 1
        return check is not None and self.read(check, step).stop

    def settings_may_be_late(self) -> bool:
        """Returns True if the ranks were already compared, so that a loop may have changed settings since."""
        return self.check is not None or self._reducer.facts is not None

    def decide(self, check: GradCheck, rule: FactorRule, step: int, *, late: bool) -> float | Tensor | None:
        """Returns the factor of the gradients for the update; None if the step is skipped. (all ranks)

        One factor unscales and clips, and the update kernel applies it, so that it needs no extra pass. Statistics that
        are still on the device give a control tensor, by which the device decides ([Note: boundary] of `grad_norm.py`).

        Args:
            step: the number of the step, from 0.
            late: result of `settings_may_be_late` before these statistics.

        Raises:
            CollectiveError, UsageError: as `read`; nothing was updated.
        """
        self._last = check, rule.loss_scale
        if isinstance(check, DeviceStats) and not check.was_read and self._weights.takes_control:
            return check.control(rule)
        stats = self.read(check, step)
        factor = rule.factor(stats)
        if factor is not None and not stats.finite:
            self._name_nans(step)
        if factor is not None and late:
            self._hyperparameters.note_update()
        return factor

    def conclude(self, check: GradCheck, rule: FactorRule, step: int, factor: float | Tensor | None) -> bool:
        """Returns True if the weights have changed, after the update with the result of `decide`.

        Raises:
            CollectiveError, UsageError: as `read`; the device skipped the update.
        """
        if not isinstance(factor, Tensor):
            return factor is not None
        assert isinstance(check, DeviceStats), "a control tensor without statistics on the device"
        applied = True
        if rule.skips_overflow:
            stats = check.read()
            applied = stats.finite and stats.same_history and stats.same_settings
        elif self._collectives.job.world_size > 1:
            self._unverified.append((step, check))
        self._weights.settle(applied=applied)
        if rule.skips_overflow:
            self.read(check, step)
        return applied

    def clear(self) -> None:
        """Forgets the statistics, after the gradients were dropped."""
        self.check, self.factor = None, 1.0

    def _name_nans(self, step: int) -> None:
        """Warns about parameters whose gradients are all NaN while those of others are not. (all ranks)"""
        # Some reads of sharded parameters are not detected: those without torch's functions, or through a DTensor.
        slots = [(g, slot) for g in self._reducer.gradients for slot in g.buffer.layout.slots if slot.numel]
        flags = torch.zeros(len(slots), 2)
        for index, (gradients, slot) in enumerate(slots):
            overlap = slot.range & gradients.buffer.own
            if overlap and gradients.shard is not None and not gradients.buffer.persistent:
                nans = gradients.shard[overlap.at(gradients.buffer.own.start)].isnan()
                flags[index] = torch.tensor([float(nans.any()), float(not nans.all())])
        self._collectives.all_reduce(flags, "max", "which gradients are NaN")
        names = [slot.fqn for (_, slot), (some, others) in zip(slots, flags.tolist(), strict=True) if some > others]
        if names and len(names) < len(slots):
            logger.log(
                logging.WARNING,
                "engine.step() %d: the gradients of %s are NaN throughout, and those of others are not. A sharded "
                "parameter reads as NaN: read it in the model's forward or inside "
                "zero.GatheredParameters(param)",
                step,
                listed(names, most=5),
            )

    def _digests(self) -> RankDigests:
        stop = self.sends_stop and stop_notice.received
        recorder = self._collectives.flight_recorder
        return RankDigests(recorder.digest(), self._hyperparameters.digest(), stop, recorder.order_digest())
