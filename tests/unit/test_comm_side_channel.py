"""The side channel, several ranks of it over one store in this process."""

from __future__ import annotations

import socket

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from zeroaccel.comm.journal import Journal
from zeroaccel.comm.side_channel import SideChannel
from zeroaccel.comm.verdict import Alarm, Position, Verdict


@pytest.fixture
def channels() -> list[SideChannel]:
    store = HashStore()
    return [SideChannel(store, rank, 3, generation=1, launcher_keeps_store=False) for rank in range(3)]


def test_the_first_alarm_stays(channels: list[SideChannel]) -> None:
    assert channels[0].alarm() is None
    before = channels[2].events()
    channels[1].raise_alarm(Alarm(1, "first", timed_out=True))
    channels[0].raise_alarm(Alarm(0, "second", timed_out=False))
    assert channels[2].alarm() == Alarm(1, "first", timed_out=True)
    assert channels[2].events() > before


def test_farewells_come_in_order_and_once(channels: list[SideChannel]) -> None:
    channels[2].publish_farewell(Position(2, left="finished and left"))
    assert [position.rank for position in channels[0].farewells(known=0)] == [2]
    channels[1].publish_farewell(Position(1, left="finished and left"))
    assert [position.rank for position in channels[0].farewells(known=1)] == [1]
    assert channels[0].events() == 2


def test_histories_are_compared_with_the_first_that_stalls(channels: list[SideChannel]) -> None:
    entries = []
    for label in ("a", "a", "b"):
        journal = Journal()
        journal.issue("gather", "all_gather", label, 8, "float32")
        entries.append(journal.issue("gather", "all_gather", "same", 8, "float32"))
    assert channels[1].meet(entries[1]) == (1, True)
    assert channels[0].meet(entries[0]) == (1, True)
    assert channels[2].meet(entries[2]) == (1, False)


def test_one_rank_judges(channels: list[SideChannel]) -> None:
    assert [channel.claim_verdict() for channel in channels] == [True, False, False]
    assert channels[2].verdict() is None
    channels[0].publish_verdict(Verdict("why", timed_out=True))
    assert channels[2].verdict() == Verdict("why", timed_out=True)


def test_positions_are_found_by_rank(channels: list[SideChannel]) -> None:
    channels[1].publish_position(Position(1, where="a.py:1 in f"))
    assert channels[0].position_of(1) == Position(1, where="a.py:1 in f", issued={})
    assert channels[0].position_of(2) is None


def test_generations_do_not_hear_each_other() -> None:
    store = HashStore()
    old = SideChannel(store, 0, 2, generation=1, launcher_keeps_store=False)
    old.raise_alarm(Alarm(0, "old", timed_out=True))
    new = SideChannel(store, 0, 2, generation=2, launcher_keeps_store=False)
    assert new.alarm() is None


def test_the_words_of_an_earlier_run_are_not_heard() -> None:
    store = HashStore()
    SideChannel(store, 0, 2, generation=1, launcher_keeps_store=True).raise_alarm(Alarm(0, "old", timed_out=True))
    assert SideChannel(store, 0, 2, generation=1, launcher_keeps_store=True).alarm() is None


@pytest.mark.parametrize(("launcher", "keeper"), [(False, 0), (True, None)])
def test_who_keeps_a_tcp_store(launcher: bool, keeper: int | None) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    channel = SideChannel(store, 0, 2, generation=1, launcher_keeps_store=launcher)
    assert channel.keeper == keeper
    assert channel.keeps_store == (keeper == 0)
