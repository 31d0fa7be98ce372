"""Writes one rank's file from live tensors: copies chunks into staging memory, computes checksums, writes, publishes.

Copying and writing run in two threads with a bounded number of chunks between them, so that the copies overlap with the
disk. `save.py` and `background_save.py` choose the threads. Once `copied` is set, the tensors may change: a background
save blocks the next optimizer step only until then.

[Note: reading a device] Tensors on a CUDA device are copied into page-locked chunks on a separate stream. On the
training stream, each copy would wait for all launched training work, and then delay the work launched after it. The
separate stream first waits for the work that training launched before the writer existed, so it copies the values of
that time. The writing thread waits for the copies of a chunk before it reads the chunk.

[Note: files in memory] A file in memory that is overwritten takes the copies itself: its pages are mapped, and locked
for a device. The next step then waits for one copy, at the speed of the memory or of the link, and neither for
checksums nor for a second copy. Mappings are kept, because locking takes longer than the copy.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zeroaccel.checkpoint.atomic_write import NewFile, begin_flush, write_all
from zeroaccel.checkpoint.manifest import FileRecord
from zeroaccel.checkpoint.rank_file import block_sums, lay_out_rank_file
from zeroaccel.checkpoint.save_plan import SaveItem
from zeroaccel.checkpoint.zero_to_fp32 import CHUNK_NBYTES
from zeroaccel.errors import CheckpointError
from zeroaccel.offload import copying_stream
from zeroaccel.offload.host_buffers import aligned_bytes, empty_on_host
from zeroaccel.ops.device_threads import CPU
from zeroaccel.zero.access.safetensors_file import ITEMSIZE, FileLayout


class Staging:
    """A bounded pool of chunks of host memory; `acquire` blocks until a chunk is free.

    Args:
        nbytes: size of the pool, at least two chunks. Chunks are allocated on demand and reused.
        pinned: use page-locked memory, for copies from a CUDA device.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self._limit = max(2, nbytes // CHUNK_NBYTES)
        self._pinned = pinned
        self._num_allocated = 0
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._files: dict[tuple[int, int, int], Tensor] = {}

    def file(self, handle: int, nbytes: int) -> Tensor:
        """Returns the first `nbytes` of a file in memory, (nbytes,) uint8, see [Note: files in memory].

        The mappings of the last two files stay, since states alternate between two.

        Raises:
            OSError: the memory has no room for the file.
        """
        os.posix_fallocate(handle, 0, nbytes)  # a write to a mapped page without memory would end the process
        status = os.fstat(handle)
        key = (status.st_dev, status.st_ino, nbytes)
        mapped = self._files.pop(key, None)
        mapped = aligned_bytes(nbytes, pinned=self._pinned, file=handle) if mapped is None else mapped
        self._files = dict([*self._files.items(), (key, mapped)][-2:])
        return mapped

    def acquire(self) -> Tensor:
        """Returns an uninitialized chunk, (CHUNK_NBYTES,) uint8. Only one thread may call it at a time."""
        if self._num_allocated < self._limit and self._free.empty():
            self._num_allocated += 1
            return empty_on_host((CHUNK_NBYTES,), torch.uint8, pinned=self._pinned)
        return self._free.get()

    def release(self, chunk: Tensor) -> None:
        """Returns a chunk to the pool."""
        self._free.put(chunk)


class ChunkCopies:
    """Copies from host memory into chunks of host memory. Each copy is complete when the call returns.

    Attributes:
        device: device of the tensors.
    """

    device = CPU

    def stream(self) -> AbstractContextManager[None]:
        """Returns the stream context that the copying thread runs in."""
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Starts a copy from `source` to `target`, both (n,) uint8."""
        target.copy_(source)

    def mark(self) -> Callable[[], object]:
        """Returns a function that blocks until all copies before the mark are complete; any thread may call it."""
        return lambda: None


class DeviceChunkCopies(ChunkCopies):
    """Copies from an accelerator, see [Note: reading a device]. The thread that launches the training must make it.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = torch.get_device_module(device)
        self._stream = copying_stream(device)
        launched = self._streams.Event()
        launched.record(self._streams.current_stream(device))
        self._stream.wait_event(launched)

    def stream(self) -> AbstractContextManager[None]:
        made: AbstractContextManager[None] = self._streams.stream(self._stream)
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], object]:
        event: torch.Event = self._streams.Event()
        event.record(self._stream)
        return event.synchronize


def copies_of(entries: Sequence[SaveItem]) -> ChunkCopies:
    """Returns the copies for some entries: on a stream of the accelerator if any entry is there."""
    devices = {entry.data.device for entry in entries if isinstance(entry.data, Tensor)}
    device = next((device for device in devices if device.type not in ("cpu", "meta")), None)
    return ChunkCopies() if device is None else DeviceChunkCopies(device)


@dataclass(frozen=True)
class _FilledChunk:
    """A chunk that may be read after `wait()`."""

    chunk: Tensor
    nbytes: int
    wait: Callable[[], object]


class RankFileWriter:
    """Writes one rank's file.

    Args:
        path: final path of the file.
        entries: the tensors to save, in any order; `copy` copies them.
        over: see `NewFile`.

    Attributes:
        entries: the tensors in the order of the file, the largest item size first, which aligns each of them.
        layout: the offset of each entry.
        fresh_nbytes: number of bytes that the file needs in addition to the file that it overwrites.
        device: the accelerator to copy tensors from, else the CPU.
        copied: set when the tensors may change, also after an error.
    """

    def __init__(self, path: Path, entries: Sequence[SaveItem], staging: Staging, *, over: Path | None = None) -> None:
        self.path = path
        self._over = over
        self.entries = sorted(entries, key=lambda entry: -ITEMSIZE[entry.dtype])
        self.layout: FileLayout = lay_out_rank_file([(e.key, e.dtype, e.data.numel()) for e in self.entries])
        self.fresh_nbytes = self.layout.nbytes - (0 if over is None else over.stat().st_size)
        self.copied = threading.Event()
        self._staging = staging
        self._copies = copies_of(self.entries)
        self.device = self._copies.device
        self._filled: queue.SimpleQueue[_FilledChunk | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._exhausted = False
        self._mapped: Tensor | None = None
        self._is_open = threading.Event()  # `write` has mapped the file, or does not map it

    def copy(self) -> None:
        """Copies all entries into staging memory; runs concurrently with `write`, which releases the chunks."""
        try:
            with torch.no_grad(), self._copies.stream():
                try:
                    self._copy()
                finally:
                    self._copies.mark()()  # also after an error, because the tensors may change afterwards
        except Exception as error:
            self._failure = error
        finally:
            self.copied.set()
            self._filled.put(None)

    def write(self, rank: int) -> FileRecord:
        """Writes the chunks that `copy` fills. The complete file is on the disk when this returns.

        Raises:
            CheckpointError: the disk is full or fails. The file is removed, and `copy` still ends.
        """
        try:
            with NewFile(self.path, unique=False, over=self._over) as file:  # the id of the save makes the name unique
                if self._over is not None:
                    self._mapped = self._staging.file(file.handle, self.layout.nbytes)
                self._is_open.set()
                table = self._write(file.handle)
                file.publish()
        except BaseException as error:
            self._is_open.set()
            self._drain()
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"{self.path}: cannot be written ({error.strerror})",
                    got=f"{self.layout.nbytes} bytes to write",
                    fix="free some space or choose another folder; earlier checkpoints are unchanged",
                ) from error
            raise
        return FileRecord(self.path.name, self.layout.nbytes, rank, hashlib.sha256(table).hexdigest())

    def _copy(self) -> None:
        self._is_open.wait()
        begin, used, chunk = 0, 0, self._chunk(0)
        for source in self._sources():
            while source.numel():
                head = source[: CHUNK_NBYTES - used]
                self._copies.copy(chunk[used : used + head.numel()], head)
                used += head.numel()
                source = source[head.numel() :]
                if used == CHUNK_NBYTES:
                    self._filled.put(_FilledChunk(chunk, used, self._copies.mark()))
                    begin, used, chunk = begin + used, 0, self._chunk(begin + used)
        self._filled.put(_FilledChunk(chunk, used, self._copies.mark()))

    def _chunk(self, begin: int) -> Tensor:
        return self._staging.acquire() if self._mapped is None else self._mapped[begin : begin + CHUNK_NBYTES]

    def _release(self, chunk: Tensor) -> None:
        if self._mapped is None:
            self._staging.release(chunk)

    def _sources(self) -> Iterator[Tensor]:
        yield torch.frombuffer(bytearray(self.layout.header), dtype=torch.uint8)
        for entry in self.entries:
            if isinstance(entry.data, Tensor):
                yield entry.data.view(torch.uint8)
            else:
                yield from entry.data.chunks(CHUNK_NBYTES)

    def _write(self, handle: int) -> bytes:
        sums, num_written = [], 0
        while (filled := self._next()) is not None:
            try:
                filled.wait()
                data = filled.chunk.numpy()[: filled.nbytes]
                sums.append(block_sums(data))
                if self._mapped is None:
                    write_all(handle, data.data)
                    begin_flush(handle, num_written, data.size)
                num_written += data.size
            finally:
                self._release(filled.chunk)
        if self._failure is not None:
            raise self._failure
        table: bytes = np.concatenate(sums).astype("<u8").tobytes()
        os.lseek(handle, num_written, os.SEEK_SET)
        write_all(handle, memoryview(table))
        return table

    def _next(self) -> _FilledChunk | None:
        filled = self._filled.get()
        self._exhausted = filled is None
        return filled

    def _drain(self) -> None:
        """Releases chunks until `copy` ends, which would otherwise block without a free chunk after a failed write."""
        while not self._exhausted and (filled := self._next()) is not None:
            self._release(filled.chunk)
