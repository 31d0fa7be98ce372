"""Tracks collectives in flight, from the call to the end of `wait`, where this rank processes the received data.

`collectives.py` issues them; the `CollectiveTracker` records them in the flight recorder, and raises the watchdog's
hang report if the backend fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord, FlightRecorder, Kind
from zeroaccel.comm.hangs.watchdog import Watchdog
from zeroaccel.comm.transport import PendingTransfer
from zeroaccel.errors import CollectiveError

_Pendings = TypeVar("_Pendings", bound=Iterable[PendingTransfer])
_DTYPE_NAMES: dict[torch.dtype, str] = {}


class Work(Protocol):
    """A collective in flight, like `torch.distributed.Work`."""

    def wait(self) -> None:
        """Blocks until the result is in place; on CUDA, makes the current stream wait for it. Idempotent.

        Raises:
            CollectiveError: the ranks have desynced, or one has ended; the message locates each rank.
        """

    def is_completed(self) -> bool:
        """True if `wait` would not block. gloo cannot be queried: False until `wait` has returned."""


class CollectiveTracker:
    """Records every collective of one topology, and explains its failures.

    Args:
        watchdog: None with one rank, which waits for no other.
        records_sizes: False for groups whose tensors differ in size from those of the job's other groups at the same
            call. The watchdog compares all ranks of the job, so values that may differ stay out of the histories.
    """

    def __init__(
        self, flight_recorder: FlightRecorder, watchdog: Watchdog | None, *, records_sizes: bool = True
    ) -> None:
        self.flight_recorder = flight_recorder
        self._watchdog = watchdog
        self._records_sizes = records_sizes
        self._mark: ArrivalMark | None = None

    def issue(self, kind: Kind, op: str, label: str, tensor: Tensor) -> CollectiveRecord:
        """Records a call before it is made. `tensor` is the full one, of the same size on every rank."""
        if self._watchdog is not None and self._watchdog.error is not None:
            raise self._watchdog.failure()
        # The names are cached, since this runs at every collective.
        dtype = tensor.dtype
        name = _DTYPE_NAMES.get(dtype) or _DTYPE_NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))
        return self.flight_recorder.issue(kind, op, label, tensor.numel() if self._records_sizes else 0, name)

    def start(self, entry: CollectiveRecord, operation: Callable[..., _Pendings], *args: Any) -> _Pendings:
        """Starts the messages of the call: ``operation(*args, tag)``."""
        try:
            return operation(*args, entry.tag)
        except RuntimeError as error:
            # If a peer has ended, posting the call can fail. The report then lists this rank as waiting for it, too.
            self.flight_recorder.begin_wait(entry)
            try:
                raise self.explain(entry, error) from error
            finally:
                self.flight_recorder.end_wait(entry)

    def transfer(self, entry: CollectiveRecord, operation: Callable[..., _Pendings], *args: Any) -> None:
        """Starts one of several transfers of a call and blocks until it is complete."""
        self.follow(entry, self.start(entry, operation, *args))

    def wait(self, entry: CollectiveRecord, pending: Iterable[PendingTransfer]) -> None:
        """Blocks until the call is complete."""
        self.follow(entry, pending)
        self.finish(entry)

    def complete(self, entry: CollectiveRecord, own_part: Callable[[], None]) -> None:
        """Runs this rank's processing of the received data."""
        listener = self.flight_recorder.listener
        if listener is None:
            own_part()
            return
        with listener.own_part(entry):
            own_part()

    def finish(self, entry: CollectiveRecord) -> None:
        """Records that the call is complete."""
        self.flight_recorder.finish(entry)

    def follow(self, entry: CollectiveRecord, pending: Iterable[PendingTransfer]) -> None:
        """Blocks until these messages of the call are complete; more may follow."""
        flight_recorder = self.flight_recorder
        flight_recorder.begin_wait(entry)
        # Backends raise RuntimeError and its subclasses (dist.DistBackendError among them) for every failure. Their
        # messages name a socket; the watchdog's report names the ranks.
        try:
            for work in pending:
                work.wait()
        except RuntimeError as error:
            raise self.explain(entry, error) from error
        finally:
            flight_recorder.end_wait(entry)

    def follow_on_device(self, entry: CollectiveRecord, device: torch.device) -> None:
        """Has the watchdog follow a call that the current stream of a device waits for, unless it follows another."""
        if self._watchdog is None or self.flight_recorder.probe is not None:
            return
        if torch.get_device_module(device).is_current_stream_capturing():  # the write would be replayed with the graph
            return
        if self._mark is None:
            self._mark = ArrivalMark(device)
        self._mark.begin()
        self.flight_recorder.probe = entry, self._mark.has_arrived

    def explain(self, entry: CollectiveRecord, error: RuntimeError) -> CollectiveError:
        """Returns the error to raise for a call that the backend has given up: the watchdog's report on all ranks."""
        if self._watchdog is None:
            return CollectiveError(f"{entry.call} failed: {error}")
        return self._watchdog.explain(entry, error)


class _Done:
    """The work of a call that needs no message."""

    __slots__ = ()

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


DONE = _Done()


class MessageWork:
    """Messages between ranks. Keeps the tensors they read and write alive until they are complete.

    Args:
        complete: processes the received data; called once, by `wait`.
    """

    __slots__ = ("__weakref__", "_complete", "_pending", "entry", "tracker")

    def __init__(
        self,
        tracker: CollectiveTracker,
        entry: CollectiveRecord,
        pending: Sequence[PendingTransfer],
        complete: Callable[[], None] | None = None,
    ) -> None:
        self.tracker = tracker
        self.entry = entry
        self._pending: Sequence[PendingTransfer] | None = pending
        self._complete = complete

    def wait(self) -> None:
        if self._pending is None:
            return
        self.tracker.wait(self.entry, self._pending)
        # Cleared before the call, because they refer to tensors: receive buffers are freed here, not with the work.
        complete, self._pending, self._complete = self._complete, None, None
        if complete is not None:
            self.tracker.complete(self.entry, complete)

    def is_completed(self) -> bool:
        return self._pending is None or all(work.is_completed() for work in self._pending)


class DeviceWork(MessageWork):
    """A collective of the backend itself, on an accelerator: `wait` does not block the host.

    The watchdog follows one of them at a time through the flight recorder's probe. On CUDA the probe is an
    `ArrivalMark` behind the work on the stream that waits for it; before `wait` nothing depends on the work. On other
    devices the probe is the work itself.
    """

    __slots__ = ("_device",)

    def __init__(
        self,
        tracker: CollectiveTracker,
        entry: CollectiveRecord,
        pending: Sequence[PendingTransfer],
        device: torch.device,
        complete: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(tracker, entry, pending, complete)
        self._device = device
        flight_recorder = tracker.flight_recorder
        # By a weak reference: the probe must not keep the tensors of a forgotten work alive.
        if device.type == "cpu" and flight_recorder.probe is None:
            itself = weakref.ref(self)
            flight_recorder.probe = entry, lambda: (work := itself()) is None or work.is_completed()

    def wait(self) -> None:
        waits = self._pending is not None
        super().wait()
        if waits and self._device.type != "cpu":
            self.tracker.follow_on_device(self.entry, self._device)


class ArrivalMark:
    """A byte of host memory that a CUDA device writes when its current stream reaches the write.

    The watchdog reads it without a call to CUDA: an event query from its thread would invalidate a graph that the
    program captures at that moment.

    1. `begin`, on the thread that uses the device. 2. `has_arrived`, on any thread. After it returns True, begin again.
    """

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(1, dtype=torch.uint8, pin_memory=True)
        self._one = torch.ones(1, dtype=torch.uint8, device=device)

    def begin(self) -> None:
        """Queues the write behind what was launched on the current stream."""
        self._arrived.zero_()
        self._arrived.copy_(self._one, non_blocking=True)

    def has_arrived(self) -> bool:
        """True if the stream has reached the write."""
        return bool(self._arrived.item())
