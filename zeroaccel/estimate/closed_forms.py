"""Estimates many workloads of one model from a few simulations, by closed forms in tokens and ranks.

[Note: closed forms] If nothing else changes, a step with another batch or sequence runs the same operations on tensors
that grow with the tokens of a micro-step, and with another number of ranks on shards of 1 / ranks. So the memory at
every moment, every shard and all sent bytes are a + b * tokens + c / ranks. Three simulations give a, b and c; two
others, elsewhere on both axes, must agree at every moment to `_TOLERANCE` of the peak. Otherwise memory grows in
another way (stored attention scores, position tables, a single rank without shards), and every workload is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

import numpy as np
from numpy.typing import NDArray

from zeroaccel.estimate.extrapolate import MemoryTrace, Moment, extrapolate_depth
from zeroaccel.estimate.mesh_parts import PHASES
from zeroaccel.estimate.simulate import Simulated, StepKind, short_traces, simulate, simulated
from zeroaccel.estimate.subject import Subject
from zeroaccel.estimate.workload import Workload

_TOLERANCE = 1e-4
_Row = NDArray[np.float64]


class ClosedForms:
    """Replaces `simulate` for a set of workloads that the caller knows beforehand.

    Args:
        workloads: workloads of one model that differ only in ranks, batch, sequence and checkpointing.

    Attributes:
        simulated: workloads without a closed form.
    """

    def __init__(self, workloads: Sequence[Workload]) -> None:
        self._workloads = workloads
        self._forms: dict[object, _FittedTrace | None] = {}
        self.simulated: set[Workload] = set()

    def __call__(
        self,
        subject: Subject,
        workload: Workload,
        stage: int,
        *,
        on_cpu: bool = False,
        offloads_params: bool = False,
        pipeline_stage: int = 0,
    ) -> Simulated:
        """Estimates one workload; same arguments and result as `simulate`."""
        kind = StepKind(stage, on_cpu, offloads_params, pipeline_stage)
        key = kind, _family(workload)
        if key not in self._forms:
            alike = [one for one in self._workloads if _family(one) == _family(workload)]
            self._forms[key] = _fit(subject, alike, kind)
        form = self._forms[key]
        if form is not None:
            return simulated(form.trace(workload), workload, pipeline_stage)
        self.simulated.add(workload)
        return simulate(subject, workload, **kind._asdict())


def _family(workload: Workload) -> tuple[bool, int]:
    """Returns the part of a workload that all workloads of a closed form share.

    One rank, and one rank per expert, are families of their own, because these do not shard their parameters.
    """
    return workload.checkpointing, min(workload.shard_ranks, 2) + (workload.shard_ranks == workload.ep > 1)


def _fit(subject: Subject, workloads: Sequence[Workload], kind: StepKind) -> _FittedTrace | None:
    """Fits the closed form; returns None if it would save no simulation, or if memory grows in another way."""
    low, high = (choose(workloads, key=lambda one: (one.tokens, one.ranks)) for choose in (min, max))
    more_tokens = next(one for one in workloads if (one.tokens, one.ranks) == (high.tokens, low.ranks))
    more_ranks = next(one for one in workloads if (one.tokens, one.ranks) == (low.tokens, high.ranks))
    corners = low, more_tokens, more_ranks
    checks = _checks(workloads, corners)
    if len(checks) < 2 or len(workloads) <= len(corners) + len(checks):
        return None

    def run(one: Workload, lengths: Sequence[int]) -> tuple[list[MemoryTrace], int]:
        traces, more = short_traces(subject, one, kind, lengths=lengths, every_operation=True)
        return [_with_short_updates(trace) for trace in traces], more

    # One corner also runs the third length, to check that memory grows evenly over depth; the second check tests this
    # for the others.
    full, more = run(more_tokens, (0, 1, 2))
    runs = [run(low, (0, 1))[0], full, run(more_ranks, (0, 1))[0]]
    for length, one in enumerate(checks):
        (found,), _ = run(one, (length,))
        form = _FittedTrace.through(corners, [traces[length if more else 0] for traces in runs])
        if form is None or not form.agrees(one, found):
            return None
    at_lengths = [_changes(traces) for traces in zip(*runs, strict=False)]
    if not more:
        return _FittedTrace.through(corners, at_lengths[0])
    lengths = [_changes([trace])[0] for trace in full]
    if all(len(one.moments) == len(traces[0].moments) for one, traces in zip(lengths, at_lengths, strict=False)):
        return _FittedTrace.through(
            corners, [extrapolate_depth(lengths, more, shorter) for shorter in zip(*at_lengths, strict=True)]
        )
    # At some moments only the memory of other corners changes, so these need the third length too.
    at_lengths.append(_changes([run(low, (2,))[0][0], full[2], run(more_ranks, (2,))[0][0]]))
    return _FittedTrace.through(corners, [extrapolate_depth(traces, more) for traces in zip(*at_lengths, strict=True)])


def _with_short_updates(trace: MemoryTrace) -> MemoryTrace:
    """Reduces each update to its highest moment, because at stage 0 an update has operations for each rank."""
    moments = [
        moment
        for phase, group in groupby(trace.moments, lambda moment: moment.phase)
        for moment in ([max(group, key=lambda one: one.total)] if PHASES[phase % len(PHASES)] == "step" else group)
    ]
    return replace(trace, moments=tuple(moments))


def _changes(traces: Sequence[MemoryTrace]) -> list[MemoryTrace]:
    """Drops moments at which no trace changes from traces of the same operations."""
    rows = list(zip(*(trace.moments for trace in traces), strict=True))
    changed = [
        row
        for before, row in zip([None, *rows], rows, strict=False)
        if before is None
        or any((old.phase, old.total) != (new.phase, new.total) for old, new in zip(before, row, strict=True))
    ]
    return [replace(trace, moments=moments) for trace, moments in zip(traces, zip(*changed, strict=True), strict=True)]


def _checks(workloads: Sequence[Workload], corners: Sequence[Workload]) -> list[Workload]:
    """Returns two workloads away from the corners on both axes, with different batch and sequence."""
    low, more_tokens, _ = corners
    away = [one for one in workloads if one.ranks != low.ranks and low.tokens < one.tokens < more_tokens.tokens]
    first = min(away, key=lambda one: one.ranks, default=None)
    others = [one for one in away if first is not None and (one.batch, one.sequence) != (first.batch, first.sequence)]
    second = max(others, key=lambda one: one.ranks, default=None)
    return [one for one in (first, second) if one is not None]


@dataclass(frozen=True)
class _FittedTrace:
    """Closed form for the traces of all workloads in a family.

    Attributes:
        like: one of the traces, for the structure that all share.
        place: its tokens, and 1 / ranks.
        values: all numbers of that trace, as one row.
        slopes: slopes of these numbers, per token and per unit of 1 / ranks.
    """

    like: MemoryTrace
    place: tuple[float, float]
    values: _Row
    slopes: tuple[_Row, _Row]

    @classmethod
    def through(cls, corners: Sequence[Workload], traces: Sequence[MemoryTrace | None]) -> _FittedTrace | None:
        """Fits the form to traces of the lowest workload, of one with more tokens and of one with more ranks.

        Returns None if their steps differ."""
        low, *more = [trace for trace in traces if trace is not None]
        if len(more) < 2 or any(_pattern(trace) != _pattern(low) for trace in more):
            return None
        places, values = [_place(one) for one in corners], _row(low)
        by_token, by_share = (
            (_row(trace) - values) / (places[1 + axis][axis] - places[0][axis]) for axis, trace in enumerate(more)
        )
        return cls(low, places[0], values, (by_token, by_share))

    def agrees(self, workload: Workload, trace: MemoryTrace) -> bool:
        """Returns True if the form equals the simulated trace of a workload at every moment."""
        if _pattern(trace) != _pattern(self.like):
            return False
        off = float(np.abs(self._at(workload) - _row(trace)).max())
        return off <= _TOLERANCE * max(moment.total for moment in trace.moments)

    def trace(self, workload: Workload) -> MemoryTrace:
        """Returns the trace of a workload, reduced to the moment of its peak."""
        row, split = self._at(workload), len(self.like.moments) * len(Moment._fields)
        moments = row[:split].reshape(-1, len(Moment._fields)).round()
        peak = Moment(*map(int, moments[int(moments[:, 1].argmax())].tolist()))
        rest = row[split:].tolist()
        numels = rest[: len(self.like.shards)]
        shards = [
            (round(one), nbytes // max(was, 1)) for one, (was, nbytes) in zip(numels, self.like.shards, strict=True)
        ]
        # A shard has whole elements; the unsharded memory does not depend on this rounding.
        off = round(sum((numel - one) * itemsize for one, (numel, itemsize) in zip(numels, shards, strict=True)))
        trained, sent = (
            rest[len(shards) : len(shards) + len(self.like.trained)],
            rest[len(shards) + len(self.like.trained) :],
        )
        return MemoryTrace(
            self.like.numel,
            (peak._replace(total=peak.total + off, params=peak.params + off),),
            tuple((numel, numel * itemsize) for numel, itemsize in shards),
            tuple(map(round, trained)),
            tuple(map(round, sent)),
        )

    def _at(self, workload: Workload) -> _Row:
        (tokens, share), (tokens_there, share_there), (by_token, by_share) = _place(workload), self.place, self.slopes
        return self.values + (tokens - tokens_there) * by_token + (share - share_there) * by_share


def _place(workload: Workload) -> tuple[float, float]:
    return workload.tokens, 1 / workload.shard_ranks


def _row(trace: MemoryTrace) -> _Row:
    """Returns all numbers of a trace as one row."""
    numels = [numel for numel, _ in trace.shards]
    return np.array([*chain(*trace.moments), *numels, *trace.trained, *trace.sent], dtype=np.float64)


def _pattern(trace: MemoryTrace) -> tuple[object, ...]:
    """Returns the structure that traces of the same step share."""
    phases = tuple(moment.phase for moment in trace.moments)
    return trace.numel, phases, len(trace.shards), len(trace.trained), len(trace.sent)
