"""Copies between pinned host memory and a device, on one stream per direction that runs beside the computation.

[Note: streams] Tensors are allocated and used on the current stream. A copy first waits for all work queued on the
current stream, because the allocator may have returned memory that earlier work there still reads. A stream that uses a
copy waits for that copy's event only: later copies may be queued behind it. Device memory that a copy uses is freed
only after the current stream has waited for the copy; host memory may change only after the host has waited, with
`finish_reads` or `finish`.

On a CPU this module is not used: host and device are one memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Work
from zeroaccel.offload import copying_stream
from zeroaccel.offload.host_buffers import HostArena
from zeroaccel.telemetry.timeline import span


class CopyHandle:
    """An asynchronous copy of a tensor to host memory.

    Args:
        host: target in host memory.
        source: tensor on the device.
        ready: event after which the source has its values.
        copied: event after the copy.
    """

    def __init__(self, host: Tensor, source: Tensor, ready: torch.Event, copied: torch.Event) -> None:
        self._host = host
        self._source: Tensor | None = source
        self._ready = ready
        self._copied = copied

    @property
    def on_device(self) -> bool:
        """True if the source still occupies device memory."""
        return self._source is not None

    @property
    def is_source_ready(self) -> bool:
        """True if the source has its values, so that the inputs of its computation can be freed."""
        return bool(self._ready.query())

    @property
    def is_copied(self) -> bool:
        """True if the copy is complete."""
        return bool(self._copied.query())

    def wait_for_source(self) -> None:
        """Makes the current stream wait until the source has its values."""
        if self._source is not None:
            self._ready.wait(self._current_stream(self._source))

    def drop_source(self) -> None:
        """Frees the source's memory. The current stream waits for the copy, the host does not."""
        if self._source is not None:
            self._copied.wait(self._current_stream(self._source))
            self._source = None

    def wait(self) -> Tensor:
        """Blocks the host until the copy is complete; returns the tensor in host memory."""
        self._copied.synchronize()
        return self.landed()

    @staticmethod
    def _current_stream(source: Tensor) -> torch.Stream:
        stream: torch.Stream = torch.get_device_module(source.device).current_stream(source.device)
        return stream

    def landed(self) -> Tensor:
        """Returns the tensor in host memory after the host has waited with `CopyStream.finish`."""
        self._source = None
        return self._host


class CopyStream:
    """The copy streams of one engine.

    Args:
        device: an accelerator.
        pinned: page-lock host memory; without it, copies block and do not overlap with computation.

    Attributes:
        device, pinned: as passed in.
    """

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.pinned = pinned
        self.device = device
        self._streams = torch.get_device_module(device)
        self._arena = HostArena(pinned=pinned)  # copies to the host have the same sizes in every step
        # The device has a copy engine for each direction: gradients leave while weights arrive.
        self._to_device = copying_stream(device)
        self._to_host = copying_stream(device)
        self._joining = self._streams.Stream(device)  # waits for the work behind a source, not for earlier copies
        # Events after the last copy of each direction for which the host has not waited.
        self._last_read: torch.Event | None = None
        self._last_write: torch.Event | None = None

    def stream(self) -> AbstractContextManager[None]:
        """Returns a context in which the stream of copies to the device is current, for work after a copy."""
        made: AbstractContextManager[None] = self._streams.stream(self._to_device)
        return made

    def to_device(self, target: Tensor, source: Tensor) -> torch.Event:
        """Starts to copy `source`, in host memory, to `target`; `source` must not change before `finish_reads`.

        Returns:
            The event after the copy, for the stream that uses it. If the source is freed before, the allocator of
            pinned memory keeps it until the copy is complete.
        """
        # Before the copy: the allocator may have reused memory of `target` that kernels of this stream still read.
        self._to_device.wait_stream(self._streams.current_stream(self.device))
        self._await_writes()
        with self._streams.stream(self._to_device):
            with span("copy", "to device", lane="copies to device"):
                target.copy_(source, non_blocking=self.pinned)
            self._last_read = self._streams.Event()
            self._last_read.record()
        return self._last_read

    def to_host(
        self, source: Tensor, work: Work, examine: Callable[[Tensor], None] = lambda source: None
    ) -> CopyHandle:
        """Starts to copy a device tensor into host memory, which is reused when its last view is gone.

        Args:
            work: computes the values of `source`, in memory of the current stream. The copy waits for it, the current
                stream does not.
            examine: launches kernels that read the source, before the copy; see `join`.
        """
        # The arena requires that all copies into its memory are on one stream, as here.
        host = self._arena.empty(source.shape, source.dtype)
        ready, copied = self._streams.Event(), self._streams.Event()
        self._joining.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._joining):
            work.wait()
            examine(source)
            ready.record()
        with self._streams.stream(self._to_host):
            ready.wait()
            with span("copy", "to host", lane="copies to host"):
                host.copy_(source, non_blocking=self.pinned)
            copied.record()
        return CopyHandle(host, source, ready, copied)

    def write_host(self, target: Tensor, source: Tensor) -> None:
        """Starts to copy `source` to `target`, in host memory; the values are there after `finish_writes`."""
        self._to_host.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._to_host), span("copy", "to host", lane="copies to host"):
            target.copy_(source, non_blocking=self.pinned)
            self._last_write = self._streams.Event()
            self._last_write.record()
        # The caller drops the source at once; the allocator must not reuse its memory before the copy is complete.
        source.record_stream(self._to_host)

    def _await_writes(self) -> None:
        """Makes copies to the device wait for unfinished copies to the host."""
        if self._last_write is not None:
            self._to_device.wait_event(self._last_write)

    def join(self) -> None:
        """Makes the current stream wait for `work` and `examine` of every copy to the host."""
        self._streams.current_stream(self.device).wait_stream(self._joining)

    def wait(self) -> None:
        """Makes the current stream wait for all copies to the device so far."""
        self._streams.current_stream(self.device).wait_stream(self._to_device)

    def finish_reads(self) -> None:
        """Blocks until no copy to the device reads host memory; the host may then change it."""
        # The event stays: the thread of updates calls this while the main thread may have begun the next copy.
        if (event := self._last_read) is not None and not event.query():
            event.synchronize()

    def finish_writes(self) -> None:
        """Blocks until the copies of `write_host` are complete."""
        if (event := self._last_write) is not None and not event.query():
            event.synchronize()

    def finish(self) -> None:
        """Blocks until the copies of both directions are complete. The host waits once, for one event."""
        if self._last_read is not None:
            self._to_host.wait_event(self._last_read)
            self._last_read = None
        self._last_write = None
        event = self._streams.Event()
        event.record(self._to_host)
        event.synchronize()
