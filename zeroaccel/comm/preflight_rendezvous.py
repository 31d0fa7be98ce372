"""Rendezvous of the launchers of several machines, before any of them starts a rank: checks arrival and agreement.

Each publishes a `NodeInfo`; the first difference between two of them ends the launch with an error that names both
machines. Then all of them run one small all-reduce over the network that the ranks will use. The launcher calls this,
not the ranks, which have `topology` and the watchdog.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from zeroaccel.comm.hangs.hang_report import rank_list
from zeroaccel.errors import CollectiveError, ConfigError

CHECK_SECONDS = 20.0
"""Limit of the network check, and the time after which the launcher reports the machines that are missing."""

_PREFIX = "zeroaccel/preflight"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class NodeInfo:
    """The description that one machine publishes.

    Attributes:
        host: host name, for messages.
        ranks: number of ranks that the machine will start.
        facts: values that must be the same on all machines, by name.
    """

    host: str
    ranks: int
    facts: Mapping[str, str]


@dataclass(frozen=True)
class PreflightRendezvous:
    """A successful rendezvous.

    Attributes:
        nodes: descriptions of all machines, in order.
        store: store of the rendezvous. The launcher keeps it until the ranks have theirs, at the same port.
    """

    nodes: Sequence[NodeInfo]
    store: Store


def rendezvous(
    address: tuple[str, int],
    machine: int,
    num_machines: int,
    node: NodeInfo,
    *,
    arrival_seconds: float,
    say: Callable[[str], None],
) -> PreflightRendezvous:
    """Waits for the other machines, compares their `NodeInfo` and tries the network. (all machines)

    Args:
        address: host and port on machine 0, which listens there.
        machine: number of this machine.
        arrival_seconds: time limit for the others to arrive.
        say: prints which machines are missing.

    Raises:
        CollectiveError: a machine did not arrive, or cannot be reached; the message names the missing ranks.
        ConfigError: two machines differ in a fact.
    """
    store = _store(address, machine, arrival_seconds, say)
    # Arrive, compare, communicate: the launchers report problems before there are ranks that could hang.
    keys = PrefixStore(_PREFIX, store)
    keys.set(f"node/{machine}", json.dumps([node.host, node.ranks, dict(node.facts)]))
    _await(keys, "node", num_machines, node.ranks, arrival_seconds, say)
    nodes = [NodeInfo(*json.loads(keys.get(f"node/{number}"))) for number in range(num_machines)]
    for number, other in enumerate(nodes):
        _compare(nodes[0], other, "machine 0", f"machine {number}")
    _try_network(keys, machine, nodes)
    return PreflightRendezvous(nodes, store)


def _store(address: tuple[str, int], machine: int, seconds: float, say: Callable[[str], None]) -> Store:
    host, port = address
    # A client retries silently until its timeout if the server is not up; two waits let `say` report in between.
    waits = [min(CHECK_SECONDS, seconds), seconds - CHECK_SECONDS]
    for wait in waits if machine else [seconds]:
        try:
            # multi_tenant: torch's own rendezvous listens at the same port, in the same process.
            return TCPStore(
                host,
                port,
                is_master=machine == 0,
                timeout=timedelta(seconds=wait),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except dist.DistError as error:
            if wait is waits[-1] or waits[-1] <= 0:
                raise CollectiveError(
                    f"machine 0 did not answer at {host}:{port} within {seconds:g} s",
                    fix="start the same command there, and check that the address and the port are reachable from here",
                ) from error
            say(f"still waiting for machine 0 at {host}:{port}")
    raise AssertionError("every wait ends in a store or an error")


def _await(
    keys: Store, what: str, count: int, ranks_each: int, seconds: float, say: Callable[[str], None] | None
) -> None:
    """Waits until every machine has set its key `what`."""
    start, has_said = time.monotonic(), False
    missing = list(range(count))
    while missing := [number for number in missing if not keys.check([f"{what}/{number}"])]:
        waited = time.monotonic() - start
        if waited > seconds:
            raise CollectiveError(_missing(missing, ranks_each, seconds))
        if waited > CHECK_SECONDS and not has_said and say is not None:
            say(f"still waiting for machine{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {count}")
            has_said = True
        time.sleep(_POLL_SECONDS)


def _missing(machines: Sequence[int], ranks_each: int, seconds: float) -> str:
    ranks = [rank for number in machines for rank in range(number * ranks_each, (number + 1) * ranks_each)]
    names = f"machine{'s' if len(machines) > 1 else ''} {', '.join(map(str, machines))}"
    return f"{names} did not arrive within {seconds:g} s, so {rank_list(ranks)} would be missing"


def compare_with_first(store: Store, node: NodeInfo) -> None:
    """Compares this machine with the first one that joined the store, for jobs whose machines come and go.

    Raises:
        ConfigError: they differ.
    """
    ours = json.dumps([node.host, node.ranks, dict(node.facts)])
    first = NodeInfo(*json.loads(store.compare_set(f"{_PREFIX}/first", "", ours)))
    _compare(first, node, "the machine that came first", "this machine")


def _compare(first: NodeInfo, node: NodeInfo, first_name: str, name: str) -> None:
    for fact in {**first.facts, **node.facts}:
        expected, got = first.facts.get(fact, "nothing"), node.facts.get(fact, "nothing")
        if expected != got:
            raise ConfigError(
                f"the machines differ in {fact}",
                expected=f"{expected} as on {first_name} ({first.host})",
                got=f"{got} on {name} ({node.host})",
                fix="make them the same on every machine",
            )


def _try_network(keys: Store, machine: int, nodes: Sequence[NodeInfo]) -> None:
    # gloo chooses the interface as it will for the ranks, so a reachable store does not show that this one works.
    limit = timedelta(seconds=CHECK_SECONDS)
    try:
        group: Any = ProcessGroupGloo(PrefixStore("network", keys), machine, len(nodes), limit)
        total = torch.tensor([float(nodes[machine].ranks)])
        group.allreduce([total]).wait(limit)
    except RuntimeError as error:
        raise CollectiveError(_cut_off(keys, machine, nodes, error)) from error
    keys.set(f"reached/{machine}", "")
    assert total.item() == sum(node.ranks for node in nodes), f"the machines' ranks add up to {total.item()}"
    _await(keys, "reached", len(nodes), nodes[machine].ranks, CHECK_SECONDS, None)


def _cut_off(keys: Store, machine: int, nodes: Sequence[NodeInfo], error: RuntimeError) -> str:
    # Machines that have not passed, by their keys in the store, which uses another connection.
    starts = [0, *accumulate(node.ranks for node in nodes)]
    silent = [n for n in range(len(nodes)) if n != machine and not keys.check([f"reached/{n}"])]
    who = "; ".join(
        f"machine {n} ({nodes[n].host}), {rank_list(list(range(starts[n], starts[n + 1])))}" for n in silent
    )
    reason = str(error).strip().splitlines()[0]
    return (
        f"an all-reduce between the machines did not end within {CHECK_SECONDS:g} s; not heard from: {who or 'none'}; "
        f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that connects them ({reason})"
    )
