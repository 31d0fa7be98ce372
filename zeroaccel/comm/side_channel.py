"""The words ranks exchange about a hang, through the rendezvous store, beside the groups that hang.

    events      counts what a rank should look up; all that is read while nothing happens
    meet/...    the first rank that stalls at a call leaves its history there for the others to compare with
    stalled     where rank 0 has stalled last
    alarm       the first alarm, never overwritten
    position/r  where rank r is, once there is an alarm
    left/i      the i-th farewell of a rank that leaves the job
    released    counts the ranks that need the store no longer
    verdict     the message

Only `watchdog.py` uses it. It decides nothing, and it has a connection of its own: the client of the default group
holds a lock while the main thread waits for a key.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from itertools import takewhile
from typing import ParamSpec, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from zeroaccel.comm.journal import Entry
from zeroaccel.comm.verdict import Alarm, Position, Verdict

__all__ = ["ChannelLost", "SideChannel"]

P = ParamSpec("P")
T = TypeVar("T")

_ANSWER_SECONDS = 4.0  # the longest one word may take; the store answers in microseconds or is in trouble


class ChannelLost(Exception):
    """The store does not answer: the process that kept it is gone. Nothing can be said to the others any more."""


class SideChannel:
    """One rank's end of the channel. Making it is collective.

    Args:
        store: the store of the default group.
        generation: which topology of this process it is for, the same on all ranks.
        launcher_keeps_store: whether the store lives in the launcher rather than in rank 0.

    Attributes:
        keeper: the rank whose end takes the store away, or None if no rank's does.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, generation: int, *, launcher_keeps_store: bool
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        # The words of an earlier run of the same job may still be in a launcher's store.
        introduction = f"zeroaccel/{generation}"
        if rank == 0:
            store.set(introduction, uuid.uuid4().hex)
        name = store.get(introduction).decode()
        base: Store = store
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        self.keeper = 0 if isinstance(base, TCPStore) and not launcher_keeps_store else None
        if isinstance(base, TCPStore):
            base = TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
            base.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        self._store = PrefixStore(name, base)
        self._kept_alive = store  # in rank 0 it is the server too, and must outlive the default group

    @property
    def keeps_store(self) -> bool:
        return self.rank == self.keeper

    def events(self) -> int:
        """A number that grows with every alarm and every farewell. One round trip to the store."""
        return _guard(self._store.add, "events", 0)

    def meet(self, entry: Entry) -> tuple[int, bool]:
        """Compares this rank's history up to `entry` with that of the first rank that stalled there.

        Returns:
            That rank (this one, when it is the first), and whether the two histories are the same.
        """
        own = f"{self.rank} {entry.digest:x}"
        rank, digest = self._compare_set(f"meet/{entry.kind}/{entry.seq}", own).split()
        return int(rank), int(digest, 16) == entry.digest

    def publish_stall(self, position: Position) -> None:
        """(rank 0)"""
        _guard(self._store.set, "stalled", position.to_json())

    def stall_of_first(self) -> Position | None:
        """Where rank 0 stalled last. It may have gone on since."""
        text = self._read("stalled")
        return Position.from_json(text) if text else None

    def raise_alarm(self, alarm: Alarm) -> None:
        self._compare_set("alarm", json.dumps(asdict(alarm)))
        _guard(self._store.add, "events", 1)

    def alarm(self) -> Alarm | None:
        text = self._read("alarm")
        return Alarm(**json.loads(text)) if text else None

    def publish_position(self, position: Position) -> None:
        _guard(self._store.set, f"position/{self.rank}", position.to_json())

    def position_of(self, rank: int) -> Position | None:
        text = self._read(f"position/{rank}")
        return Position.from_json(text) if text else None

    def publish_farewell(self, position: Position) -> None:
        index = _guard(self._store.add, "farewells", 1)
        _guard(self._store.set, f"left/{index}", position.to_json())
        _guard(self._store.add, "events", 1)

    def farewells(self, known: int) -> list[Position]:
        """The farewells after the first `known`, up to one that is still being written."""
        count = _guard(self._store.add, "farewells", 0)
        texts = (self._read(f"left/{index}") for index in range(known + 1, count + 1))
        return [Position.from_json(text) for text in takewhile(bool, texts) if text]

    def release_store(self) -> None:
        """Says that this rank will not use the store again. Once per rank."""
        _guard(self._store.add, "released", 1)

    def released(self) -> int:
        """How many ranks have said so."""
        return _guard(self._store.add, "released", 0)

    def claim_verdict(self) -> bool:
        """Whether this rank is the first to offer to write the verdict."""
        return _guard(self._store.add, "judges", 1) == 1

    def publish_verdict(self, verdict: Verdict) -> None:
        _guard(self._store.set, "verdict", json.dumps(asdict(verdict)))

    def verdict(self) -> Verdict | None:
        text = self._read("verdict")
        return Verdict(**json.loads(text)) if text else None

    def _read(self, key: str) -> bytes | None:
        if not _guard(self._store.check, [key]):
            return None
        return _guard(self._store.get, key)

    def _compare_set(self, key: str, value: str) -> str:
        """Sets `key` if nobody has; returns what it holds then."""
        return _guard(self._store.compare_set, key, "", value).decode()


def _guard(operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return operation(*args, **kwargs)
    except RuntimeError as error:  # torch's errors of stores and networks derive from it
        raise ChannelLost(str(error)) from error
