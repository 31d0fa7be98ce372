"""Collectives in flight, over messages that a test completes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from zeroaccel.comm.collective_tracker import AverageWork, CollectiveTracker, DeviceWork, MessageWork, RankSumWork
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord, FlightRecorder
from zeroaccel.comm.transport import BufferPool
from zeroaccel.errors import CollectiveError

CPU = torch.device("cpu")


class Message:
    """What a backend returns; the test completes it."""

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


def test_the_journal_follows_a_wait(tracker: CollectiveTracker) -> None:
    entry, messages = _issue(tracker), [Message(tracker.flight_recorder) for _ in range(3)]
    work = MessageWork(tracker, entry, messages)
    assert not work.is_completed()
    work.wait()
    work.wait()
    assert [message.waited_for for message in messages] == [[entry]] * 3
    assert tracker.flight_recorder.longest_wait is None
    assert tracker.flight_recorder.last_finished is entry
    assert work.is_completed()


def test_a_work_is_complete_when_all_its_messages_are(tracker: CollectiveTracker) -> None:
    messages = [Message(tracker.flight_recorder) for _ in range(2)]
    work = MessageWork(tracker, _issue(tracker), messages)
    messages[0].completed = True
    assert not work.is_completed()
    messages[1].completed = True
    assert work.is_completed()


def test_a_failure_names_the_call_and_ends_the_wait(tracker: CollectiveTracker) -> None:
    message = Message(tracker.flight_recorder)
    message.failure = RuntimeError("Connection closed by peer")
    work = MessageWork(tracker, _issue(tracker, "unshard layers.3"), [message])
    with pytest.raises(CollectiveError, match=r'gather #1 .*"unshard layers.3".*Connection closed by peer'):
        work.wait()
    assert tracker.flight_recorder.longest_wait is None
    assert tracker.flight_recorder.last_finished is None


def test_a_call_that_cannot_be_made_is_a_failure_too(tracker: CollectiveTracker) -> None:
    def move(tag: int) -> list[Message]:
        raise RuntimeError("Socket closed")

    with pytest.raises(CollectiveError, match=r"gather #1 .*Socket closed"):
        tracker.start(_issue(tracker), move)


def test_the_tag_goes_with_the_call(tracker: CollectiveTracker) -> None:
    entry = _issue(tracker)
    tags: list[int] = []
    tracker.start(entry, lambda tag: tags.append(tag) or (), *())
    assert tags == [entry.tag]


def test_parts_are_summed_at_the_wait_and_their_memory_goes_back(tracker: CollectiveTracker) -> None:
    pool = BufferPool()
    parts = pool.acquire(6, torch.float32)
    address = parts.data_ptr()
    parts.copy_(torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0, 30.0]))
    out = torch.zeros(3)
    work = RankSumWork(tracker, _issue(tracker), [Message(tracker.flight_recorder)], pool, parts, out, 0.5)
    assert out.tolist() == [0.0, 0.0, 0.0]
    work.wait()
    assert out.tolist() == [5.5, 11.0, 16.5]
    work.wait()
    assert out.tolist() == [5.5, 11.0, 16.5]
    assert pool.acquire(6, torch.float32).data_ptr() == address
    assert pool.acquire(6, torch.float32).data_ptr() != address


def test_an_average_is_scaled_once(tracker: CollectiveTracker) -> None:
    out = torch.tensor([1.0, 2.0])
    work = AverageWork(tracker, _issue(tracker), [Message(tracker.flight_recorder)], out, out, 3.0)
    work.wait()
    work.wait()
    assert out.tolist() == [3.0, 6.0]


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
    del work, others


def test_a_probe_does_not_keep_a_work_alive(tracker: CollectiveTracker) -> None:
    work = DeviceWork(tracker, _issue(tracker), [Message(tracker.flight_recorder)], CPU)
    assert tracker.flight_recorder.probe is not None
    _, has_completed = tracker.flight_recorder.probe
    assert not has_completed()
    del work
    assert has_completed()
