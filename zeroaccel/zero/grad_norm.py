"""Norm, overflow check, comparison of the ranks and the resulting gradient factor, at the boundary of a step.

A floating-point sum depends on its order, so squares are summed as integers (`ops/reductions.py`): the norm, and with
it the clipping, has the same bits for every layout, world size, stage and device.

[Note: boundary] If the optimizer steps in host memory, the host computes the norm and knows the factor before the
update (`stats_on_host`), mostly from sums of the time when gradients arrived (`grad_reducer.py`); also if some masters
and their gradients stay on the device. If all stay on an accelerator, the host would have to wait twice for all pending
work of the device. There everything stays on the device (`check_on_device`): the norm, the agreement of the ranks, the
factor, and the decision to skip the step, which the update's kernels read from memory. The host launches all of it,
then the update, and reads the outcome once, later, while the update runs; or never, if nothing on the host depends on
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Collectives
from zeroaccel.ops.device_values import read_values
from zeroaccel.ops.reductions import max_abs, max_abs_into, norm_exponent, norm_from, square_sums_into
from zeroaccel.ops.step_control import finalize, largest_of_facts, write_facts

FACTS_LABEL, NORM_LABEL = "gradient overflow check", "gradient norm"  # names of the collectives in hang messages


@dataclass(frozen=True)
class GradStats:
    """Norm and checks of one step's gradients, equal on all ranks.

    Attributes:
        finite: True if no rank has an infinity or NaN.
        norm: the global L2 norm, still multiplied by the loss scale; NaN if not computed or not finite.
        same_history: True if every rank issued the same collectives since the start.
        same_settings: True if every rank's optimizer has the same hyperparameters.
        stop: True if a rank was asked to stop before it joined this step.
        same_order: True if every rank launched its gathers and reductions in one order.
        norms: the norm of each gradient, in the order of `counted`, if asked for.
    """

    finite: bool
    norm: float
    same_history: bool
    same_settings: bool
    stop: bool = False
    same_order: bool = True
    norms: tuple[float, ...] = ()

    def read(self) -> GradStats:
        """Returns itself, to satisfy `GradCheck`."""
        return self

    def read_norms(self) -> tuple[float, ...]:
        """Returns `norms`, to satisfy `GradCheck`."""
        return self.norms

    def unscaled_norm(self, loss_scale: float) -> float | None:
        """Returns the norm of the unscaled gradients; inf if one is not finite, None if the norm was not computed."""
        if not self.finite:
            return math.inf
        return None if math.isnan(self.norm) else self.norm / loss_scale


@dataclass(frozen=True)
class FactorRule:
    """The rule for the factor that multiplies a step's gradients: unscaling and clipping in one.

    Attributes:
        loss_scale: loss scale of the step's backwards.
        clipping: the largest norm of the unscaled gradients; 0 disables clipping.
        most: an upper bound of the clipping factor, set by the program.
        skips_overflow: skip a step with gradients that are not finite.
    """

    loss_scale: float
    clipping: float = 0.0
    most: float = 1.0
    skips_overflow: bool = True

    @property
    def unclipped(self) -> float:
        """The factor if the step is neither skipped nor clipped."""
        return min(1.0, self.most) / self.loss_scale

    def factor(self, stats: GradStats) -> float | None:
        """Returns the factor for gradients with these statistics; None if the step is skipped.

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
    """The statistics of one step's gradients, known or still on the device."""

    def read(self) -> GradStats:
        """Returns the statistics; the host waits for the device if it has not read them yet."""

    def read_norms(self) -> tuple[float, ...]:
        """Returns the norm of each gradient, still multiplied by the loss scale, if it was asked for; may wait."""


class DeviceStats:
    """A `GradCheck` on the device, where the update reads its outcome. See [Note: boundary].

    Args:
        facts: (6,) float64 over all ranks: the largest magnitude, the two digests as (largest, -smallest), and `stop`.
        sums: (2,) int64 over all ranks, from `square_sums`; None if no norm is needed.
        rows: (N, 2) int64, the same for each gradient, if asked for.
    """

    def __init__(self, facts: Tensor, sums: Tensor | None, rows: Tensor | None = None) -> None:
        self._facts = facts
        self._sums = sums
        self._rows = rows
        self._host: Tensor | None = None
        self._event: torch.Event | None = None
        self._stats: GradStats | None = None

    def control(self, rule: FactorRule) -> Tensor:
        """Returns (2,) float32 on the device: the factor of `rule`, and 1 if the update applies, else 0.

        The update does not apply either if the ranks differ. This also starts the copy of the statistics to the host.
        """
        control = torch.empty(2, dtype=torch.float32, device=self._facts.device)
        summary = torch.empty(6, dtype=torch.float64, device=self._facts.device)
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
        # Queued before the update on the stream, so that the host waits for the norm only, not for the update.
        if summary.device.type == "cpu":
            self._host = summary
            return
        self._host = torch.empty(6, dtype=torch.float64, pin_memory=True)
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
            finite, norm, history, settings, stop, order = self._host.tolist()
            self._stats = GradStats(bool(finite), norm, bool(history), bool(settings), bool(stop), bool(order))
        return self._stats

    def read_norms(self) -> tuple[float, ...]:
        if self._rows is None or not self.read().finite:
            return ()
        return _norms(self._rows.cpu(), norm_exponent(float(self._facts[0])))

    @property
    def was_read(self) -> bool:
        """True if the host has the statistics."""
        return self._stats is not None

    def is_ready(self) -> bool:
        """Returns True if `read` would not wait."""
        if self._stats is not None:
            return True
        return self._host is not None and (self._event is None or self._event.query())


@dataclass(frozen=True)
class RankDigests:
    """The facts that a rank sends to the others at a step; digests are below 2^52, which float64 holds exactly.

    Attributes:
        history: digest of the collectives that this rank has issued.
        settings: digest of its optimizer's hyperparameters.
        stop: True if this rank was asked to stop.
        order: digest of the order of its gathers and reductions.
    """

    history: int
    settings: int
    stop: bool = False
    order: int = 0


def join_facts_on_host(
    largest: float,
    digests: RankDigests,
    collectives: Collectives,
    device: torch.device,
    resident: Sequence[Tensor] = (),
) -> Tensor:
    """Returns the facts of all ranks, (8,) float64 in host memory, as `step_control.write_facts`.

    Needs one small all-reduce, or two in a pipeline: histories are compared within a stage, since each stage issues its
    own collectives.

    Args:
        largest: magnitude of this rank's own elements of the mean gradients in host memory; inf if one is not finite.
        resident: shards of those on the device that no pass has examined.
        device: compute device of the ranks, over which the facts travel.
    """
    # One collective answers five questions: an overflow anywhere, three digests as (value, -value), so that one maximum
    # gives the largest and the smallest of each, and a stop request anywhere.
    if resident:
        found = torch.zeros(1, dtype=torch.int32, device=device)
        for shard in resident:
            max_abs_into(shard, found)
        largest = max(largest, max_abs(found.view(torch.float32)))  # a NaN counts as inf
    history, settings, order = digests.history, digests.settings, digests.order
    values = [largest, history, -history, settings, -settings, digests.stop, order, -order]
    facts = torch.tensor(values, dtype=torch.float64)
    if collectives.peers is not collectives.job:
        _all_reduce(facts, "max", FACTS_LABEL, collectives.peers, device)
        _outcome_of_histories(facts)
    _all_reduce(facts, "max", FACTS_LABEL, collectives.job, device)
    return facts


def _outcome_of_histories(facts: Tensor) -> None:
    """Replaces digests, as (largest, -smallest), by whether they differ, which ranks of other stages can compare."""
    for digest, negative in ((1, 2), (6, 7)):  # history, order
        facts[digest] = facts[digest] != -facts[negative]
        facts[negative].zero_()  # the assignment of a number would be a copy, for which the host waits


def join_facts_on_device(largest: Tensor, digests: RankDigests, collectives: Collectives) -> Tensor:
    """Does the same as `join_facts_on_host` on the device, without waiting for it.

    Args:
        largest: (1,) int32, from `max_abs_into` over this rank's gradients.
    """
    facts = torch.empty(8, dtype=torch.float64, device=largest.device)
    write_facts(largest, digests.history, digests.settings, digests.stop, digests.order, facts)
    if collectives.peers is not collectives.job:
        collectives.peers.all_reduce_on_device(facts, "max", FACTS_LABEL)
        _outcome_of_histories(facts)
    collectives.job.all_reduce_on_device(facts, "max", FACTS_LABEL)
    return facts


def stats_on_host(
    facts: Tensor,
    counted: Sequence[Callable[[int], tuple[int, int]] | None],
    collectives: Collectives,
    device: torch.device,
    *,
    norm: bool,
    norms: bool = False,
    resident: Mapping[int, Tensor] = MappingProxyType({}),
) -> GradStats:
    """Returns the statistics of gradients in host memory, some perhaps on the device; a norm needs an all-reduce more.

    Args:
        facts: the facts of all ranks, in host memory.
        counted: for each shard that enters the norm, its `square_sums` by exponent; None for one that counts on another
            rank, which holds the same, and for those of `resident`.
        device: compute device of the ranks, over which the sums travel.
        norm: compute the norm too.
        norms: compute the norm of each gradient too; all ranks have the same number of them.
        resident: place in `counted` -> shard on the device that no pass has examined.
    """
    largest, latest, earliest, highest, lowest, stop, last, first = facts.tolist()
    same_history, same_settings = latest == -earliest, highest == -lowest
    agreed = same_history, same_settings, bool(stop), last == -first
    finite = math.isfinite(largest)
    if not (finite and same_history and same_settings and norm):
        return GradStats(finite, math.nan, *agreed)
    if largest == 0.0:
        return GradStats(True, 0.0, *agreed)
    # Every rank scales by the power of two above the global maximum, so no square exceeds its 50 bits.
    exponent = norm_exponent(largest)
    rows = torch.zeros(len(counted) if norms else 1, 2, dtype=torch.int64)
    if resident:  # the device adds while the host does
        below = torch.full((1,), math.ldexp(0.5, exponent), dtype=torch.float32, device=device).view(torch.int32)
        added = torch.zeros_like(rows, device=device)
        for index, shard in resident.items():
            square_sums_into(shard, below, added[index if norms else 0])
    for index, square_sums in enumerate(counted):
        if square_sums is not None:
            rows[index if norms else 0] += torch.tensor(square_sums(exponent), dtype=torch.int64)
    if resident:
        rows += torch.tensor(read_values(added), dtype=torch.int64).view(rows.shape)
    _all_reduce(rows.view(-1), "sum", NORM_LABEL, collectives.job, device)
    high, low = rows.sum(0).tolist()
    each = _norms(rows, exponent) if norms else ()
    return GradStats(True, norm_from(high, low, exponent), *agreed, norms=each)


def _norms(rows: Tensor, exponent: int) -> tuple[float, ...]:
    return tuple(norm_from(high, low, exponent) for high, low in rows.tolist())


def _all_reduce(
    values: Tensor, op: Literal["sum", "max"], label: str, collectives: Collectives, device: torch.device
) -> None:
    """All-reduces a few values in host memory, whose sums do not depend on the order."""
    if device.type == "cpu" or collectives.world_size == 1:
        collectives.all_reduce(values, op, label)
        return
    # Over the device's links: the host waits once, instead of for messages between all pairs of ranks.
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    joined = pinned.to(device, non_blocking=True)
    collectives.all_reduce_on_device(joined, op, label)
    values.copy_(torch.tensor(read_values(joined), dtype=values.dtype))


def check_on_device(
    shards: Sequence[Tensor],
    counted: Sequence[Tensor | None],
    collectives: Collectives,
    *,
    device: torch.device,
    digests: RankDigests,
    norm: bool,
    norms: bool = False,
) -> DeviceStats:
    """Computes the statistics of gradients on `device`, without waiting, with the same bits as in host memory.

    It issues two small all-reduces on the device; the second has no effect if the first found a difference.

    Args:
        shards: the mean gradients of this rank's own elements, any float dtype, any number.
        counted: those that enter the norm; None for one that counts on another rank, which holds the same.
        norm, norms: see `stats_on_host`.
    """
    largest = torch.zeros(1, dtype=torch.int32, device=device)
    for shard in shards:
        max_abs_into(shard, largest)
    facts = join_facts_on_device(largest, digests, collectives)
    if not norm:
        return DeviceStats(facts, None)
    largest_of_facts(facts, largest)
    rows = torch.zeros(len(counted) if norms else 1, 2, dtype=torch.int64, device=device)
    for index, flat in enumerate(counted):
        if flat is not None:
            square_sums_into(flat, largest, rows[index if norms else 0])
    collectives.job.all_reduce_on_device(rows.view(-1), "sum", NORM_LABEL)
    return DeviceStats(facts, rows.sum(0), rows) if norms else DeviceStats(facts, rows[0])


def clip_factor(norm: float, max_norm: float) -> float:
    """Returns the factor that reduces gradients of this norm to `max_norm`, at most 1; 1 if `max_norm` is 0 (off).

    Example:
        >>> round(clip_factor(norm=4.0, max_norm=1.0), 3)
        0.25
        >>> clip_factor(norm=0.5, max_norm=1.0)
        1.0
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))  # 1e-6 as in torch.nn.utils.clip_grad_norm_
