"""Launchers at the preflight rendezvous: in time, too late, and with different settings. Each is a thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
from torch.distributed import HashStore

from tests import time_limits
from tests.support.environment import free_port
from zeroaccel.comm import preflight_rendezvous
from zeroaccel.comm.preflight_rendezvous import NodeInfo, compare_with_first, rendezvous
from zeroaccel.errors import CollectiveError, ConfigError

FACTS = {"zeroaccel": "1", "mixed_precision": "bf16"}


def _meet(nodes: Mapping[int, NodeInfo], count: int, seconds: float | None = None) -> dict[int, object]:
    """Returns the result on each machine that arrived: a PreflightRendezvous or an error."""
    port = free_port()
    patience = time_limits.seconds(20.0) if seconds is None else seconds
    results: dict[int, object] = {}

    def come(number: int, node: NodeInfo) -> None:
        try:
            results[number] = rendezvous(
                ("127.0.0.1", port), number, count, node, arrival_seconds=patience, say=lambda message: None
            )
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=come, args=pair) for pair in nodes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(time_limits.seconds(60))
    return results


def test_every_machine_gets_the_facts_of_all() -> None:
    nodes = {number: NodeInfo(f"node{number}", 2 + number, FACTS) for number in range(3)}
    results = _meet(nodes, 3)
    for result in results.values():
        assert isinstance(result, preflight_rendezvous.PreflightRendezvous), result
        assert result.nodes == list(nodes.values())


def test_a_difference_is_named_on_every_machine() -> None:
    nodes = {0: NodeInfo("a", 1, FACTS), 1: NodeInfo("b", 1, FACTS | {"mixed_precision": "fp16"})}
    for result in _meet(nodes, 2).values():
        assert isinstance(result, ConfigError)
        assert str(result) == (
            "the machines differ in mixed_precision: expected bf16 as on machine 0 (a), got 'fp16 on machine 1 (b)'; "
            "make them the same on every machine"
        )


def test_missing_machines_are_named_with_their_ranks() -> None:
    results = _meet({0: NodeInfo("a", 4, FACTS), 2: NodeInfo("c", 4, FACTS)}, 4, seconds=1.0)
    for result in results.values():
        assert isinstance(result, CollectiveError)
        assert str(result) == ("machines 1, 3 did not arrive within 1 s, so ranks 4-7, 12-15 would be missing")


def test_a_missing_main_machine_is_reported() -> None:
    (result,) = _meet({1: NodeInfo("b", 1, FACTS)}, 2, seconds=1.0).values()
    assert isinstance(result, CollectiveError)
    assert str(result).startswith("machine 0 did not answer at 127.0.0.1:")


def test_a_broken_network_is_reported_with_the_silent_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_rendezvous, "CHECK_SECONDS", 1.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    for number, result in _meet({0: NodeInfo("a", 2, FACTS), 1: NodeInfo("b", 2, FACTS)}, 2).items():
        assert isinstance(result, CollectiveError)
        other = ("machine 1 (b), ranks 2-3", "machine 0 (a), ranks 0-1")[number]
        assert f"not heard from: {other}; set GLOO_SOCKET_IFNAME" in str(result)


def test_a_machine_with_another_tree_is_named() -> None:
    store = HashStore()
    compare_with_first(store, NodeInfo("one", 1, {"the version of torch": "2.13", "the contents of a.py": "ab"}))
    compare_with_first(store, NodeInfo("two", 1, {"the version of torch": "2.13", "the contents of a.py": "ab"}))
    message = r"differ in the contents of a.py: expected ab as on the machine that came first \(one\), got .*cd on this"
    with pytest.raises(ConfigError, match=message):
        compare_with_first(store, NodeInfo("three", 1, {"the version of torch": "2.13", "the contents of a.py": "cd"}))
