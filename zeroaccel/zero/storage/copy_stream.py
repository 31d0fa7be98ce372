"""Copies between pinned host memory and a CUDA device, on a stream of their own during the computation.

[Note: streams] Tensors are allocated and used on the current stream. A copy to the device first waits for what the
current stream has been given so far, since the allocator may have handed out memory that earlier work there still
reads; before the result is used, `wait` makes the current stream wait. Host memory that is reused by hand may be
changed after `wait(finished=True)`. A source on the device is kept until its `CopyHandle` is waited for.

Where the device is the CPU there is none of this: host and device are one memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


class CopyHandle:
    """A tensor on its way to host memory."""

    def __init__(self, host: Tensor, source: Tensor, event: torch.cuda.Event) -> None:
        self._host = host
        self._source: Tensor | None = source
        self._event = event

    def wait(self) -> Tensor:
        """The tensor in host memory, once it is there."""
        self._event.synchronize()
        self._source = None
        return self._host


class CopyStream:
    """The stream of one engine's copies.

    Args:
        device: a CUDA device.
        pinned: page-lock host memory; without it copies block, and overlap nothing.
    """

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.pinned = pinned
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def stream(self) -> AbstractContextManager[None]:
        """Makes the stream of the copies the current one, for work that follows a copy."""
        return torch.cuda.stream(self._stream)

    def to_device(self, target: Tensor, source: Tensor) -> None:
        """target = source, from host memory. The allocator of pinned memory keeps a source that is freed meanwhile."""
        # Before the copy: the allocator may have reused memory of `target` that kernels of this stream still read.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=self.pinned)

    def to_host(self, source: Tensor) -> CopyHandle:
        """Starts to copy a tensor of the device into new host memory."""
        # The event, not the stream, is what `CopyHandle.wait` waits for: later copies may be queued behind this one.
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=self.pinned)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=self.pinned)
            event = torch.cuda.Event()
            event.record()
        return CopyHandle(host, source, event)

    def wait(self, *, finished: bool = False) -> None:
        """Makes the current stream wait for all copies so far.

        Args:
            finished: also the host, so that their sources may change.
        """
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if finished:
            self._stream.synchronize()
