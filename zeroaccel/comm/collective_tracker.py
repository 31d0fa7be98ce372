"""Collectives in flight: tracked from the call to the end of `wait`, and what each has left to do then.

`collectives.py` issues them; the `CollectiveTracker` records them in the flight recorder, and raises the watchdog's
hang report where the backend fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord, FlightRecorder, Kind
from zeroaccel.comm.hangs.watchdog import Watchdog
from zeroaccel.comm.quantized import INT8, dequantize
from zeroaccel.comm.transport import BufferPool, PendingTransfer
from zeroaccel.errors import CollectiveError
from zeroaccel.ops.reductions import sum_ranks

__all__ = [
    "DONE",
    "AverageWork",
    "CollectiveTracker",
    "DeviceWork",
    "MessageWork",
    "QuantizedGatherDeviceWork",
    "QuantizedGatherWork",
    "RankSumWork",
    "Work",
]

_Pendings = TypeVar("_Pendings", bound=Iterable[PendingTransfer])
_DTYPE_NAMES: dict[torch.dtype, str] = {}


class Work(Protocol):
    """A collective in flight, like `torch.distributed.Work`."""

    def wait(self) -> None:
        """Blocks until the result is in place; on CUDA, makes the current stream wait for it. Idempotent.

        Raises:
            CollectiveError: the ranks have desynced, or one is gone; the message says where each of them is.
        """

    def is_completed(self) -> bool:
        """Whether `wait` would not block. On gloo, which cannot be asked, False until `wait` has returned."""


class CollectiveTracker:
    """Records every collective of one topology, and explains its failures.

    Args:
        watchdog: None with one rank, which waits for no other.
    """

    def __init__(self, flight_recorder: FlightRecorder, watchdog: Watchdog | None) -> None:
        self.flight_recorder = flight_recorder
        self._watchdog = watchdog

    def issue(self, kind: Kind, op: str, label: str, tensor: Tensor) -> CollectiveRecord:
        """Records a call that is about to be made. `tensor` is the full one, of the same size on every rank."""
        if self._watchdog is not None and self._watchdog.error is not None:
            raise self._watchdog.failure()
        dtype = tensor.dtype
        name = _DTYPE_NAMES.get(dtype) or _DTYPE_NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))
        return self.flight_recorder.issue(kind, op, label, tensor.numel(), name)

    def start(self, entry: CollectiveRecord, operation: Callable[..., _Pendings], *args: Any) -> _Pendings:
        """Starts its messages: ``operation(*args, tag)``."""
        try:
            return operation(*args, entry.tag)
        except RuntimeError as error:
            raise self._explain(entry, error) from error

    def transfer(self, entry: CollectiveRecord, operation: Callable[..., _Pendings], *args: Any) -> None:
        """One of several transfers of a call: starts it and blocks until it is complete."""
        self.follow(entry, self.start(entry, operation, *args))

    def wait(self, entry: CollectiveRecord, pending: Iterable[PendingTransfer]) -> None:
        """Blocks until the call is complete."""
        self.follow(entry, pending)
        self.finish(entry)

    def finish(self, entry: CollectiveRecord) -> None:
        """Records that the call is complete."""
        self.flight_recorder.finish(entry)

    def follow(self, entry: CollectiveRecord, pending: Iterable[PendingTransfer]) -> None:
        """Blocks until these messages of the call are complete; others may follow."""
        flight_recorder = self.flight_recorder
        flight_recorder.begin_wait(entry)
        try:
            for work in pending:
                work.wait()
        except RuntimeError as error:
            raise self._explain(entry, error) from error
        finally:
            flight_recorder.end_wait(entry)

    def _explain(self, entry: CollectiveRecord, error: RuntimeError) -> CollectiveError:
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
    """Messages between ranks. Keeps the tensors they read and write alive until they are complete."""

    __slots__ = ("__weakref__", "_pending", "entry", "tracker")

    def __init__(self, tracker: CollectiveTracker, entry: CollectiveRecord, pending: Sequence[PendingTransfer]) -> None:
        self.tracker = tracker
        self.entry = entry
        self._pending: Sequence[PendingTransfer] | None = pending

    def wait(self) -> None:
        if self._pending is not None:
            self.tracker.wait(self.entry, self._pending)
            self._pending = None
            self._complete()

    def is_completed(self) -> bool:
        return self._pending is None or all(work.is_completed() for work in self._pending)

    def _complete(self) -> None:
        """What this rank has left to do with what arrived, once."""


class RankSumWork(MessageWork):
    """A reduce-scatter whose sum this rank makes itself, in the order of the ranks.

    Args:
        parts: W times (S,), acquired from `pool`; the parts in the order of the ranks.
        out: (S,), gets the scaled sum.
    """

    __slots__ = ("_buffer_pool", "_out", "_parts", "_scale")

    def __init__(
        self,
        tracker: CollectiveTracker,
        entry: CollectiveRecord,
        pending: Sequence[PendingTransfer],
        pool: BufferPool,
        parts: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        super().__init__(tracker, entry, pending)
        self._buffer_pool = pool
        self._parts = parts
        self._out = out
        self._scale = scale

    def _complete(self) -> None:
        if self._out.numel():
            sum_ranks(self._out, self._parts.view(-1, self._out.numel()), self._scale)
        self._buffer_pool.release(self._parts)
        del self._parts


class QuantizedGatherWork(MessageWork):
    """An all-gather of int8 codes.

    Args:
        codes: (W, INT8.nbytes(S)) uint8, acquired from `pool`; in the order of the ranks.
        out: (W*S,), gets their values.
    """

    __slots__ = ("_buffer_pool", "_codes", "_out")

    def __init__(
        self,
        tracker: CollectiveTracker,
        entry: CollectiveRecord,
        pending: Sequence[PendingTransfer],
        codes: Tensor,
        out: Tensor,
        pool: BufferPool,
    ) -> None:
        super().__init__(tracker, entry, pending)
        self._codes, self._out, self._buffer_pool = codes, out, pool

    def _complete(self) -> None:
        _dequantize_all(self._codes, self._out)
        self._buffer_pool.release(self._codes)
        del self._codes


class DeviceWork(MessageWork):
    """A collective of the backend itself, on an accelerator: `wait` does not block the host.

    The watchdog follows one at a time by the flight recorder's probe: the work itself, and after `wait` an event behind
    it on the stream that waits, which unlike the work holds no memory.
    """

    __slots__ = ("_device",)

    def __init__(
        self,
        tracker: CollectiveTracker,
        entry: CollectiveRecord,
        pending: Sequence[PendingTransfer],
        device: torch.device,
    ) -> None:
        super().__init__(tracker, entry, pending)
        self._device = device
        flight_recorder = tracker.flight_recorder
        if flight_recorder.probe is None:
            itself = weakref.ref(self)
            flight_recorder.probe = entry, lambda: (work := itself()) is None or work.is_completed()

    def wait(self) -> None:
        super().wait()
        flight_recorder = self.tracker.flight_recorder
        if self._device.type == "cuda" and (flight_recorder.probe is None or flight_recorder.probe[0] is self.entry):
            event: torch.Event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            flight_recorder.probe = self.entry, event.query


class AverageWork(DeviceWork):
    """A backend's reduce-scatter.

    Args:
        average: (S,), gets the average over the ranks; may be `out`.
        out: (S,), gets `scale` times the sum over the W ranks.
    """

    __slots__ = ("_average", "_factor", "_out")

    def __init__(
        self,
        tracker: CollectiveTracker,
        entry: CollectiveRecord,
        pending: Sequence[PendingTransfer],
        average: Tensor,
        out: Tensor,
        factor: float,
    ) -> None:
        super().__init__(tracker, entry, pending, out.device)
        self._average = average
        self._out = out
        self._factor = factor  # W * scale

    def _complete(self) -> None:
        if self._average is not self._out:
            self._out.copy_(self._average.float().mul_(self._factor))
        elif self._factor != 1.0:
            self._out.mul_(self._factor)


class QuantizedGatherDeviceWork(DeviceWork):
    """As `QuantizedGatherWork`, on an accelerator, whose allocator needs no pool."""

    __slots__ = ("_codes", "_out")

    def __init__(
        self,
        tracker: CollectiveTracker,
        entry: CollectiveRecord,
        pending: Sequence[PendingTransfer],
        codes: Tensor,
        out: Tensor,
    ) -> None:
        super().__init__(tracker, entry, pending, out.device)
        self._codes, self._out = codes, out

    def _complete(self) -> None:
        _dequantize_all(self._codes, self._out)


def _dequantize_all(codes: Tensor, out: Tensor) -> None:
    """out: (W*S,) = the values of the (W, INT8.nbytes(S)) codes."""
    for code, part in zip(codes, out.view(codes.shape[0], -1), strict=True):
        dequantize(code, INT8, part)
