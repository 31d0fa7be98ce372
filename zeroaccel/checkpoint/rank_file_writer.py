"""Writes one rank's file from live tensors: copied chunk by chunk into staging memory, summed, written, published.

Copying and writing run in two threads with a bounded number of chunks between them, so that the disk is the only thing
waited for. Who calls decides which of the two is the caller's thread (`save.py`, `background_save.py`). Once `copied`
is set the tensors may change.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zeroaccel.checkpoint.atomic_write import NewFile, begin_flush, write_all
from zeroaccel.checkpoint.manifest import ITEMSIZE, FileRecord
from zeroaccel.checkpoint.rank_file import CHUNK_NBYTES, FileLayout, block_sums, lay_out_file
from zeroaccel.checkpoint.save_plan import SaveItem
from zeroaccel.errors import CheckpointError

__all__ = ["RankFileWriter", "Staging"]


class Staging:
    """A bounded pool of chunks of host memory; `take` waits for one to come back.

    Args:
        nbytes: of the pool; at least two chunks are made. They are made as they are needed, and kept.
    """

    def __init__(self, nbytes: int) -> None:
        self._limit = max(2, nbytes // CHUNK_NBYTES)
        self._made = 0
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def take(self) -> Tensor:
        """(CHUNK_NBYTES,) uint8 of anything. For one taker at a time."""
        if self._made < self._limit and self._free.empty():
            self._made += 1
            return torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
        return self._free.get()

    def put(self, chunk: Tensor) -> None:
        """Gives one back."""
        self._free.put(chunk)


@dataclass(frozen=True)
class _Filled:
    chunk: Tensor
    nbytes: int


class RankFileWriter:
    """One rank's file on its way to the disk.

    Args:
        path: its final name.
        entries: what goes into it, in the order of the file; all of them still to be copied.

    Attributes:
        layout: where each entry will lie.
        copied: set when the tensors are needed no longer, or never will be because of an error.
    """

    def __init__(self, path: Path, entries: Sequence[SaveItem], staging: Staging) -> None:
        self.path = path
        self.entries = sorted(entries, key=lambda entry: -ITEMSIZE[entry.dtype])
        self.layout: FileLayout = lay_out_file([(e.key, e.dtype, e.data.numel()) for e in self.entries])
        self.copied = threading.Event()
        self._staging = staging
        self._filled: queue.SimpleQueue[_Filled | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._exhausted = False

    def copy(self) -> None:
        """Copies everything into staging memory; runs beside `write`, which returns the chunks."""
        try:
            with torch.no_grad():
                self._copy()
        except Exception as error:
            self._failure = error
        finally:
            self.copied.set()
            self._filled.put(None)

    def write(self, rank: int) -> FileRecord:
        """Writes what `copy` provides; the file is there, whole and on the disk, when this returns.

        Raises:
            CheckpointError: the disk is full or fails. Nothing is left of the file, and `copy` ends all the same.
        """
        try:
            with NewFile(self.path, unique=False) as file:  # the name has the number of this save
                table = self._write(file.handle)
                file.publish()
        except BaseException as error:
            self._drain()
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"{self.path}: cannot be written ({error.strerror})",
                    got=f"{self.layout.nbytes} bytes to write",
                    fix="free some space or choose another folder; earlier checkpoints are as they were",
                ) from error
            raise
        return FileRecord(self.path.name, self.layout.nbytes, rank, hashlib.sha256(table).hexdigest())

    def _copy(self) -> None:
        chunk, used = self._staging.take(), 0
        for source in self._sources():
            while source.numel():
                part = source[: CHUNK_NBYTES - used]
                chunk[used : used + part.numel()].copy_(part)
                used += part.numel()
                source = source[part.numel() :]
                if used == CHUNK_NBYTES:
                    self._filled.put(_Filled(chunk, used))
                    chunk, used = self._staging.take(), 0
        self._filled.put(_Filled(chunk, used))

    def _sources(self) -> Iterator[Tensor]:
        yield torch.frombuffer(bytearray(self.layout.header), dtype=torch.uint8)
        for entry in self.entries:
            if isinstance(entry.data, Tensor):
                yield entry.data.view(torch.uint8)
            else:
                yield from entry.data.chunks(CHUNK_NBYTES)

    def _write(self, handle: int) -> bytes:
        sums, written = [], 0
        while (filled := self._next()) is not None:
            try:
                data = filled.chunk.numpy()[: filled.nbytes]
                sums.append(block_sums(data))
                write_all(handle, data.data)
                begin_flush(handle, written, data.size)
                written += data.size
            finally:
                self._staging.put(filled.chunk)
        if self._failure is not None:
            raise self._failure
        table: bytes = np.concatenate(sums).astype("<u8").tobytes()
        write_all(handle, memoryview(table))
        return table

    def _next(self) -> _Filled | None:
        filled = self._filled.get()
        self._exhausted = filled is None
        return filled

    def _drain(self) -> None:
        """Lets `copy` come to its end after a failure."""
        while not self._exhausted and (filled := self._next()) is not None:
            self._staging.put(filled.chunk)
