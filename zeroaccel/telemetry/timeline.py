"""What one rank does during a few steps, as spans of time: compute, waits, collectives in flight, updates, copies.

`zero/step_trace.py` records and stops; `trace_file.py` writes the spans of all ranks. While nothing is recorded `span`
costs a comparison, and no hook and no listener is there. Nothing here communicates but `clock_offsets`, and nothing
changes what is computed.

[Note: marks] A moment on the host is `time.perf_counter_ns()`. On a CUDA device the host only queues work, so there a
moment is an event on the current stream, and becomes a time when the recording has ended: what the span of a wait
covers is then the time in which the device had nothing to do but wait.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord
from zeroaccel.telemetry.trace_file import Kind, RankSpans, Span

Mark = int | torch.Event
"""A moment: nanoseconds of the host's clock, or an event of a device."""

_CLOCK_ROUNDS = 12
_THREADS = "zeroaccel-"  # how the names of our threads begin


class Timeline:
    """The spans of this rank, from when it is made to `resolved`.

    1. `begin_step` once, `end_step` after each step. 2. Spans come from any thread. 3. `resolved`.

    Args:
        device: that is computed on.
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
        """Now, where this lane does its work: on the device, or on the host."""
        if self._streams is None or lane == "host" or lane.startswith(_THREADS):
            return time.perf_counter_ns()
        event: torch.Event = self._streams.Event(enable_timing=True)
        event.record(self._streams.current_stream(self._device))
        return event

    def add(self, kind: Kind, name: str, begin: Mark, lane: str = "main", detail: str = "", number: int = 0) -> None:
        """A span that ends now."""
        self._spans.append((kind, name, lane, begin, self.mark(lane), detail, number))

    @contextlib.contextmanager
    def span(self, kind: Kind, name: str, detail: str = "", lane: str = "") -> Iterator[None]:
        """The block as a span, in the lane of this thread or in another."""
        lane = lane or own_lane()
        begin = self.mark(lane)
        try:
            yield
        finally:
            self.add(kind, name, begin, lane, detail)

    def in_flight(self, label: str, lane: str, ends: tuple[Mark, Mark], detail: str, number: int) -> None:
        """A collective, from its call to its end."""
        self._spans.append(("flight", label, lane, *ends, detail, number))

    def transfer(self, name: str, begun: float) -> None:
        """Transfers of a tier that began at `begun`, in seconds of the host's clock, and are complete now."""
        self._spans.append(("copy", name, name, round(begun * 1e9), time.perf_counter_ns(), "in flight", 0))

    # -- backward has beginnings only: that of a unit ends where that of the next begins

    def begin_backward(self, unit: str) -> None:
        """The first gradient of an output of a unit has arrived."""
        if self._backward is None or self._backward[0] != unit:
            self.end_backward()
            self._backward = unit, self.mark()

    def end_backward(self) -> None:
        """The last unit's backward is over."""
        if self._backward is not None:
            (unit, begin), self._backward = self._backward, None
            self.add("compute", unit, begin, detail="backward")

    # -- steps

    def begin_step(self) -> None:
        """The first step begins."""
        self._steps.append(self.mark())

    def end_step(self) -> None:
        """A step is over, and the next begins."""
        self._steps.append(self.mark())

    @property
    def num_steps(self) -> int:
        """Steps that are complete."""
        return max(0, len(self._steps) - 1)

    def resolved(self) -> RankSpans:
        """All of it with times; on an accelerator it waits for the device."""
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
    """Listens to a flight recorder: each collective in flight, each wait for one, and this rank's part of each.

    Args:
        group: of the recorder's calls; "" for those that all ranks issue.
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
        if begun is not None:  # else the recording began within the wait
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
    """The lane of this thread: "main" unless it is one of ours; autograd has threads of its own on a device."""
    name = threading.current_thread().name
    return name.rpartition("_")[0] or name if name.startswith(_THREADS) else "main"


active: Timeline | None = None
"""What is recorded into; one at a time in a process. `zero/step_trace.py` sets it."""

_NOTHING = contextlib.nullcontext()


def span(kind: Kind, name: str, detail: str = "", lane: str = "") -> AbstractContextManager[None]:
    """The block as a span of the recording, if there is one.

    Args:
        lane: of a stream of a device; by default that of this thread.

    Example:
        >>> with span("update", "layers.0"):
        ...     pass
    """
    return _NOTHING if active is None else active.span(kind, name, detail, lane)


def clock_offsets(collectives: Collectives) -> list[tuple[int, int]]:
    """By rank: what to add to its clock to get that of rank 0, and by how much that may be wrong. (all ranks)

    In nanoseconds. A barrier has a moment at which all ranks are in it: after each has entered and before any has left.
    So an offset lies between rank 0's entry less the rank's exit and rank 0's exit less the rank's entry, in every one
    of the rounds. Ranks of one machine read one clock.
    """
    own = []
    for _ in range(_CLOCK_ROUNDS):
        before = time.perf_counter_ns()
        collectives.barrier("clock offsets")
        own.append((before, time.perf_counter_ns()))
    of_ranks: list[list[tuple[int, int]]] = collectives.gather_objects(own, "clock offsets")
    here = next((set(node) for node in collectives.topology.nodes if 0 in node), {0})
    return [(0, 0) if rank in here else _offset(of_ranks[0], times) for rank, times in enumerate(of_ranks)]


def _offset(reference: Sequence[tuple[int, int]], times: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(offset, half of the interval that it lies in).

    Example:
        >>> _offset([(0, 10), (20, 26)], [(1000, 1010), (1021, 1025)])
        (-1000, 5)
    """
    low = max(entered - left for (entered, _), (_, left) in zip(reference, times, strict=True))
    high = min(left - entered for (_, left), (entered, _) in zip(reference, times, strict=True))
    return (low + high) // 2, max(0, (high - low + 1) // 2)
