"""The flight recorder: a ring of this rank's recent collectives, and a rolling hash per kind to compare ranks.

`collective_tracker.py` writes it, `watchdog.py` reads it from its thread, and `hang_report.py` prints its records. It
does not depend on torch.distributed and does not communicate.

Collectives of one kind run in one order on all ranks, so kind and number identify a call: "gather #412" is the same
call on every rank unless the ranks have desynced.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from zeroaccel.errors import CollectiveError

Kind = Literal["gather", "reduce", "control"]
KINDS: tuple[Kind, ...] = ("gather", "reduce", "control")

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplication loses no bit of the history


class Call(NamedTuple):
    """One collective, in the form that ranks exchange. `numel` counts the full tensor, not one rank's shard."""

    kind: Kind
    seq: int  # 1, 2, ... within the kind
    op: str
    label: str
    numel: int
    dtype: str
    phase: str

    def same_as(self, other: Call) -> bool:
        """True if both describe one collective. The phase is not compared: it is only for the reader of a message."""
        return self[:6] == other[:6]

    def __str__(self) -> str:
        size = f"{self.numel} x {self.dtype}" if self.numel else self.dtype
        details = ", ".join(filter(None, (size, self.phase)))
        return f'{self.kind} #{self.seq} {self.op} "{self.label}"' + (f" ({details})" if details else "")


class CollectiveRecord:
    """A collective issued by this rank. Its states are issued, waiting (zero or more times), done."""

    __slots__ = ("digest", "done", "dtype", "kind", "label", "numel", "op", "phase", "seq", "since")

    def __init__(self, kind: Kind, seq: int, op: str, label: str, numel: int, dtype: str, phase: str, digest: int):
        self.kind = kind
        self.seq = seq
        self.op = op
        self.label = label
        self.numel = numel
        self.dtype = dtype
        self.phase = phase
        self.digest = digest  # of all calls of this kind up to and including this one
        self.done = False
        self.since = time.monotonic()  # of the last change: issued, began to wait, done

    @property
    def tag(self) -> int:
        """Message tag that ranks share only while their histories agree: data never mixes with that of another call."""
        return self.digest & 0x7FFFFFFF

    @property
    def call(self) -> Call:
        return Call(self.kind, self.seq, self.op, self.label, self.numel, self.dtype, self.phase)


class CollectiveListener(Protocol):
    """Callbacks for every change of a record while steps are traced; see `telemetry/timeline.py`."""

    def issued(self, entry: CollectiveRecord) -> None:
        """Called before the collective is posted."""

    def wait_begins(self, entry: CollectiveRecord) -> None:
        """Called when this thread blocks on the collective."""

    def wait_ends(self, entry: CollectiveRecord) -> None:
        """Called when this thread continues."""

    def finished(self, entry: CollectiveRecord) -> None:
        """Called when the collective is complete."""

    def own_part(self, entry: CollectiveRecord) -> AbstractContextManager[None]:
        """Surrounds this rank's processing of the received data."""


class _History:
    """Length and rolling hash of the calls of one kind."""

    __slots__ = ("digest", "seq")

    def __init__(self) -> None:
        self.seq = 0
        self.digest = 0


class FlightRecorder:
    """The ring of this rank's collectives.

    Lifecycle of a call: 1. `issue` when it is posted, 2. `begin_wait` when a thread blocks on it, 3. `finish` when it
    has completed. The threads that communicate write it, the watchdog's reads it; every step is one atomic operation of
    the interpreter, so there is no lock.

    Example:
        >>> recorder = FlightRecorder()
        >>> record = recorder.issue("gather", "all_gather", "unshard layers.0", 4096, "bfloat16")
        >>> print(record.call)
        gather #1 all_gather "unshard layers.0" (4096 x bfloat16)

    Attributes:
        phase: current activity of the engine ("forward", "backward", "step", "eval"), set by it, for messages only.
        step: current step of the engine, for messages only; -1 before the first.
        activity: current part of a schedule on this rank, for messages only: "forward of micro-batch 2 on stage 1".
        probe: a collective on an accelerator and a function that returns True once it has completed, or None. On an
            accelerator `wait` does not block the host, so the watchdog follows one collective at a time by its probe.
        listener: callbacks of a trace; None while no trace is recorded.
        exception: one that the other ranks have not been told of: see `holding`.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.phase = ""
        self.step = -1
        self.activity = ""
        self.probe: tuple[CollectiveRecord, Callable[[], bool]] | None = None
        self.listener: CollectiveListener | None = None
        self.exception: Exception | None = None
        self._entries: deque[CollectiveRecord] = deque(maxlen=capacity)
        self._waits: list[CollectiveRecord] = []
        self._histories: dict[Kind, _History] = {kind: _History() for kind in KINDS}
        self._merged = 0

    def issue(self, kind: Kind, op: str, label: str, numel: int, dtype: str) -> CollectiveRecord:
        """Numbers a new collective and adds it to the history."""
        # The digest is a polynomial in the calls, so that ranks compare histories of any length by one number.
        history = self._histories[kind]
        history.seq += 1
        fingerprint = _fingerprint(op, label, numel, dtype)
        history.digest = (history.digest * _MULTIPLIER + fingerprint) & _MASK
        if kind != "control":
            self._merged = (self._merged * _MULTIPLIER + fingerprint + (kind == "reduce")) & _MASK
        entry = CollectiveRecord(kind, history.seq, op, label, numel, dtype, self.phase, history.digest)
        self._entries.append(entry)
        if self.listener is not None:
            self.listener.issued(entry)
        return entry

    def entry(self, tag: int) -> CollectiveRecord | None:
        """Returns the newest call with this message tag, or None if it has left the ring."""
        return next((entry for entry in reversed(tuple(self._entries)) if entry.tag == tag), None)

    def begin_wait(self, entry: CollectiveRecord) -> None:
        entry.since = time.monotonic()
        self._waits.append(entry)
        if self.listener is not None:
            self.listener.wait_begins(entry)

    def end_wait(self, entry: CollectiveRecord) -> None:
        if self.listener is not None:
            self.listener.wait_ends(entry)
        self._waits.remove(entry)

    @contextmanager
    def holding(self, error: Exception | None) -> Iterator[None]:
        """Surrounds the exchange that tells the other ranks of `error`. If a rank never joins it, the report names it.

        An exception that leaves the block, such as that report, leaves `exception` in place.
        """
        # Every rank knows of a report, which is not another cause.
        self.exception = None if isinstance(error, CollectiveError) else error
        yield
        self.exception = None

    def finish(self, entry: CollectiveRecord) -> None:
        entry.done = True
        entry.since = time.monotonic()
        if self.listener is not None:
            self.listener.finished(entry)

    @property
    def longest_wait(self) -> CollectiveRecord | None:
        """The call that has blocked a thread of this rank longest."""
        return min(tuple(self._waits), key=lambda entry: entry.since, default=None)

    @property
    def last_finished(self) -> CollectiveRecord | None:
        return max((e for e in tuple(self._entries) if e.done), key=lambda entry: entry.since, default=None)

    def issued(self) -> dict[str, int]:
        """Returns the number of collectives that this rank has issued, by kind."""
        return {kind: history.seq for kind, history in self._histories.items()}

    def recent(self, per_kind: int = 24) -> list[Call]:
        """Returns the newest calls of each kind, oldest first."""
        calls: list[Call] = []
        for kind in KINDS:
            calls += [entry.call for entry in tuple(self._entries) if entry.kind == kind][-per_kind:]
        return calls

    def digest(self) -> int:
        """Returns the history of all kinds as a number below 2^52, exact in a float64.

        Ranks with the same history of collectives have the same digest. The largest and the smallest digest over ranks
        therefore differ if and only if (up to a chance of 2^-52) two ranks have desynced.
        """
        return _mix(history.digest for history in self._histories.values()) >> 12

    def order_digest(self) -> int:
        """Returns the common order of gathers and reductions as a number below 2^52; it may differ between ranks."""
        return _mix([self._merged]) >> 12


def _mix(values: Iterable[int]) -> int:
    mixed = 0
    for value in values:
        mixed = (mixed * _MULTIPLIER + (value ^ value >> 31)) & _MASK
    return (mixed ^ mixed >> 29) * _MULTIPLIER & _MASK


@lru_cache(maxsize=1 << 16)
def _fingerprint(op: str, label: str, numel: int, dtype: str) -> int:
    # `hash` is unsuitable: for strings it differs between processes.
    text = f"{op}\0{label}\0{numel}\0{dtype}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
