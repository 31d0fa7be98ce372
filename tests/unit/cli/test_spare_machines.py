"""When a spare machine waits and when it joins: the changed calls of torch's rendezvous, without a rendezvous."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action

from zeroaccel.cli.launch import machines_come_and_go
from zeroaccel.cli.launch.machines_come_and_go import SpareMachine
from zeroaccel.comm.preflight_rendezvous import NodeInfo, compare_with_first
from zeroaccel.errors import ConfigError


def context(node: str, members: str, late: str, spares: str, *, complete: bool = True) -> Any:
    """Returns the state of a rendezvous as machine `node` sees it; each machine is one letter."""
    state = SimpleNamespace(
        participants=set(members),
        wait_list=set(late),
        redundancy_list=set(spares),
        complete=complete,
        closed=False,
        last_heartbeats={node: datetime.now(timezone.utc)},
    )
    settings = SimpleNamespace(keep_alive_interval=timedelta(seconds=60))
    return SimpleNamespace(state=state, node=node, settings=settings)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(machines_come_and_go, "_BETWEEN_ROUNDS_SECONDS", 0)
    return []


def test_spares_join_as_places_are_free(said: list[str]) -> None:
    first, second = (SpareMachine(2, said.append) for _ in range(2))
    for spare in (first, second):
        spare.say_that_it_waits()
    assert len(said) == 2
    assert first.next_action(context("s", "ab", "", "st")) == _Action.SYNC
    # "b" is lost and "a" has left the round: "a" joins again before any spare machine.
    assert first.next_action(context("s", "b", "a", "st")) == _Action.SYNC
    forming = {"complete": False}
    assert first.next_action(context("s", "a", "", "st", **forming)) == _Action.KEEP_ALIVE
    assert first.next_action(context("s", "a", "", "st", **forming)) == _Action.REMOVE_FROM_REDUNDANCY_LIST
    for _ in range(3):
        assert second.next_action(context("t", "a", "", "st", **forming)) == _Action.SYNC
    first.joins()
    assert said[-1] == "a machine was lost: this spare machine replaces it"
    assert (first.job_ended(), second.job_ended()) == (False, True)


def test_a_complete_round_with_a_free_place_is_waited_for(said: list[str]) -> None:
    spare = SpareMachine(2, said.append)
    assert spare.next_action(context("s", "a", "", "s")) == _Action.KEEP_ALIVE
    assert spare.next_action(context("s", "a", "", "s")) == _Action.SYNC


def test_a_machine_that_comes_late_becomes_a_spare(said: list[str]) -> None:
    spare = SpareMachine(2, said.append)
    assert spare.next_action(context("s", "ab", "s", "")) == _Action.REMOVE_FROM_WAIT_LIST
    assert spare.next_action(context("s", "a", "s", "")) is None
    assert spare.next_action(context("s", "ab", "", "")) is None


def test_a_machine_with_another_tree_is_named() -> None:
    store = HashStore()
    compare_with_first(store, NodeInfo("one", 1, {"the version of torch": "2.13", "the contents of a.py": "ab"}))
    compare_with_first(store, NodeInfo("two", 1, {"the version of torch": "2.13", "the contents of a.py": "ab"}))
    message = r"differ in the contents of a.py: expected ab as on the machine that came first \(one\), got .*cd on this"
    with pytest.raises(ConfigError, match=message):
        compare_with_first(store, NodeInfo("three", 1, {"the version of torch": "2.13", "the contents of a.py": "cd"}))
