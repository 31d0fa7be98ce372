"""The side channel: several ranks over one store in this process."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from tests import time_limits
from zeroaccel.comm.hangs import side_channel
from zeroaccel.comm.hangs.flight_recorder import FlightRecorder
from zeroaccel.comm.hangs.hang_report import Alarm, HangReport, RankState
from zeroaccel.comm.hangs.side_channel import ChannelLost, ChannelSilent, SideChannel


@pytest.fixture
def channels() -> list[SideChannel]:
    store = HashStore()
    return [SideChannel(store, rank, 3, generation=1, launcher_owns_store=False) for rank in range(3)]


def test_the_first_alarm_stays(channels: list[SideChannel]) -> None:
    assert channels[0].alarm() is None
    before = channels[2].events()
    channels[1].raise_alarm(Alarm(1, "first", timed_out=True))
    channels[0].raise_alarm(Alarm(0, "second", timed_out=False))
    assert channels[2].alarm() == Alarm(1, "first", timed_out=True)
    assert channels[2].events() > before


def test_exit_notices_come_in_order_and_once(channels: list[SideChannel]) -> None:
    channels[2].publish_exit(RankState(2, exit_reason="finished and left"))
    assert [state.rank for state in channels[0].exits(skip=0)] == [2]
    channels[1].publish_exit(RankState(1, exit_reason="finished and left"))
    assert [state.rank for state in channels[0].exits(skip=1)] == [1]
    assert channels[0].events() == 2


def test_histories_are_compared_with_the_first_that_stalls(channels: list[SideChannel]) -> None:
    entries = []
    for label in ("a", "a", "b"):
        flight_recorder = FlightRecorder()
        flight_recorder.issue("gather", "all_gather", label, 8, "float32")
        entries.append(flight_recorder.issue("gather", "all_gather", "same", 8, "float32"))
    assert channels[1].compare_history(entries[1]) == (1, True)
    assert channels[0].compare_history(entries[0]) == (1, True)
    assert channels[2].compare_history(entries[2]) == (1, False)
    assert channels[2].compare_history(entries[2], "layers") == (2, True)  # with another recorder's history


def test_one_rank_writes_the_report_and_states_are_found_by_rank(channels: list[SideChannel]) -> None:
    assert [channel.claim_report() for channel in channels] == [True, False, False]
    assert channels[2].report() is None
    channels[0].publish_report(HangReport("why", timed_out=True))
    assert channels[2].report() == HangReport("why", timed_out=True)
    channels[1].publish_state(RankState(1, where="a.py:1 in f"))
    assert channels[0].state_of(1) == RankState(1, where="a.py:1 in f", issued={})
    assert channels[0].state_of(2) is None


@pytest.mark.parametrize(("generation", "launcher"), [(2, False), (1, True)])
def test_the_alarm_of_an_earlier_generation_or_run_is_not_read(generation: int, launcher: bool) -> None:
    store = HashStore()
    SideChannel(store, 0, 2, generation=1, launcher_owns_store=launcher).raise_alarm(Alarm(0, "old", timed_out=True))
    assert SideChannel(store, 0, 2, generation=generation, launcher_owns_store=launcher).alarm() is None


@pytest.mark.parametrize(("launcher", "store_owner"), [(False, 0), (True, None)])
def test_the_rank_that_hosts_a_tcp_store(launcher: bool, store_owner: int | None) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    channel = SideChannel(store, 0, 2, generation=1, launcher_owns_store=launcher)
    assert channel.store_owner == store_owner
    assert channel.owns_store == (store_owner == 0)


class _StoppedStore:
    """A store that does not answer until `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.counts: dict[str, int] = {}
        self.texts: dict[str, str] = {}

    def add(self, key: str, amount: int) -> int:
        self.go_on.wait()
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def set(self, key: str, text: str) -> None:
        self.texts[key] = text


@pytest.fixture
def stopped(channels: list[SideChannel], monkeypatch: pytest.MonkeyPatch) -> tuple[SideChannel, _StoppedStore]:
    monkeypatch.setattr(side_channel, "_ANSWER_SECONDS", 0.2)
    store = _StoppedStore()
    channels[1]._store = store  # type: ignore[assignment]
    return channels[1], store


def test_a_store_that_does_not_answer_is_not_waited_for(stopped: tuple[SideChannel, _StoppedStore]) -> None:
    channel, store = stopped
    with pytest.raises(ChannelSilent, match=r"the rendezvous store at HashStore has not answered for \d+ s"):
        channel.events()
    began = time.monotonic()
    for _ in range(100):  # 0.2 s each if they queried the store
        with pytest.raises(ChannelSilent):
            channel.events()
    assert time.monotonic() - began < time_limits.seconds(2.0)
    store.go_on.set()
    channel.await_answer(time_limits.seconds(10.0))
    assert channel.events() == 0


def test_a_notice_to_a_silent_store_arrives_complete_and_once(stopped: tuple[SideChannel, _StoppedStore]) -> None:
    channel, store = stopped
    with pytest.raises(ChannelSilent):
        channel.publish_exit(RankState(1, exit_reason="finished and left"))
    store.go_on.set()
    channel.await_answer(time_limits.seconds(10.0))
    assert store.counts == {"exits": 1, "events": 1}
    assert list(store.texts) == ["exit/1"]


class _BrokenStore:
    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Connection reset by peer")


def test_a_broken_connection_is_lost_rather_than_silent(channels: list[SideChannel]) -> None:
    channels[1]._store = _BrokenStore()  # type: ignore[assignment]
    with pytest.raises(ChannelLost, match="reset by peer") as caught:
        channels[1].events()
    assert not isinstance(caught.value, ChannelSilent)


def test_the_thread_of_a_channel_ends_with_it() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "zeroaccel-side-channel"}

    before = threads()  # threads of other tests may still end
    channel = SideChannel(HashStore(), 0, 1, generation=9, launcher_owns_store=False)
    (own,) = threads() - before
    del channel
    own.join(time_limits.seconds(10.0))
    assert not own.is_alive()
