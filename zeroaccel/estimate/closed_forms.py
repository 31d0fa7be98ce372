"""Estimates many workloads of one model from a few simulations, by closed forms in tokens, sequence and ranks.

[Note: closed forms] If nothing else changes, a step with another batch or sequence runs the same operations on tensors
that grow with the tokens of a micro-step or, like tables of positions, with the sequence, and with another number of
ranks on shards of 1 / ranks. So the memory at every moment, every shard and all sent bytes are
a + b * tokens + c * sequence + d / ranks. Four simulations give a to d; another one, elsewhere in batch and ranks, must
agree at every moment to `_TOLERANCE` of the peak. Otherwise memory grows in another way (stored attention scores, a
single rank without shards), and every workload is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

import numpy as np
from numpy.typing import NDArray

from zeroaccel.estimate.extrapolate import MemoryTrace, Moment, changes_of, extrapolate_depth
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
            alike = [other for other in self._workloads if _family(other) == _family(workload)]
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
    corners = _corners(workloads)
    check = next((workload for workload in workloads if corners and _is_away(workload, corners)), None)
    if check is None or len(workloads) <= len(corners) + 1:
        return None
    low = corners[0]

    def run(workload: Workload, length: int) -> MemoryTrace:
        (trace,), _ = short_traces(subject, workload, kind, lengths=(length,), every_operation=True)
        return _comparable(trace)

    _, more = short_traces(subject, low, kind, lengths=(0,), every_operation=True)
    at_lengths = []
    for length in (0, 1) if more else (0,):
        is_last = length == 1 or not more
        traces = _aligned([run(place, length) for place in (*corners, *([check] if is_last else []))])
        form = _FittedTrace.through(corners, traces[: len(corners)]) if traces else None
        if form is None or (is_last and not form.agrees(check, traces[-1])):
            return None
        at_lengths.append(_changes(traces[: len(corners)]))
    if not more:
        return _FittedTrace.through(corners, at_lengths[0])
    # One corner also runs the third length, to check that memory grows evenly over depth: the lowest, whose traces
    # exist if it was estimated before, or the highest. Its own memory must change wherever that of any corner does.
    for place in (low, corners[2]):
        lengths = [changes_of(run(place, length)) for length in (0, 1)]
        if all(len(same.moments) == len(traces[0].moments) for same, traces in zip(lengths, at_lengths, strict=True)):
            lengths.append(changes_of(run(place, 2)))
            return _FittedTrace.through(
                corners, [extrapolate_depth(lengths, more, shorter) for shorter in zip(*at_lengths, strict=True)]
            )
    # At some moments only the memory of other corners changes, so all need the third length.
    longest = _aligned([run(place, 2) for place in corners])
    if not longest:
        return None
    at_lengths.append(_changes(longest))
    return _FittedTrace.through(corners, [extrapolate_depth(traces, more) for traces in zip(*at_lengths, strict=True)])


def _comparable(trace: MemoryTrace) -> MemoryTrace:
    """Drops moments of operations without memory, and reduces each update to its highest moment.

    Whether padding is set to zero depends on the number of ranks, and at stage 0 an update has operations for each.
    """
    named = [pair for pair in zip(trace.moments, trace.operations, strict=True) if pair[1] is not None]
    pairs = [
        pair
        for phase, group in groupby(named, lambda pair: pair[0].phase)
        for pair in (
            [(max((moment for moment, _ in group), key=lambda moment: moment.total), "update")]
            if PHASES[phase % len(PHASES)] == "step"
            else group
        )
    ]
    return replace(trace, moments=tuple(moment for moment, _ in pairs), operations=tuple(name for _, name in pairs))


def _aligned(traces: Sequence[MemoryTrace]) -> list[MemoryTrace]:
    """Reduces traces to the operations that all have; [] if another operation may add to the peak.

    Some operations depend on the workload: a single sample's labels are contiguous without a copy, and padding depends
    on the number of ranks. These may be omitted if a common operation next to them has the same memory to `_TOLERANCE`.
    """
    names = [list(zip((moment.phase for moment in trace.moments), trace.operations, strict=True)) for trace in traces]
    common = names[0]
    for other in names[1:]:
        common = [common[index] for index, _ in _pairs(common, other)]
    reduced = []
    for trace, steps in zip(traces, names, strict=True):
        places = [index for _, index in _pairs(common, steps)]
        if len(places) != len(common) or not _omits_no_peak(trace, places):
            return []
        moments, operations = zip(*((trace.moments[at], trace.operations[at]) for at in places), strict=True)
        reduced.append(replace(trace, moments=moments, operations=operations))
    return reduced


def _pairs(first: Sequence[object], second: Sequence[object]) -> list[tuple[int, int]]:
    """Returns the indices of the common items of two sequences, in order; [] if too many in a row differ."""
    pairs, index, other = [], 0, 0
    while index < len(first) and other < len(second):
        if first[index] == second[other]:
            pairs.append((index, other))
            index, other = index + 1, other + 1
            continue
        skips = ((skipped - more, more) for skipped in range(1, _MOST_SKIPPED + 1) for more in range(skipped + 1))
        for in_first, in_second in skips:
            here, there = (
                items[at : at + _SAME_AGAIN] for items, at in ((first, index + in_first), (second, other + in_second))
            )
            if here and here == there:
                index, other = index + in_first, other + in_second
                break
        else:
            return []
    return pairs


_MOST_SKIPPED, _SAME_AGAIN = 16, 6  # operations that only one trace has; equal ones that must follow


def _omits_no_peak(trace: MemoryTrace, places: Sequence[int]) -> bool:
    totals = [moment.total for moment in trace.moments]
    most = _TOLERANCE * max(totals)
    for before, after in zip([-1, *places], [*places, len(totals)], strict=True):
        neighbours = [totals[at] for at in (before, after) if 0 <= at < len(totals)]
        if max(totals[before + 1 : after], default=0) > max(neighbours, default=0) + most:
            return False
    return True


def _changes(traces: Sequence[MemoryTrace]) -> list[MemoryTrace]:
    """Drops moments at which no trace changes from traces of the same operations."""
    rows = list(zip(*(trace.moments for trace in traces), strict=True))
    changed = [
        row
        for before, row in zip([None, *rows], rows, strict=False)
        if before is None
        or any((old.phase, old.total) != (new.phase, new.total) for old, new in zip(before, row, strict=True))
    ]
    return [
        replace(trace, moments=moments, operations=())
        for trace, moments in zip(traces, zip(*changed, strict=True), strict=True)
    ]


def _corners(workloads: Sequence[Workload]) -> list[Workload]:
    """Returns the lowest workload, one with longer sequences, one with larger batches too, and one with more ranks.

    Returns [] if the workloads do not include these, or differ in batch or ranks only.
    """
    low, high = (choose(workloads, key=lambda workload: (workload.tokens, workload.ranks)) for choose in (min, max))
    places = (
        (low.batch, low.sequence, low.ranks),
        (low.batch, high.sequence, low.ranks),
        (high.batch, high.sequence, low.ranks),
        (low.batch, low.sequence, high.ranks),
    )
    at = {(workload.batch, workload.sequence, workload.ranks): workload for workload in workloads}
    return [at[place] for place in places] if len(set(places)) == 4 and at.keys() >= set(places) else []


def _is_away(case: Workload, corners: Sequence[Workload]) -> bool:
    """Returns True for a workload with the sequence of the lowest corner, but other batches and ranks than it."""
    low, _, high, more_ranks = corners
    return case.batch == high.batch and case.sequence == low.sequence and low.ranks < case.ranks < more_ranks.ranks


@dataclass(frozen=True)
class _FittedTrace:
    """Closed form for the traces of all workloads in a family.

    Attributes:
        like: one of the traces, for the structure that all share.
        place: see `_place`.
        values: all numbers of that trace, as one row.
        slopes: slopes of these numbers, per unit of each number of the place.
    """

    like: MemoryTrace
    place: _Row
    values: _Row
    slopes: _Row

    @classmethod
    def through(cls, corners: Sequence[Workload], traces: Sequence[MemoryTrace | None]) -> _FittedTrace | None:
        """Fits the form to traces of the corners; returns None if their steps differ."""
        found = [trace for trace in traces if trace is not None]
        if len(found) < len(corners) or any(_pattern(trace) != _pattern(found[0]) for trace in found):
            return None
        places, (low, longer, high, more_ranks) = [_place(item) for item in corners], [_row(item) for item in found]
        # One slope after another, so that amounts that are equal at all corners have slopes of exactly zero.
        by_token = (high - longer) / (places[2] - places[1])[0]
        tokens, sequence, _ = places[1] - places[0]
        by_position = (longer - low - tokens * by_token) / sequence
        by_share = (more_ranks - low) / (places[3] - places[0])[2]
        return cls(found[0], places[0], low, np.stack([by_token, by_position, by_share]))

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
            (round(real), nbytes // max(was, 1)) for real, (was, nbytes) in zip(numels, self.like.shards, strict=True)
        ]
        # A shard has whole elements; the unsharded memory does not depend on this rounding.
        off = round(sum((numel - real) * itemsize for real, (numel, itemsize) in zip(numels, shards, strict=True)))
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
        at: _Row = self.values + (_place(workload) - self.place) @ self.slopes
        return at


def _place(workload: Workload) -> _Row:
    return np.array([workload.tokens, workload.sequence, 1 / workload.shard_ranks], dtype=np.float64)


def _row(trace: MemoryTrace) -> _Row:
    """Returns all numbers of a trace as one row."""
    numels = [numel for numel, _ in trace.shards]
    return np.array([*chain(*trace.moments), *numels, *trace.trained, *trace.sent], dtype=np.float64)


def _pattern(trace: MemoryTrace) -> tuple[object, ...]:
    """Returns the structure that traces of the same step share."""
    phases = tuple(moment.phase for moment in trace.moments)
    return trace.numel, phases, len(trace.shards), len(trace.trained), len(trace.sent)
