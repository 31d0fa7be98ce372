"""Collectives under way, over messages that are told when to complete."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from zeroaccel.comm.buffer_pool import BufferPool
from zeroaccel.comm.collective_tracker import AverageWork, CollectiveTracker, DeviceWork, MessageWork, RankSumWork
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord, FlightRecorder
from zeroaccel.errors import CollectiveError

CPU = torch.device("cpu")


class Message:
    """What a backend returns, complete when told."""

    def __init__(self, journal: FlightRecorder) -> None:
        self.journal = journal
        self.completed = False
        self.waited_for: list[CollectiveRecord | None] = []
        self.failure: RuntimeError | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.waited_for.append(self.journal.longest_wait)
        if self.failure is not None:
            raise self.failure
        self.completed = True
        return True

    def is_completed(self) -> bool:
        return self.completed


@pytest.fixture
def supervisor() -> CollectiveTracker:
    return CollectiveTracker(FlightRecorder(), None)


def _issue(supervisor: CollectiveTracker, label: str = "unshard a") -> CollectiveRecord:
    return supervisor.issue("gather", "all_gather", label, torch.empty(4))


def test_the_journal_follows_a_wait(supervisor: CollectiveTracker) -> None:
    entry, messages = _issue(supervisor), [Message(supervisor.journal) for _ in range(3)]
    work = MessageWork(supervisor, entry, messages)
    assert not work.is_completed()
    work.wait()
    work.wait()
    assert [message.waited_for for message in messages] == [[entry]] * 3
    assert supervisor.journal.longest_wait is None
    assert supervisor.journal.last_finished is entry
    assert work.is_completed()


def test_a_work_is_complete_when_all_its_messages_are(supervisor: CollectiveTracker) -> None:
    messages = [Message(supervisor.journal) for _ in range(2)]
    work = MessageWork(supervisor, _issue(supervisor), messages)
    messages[0].completed = True
    assert not work.is_completed()
    messages[1].completed = True
    assert work.is_completed()


def test_a_failure_names_the_call_and_ends_the_wait(supervisor: CollectiveTracker) -> None:
    message = Message(supervisor.journal)
    message.failure = RuntimeError("Connection closed by peer")
    work = MessageWork(supervisor, _issue(supervisor, "unshard layers.3"), [message])
    with pytest.raises(CollectiveError, match=r'gather #1 .*"unshard layers.3".*Connection closed by peer'):
        work.wait()
    assert supervisor.journal.longest_wait is None
    assert supervisor.journal.last_finished is None


def test_a_call_that_cannot_be_made_is_a_failure_too(supervisor: CollectiveTracker) -> None:
    def move(tag: int) -> list[Message]:
        raise RuntimeError("Socket closed")

    with pytest.raises(CollectiveError, match=r"gather #1 .*Socket closed"):
        supervisor.start(_issue(supervisor), move)


def test_the_tag_goes_with_the_call(supervisor: CollectiveTracker) -> None:
    entry = _issue(supervisor)
    tags: list[int] = []
    supervisor.start(entry, lambda tag: tags.append(tag) or (), *())
    assert tags == [entry.tag]


def test_parts_are_summed_at_the_wait_and_their_memory_goes_back(supervisor: CollectiveTracker) -> None:
    scratch = BufferPool()
    parts = scratch.take(6, torch.float32)
    address = parts.data_ptr()
    parts.copy_(torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0, 30.0]))
    out = torch.zeros(3)
    work = RankSumWork(supervisor, _issue(supervisor), [Message(supervisor.journal)], scratch, parts, out, 0.5)
    assert out.tolist() == [0.0, 0.0, 0.0]
    work.wait()
    assert out.tolist() == [5.5, 11.0, 16.5]
    work.wait()
    assert out.tolist() == [5.5, 11.0, 16.5]
    assert scratch.take(6, torch.float32).data_ptr() == address
    assert scratch.take(6, torch.float32).data_ptr() != address


def test_an_average_is_scaled_once(supervisor: CollectiveTracker) -> None:
    out = torch.tensor([1.0, 2.0])
    work = AverageWork(supervisor, _issue(supervisor), [Message(supervisor.journal)], out, out, 3.0)
    work.wait()
    work.wait()
    assert out.tolist() == [3.0, 6.0]


def test_one_collective_at_a_time_is_probed(supervisor: CollectiveTracker) -> None:
    first, second = Message(supervisor.journal), Message(supervisor.journal)
    entry = _issue(supervisor)
    work = DeviceWork(supervisor, entry, [first], CPU)
    others = DeviceWork(supervisor, _issue(supervisor), [second], CPU)
    assert supervisor.journal.probe is not None
    probed, has_completed = supervisor.journal.probe
    assert probed is entry
    assert not has_completed()
    second.completed = True
    assert not has_completed()
    first.completed = True
    assert has_completed()
    del work, others


def test_a_probe_does_not_keep_a_work_alive(supervisor: CollectiveTracker) -> None:
    work = DeviceWork(supervisor, _issue(supervisor), [Message(supervisor.journal)], CPU)
    assert supervisor.journal.probe is not None
    _, has_completed = supervisor.journal.probe
    assert not has_completed()
    del work
    assert has_completed()
