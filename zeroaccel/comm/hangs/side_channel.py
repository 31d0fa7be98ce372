"""The side channel: what the watchdogs tell each other about a hang, through the rendezvous store.

    events      counts what a rank should look up; all that is read while nothing happens
    meet/...    the first rank that stalls at a call leaves its history there for the others to compare with
    stalled/r   where rank r has stalled last
    alarm       the first alarm, never overwritten
    state/r     the state of rank r, once there is an alarm
    exit/i      the i-th exit notice of a rank that leaves the job
    released    counts the ranks that need the store no longer
    report      the hang report

It does not use the process groups, which hang. Only `watchdog.py` uses it; it decides nothing. It has a connection of
its own: the client of the default group holds a lock while the main thread waits for a key. It also has a thread of its
own: of the store's operations only waiting for a key has a time limit (torch 2.13), and the others block as long as the
process that hosts the store is stopped, or as the kernel tries to reach a machine that is cut off, a quarter of an
hour.
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

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord
from zeroaccel.comm.hangs.hang_report import Alarm, HangReport, RankState
from zeroaccel.ops.device_threads import CPU, start_thread

P = ParamSpec("P")
T = TypeVar("T")

_Requests = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]

_ANSWER_SECONDS = 4.0  # the longest one operation may take; a healthy store answers in microseconds
_SLICES = 10  # of that time; a process that was stopped itself spends one of them, not all


class ChannelLost(Exception):
    """The connection to the store is broken: the process that hosted it is gone. The other ranks cannot be reached."""


class ChannelSilent(ChannelLost):
    """The store has not answered for a while. It may again; the operation under way is carried out then."""


class SideChannel:
    """One rank's end of the channel. Making it is collective.

    Args:
        store: the store of the default group.
        generation: which topology of this process it is for, the same on all ranks.
        launcher_owns_store: whether the launcher hosts the store, rather than rank 0.

    Attributes:
        store_owner: the rank whose process hosts the store, so that it ends with that rank; None if no rank's does.
        address: "host:port" of the store, or its class where it has no address.

    Methods that ask the store wait 4 s at most.

    Raises:
        ChannelSilent: no answer came, or the last one is still to come.
        ChannelLost: the connection is broken.
    """

    def __init__(self, store: Store, rank: int, world_size: int, generation: int, *, launcher_owns_store: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        # An earlier run of the same job may have left its keys in a launcher's store, so this run has its own prefix.
        prefix_key = f"zeroaccel/{generation}"
        if rank == 0:
            store.set(prefix_key, uuid.uuid4().hex)
        prefix = store.get(prefix_key).decode()
        # Below the prefixes is the client or server itself; of a TCPStore this rank opens a second connection.
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
        self._default_store = store  # in rank 0 it is the server too, and must outlive the default group

    @property
    def owns_store(self) -> bool:
        return self.rank == self.store_owner

    def events(self) -> int:
        """A number that grows with every alarm and every exit notice. One round trip to the store."""
        return self._ask(self._store.add, "events", 0)

    def compare_history(self, entry: CollectiveRecord, group: str = "") -> tuple[int, bool]:
        """Compares this rank's history up to `entry` with that of the first rank that stalled there.

        Args:
            group: the name of the recorder that has it; empty for that of calls that all ranks issue.

        Returns:
            That rank (this one, when it is the first), and whether the two histories are the same; if not, the two
            ranks have desynced.
        """
        own = f"{self.rank} {entry.digest:x}"
        rank, digest = self._compare_set(f"meet/{group}/{entry.kind}/{entry.seq}", own).split()
        return int(rank), int(digest, 16) == entry.digest

    def publish_stall(self, state: RankState) -> None:
        """Says where this rank has stalled, for others to compare with."""
        self._ask(self._store.set, f"stalled/{self.rank}", state.to_json())

    def stall_of(self, rank: int) -> RankState | None:
        """Where a rank stalled last, if it has said so. It may have gone on since."""
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
        # As one request: an index without its notice would hide the notices after it.
        index = self._store.add("exits", 1)
        self._store.set(f"exit/{index}", text)
        self._store.add("events", 1)

    def exits(self, skip: int) -> list[RankState]:
        """The exit notices after the first `skip`, up to one that is still being written."""
        count = self._ask(self._store.add, "exits", 0)
        texts = (self._read(f"exit/{index}") for index in range(skip + 1, count + 1))
        return [RankState.from_json(text) for text in takewhile(bool, texts) if text]

    def release_store(self) -> None:
        """Counts this rank among those that will not use the store again. Once per rank."""
        self._ask(self._store.add, "released", 1)

    def num_released(self) -> int:
        """How many ranks have released the store."""
        return self._ask(self._store.add, "released", 0)

    def claim_report(self) -> bool:
        """Whether this rank is to write the report: the first that asks."""
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
        """Waits for the answer that is still to come, if there is one, or for the end of the connection."""
        if self._unanswered is not None:
            wait([self._unanswered], seconds)

    def _ask(self, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the operation returns, carried out by the channel's thread."""
        # The thread is still busy with an earlier operation: a second one would only wait behind it.
        if self._unanswered is not None:
            if not self._unanswered.done():
                raise ChannelSilent(self._silence())
            self._unanswered = None
        answer: Future[T] = Future()
        self._requested_at = time.monotonic()
        self._requests.put((lambda: operation(*args, **kwargs), answer))
        # In slices, so that a process that was itself stopped for a while (SIGSTOP) does not take its own pause for the
        # store's silence.
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
    """The channel's thread: carries out one request after another, until the channel is gone."""
    while (request := requests.get()) is not None:
        operation, answer = request
        try:
            answer.set_result(operation())
        except BaseException as error:
            answer.set_exception(error)
        del request, operation, answer
