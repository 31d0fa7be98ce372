"""The file of a recorded trace, and its analysis: the split of each rank's time, and the largest waits.

The file is JSON in the Trace Event Format, which Perfetto and Chrome open, with an additional key `zeroaccel` beside
the events. All times use one clock, rank 0's, from the beginning of the first recorded step. This module does not need
torch: the command line reads the ranks' files.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from zeroaccel.errors import UsageError

Kind = Literal["phase", "compute", "wait", "flight", "sum", "update", "copy"]
"""Kinds of spans: a phase of the engine; a unit's forward or backward; a rank blocked in a collective; a collective
from its call to its end; adding up received data; an update of masters; a wait for a tier, or a copy."""

SHARES = ("compute", "exposed communication", "sums of gradients", "update", "waits for tiers", "other")
"""The parts of a step's time on the training thread: each moment belongs to one part."""

_SHARE_OF: dict[str, str] = {
    "compute": "compute",
    "wait": "exposed communication",
    "sum": "sums of gradients",
    "update": "update",
    "copy": "waits for tiers",
}


class Span(NamedTuple):
    """One span of one rank.

    Attributes:
        kind: see `Kind`.
        name: name of the unit or the phase, or label of the collective, such as "unshard layers.0".
        lane: "main" for the training thread; otherwise the name of another thread or of a transfer.
        begin, end: in nanoseconds.
        detail: "forward", "backward", "recompute"; for a collective "kind/operation/phase/group".
        serial: number of a collective among those of its kind; 0 for other spans.
    """

    kind: Kind
    name: str
    lane: str
    begin: int
    end: int
    detail: str = ""
    serial: int = 0


@dataclass(frozen=True)
class RankSpans:
    """The recording of one rank.

    Attributes:
        spans: in the order in which they ended.
        steps: (begin, end) of each step, in nanoseconds.
    """

    spans: tuple[Span, ...]
    steps: tuple[tuple[int, int], ...]

    def shifted(self, nanoseconds: int) -> RankSpans:
        """Returns the same spans on a clock that is ahead by this amount."""
        spans = (span._replace(begin=span.begin + nanoseconds, end=span.end + nanoseconds) for span in self.spans)
        return RankSpans(tuple(spans), tuple((begin + nanoseconds, end + nanoseconds) for begin, end in self.steps))


@dataclass(frozen=True)
class TraceFacts:
    """Facts about a recording besides its spans.

    Attributes:
        engine: first line of the engine's `repr`.
        units: names of the units, in model order.
        first_step: number of the first recorded step, from 1.
        clock_errors: maximum error in nanoseconds of each rank's alignment with rank 0.
        one_group: True if all ranks issue every collective, so that a number means the same call on each.
        separates_units: False for a compiled model, whose units have no separate spans.
        on_device: True if times are those of a CUDA device's streams.
    """

    engine: str
    units: tuple[str, ...]
    first_step: int
    clock_errors: tuple[int, ...]
    one_group: bool
    separates_units: bool = True
    on_device: bool = False


class Wait(NamedTuple):
    """A wait in which a rank is blocked in a collective and does not compute, averaged over the steps.

    Attributes:
        label: label of the collective, such as "unshard layers.0".
        operation: operation of the collective, such as "all_gather".
        phase: phase of the engine, such as "forward".
        seconds: seconds per step.
        occurrences: number in all steps.
        last_rank: the rank that issued the longest of them last; None if ranks cannot be compared.
        late_seconds: how long `rank` had already waited then; 0 if every rank had arrived before the wait, which
            then consists of the transfer alone.
    """

    rank: int
    label: str
    operation: str
    phase: str
    seconds: float
    occurrences: int
    last_rank: int | None
    late_seconds: float

    def __str__(self) -> str:
        said = f'{self.seconds * 1e3:.2f} ms per step: rank {self.rank} waits for {self.operation} "{self.label}"'
        said += f" in {self.phase}" if self.phase else ""
        if self.last_rank is None:
            return said
        if not self.late_seconds:
            return f"{said}; every rank had arrived before, so this is the transfer"
        return f"{said}; rank {self.last_rank} arrives last, {self.late_seconds * 1e3:.2f} ms into the longest wait"


@dataclass(frozen=True)
class StepTraceFile:
    """The spans of all ranks on one clock.

    Attributes:
        ranks: recordings by rank.
    """

    facts: TraceFacts
    ranks: tuple[RankSpans, ...]
    _split: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_steps(self) -> int:
        """Number of recorded steps."""
        return len(self.ranks[0].steps)

    def in_step(self, rank: int, step: int) -> list[Span]:
        """Returns a rank's spans in a step (from 0), cut at its ends."""
        begin, end = self.ranks[rank].steps[step]
        return [
            span._replace(begin=max(span.begin, begin), end=min(span.end, end))
            for span in self.ranks[rank].spans
            if span.begin < end and span.end > begin
        ]

    def exposed(self, rank: int, step: int) -> list[Span]:
        """Returns waits of the training thread, without parts in which another thread of the rank updates masters."""
        spans = self.in_step(rank, step)
        busy = [(span.begin, span.end) for span in spans if span.kind == "update" and span.lane != "main"]
        return [
            span._replace(begin=begin, end=end)
            for span in innermost([span for span in spans if span.lane == "main"])
            if span.kind == "wait"
            for begin, end in _without((span.begin, span.end), busy)
        ]

    def split(self, rank: int, step: int) -> dict[str, float]:
        """Returns the seconds of a step by `SHARES`; they add up to the step."""
        if (rank, step) not in self._split:
            totals = dict.fromkeys(SHARES, 0)
            begin, end = self.ranks[rank].steps[step]
            for span in innermost([span for span in self.in_step(rank, step) if span.lane == "main"]):
                share = _SHARE_OF.get(span.kind)
                if share is not None and span.kind != "wait":
                    totals[share] += span.end - span.begin
            totals["exposed communication"] = sum(span.end - span.begin for span in self.exposed(rank, step))
            totals["other"] = end - begin - sum(totals.values())
            self._split[rank, step] = {share: nanoseconds / 1e9 for share, nanoseconds in totals.items()}
        return self._split[rank, step]

    def mean_split(self, rank: int) -> dict[str, float]:
        """Returns the mean of `split` over the steps."""
        of_steps = [self.split(rank, step) for step in range(self.num_steps)]
        return {share: sum(split[share] for split in of_steps) / len(of_steps) for share in SHARES}

    def largest_waits(self, most: int = 3) -> list[Wait]:
        """Returns the costliest waits; those of one rank for one collective of a step are summed. Largest first."""
        issued = self._issued() if self.facts.one_group else {}
        found: dict[tuple[int, str, str, str], list[Span]] = defaultdict(list)
        for rank in range(len(self.ranks)):
            for step in range(self.num_steps):
                for span in self.exposed(rank, step):
                    _, operation, phase, _ = span.detail.split("/", 3)
                    found[rank, span.name, operation, phase].append(span)
        waits = []
        for (rank, label, operation, phase), spans in found.items():
            seconds = sum(span.end - span.begin for span in spans) / 1e9 / self.num_steps
            longest = max(spans, key=lambda span: span.end - span.begin)
            times = issued.get((longest.detail.split("/", 1)[0], longest.serial), {})
            last = max(times, key=lambda rank: times[rank]) if len(times) == len(self.ranks) > 1 else None
            late = 0.0 if last is None else max(0.0, (times[last] - longest.begin) / 1e9)
            waits.append(Wait(rank, label, operation, phase, seconds, len(spans), last, late))
        return sorted(waits, key=lambda wait: -wait.seconds)[:most]

    def _issued(self) -> dict[tuple[str, int], dict[int, int]]:
        """Maps (kind, number) of a collective to the time at which each rank issued it."""
        times: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        for rank, recorded in enumerate(self.ranks):
            for span in recorded.spans:
                if span.kind == "flight":
                    times[span.detail.split("/", 1)[0], span.serial][rank] = span.begin
        return times


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Cuts spans of one thread so that each moment belongs to the innermost one; returns them in order of time.

    Example:
        >>> outer, inner = Span("phase", "forward", "main", 0, 10), Span("compute", "layers.0", "main", 2, 5)
        >>> [(span.name, span.begin, span.end) for span in innermost([outer, inner])]
        [('forward', 0, 2), ('layers.0', 2, 5), ('forward', 5, 10)]
    """
    pieces: list[Span] = []
    stack: list[Span] = []
    now = 0

    def until(moment: int) -> None:
        nonlocal now
        if stack and moment > now:
            pieces.append(stack[-1]._replace(begin=now, end=moment))
        now = max(now, moment)

    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while stack and stack[-1].end <= span.begin:
            until(stack[-1].end)
            stack.pop()
        until(span.begin)
        # Rounding of device times can make spans overlap without nesting: the later one is then cut.
        stack.append(span._replace(end=min(span.end, stack[-1].end)) if stack else span)
        now = max(now, span.begin)
    while stack:
        until(stack[-1].end)
        stack.pop()
    return pieces


def _without(span: tuple[int, int], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the parts of an interval that no other interval covers."""
    parts = [span]
    for begin, end in others:
        cut = [piece for first, last in parts for piece in ((first, min(last, begin)), (max(first, end), last))]
        parts = [(first, last) for first, last in cut if first < last]
    return parts


# -- the file

_STEPS = "steps"
_FLIGHT = "flight"


def trace_events(trace: StepTraceFile) -> Iterator[dict[str, Any]]:
    """Yields the events: a process per rank, a thread per lane; collectives in flight are asynchronous events."""
    origin = min(begin for recorded in trace.ranks for begin, _ in recorded.steps[:1])
    for rank, recorded in enumerate(trace.ranks):
        yield _named("process_name", rank, 0, f"rank {rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        lanes = {lane: number for number, lane in enumerate(_lanes(recorded.spans))}
        for lane, number in lanes.items():
            yield _named("thread_name", rank, number, lane)
        for number, (begin, end) in enumerate(recorded.steps):
            yield _complete(rank, 0, f"step {trace.facts.first_step + number}", "step", begin - origin, end - begin)
        for lane in lanes:
            for span in _nested(span for span in recorded.spans if span.lane == lane and span.kind != _FLIGHT):
                event = _complete(rank, lanes[lane], span.name, span.kind, span.begin - origin, span.end - span.begin)
                event["args"] = {"detail": span.detail, "number": span.serial}
                yield event
        for number, span in enumerate(span for span in recorded.spans if span.kind == _FLIGHT):
            shared = {"name": span.name, "cat": _FLIGHT, "id": f"{rank}.{number}", "pid": rank, "tid": lanes[span.lane]}
            args = {"detail": span.detail, "number": span.serial}
            yield {"ph": "b", "ts": (span.begin - origin) / 1e3, "args": args, **shared}
            yield {"ph": "e", "ts": (span.end - origin) / 1e3, **shared}


def _lanes(spans: Iterable[Span]) -> list[str]:
    found = {span.lane for span in spans}
    return [_STEPS, "main", *sorted(found - {"main"})]


def _named(name: str, rank: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": {"name": text}}


def _complete(rank: int, thread: int, name: str, category: str, begin: int, length: int) -> dict[str, Any]:
    times = {"ts": begin / 1e3, "dur": max(0, length) / 1e3}
    return {"ph": "X", "name": name, "cat": category, **times, "pid": rank, "tid": thread}


def _nested(spans: Iterable[Span]) -> Iterator[Span]:
    """Yields spans in order of time, cut at the end of the enclosing span: viewers need complete events to nest."""
    ends: list[int] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while ends and ends[-1] <= span.begin:
            ends.pop()
        end = min(span.end, ends[-1]) if ends else span.end
        ends.append(end)
        yield span._replace(end=end)


def write_trace(path: Path, trace: StepTraceFile) -> None:
    """Writes the file whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    facts = {name: getattr(trace.facts, name) for name in TraceFacts.__dataclass_fields__}
    content = {"displayTimeUnit": "ms", "zeroaccel": facts, "traceEvents": list(trace_events(trace))}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_trace(path: Path) -> StepTraceFile:
    """Reads a file written by `write_trace`.

    Raises:
        UsageError: there is no such file, or another program wrote it.
    """
    expected, fix = "a trace written by zeroaccel", "zeroaccel trace SCRIPT, or engine.record_trace(...), writes one"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(str(path), expected=expected, got=error.strerror, fix=fix) from None
    except ValueError:
        raise UsageError(str(path), expected=expected, got="no JSON", fix=fix) from None
    if not isinstance(content, dict) or "zeroaccel" not in content:
        raise UsageError(str(path), expected=expected, got="JSON without the key zeroaccel", fix=fix)
    try:
        return _parsed(content)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UsageError(str(path), expected=expected, got=f"a damaged file ({error!r})", fix=fix) from None


def _parsed(content: Mapping[str, Any]) -> StepTraceFile:
    facts = content["zeroaccel"]
    known = TraceFacts(
        engine=str(facts["engine"]),
        units=tuple(map(str, facts["units"])),
        first_step=int(facts["first_step"]),
        clock_errors=tuple(map(int, facts["clock_errors"])),
        one_group=bool(facts["one_group"]),
        separates_units=bool(facts["separates_units"]),
        on_device=bool(facts["on_device"]),
    )
    lanes: dict[tuple[int, int], str] = {}
    spans: dict[int, list[Span]] = defaultdict(list)
    steps: dict[int, list[tuple[int, int]]] = defaultdict(list)
    begun: dict[str, dict[str, Any]] = {}
    for event in content["traceEvents"]:
        rank, phase = event["pid"], event["ph"]
        if phase == "M" and event["name"] == "thread_name":
            lanes[rank, event["tid"]] = event["args"]["name"]
        elif phase == "X":
            begin = round(event["ts"] * 1e3)
            end = begin + round(event["dur"] * 1e3)
            if event["cat"] == "step":
                steps[rank].append((begin, end))
            else:
                spans[rank].append(_span(event, lanes, begin, end))
        elif phase == "b":
            begun[event["id"]] = event
        elif phase == "e":
            begin = begun.pop(event["id"])
            spans[rank].append(_span(begin, lanes, round(begin["ts"] * 1e3), round(event["ts"] * 1e3)))
    ranks = tuple(RankSpans(tuple(spans[rank]), tuple(steps[rank])) for rank in range(len(known.clock_errors)))
    if not ranks or not ranks[0].steps or len({len(rank_spans.steps) for rank_spans in ranks}) > 1:
        raise ValueError("no steps, or different numbers of steps on the ranks")
    return StepTraceFile(known, ranks)


def _span(event: Mapping[str, Any], lanes: Mapping[tuple[int, int], str], begin: int, end: int) -> Span:
    kind = event["cat"]
    if kind not in get_args(Kind):
        raise ValueError(f"kind {kind}")
    args = event["args"]
    return Span(kind, event["name"], lanes[event["pid"], event["tid"]], begin, end, args["detail"], int(args["number"]))


def unit_of(span: Span, units: Sequence[str]) -> str | None:
    """Returns the unit that a span is about; None for spans about all units."""
    name = span.name
    if span.kind in ("wait", "flight", "sum"):
        verb, _, name = span.name.partition(" ")
        if verb not in ("unshard", "reduce"):
            return None
    return name if name in units else None
