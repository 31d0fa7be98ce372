"""The ordered collectives and messages of one rank, and a check that the ranks of a job can complete theirs.

NCCL runs a collective when all ranks of its group have launched it, and on each rank after the work that its stream
waits for. A call therefore *starts* after other calls of its rank: the previous one on its communicator, those that its
stream or the host has waited for, and all earlier calls if a call makes the host wait for the device. A collective is
the same node on all its ranks. If these orders form a cycle over several ranks, the ranks deadlock.

[Note: first uses] NCCL connects the ranks of a communicator at its first collective of each kind, and two ranks at
their first message; a message outside a batch even makes a communicator of the two. The host is blocked until every
rank has arrived. Meanwhile NCCL allocates memory, which waits for the running work of the device.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.cuda_model.stream_model import StreamModel


class Key(NamedTuple):
    """Identity of a call on every rank that takes part: the n-th one of a kind.

    Attributes:
        communicator: the same name on all ranks.
        what: "collective", "host collective", "connect OP" or "A -> B".
    """

    communicator: str
    what: str
    number: int


@dataclass(frozen=True)
class Call:
    """One call of a rank.

    Attributes:
        ranks: the ranks that have to take part.
        op: kind of the call.
        phase, place: phase of the program and line of the package.
        after: calls that are complete before this one starts.
    """

    key: Key
    ranks: tuple[int, ...]
    op: str
    phase: str
    place: str
    after: frozenset[Key]

    def __str__(self) -> str:
        return f"{self.op} in {self.key.communicator} ({self.phase or 'construction'}, {self.place})"


class CallLog:
    """Calls of one rank.

    Attributes:
        calls: in order.
        late: number of first uses after construction, by description.
    """

    def __init__(self, model: StreamModel) -> None:
        self.calls: list[Call] = []
        self.late: Counter[str] = Counter()
        self._model = model
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._on_lane: dict[int, list[tuple[int, Key]]] = {}
        self._host_saw: set[Key] = set()  # complete before the host goes on, without a wait that its clock records
        self._connected: set[tuple[str, str]] = set()
        self._used: set[tuple[str, str]] = set()

    def first_use(self, communicator: str, ranks: tuple[int, ...], what: str) -> None:
        """Notes that a collective or message of a kind is about to be called; see [Note: first uses]."""
        if (communicator, what) in self._connected or len(ranks) == 1:
            return
        self._connected.add((communicator, what))
        call = self._made(communicator, ranks, f"connect {what}", f"first {what}", self._all())
        self._host_saw = {call.key}
        if call.phase:
            self.late[f"{call.phase}: the first {what} in {communicator} blocks the host at {call.place}"] += 1

    def launch(
        self, communicator: str, ranks: tuple[int, ...], what: str, op: str, lane: int, *, beside: int = 0
    ) -> None:
        """Notes the latest operation of a stream as a collective or message.

        Args:
            beside: number of earlier operations of the same batch, which run at the same time.
        """
        if self._model.phase:
            self._used.add((communicator, op))
            if {(communicator, kind) for kind in ("all_gather", "reduce_scatter")} <= self._used:
                # Ranks may begin a gather and a reduction in different orders, which deadlocks within one communicator.
                place = self._model.place()
                self._model.find(f"ONE COMMUNICATOR: {communicator} carries gathers and reductions, at {place}")
        clock = self._model.moment(lane).clock
        after = set(self._host_saw)
        for other, entries in self._on_lane.items():
            reached = clock.get(other, 0) - (1 + beside if other == lane else 0)
            after.update([key for tick, key in entries if tick <= reached][-1:])
        call = self._made(communicator, ranks, what, op, after)
        self._on_lane.setdefault(lane, []).append((clock[lane], call.key))

    def block_host(self, communicator: str, ranks: tuple[int, ...], op: str) -> None:
        """Notes a collective in host memory: the calling thread waits until all ranks have arrived."""
        if len(ranks) == 1:
            return
        thread = self._model.thread
        clock = self._model.moment(thread).clock
        after = set(self._host_saw)
        for lane, entries in self._on_lane.items():
            after.update([key for tick, key in entries if tick <= clock.get(lane, 0)][-1:])
        self._host_saw |= {self._made(communicator, ranks, "host collective", op, after).key}

    def host_waited_for_all(self) -> None:
        """Notes that the host waits until the device has completed all launched work."""
        self._host_saw = self._all()

    def _all(self) -> set[Key]:
        return self._host_saw | {entries[-1][1] for entries in self._on_lane.values()}

    def _made(self, communicator: str, ranks: tuple[int, ...], what: str, op: str, after: set[Key]) -> Call:
        number = self._numbers[communicator, what]
        self._numbers[communicator, what] += 1
        model = self._model
        call = Call(Key(communicator, what, number), ranks, op, model.phase, model.place(), frozenset(after))
        self.calls.append(call)
        return call


def deadlocks(logs: Mapping[int, Sequence[Call]]) -> list[str]:
    """Returns descriptions of the calls that the ranks of a job cannot complete; empty if they complete all.

    Args:
        logs: by rank. Ranks that are missing are not checked.
    """
    of_ranks = {rank: {call.key: call for call in calls} for rank, calls in logs.items()}
    found = []
    for rank, calls in of_ranks.items():
        for key, call in calls.items():
            for other in (set(call.ranks) & set(logs)) - {rank}:
                theirs = of_ranks[other].get(key)
                if theirs is None:
                    found.append(f"rank {other} never takes part in {call} of rank {rank}")
                elif rank < other and theirs.op.split()[0] != call.op.split()[0] and "->" not in key.what:
                    found.append(f"rank {rank} calls {call}, and rank {other} {theirs}")
    graph: dict[Key, set[Key]] = {}
    for calls in of_ranks.values():
        for key, call in calls.items():
            graph.setdefault(key, set()).update(call.after)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = [f"{key.what} {key.number} in {key.communicator}" for key in error.args[1]]
        found.append(f"a circle: {' before '.join(circle)}")
    return found
