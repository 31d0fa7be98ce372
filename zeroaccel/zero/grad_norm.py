"""Norm, overflow check and comparison of the ranks, at the boundary of a step, and the factor that follows from them.

A floating-point sum depends on its order, so squares are summed as integers (`ops/reductions.py`): the norm has the
same bits for every layout, world size, stage and device, and so has the clipping.

[Note: boundary] Where the optimizer steps in host memory, the host takes the norm and knows the factor before it
updates (`stats_on_host`). On an accelerator the host would have to wait twice for all that the device still has to do.
There everything stays on the device (`check_on_device`): the norm, the agreement of the ranks, the factor, and whether
the step is skipped, which the update's kernels read from memory. The host launches all of it, then the update, and
reads the outcome once, later, while the update runs; or never, where nothing on the host depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Collectives
from zeroaccel.ops.device_values import read_values
from zeroaccel.ops.reductions import max_abs, max_abs_into, norm_exponent, norm_from, square_sums, square_sums_into
from zeroaccel.ops.step_control import finalize, largest_of_facts, write_facts

FACTS_LABEL, NORM_LABEL = "gradient overflow check", "gradient norm"  # of the collectives, in messages about hangs


@dataclass(frozen=True)
class GradStats:
    """Norm and checks of one step's gradients, equal on all ranks.

    Attributes:
        finite: no infinity and no NaN on any rank.
        norm: the global L2 norm, still multiplied by the loss scale; NaN when not computed or not finite.
        same_history: every rank issued the same collectives since the start.
        same_settings: every rank's optimizer has the same hyperparameters.
        stop: a rank was asked to stop before it joined this step.
    """

    finite: bool
    norm: float
    same_history: bool
    same_settings: bool
    stop: bool = False

    def read(self) -> GradStats:
        """See `GradCheck`: they are known."""
        return self

    def unscaled_norm(self, loss_scale: float) -> float | None:
        """The norm of the gradients themselves; inf where one is not finite, None where it was not computed."""
        if not self.finite:
            return math.inf
        return None if math.isnan(self.norm) else self.norm / loss_scale


@dataclass(frozen=True)
class FactorRule:
    """What the gradients of one step are multiplied by: unscaling and clipping in one factor.

    Attributes:
        loss_scale: of the step's backwards.
        clipping: the largest norm of the unscaled gradients; 0 for any.
        most: an upper bound of the clipping factor, set by the program.
        skips_overflow: a step with gradients that are not finite is skipped.
    """

    loss_scale: float
    clipping: float = 0.0
    most: float = 1.0
    skips_overflow: bool = True

    def factor(self, stats: GradStats) -> float | None:
        """The factor of gradients with these statistics; None where the step is skipped.

        Example:
            >>> FactorRule(loss_scale=2.0, clipping=1.0).factor(GradStats(True, 8.0, True, True))
            0.12499996875000781
        """
        if self.skips_overflow and not stats.finite:
            return None
        norm = stats.unscaled_norm(self.loss_scale)
        clip = 1.0 if norm is None else clip_factor(norm, self.clipping)
        return min(clip, self.most) / self.loss_scale


class GradCheck(Protocol):
    """The statistics of one step's gradients: known, or still on the device."""

    def read(self) -> GradStats:
        """The statistics; the host waits for the device if it has not read them yet."""


class DeviceStats:
    """A `GradCheck` on the device, where the update reads its outcome. See [Note: boundary].

    Args:
        facts: (6,) float64 of all ranks: the largest magnitude, the two digests as (largest, -smallest), and `stop`.
        sums: (2,) int64 of all ranks, as `square_sums`; None where no norm was asked for.
    """

    def __init__(self, facts: Tensor, sums: Tensor | None) -> None:
        self._facts = facts
        self._sums = sums
        self._host: Tensor | None = None
        self._event: torch.Event | None = None
        self._stats: GradStats | None = None

    def control(self, rule: FactorRule) -> Tensor:
        """(2,) float32 on the device: the factor of `rule`, and 1 where the update applies, else 0.

        Where the ranks differ no update applies either. Also starts to copy the statistics to the host.
        """
        control = torch.empty(2, dtype=torch.float32, device=self._facts.device)
        summary = torch.empty(5, dtype=torch.float64, device=self._facts.device)
        finalize(
            self._facts,
            self._sums,
            scale=rule.loss_scale,
            clipping=rule.clipping,
            grad_factor=rule.most,
            skip_overflow=rule.skips_overflow,
            control=control,
            summary=summary,
        )
        if self._stats is None:
            self._copy(summary)
        return control

    def _copy(self, summary: Tensor) -> None:
        # Before the update in the order of the stream, so that the host waits for the norm only, not for the update.
        if summary.device.type == "cpu":
            self._host = summary
            return
        self._host = torch.empty(5, dtype=torch.float64, pin_memory=True)
        self._host.copy_(summary, non_blocking=True)
        self._event = torch.get_device_module(summary.device).Event()
        self._event.record()

    def read(self) -> GradStats:
        if self._stats is None:
            if self._host is None:
                self.control(FactorRule(1.0))
            assert self._host is not None, "the statistics were not copied"
            if self._event is not None:
                self._event.synchronize()
            finite, norm, *flags = self._host.tolist()
            self._stats = GradStats(bool(finite), norm, *map(bool, flags))
        return self._stats

    @property
    def was_read(self) -> bool:
        """Whether the host has the statistics."""
        return self._stats is not None

    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        if self._stats is not None:
            return True
        return self._host is not None and (self._event is None or self._event.query())


@dataclass(frozen=True)
class RankDigests:
    """What a rank tells the others at a step: digests below 2^52, which a float64 has exactly, and whether to stop.

    Attributes:
        history: of the collectives that this rank has issued.
        settings: of its optimizer's hyperparameters.
        stop: it was asked to stop.
    """

    history: int
    settings: int
    stop: bool = False


def join_facts_on_host(
    shards: Sequence[Tensor], digests: RankDigests, collectives: Collectives, device: torch.device
) -> Tensor:
    """(6,) float64 in host memory, of all ranks: as `step_control.write_facts`. One small all-reduce.

    In a pipeline two: histories are compared within its stages, which issue collectives of their own.

    Args:
        shards: the mean gradients of this rank's own elements, in host memory, any float dtype, any number.
        device: that the ranks compute on, and by which the facts travel.
    """
    # One collective carries four answers: an overflow anywhere, two digests as (value, -value), so that one maximum
    # shows the largest and the smallest of each, and a stop anywhere.
    largest = max((max_abs(shard) for shard in shards), default=0.0)
    values = [largest, digests.history, -digests.history, digests.settings, -digests.settings, digests.stop]
    facts = torch.tensor(values, dtype=torch.float64)
    if collectives.peers is not collectives.job:
        _all_reduce(facts, "max", FACTS_LABEL, collectives.peers, device)
        _outcome_of_histories(facts)
    _all_reduce(facts, "max", FACTS_LABEL, collectives.job, device)
    return facts


def _outcome_of_histories(facts: Tensor) -> None:
    """Replaces two digests, as (largest, -smallest), by whether they differ: what ranks elsewhere can compare."""
    facts[1] = facts[1] != -facts[2]
    facts[2].zero_()  # an assignment of a number would be a copy that the host waits for


def join_facts_on_device(largest: Tensor, digests: RankDigests, collectives: Collectives) -> Tensor:
    """The same on the device, without waiting for it.

    Args:
        largest: (1,) int32, of `max_abs_into` over this rank's gradients.
    """
    facts = torch.empty(6, dtype=torch.float64, device=largest.device)
    write_facts(largest, digests.history, digests.settings, digests.stop, facts)
    if collectives.peers is not collectives.job:
        collectives.peers.all_reduce_on_device(facts, "max", FACTS_LABEL)
        _outcome_of_histories(facts)
    collectives.job.all_reduce_on_device(facts, "max", FACTS_LABEL)
    return facts


def stats_on_host(
    facts: Tensor, counted: Sequence[Tensor], collectives: Collectives, device: torch.device, *, norm: bool
) -> GradStats:
    """The statistics of gradients in host memory; with a norm, one more small all-reduce.

    Args:
        facts: of all ranks, in host memory.
        counted: the shards that enter the norm: replicated gradients are counted on one of their ranks only.
        device: that the ranks compute on, and by which the sums travel.
        norm: whether to compute the norm too.
    """
    largest, latest, earliest, highest, lowest, stop = facts.tolist()
    same_history, same_settings, stop = latest == -earliest, highest == -lowest, bool(stop)
    finite = math.isfinite(largest)
    if not (finite and same_history and same_settings and norm):
        return GradStats(finite, math.nan, same_history, same_settings, stop)
    if largest == 0.0:
        return GradStats(True, 0.0, same_history, same_settings, stop)
    # Every rank scales by the power of two above the global maximum, so no square overflows its 50 bits.
    exponent = norm_exponent(largest)
    sums = torch.zeros(2, dtype=torch.int64)
    for shard in counted:
        sums += torch.tensor(square_sums(shard, exponent), dtype=torch.int64)
    _all_reduce(sums, "sum", NORM_LABEL, collectives.job, device)
    return GradStats(True, norm_from(int(sums[0]), int(sums[1]), exponent), same_history, same_settings, stop)


def _all_reduce(
    values: Tensor, op: Literal["sum", "max"], label: str, collectives: Collectives, device: torch.device
) -> None:
    """An all-reduce of a few values in host memory, of which no sum depends on the order."""
    if device.type == "cpu" or collectives.world_size == 1:
        collectives.all_reduce(values, op, label)
        return
    # By the device's own links: the host waits for it once, instead of for messages between all pairs of ranks.
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    joined = pinned.to(device, non_blocking=True)
    collectives.all_reduce_on_device(joined, op, label)
    values.copy_(torch.tensor(read_values(joined), dtype=values.dtype))


def check_on_device(
    shards: Sequence[Tensor],
    counted: Sequence[Tensor],
    collectives: Collectives,
    *,
    device: torch.device,
    digests: RankDigests,
    norm: bool,
) -> DeviceStats:
    """The statistics of gradients on `device`, without waiting for it: the bits of those in host memory.

    Two small all-reduces on the device; the second adds nothing that matters where the first found a difference.
    Arguments as for `join_facts_on_host` and `stats_on_host`.
    """
    largest = torch.zeros(1, dtype=torch.int32, device=device)
    for shard in shards:
        max_abs_into(shard, largest)
    facts = join_facts_on_device(largest, digests, collectives)
    if not norm:
        return DeviceStats(facts, None)
    largest_of_facts(facts, largest)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for shard in counted:
        square_sums_into(shard, largest, sums)
    collectives.job.all_reduce_on_device(sums, "sum", NORM_LABEL)
    return DeviceStats(facts, sums)


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that reduces gradients of this norm to `max_norm`, at most 1; 1 when `max_norm` is 0 (off).

    Example:
        >>> round(clip_factor(norm=4.0, max_norm=1.0), 3)
        0.25
        >>> clip_factor(norm=0.5, max_norm=1.0)
        1.0
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))  # the 1e-6 of torch.nn.utils.clip_grad_norm_
