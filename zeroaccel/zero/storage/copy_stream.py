"""Copies between pinned host memory and a device, on a stream for each direction beside the computation.

[Note: streams] Tensors are allocated and used on the current stream. A copy first waits for what the current stream has
been sent so far, since the allocator may have handed out memory that earlier work there still reads. A stream that uses
a copy waits for its event and for no other: later copies may be queued behind it. Memory of the device that a copy uses
goes back to the allocator only after the current stream has waited for it; memory of the host may be changed only after
the host has, which `finish_reads` and `finish` are for.

Where the device is the CPU there is none of this: host and device are one memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Work
from zeroaccel.offload.host_buffers import HostArena
from zeroaccel.telemetry.timeline import span


class CopyHandle:
    """A tensor on its way to host memory.

    Args:
        host: where it goes.
        source: on the device.
        ready: when the source has its values.
        copied: when the copy is through.
    """

    def __init__(self, host: Tensor, source: Tensor, ready: torch.Event, copied: torch.Event) -> None:
        self._host = host
        self._source: Tensor | None = source
        self._ready = ready
        self._copied = copied

    @property
    def on_device(self) -> bool:
        """Whether the source occupies memory of the device."""
        return self._source is not None

    @property
    def is_source_ready(self) -> bool:
        """Whether the source has its values, so that what it is made of can be freed."""
        return bool(self._ready.query())

    @property
    def is_copied(self) -> bool:
        """Whether the copy is through."""
        return bool(self._copied.query())

    def wait_for_source(self) -> None:
        """Makes the current stream wait until the source has its values."""
        if self._source is not None:
            self._ready.wait(self._current_stream(self._source))

    def drop_source(self) -> None:
        """Gives the source's memory back. The current stream waits for the copy, the host does not."""
        if self._source is not None:
            self._copied.wait(self._current_stream(self._source))
            self._source = None

    def wait(self) -> Tensor:
        """The tensor in host memory, once it is there. The host waits."""
        self._copied.synchronize()
        return self.landed()

    @staticmethod
    def _current_stream(source: Tensor) -> torch.Stream:
        stream: torch.Stream = torch.get_device_module(source.device).current_stream(source.device)
        return stream

    def landed(self) -> Tensor:
        """The tensor in host memory, of a copy that the host has waited for in another way (`CopyStream.finish`)."""
        self._source = None
        return self._host


class CopyStream:
    """The copies of one engine.

    Args:
        device: an accelerator.
        pinned: page-lock host memory; without it copies block, and overlap nothing.
    """

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.pinned = pinned
        self._device = device
        self._streams = torch.get_device_module(device)
        self._arena = HostArena(pinned=pinned)  # what is copied to the host is as large in every step
        # The device has an engine for each direction: gradients leave while weights come.
        self._to_device = self._streams.Stream(device)
        self._to_host = self._streams.Stream(device)
        self._joining = self._streams.Stream(device)  # waits for what makes a source, apart from the copies before it
        # Behind the copies of each direction that the host has not seen through.
        self._last_read: torch.Event | None = None
        self._last_write: torch.Event | None = None

    def stream(self) -> AbstractContextManager[None]:
        """Makes the stream of the copies to the device the current one, for work that follows a copy."""
        made: AbstractContextManager[None] = self._streams.stream(self._to_device)
        return made

    def to_device(self, target: Tensor, source: Tensor) -> torch.Event:
        """Starts target = source, from host memory, which must not change before `finish_reads`.

        Returns:
            The event behind the copy, for the stream that uses it. The allocator of pinned memory keeps a source that
            is freed meanwhile.
        """
        # Before the copy: the allocator may have reused memory of `target` that kernels of this stream still read.
        self._to_device.wait_stream(self._streams.current_stream(self._device))
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
        """Starts to copy a tensor of the device into host memory, which is used again once no view of it is left.

        Args:
            work: makes the values of `source`, in memory of the current stream. The copy waits for it, the current
                stream does not.
            examine: launches kernels that read the source, before the copy; see `join`.
        """
        # The arena's condition holds: all copies into its memory are on one stream.
        host = self._arena.empty(source.shape, source.dtype)
        ready, copied = self._streams.Event(), self._streams.Event()
        self._joining.wait_stream(self._streams.current_stream(self._device))
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
        """Starts target = source, in host memory, which has the values after `finish_writes`."""
        self._to_host.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._to_host), span("copy", "to host", lane="copies to host"):
            target.copy_(source, non_blocking=self.pinned)
            self._last_write = self._streams.Event()
            self._last_write.record()
        # The caller drops the source at once; its memory is used again when the copy is through, not before.
        source.record_stream(self._to_host)

    def _await_writes(self) -> None:
        """Makes copies to the device wait for the values of host memory that still come from it."""
        if self._last_write is not None:
            self._to_device.wait_event(self._last_write)

    def join(self) -> None:
        """Makes the current stream wait until every source of a copy to the host was made and examined."""
        self._streams.current_stream(self._device).wait_stream(self._joining)

    def wait(self) -> None:
        """Makes the current stream wait for all copies to the device so far."""
        self._streams.current_stream(self._device).wait_stream(self._to_device)

    def finish_reads(self) -> None:
        """Returns when no copy to the device reads host memory any more, which may then be changed."""
        if self._last_read is not None and not self._last_read.query():
            self._last_read.synchronize()
        self._last_read = None

    def finish_writes(self) -> None:
        """Returns when host memory has what `write_host` copies there."""
        if self._last_write is not None and not self._last_write.query():
            self._last_write.synchronize()
        self._last_write = None

    def finish(self) -> None:
        """Returns when the copies of both directions are through. One wait of the host, on one event."""
        if self._last_read is not None:
            self._to_host.wait_event(self._last_read)
            self._last_read = None
        self._last_write = None
        event = self._streams.Event()
        event.record(self._to_host)
        event.synchronize()
