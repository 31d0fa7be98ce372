"""The NVMe tier: a table of offsets in a file, pooled host buffers, and the order of the transfers in flight.

[Note: no deadlock] A fetch waits for room in the budget only while a write is in flight, which releases its buffer when
it ends. Otherwise the waiting thread may own the other buffers itself, so its request may exceed the budget.

[Note: loans that a device reads] A buffer may be released with an event that follows an accelerator's copy from it. It
stays in use until the event has passed. Each fetch polls these events; a request that finds no room waits for one.

[Note: order] A fetch or a store of a key starts after the pending store of that key. Otherwise transfers are
independent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from zeroaccel.offload.file_io import BlockFile, Direction, IoSettings, Traffic, transfer
from zeroaccel.offload.host_buffers import ALIGN_NBYTES, HostBuffers, aligned_nbytes
from zeroaccel.offload.offload_folder import OffloadFolder


class _Fetch:
    """Queued until there is room and no write of its key is in flight; then started."""

    def __init__(self, tier: NvmeTier, key: str, nbytes: int) -> None:
        self.tier = tier
        self.key = key
        self.nbytes = nbytes  # to read; the buffer has the key's size
        self.buffer: Tensor | None = None
        self.done = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> Tensor:
        if not self.done.is_set():
            self.tier._start_now(self)
            self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.buffer is not None, f"{self.key}: the fetch has no buffer"
        return self.buffer


class NvmeTier:
    """See `Tier`. Safe to use from several threads.

    Args:
        sizes: size in bytes of each key.
        folder: result of `examine_folder`.
        where: config key of the folder, for errors.
        buffers: pool of buffers to read into and to write from.
        settings: parameters for reading and writing the file.

    Attributes:
        file: file of all keys.
        buffers: the given pool.

    Raises:
        ConfigError: the file cannot be created in the folder, or there is not enough space.
    """

    def __init__(
        self, sizes: Mapping[str, int], folder: OffloadFolder, where: str, buffers: HostBuffers, settings: IoSettings
    ) -> None:
        self._table: dict[str, tuple[int, int]] = {}
        end = 0
        for key, nbytes in sizes.items():
            self._table[key] = end, nbytes
            end += aligned_nbytes(nbytes)
        self.nbytes = sum(sizes.values())
        self.file = BlockFile(folder, max(end, ALIGN_NBYTES), where, settings)  # a file of 0 bytes cannot be reserved
        self.buffers = buffers
        self.name = f"{folder.path} ({folder.file_system})"
        self.traffic: Mapping[Direction, Traffic] = self.file.traffic
        self._state = threading.Condition()
        self._queued: deque[_Fetch] = deque()
        self._writing: set[str] = set()
        self._read_by_device: deque[tuple[Tensor, torch.Event]] = deque()  # released, oldest first
        self._failure: Exception | None = None

    def fetch(self, key: str, nbytes: int | None = None) -> _Fetch:
        """See `Tier.fetch`."""
        # Queued even if it can start now, so that one place decides about room and order.
        fetch = _Fetch(self, key, self._table[key][1] if nbytes is None else nbytes)
        with self._state:
            self._take_back()
            self._queued.append(fetch)
            self._start_queued()
        return fetch

    def take(self, key: str) -> Tensor:
        """See `Tier.take`; waits for room according to [Note: no deadlock]."""
        with self._state:
            return self._acquire(self._table[key][1])

    def store(self, key: str, buffer: Tensor, nbytes: int | None = None) -> None:
        """See `Tier.store`."""
        offset, size = self._table[key]
        assert buffer.numel() == size and self.buffers.owns(buffer), f"{key}: the buffer does not belong to this tier"

        def stored(error: Exception | None) -> None:
            with self._state:
                self._failure = self._failure or error
                self._writing.discard(key)
                self.buffers.release(buffer)
                self._start_queued()
                self._state.notify_all()

        # Two writes of one key in flight could complete in either order.
        with self._state:
            self._state.wait_for(lambda: key not in self._writing)
            self._writing.add(key)
        self.file.start("write", _aligned(buffer, size if nbytes is None else nbytes), offset, stored)

    def release(self, buffer: Tensor, *, after: torch.Event | None = None) -> None:
        """See `Tier.release` and [Note: loans that a device reads]."""
        with self._state:
            if after is not None:
                self._read_by_device.append((buffer, after))
                self._take_back()
            else:
                self.buffers.release(buffer)
            self._start_queued()

    def read(self, key: str, start: int, nbytes: int) -> Tensor:
        """See `Tier.read`. With checksums it reads entire blocks, so that there is a checksum to compare."""
        # Direct I/O reads multiples of the alignment: widen the range to them, and cut out the requested bytes.
        unit = self.file.settings.block_nbytes if self.file.settings.checksum else ALIGN_NBYTES
        base, size = self._table[key]
        first = max((base + start) // unit * unit, base)
        last = min(-(-(base + start + nbytes) // unit) * unit, base + aligned_nbytes(size))
        with self._state:
            self._state.wait_for(lambda: key not in self._writing)
            buffer = self._acquire(last - first)
        try:
            transfer(self.file, "read", buffer, first)
            return buffer[base + start - first :][:nbytes].clone()
        finally:
            self.release(buffer)

    def settle(self) -> None:
        """See `Tier.settle`."""
        # A write fails in a thread of the file, where no caller could catch the error: it is raised here, once.
        with self._state:
            self._state.wait_for(lambda: not self._writing)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """See `Tier.close`."""
        with self._state:
            self._take_back(at_least=len(self._read_by_device))
        self.file.close()
        self.buffers.clear()

    # --- room and order; the caller holds the lock

    def _start_queued(self) -> None:
        """Starts the queued fetches that may start now, in order, as long as there is room."""
        for fetch in list(self._queued):
            if fetch.key in self._writing:
                continue
            buffer = self.buffers.acquire(self._table[fetch.key][1])
            # The first one without room stops the rest, so that smaller ones cannot delay it indefinitely.
            if buffer is None:
                return
            self._start(fetch, buffer)

    def _start_now(self, fetch: _Fetch) -> None:
        """Starts a fetch that a thread waits for as soon as possible, before other queued ones."""
        with self._state:
            self._state.wait_for(lambda: fetch not in self._queued or fetch.key not in self._writing)
            if fetch in self._queued:
                buffer = self._acquire(self._table[fetch.key][1])
                if fetch in self._queued:
                    self._start(fetch, buffer)
                else:  # the end of a write started it while this thread waited for room
                    self.buffers.release(buffer)

    def _acquire(self, nbytes: int) -> Tensor:
        """Returns a buffer according to [Note: no deadlock]."""
        self._take_back()
        while (buffer := self.buffers.acquire(nbytes)) is None:
            if self._read_by_device:
                self._take_back(at_least=1)
                continue
            # No write in flight and no pending event will release a buffer: see [Note: no deadlock].
            if not self._writing:
                return self.buffers.acquire_over_budget(nbytes)
            self._state.wait()
        return buffer

    def _take_back(self, at_least: int = 0) -> None:
        """Takes back buffers that the device has read, or waits until it has read the oldest `at_least`."""
        # In the order of their copies, which run one after the other.
        while self._read_by_device:
            buffer, copied = self._read_by_device[0]
            if at_least > 0:
                copied.synchronize()
                at_least -= 1
            elif not copied.query():
                return
            self._read_by_device.popleft()
            self.buffers.release(buffer)

    def _start(self, fetch: _Fetch, buffer: Tensor) -> None:
        self._queued.remove(fetch)
        fetch.buffer = buffer

        def done(error: Exception | None) -> None:
            if error is not None:
                fetch.error = error
                self.release(buffer)
            fetch.done.set()

        offset = self._table[fetch.key][0]
        self.file.start("read", _aligned(buffer, fetch.nbytes), offset, done)


def _aligned(buffer: Tensor, nbytes: int) -> Tensor:
    """Returns the buffer's first `nbytes`, extended to the next multiple of the alignment, for direct I/O."""
    return torch.as_strided(buffer, (aligned_nbytes(nbytes),), (1,))
