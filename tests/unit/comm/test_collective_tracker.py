"""Collectives in flight, made of messages that the test completes."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from zeroaccel.comm import collective_tracker
from zeroaccel.comm.collective_tracker import ArrivalMark, CollectiveTracker, DeviceWork, MessageWork
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord, FlightRecorder
from zeroaccel.errors import CollectiveError

CPU = torch.device("cpu")


class Message:
    """A backend's handle of a message, which the test completes."""

    def __init__(self, flight_recorder: FlightRecorder) -> None:
        self.flight_recorder = flight_recorder
        self.completed = False
        self.waited_for: list[CollectiveRecord | None] = []
        self.failure: RuntimeError | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.waited_for.append(self.flight_recorder.longest_wait)
        if self.failure is not None:
            raise self.failure
        self.completed = True
        return True

    def is_completed(self) -> bool:
        return self.completed


@pytest.fixture
def tracker() -> CollectiveTracker:
    return CollectiveTracker(FlightRecorder(), None)


def _issue(tracker: CollectiveTracker, label: str = "unshard a") -> CollectiveRecord:
    return tracker.issue("gather", "all_gather", label, torch.empty(4))


def test_the_flight_recorder_follows_a_wait(tracker: CollectiveTracker) -> None:
    entry, messages = _issue(tracker), [Message(tracker.flight_recorder) for _ in range(3)]
    work = MessageWork(tracker, entry, messages)
    messages[0].completed = messages[1].completed = True
    assert not work.is_completed(), "only two of three messages have arrived"
    work.wait()
    work.wait()
    assert [message.waited_for for message in messages] == [[entry]] * 3
    assert tracker.flight_recorder.longest_wait is None
    assert tracker.flight_recorder.last_finished is entry
    assert work.is_completed()


def test_a_failure_names_the_call_and_ends_the_wait(tracker: CollectiveTracker) -> None:
    message = Message(tracker.flight_recorder)
    message.failure = RuntimeError("Connection closed by peer")
    work = MessageWork(tracker, _issue(tracker, "unshard layers.3"), [message])
    with pytest.raises(CollectiveError, match=r'gather #1 .*"unshard layers.3".*Connection closed by peer'):
        work.wait()
    assert tracker.flight_recorder.longest_wait is None
    assert tracker.flight_recorder.last_finished is None


def test_a_call_gets_its_tag_and_one_that_cannot_be_made_is_a_failure_too(tracker: CollectiveTracker) -> None:
    def move(tag: int) -> list[Message]:
        raise RuntimeError("Socket closed")

    with pytest.raises(CollectiveError, match=r"gather #1 .*Socket closed"):
        tracker.start(_issue(tracker), move)
    entry, tags = _issue(tracker), []
    tracker.start(entry, lambda tag: tags.append(tag) or (), *())
    assert tags == [entry.tag]


def test_the_report_of_a_call_that_cannot_be_made_says_that_this_rank_waits_for_it() -> None:
    recorder, waited_for = FlightRecorder(), []

    def explain(entry: CollectiveRecord, error: RuntimeError) -> CollectiveError:
        waited_for.append((entry, recorder.longest_wait))
        return CollectiveError("the report")

    def move(tag: int) -> list[Message]:
        raise RuntimeError("Connection closed by peer")

    tracker = CollectiveTracker(recorder, SimpleNamespace(error=None, explain=explain))  # type: ignore[arg-type]
    entry = _issue(tracker)
    with pytest.raises(CollectiveError, match="the report"):
        tracker.start(entry, move)
    assert waited_for == [(entry, entry)]
    assert recorder.longest_wait is None


def test_the_wait_runs_the_remaining_operation_once_and_releases_its_buffers(tracker: CollectiveTracker) -> None:
    buffer = torch.zeros(3)
    alive, total = weakref.ref(buffer), torch.zeros(3)
    work = MessageWork(
        tracker, _issue(tracker), [Message(tracker.flight_recorder)], partial(total.add_, buffer.add_(1))
    )
    del buffer
    assert alive() is not None
    assert not total.any()
    work.wait()
    work.wait()
    assert total.tolist() == [1.0] * 3
    assert alive() is None
    assert work.is_completed()


def test_one_collective_at_a_time_is_probed(tracker: CollectiveTracker) -> None:
    first, second = Message(tracker.flight_recorder), Message(tracker.flight_recorder)
    entry = _issue(tracker)
    work = DeviceWork(tracker, entry, [first], CPU)
    others = DeviceWork(tracker, _issue(tracker), [second], CPU)
    assert tracker.flight_recorder.probe is not None
    probed, has_completed = tracker.flight_recorder.probe
    assert probed is entry
    assert not has_completed()
    second.completed = True
    assert not has_completed()
    first.completed = True
    assert has_completed()
    first.completed = False
    assert not has_completed()
    del work  # a probe does not keep it alive
    assert has_completed()
    del others


class Mark:
    """A stand-in for `ArrivalMark`, which the test sets as arrived."""

    made: ClassVar[list[Mark]] = []

    def __init__(self, device: torch.device) -> None:
        self.begun, self.arrived = 0, True
        self.made.append(self)

    def begin(self) -> None:
        assert self.arrived, "begun again before it has arrived"
        self.begun, self.arrived = self.begun + 1, False

    def has_arrived(self) -> bool:
        return self.arrived


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> CollectiveTracker:
    monkeypatch.setattr(collective_tracker, "ArrivalMark", Mark)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Mark, "made", [])
    return CollectiveTracker(FlightRecorder(), SimpleNamespace(error=None))  # type: ignore[arg-type]


def _started(tracker: CollectiveTracker) -> DeviceWork:
    message = Message(tracker.flight_recorder)
    message.is_completed = lambda: pytest.fail("CUDA was queried")  # type: ignore[method-assign]
    return DeviceWork(tracker, _issue(tracker), [message], torch.device("cuda", 0))


def test_on_cuda_the_watchdog_reads_host_memory(on_cuda: CollectiveTracker) -> None:
    recorder = on_cuda.flight_recorder
    first, second = _started(on_cuda), _started(on_cuda)
    assert recorder.probe is None, "no thread waits for them yet"
    first.wait()
    second.wait()
    assert recorder.probe is not None
    entry, has_completed = recorder.probe
    assert entry is first.entry
    assert not has_completed()
    (mark,) = Mark.made
    mark.arrived = True
    assert has_completed()
    recorder.probe = None  # as the watchdog does
    first.wait()
    assert recorder.probe is None, "the first wait has already covered it"
    third = _started(on_cuda)
    third.wait()
    assert recorder.probe is not None
    assert recorder.probe[0] is third.entry
    assert Mark.made == [mark]
    assert mark.begun == 2


def test_neither_a_graph_that_is_captured_nor_a_job_without_a_watchdog_gets_a_mark(
    on_cuda: CollectiveTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _started(CollectiveTracker(on_cuda.flight_recorder, None)).wait()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _started(on_cuda).wait()
    assert on_cuda.flight_recorder.probe is None
    assert Mark.made == []


def test_a_mark_arrives_with_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory only; the device's calls are replaced."""
    zeros, ones = torch.zeros, torch.ones
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, pin_memory: zeros(*size, dtype=dtype))
    monkeypatch.setattr(torch, "ones", lambda *size, dtype, device: ones(*size, dtype=dtype))
    mark = ArrivalMark(torch.device("cuda", 0))
    assert not mark.has_arrived()
    for _ in range(2):
        mark.begin()
        assert mark.has_arrived()  # a copy in host memory is immediate
