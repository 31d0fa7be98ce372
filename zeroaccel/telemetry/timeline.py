"""The activity of one rank during a few steps, as spans of time: compute, waits, collectives, updates, copies.

`zero/step_trace.py` starts and stops recordings; `trace_file.py` writes the spans of all ranks. Without a recording,
`span` costs two comparisons, and there are no hooks or listeners. Only `clock_offsets` communicates. Recording does not
change results.

[Note: names in torch's profiler] While torch's profiler runs, `span` and `named_range` also open a `record_function`
range, such as `zeroaccel::unshard layers.3`. `torch.autograd.profiler.emit_nvtx` turns these into NVTX ranges. A
`record_function` without a profiler costs several microseconds, which would be 1 % of a small step, so the ranges exist
only while a profiler is running.

[Note: marks] A moment on the host is `time.perf_counter_ns()`. On a CUDA device the host only queues work, so a moment
is an event on the current stream, and becomes a time when the recording has ended. The span of a wait then covers the
time in which the device had nothing else to do.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch.autograd import profiler

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord
from zeroaccel.telemetry.trace_file import Kind, RankSpans, Span

Mark = int | torch.Event
"""A moment: nanoseconds of the host's clock, or an event of a device."""

_CLOCK_ROUNDS = 12
_RANGES = "zeroaccel::"
_THREADS = "zeroaccel-"  # prefix of this package's thread names


class Timeline:
    """The spans of this rank, from its construction to `resolved`.

    1. `begin_step` once, `end_step` after each step. 2. Any thread adds spans. 3. `resolved`.

    Args:
        device: device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = None if device.type == "cpu" else torch.get_device_module(device)
        self._spans: list[tuple[Kind, str, str, Mark, Mark, str, int]] = []
        self._steps: list[Mark] = []
        self._backward: tuple[str, Mark] | None = None  # the unit whose backward runs
        self._origin: tuple[torch.Event, int] | None = None
        if self._streams is not None:
            self._streams.synchronize(self._device)
            event = self._streams.Event(enable_timing=True)
            event.record(self._streams.current_stream(self._device))
            event.synchronize()
            self._origin = event, time.perf_counter_ns()

    def mark(self, lane: str = "main") -> Mark:
        """Returns the current moment on the clock of this lane's work: the device's or the host's."""
        if self._streams is None or lane == "host" or lane.startswith(_THREADS):
            return time.perf_counter_ns()
        event: torch.Event = self._streams.Event(enable_timing=True)
        event.record(self._streams.current_stream(self._device))
        return event

    def add(self, kind: Kind, name: str, begin: Mark, lane: str = "main", detail: str = "", number: int = 0) -> None:
        """Adds a span that ends now."""
        self._spans.append((kind, name, lane, begin, self.mark(lane), detail, number))

    @contextlib.contextmanager
    def span(self, kind: Kind, name: str, detail: str = "", lane: str = "") -> Iterator[None]:
        """Records the block as a span, in the lane of this thread or in another."""
        lane = lane or own_lane()
        begin = self.mark(lane)
        try:
            yield
        finally:
            self.add(kind, name, begin, lane, detail)

    def in_flight(self, label: str, lane: str, ends: tuple[Mark, Mark], detail: str, number: int) -> None:
        """Adds a collective, from its call to its end."""
        self._spans.append(("flight", label, lane, *ends, detail, number))

    def transfer(self, name: str, begun: float) -> None:
        """Adds completed transfers of a tier that began at `begun`, in seconds of the host's clock."""
        self._spans.append(("copy", name, name, round(begun * 1e9), time.perf_counter_ns(), "in flight", 0))

    # -- backward has only start marks: a unit's backward ends where the next one's begins

    def begin_backward(self, unit: str) -> None:
        """Marks the arrival of the first gradient of a unit's outputs."""
        if self._backward is None or self._backward[0] != unit:
            self.end_backward()
            self._backward = unit, self.mark()

    def end_backward(self) -> None:
        """Marks the end of the last unit's backward."""
        if self._backward is not None:
            (unit, begin), self._backward = self._backward, None
            self.add("compute", unit, begin, detail="backward")

    # -- steps

    def begin_step(self) -> None:
        """Marks the start of the first step."""
        self._steps.append(self.mark())

    def end_step(self) -> None:
        """Marks the end of a step and the start of the next."""
        self._steps.append(self.mark())

    @property
    def num_steps(self) -> int:
        """Number of complete steps."""
        return max(0, len(self._steps) - 1)

    def resolved(self) -> RankSpans:
        """Returns everything with times; on an accelerator it waits for the device."""
        if self._streams is not None:
            self._streams.synchronize(self._device)
        spans = tuple(
            Span(kind, name, lane, self._time(begin), self._time(end), detail, number)
            for kind, name, lane, begin, end, detail, number in self._spans
        )
        ends = [self._time(mark) for mark in self._steps]
        return RankSpans(spans, tuple(itertools.pairwise(ends)))

    def _time(self, mark: Mark) -> int:
        if isinstance(mark, int):
            return mark
        assert self._origin is not None, "an event without a device"
        event, origin = self._origin
        milliseconds: float = event.elapsed_time(mark)
        return origin + round(milliseconds * 1e6)


class CollectiveSpans:
    """Listens to a flight recorder: collectives in flight, waits for them, and this rank's processing of their data.

    Args:
        group: group of the recorder's calls; "" for calls that all ranks issue.
    """

    def __init__(self, timeline: Timeline, group: str = "") -> None:
        self._timeline = timeline
        self._group = group
        self._issued: dict[int, Mark] = {}
        self._waits: dict[tuple[int, int], tuple[Mark, str]] = {}  # by record and thread: two may wait for one

    def issued(self, entry: CollectiveRecord) -> None:
        self._issued[id(entry)] = self._timeline.mark(self._lane_of(entry))

    def wait_begins(self, entry: CollectiveRecord) -> None:
        lane = own_lane()
        self._waits[id(entry), threading.get_ident()] = self._timeline.mark(lane), lane

    def wait_ends(self, entry: CollectiveRecord) -> None:
        begun = self._waits.pop((id(entry), threading.get_ident()), None)
        if begun is not None:  # None if the recording began within the wait
            begin, lane = begun
            self._timeline.add("wait", entry.label, begin, lane, self._detail(entry), entry.seq)

    def finished(self, entry: CollectiveRecord) -> None:
        begin = self._issued.pop(id(entry), None)
        if begin is not None:
            lane = self._lane_of(entry)
            end = self._timeline.mark(lane)
            self._timeline.in_flight(entry.label, f"{entry.kind}s", (begin, end), self._detail(entry), entry.seq)

    def own_part(self, entry: CollectiveRecord) -> AbstractContextManager[None]:
        return self._timeline.span("sum", entry.label, entry.op)

    def _detail(self, entry: CollectiveRecord) -> str:
        return f"{entry.kind}/{entry.op}/{entry.phase}/{self._group}"

    def _lane_of(self, entry: CollectiveRecord) -> str:
        return "main" if entry.kind != "control" else "host"


def own_lane() -> str:
    """Returns the lane of this thread: "main" unless this package started it; on a device, autograd has own threads."""
    name = threading.current_thread().name
    return name.rpartition("_")[0] or name if name.startswith(_THREADS) else "main"


active: Timeline | None = None
"""The current recording; one at a time in a process. `zero/step_trace.py` sets it."""

_NOTHING = contextlib.nullcontext()


def span(kind: Kind, name: str, detail: str = "", lane: str = "") -> AbstractContextManager[object]:
    """Records the block as a span, if there is a recording, and names it in torch's profiler.

    Args:
        lane: lane of a device's stream; by default this thread's.

    Example:
        >>> with span("update", "layers.0"):
        ...     pass
    """
    if active is not None:
        return active.span(kind, name, detail, lane)
    return named_range(kind, name)


def named_range(action: str, name: str = "") -> AbstractContextManager[object]:
    """Names the block in torch's profiler, `zeroaccel::ACTION NAME`, if a profiler is running on this process.

    Args:
        action: the work of the block, such as "unshard".
        name: the unit or checkpoint that it works on.

    Example:
        >>> with named_range("unshard", "layers.0"):
        ...     pass
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"{_RANGES}{action} {name}".rstrip())


def clock_offsets(collectives: Collectives) -> list[tuple[int, int]]:
    """Returns by rank: the offset from its clock to rank 0's, and the maximum error of that offset. (all ranks)

    In nanoseconds. At some moment all ranks are in a barrier: after each has entered and before any has left. In every
    round the offset therefore lies between rank 0's entry minus the rank's exit and rank 0's exit minus the rank's
    entry. Ranks of one machine read one clock.
    """
    offsets = []
    for _ in range(_CLOCK_ROUNDS):
        before = time.perf_counter_ns()
        collectives.barrier("clock offsets")
        offsets.append((before, time.perf_counter_ns()))
    of_ranks: list[list[tuple[int, int]]] = collectives.gather_objects(offsets, "clock offsets")
    here = next((set(node) for node in collectives.topology.nodes if 0 in node), {0})
    return [(0, 0) if rank in here else _offset(of_ranks[0], times) for rank, times in enumerate(of_ranks)]


def _offset(reference: Sequence[tuple[int, int]], times: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns (offset, half of the interval that contains it).

    Example:
        >>> _offset([(0, 10), (20, 26)], [(1000, 1010), (1021, 1025)])
        (-1000, 5)
    """
    low = max(entered - left for (entered, _), (_, left) in zip(reference, times, strict=True))
    high = min(left - entered for (_, left), (entered, _) in zip(reference, times, strict=True))
    return (low + high) // 2, max(0, (high - low + 1) // 2)
