"""The side channel: messages between the watchdogs about a hang, through the rendezvous store.

    events      counter of news; the only key that is read while nothing happens
    meet/...    history of the first rank that stalls at a call, for the others to compare with
    stalled/r   state of rank r at its last stall
    alarm       the first alarm, never overwritten
    state/r     state of rank r after an alarm
    exit/i      the i-th exit notice of a rank that leaves the job
    released    number of ranks that no longer need the store
    report      the hang report

It does not use the process groups, because they hang. Only `watchdog.py` uses it; it makes no decisions. It has its own
connection: the client of the default group holds a lock while the main thread waits for a key. It also has its own
thread: among the store's operations only waiting for a key has a time limit (torch 2.13). The others block as long as
the process that hosts the store is stopped, or as long as the kernel tries to reach a disconnected machine: a quarter
of an hour.
"""

from __future__ import annotations

import json
import queue
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from itertools import takewhile
from typing import Any, ParamSpec, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord
from zeroaccel.comm.hangs.hang_report import Alarm, HangReport, RankState
from zeroaccel.ops.device_threads import CPU, start_thread

P = ParamSpec("P")
T = TypeVar("T")

_Requests = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]

_ANSWER_SECONDS = 4.0  # time limit of one operation; a healthy store answers in microseconds
_SLICES = 10  # of that time; a process that was itself stopped spends one of them, not all


class ChannelLost(Exception):
    """The connection to the store is broken, because its host process has ended. The other ranks cannot be reached."""


class ChannelSilent(ChannelLost):
    """The store has not answered for a while. It may answer later, and then completes the pending operation."""


class SideChannel:
    """One rank's end of the channel. Making it is collective.

    Args:
        store: the store of the default group.
        generation: number of the topology within this process, the same on all ranks.
        launcher_owns_store: True if the launcher hosts the store; False if rank 0 does.

    Attributes:
        store_owner: the rank whose process hosts the store, so that it ends with that rank; None if no rank hosts it.
        address: "host:port" of the store, or its class name if it has no address.

    Methods that query the store wait at most 4 s.

    Raises:
        ChannelSilent: no answer arrived, or the previous one is still pending.
        ChannelLost: the connection is broken.
    """

    def __init__(self, store: Store, rank: int, world_size: int, generation: int, *, launcher_owns_store: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        # An earlier run of the same job may have left its keys in a launcher's store, so each run has its own prefix.
        prefix_key = f"zeroaccel/{generation}"
        if rank == 0:
            store.set(prefix_key, uuid.uuid4().hex)
        prefix = store.get(prefix_key).decode()
        # Under the prefixes is the client or server itself; for a TCPStore this rank opens a second connection.
        base: Store = store
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        self.store_owner = 0 if isinstance(base, TCPStore) and not launcher_owns_store else None
        if isinstance(base, TCPStore):
            base = TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
            base.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
            self.address = f"{base.host}:{base.port}"
        else:
            self.address = type(base).__name__
        self._requests: _Requests = queue.SimpleQueue()
        self._requested_at = 0.0
        self._unanswered: Future[Any] | None = None
        start_thread(partial(_serve, self._requests), "zeroaccel-side-channel", CPU, daemon=True)
        weakref.finalize(self, self._requests.put, None).atexit = False
        self._store = PrefixStore(prefix, base)
        self._default_store = store  # on rank 0 it is also the server, and must outlive the default group

    @property
    def owns_store(self) -> bool:
        return self.rank == self.store_owner

    def events(self) -> int:
        """Returns a number that grows with every alarm and every exit notice. One round trip to the store."""
        return self._ask(self._store.add, "events", 0)

    def compare_history(self, entry: CollectiveRecord, group: str = "") -> tuple[int, bool]:
        """Compares this rank's history up to `entry` with that of the first rank that stalled there.

        Args:
            group: name of the recorder of `entry`; "" for the recorder of calls that all ranks issue.

        Returns:
            That rank (this one if it is the first), and True if the two histories are equal; if not, the two ranks have
            desynced.
        """
        ours = f"{self.rank} {entry.digest:x}"
        rank, digest = self._compare_set(f"meet/{group}/{entry.kind}/{entry.seq}", ours).split()
        return int(rank), int(digest, 16) == entry.digest

    def publish_stall(self, state: RankState) -> None:
        """Publishes where this rank has stalled, for others to compare with."""
        self._ask(self._store.set, f"stalled/{self.rank}", state.to_json())

    def stall_of(self, rank: int) -> RankState | None:
        """Returns the published state of a rank's last stall, or None. The rank may have continued since."""
        text = self._read(f"stalled/{rank}")
        return RankState.from_json(text) if text else None

    def raise_alarm(self, alarm: Alarm) -> None:
        self._compare_set("alarm", json.dumps(asdict(alarm)))
        self._ask(self._store.add, "events", 1)

    def alarm(self) -> Alarm | None:
        text = self._read("alarm")
        return Alarm(**json.loads(text)) if text else None

    def publish_state(self, state: RankState) -> None:
        self._ask(self._store.set, f"state/{self.rank}", state.to_json())

    def state_of(self, rank: int) -> RankState | None:
        text = self._read(f"state/{rank}")
        return RankState.from_json(text) if text else None

    def publish_exit(self, state: RankState) -> None:
        self._ask(self._write_exit, state.to_json())

    def _write_exit(self, text: str) -> None:
        # One request: an index without its notice would hide the notices after it.
        index = self._store.add("exits", 1)
        self._store.set(f"exit/{index}", text)
        self._store.add("events", 1)

    def exits(self, skip: int) -> list[RankState]:
        """Returns the exit notices after the first `skip`, up to one that is still being written."""
        count = self._ask(self._store.add, "exits", 0)
        texts = (self._read(f"exit/{index}") for index in range(skip + 1, count + 1))
        return [RankState.from_json(text) for text in takewhile(bool, texts) if text]

    def release_store(self) -> None:
        """Counts this rank among those that will not use the store again. Call it once per rank."""
        self._ask(self._store.add, "released", 1)

    def num_released(self) -> int:
        """Returns the number of ranks that have released the store."""
        return self._ask(self._store.add, "released", 0)

    def claim_report(self) -> bool:
        """Returns True on the first rank that calls it, which then writes the report."""
        return self._ask(self._store.add, "claims", 1) == 1

    def publish_report(self, report: HangReport) -> None:
        self._ask(self._store.set, "report", json.dumps(asdict(report)))

    def report(self) -> HangReport | None:
        text = self._read("report")
        return HangReport(**json.loads(text)) if text else None

    def _read(self, key: str) -> bytes | None:
        if not self._ask(self._store.check, [key]):
            return None
        return self._ask(self._store.get, key)

    def _compare_set(self, key: str, value: str) -> str:
        """Sets `key` if it has no value yet; returns its value."""
        return self._ask(self._store.compare_set, key, "", value).decode()

    def await_answer(self, seconds: float) -> None:
        """Waits for a pending answer, if there is one, or for the end of the connection."""
        if self._unanswered is not None:
            wait([self._unanswered], seconds)

    def _ask(self, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the operation in the channel's thread and returns its result."""
        # If the thread is still busy with an earlier operation, a second one would only wait behind it.
        if self._unanswered is not None:
            if not self._unanswered.done():
                raise ChannelSilent(self._silence())
            self._unanswered = None
        answer: Future[T] = Future()
        self._requested_at = time.monotonic()
        self._requests.put((lambda: operation(*args, **kwargs), answer))
        # In slices, so that a process that was itself stopped for a while (SIGSTOP) does not mistake its own pause for
        # silence of the store.
        for _ in range(_SLICES):
            if wait([answer], _ANSWER_SECONDS / _SLICES).done:
                break
        else:
            self._unanswered = answer
            raise ChannelSilent(self._silence())
        try:
            return answer.result()
        except RuntimeError as error:  # torch's errors of stores and networks derive from it
            raise ChannelLost(str(error)) from error

    def _silence(self) -> str:
        seconds = time.monotonic() - self._requested_at
        return f"the rendezvous store at {self.address} has not answered for {seconds:.0f} s"


def _serve(requests: _Requests) -> None:
    """The channel's thread: runs one request after another until the channel is deleted."""
    while (request := requests.get()) is not None:
        operation, answer = request
        try:
            answer.set_result(operation())
        except BaseException as error:
            answer.set_exception(error)
        del request, operation, answer
