"""The file of an NVMe tier: preallocated, in blocks that a few threads read and write with direct I/O.

The file has no name: no other process can open it, two runs in one folder never share it, and its space is freed when
the process ends, for whatever reason. Offsets, lengths and addresses are multiples of `ALIGN_NBYTES`. This module does
not interpret the bytes.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import queue
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from torch import Tensor

from zeroaccel.errors import ConfigError, OffloadError
from zeroaccel.logs import log_once
from zeroaccel.offload.host_buffers import ALIGN_NBYTES, aligned_bytes, aligned_nbytes
from zeroaccel.offload.offload_folder import OffloadFolder
from zeroaccel.ops.device_threads import CPU, start_thread

Direction = Literal["read", "write"]
_Done = Callable[["Exception | None"], None]
_PROBE_NBYTES = 32 << 20


@dataclass(frozen=True)
class IoSettings:
    """Parameters for reading and writing a file: the config's `aio` section.

    Attributes:
        block_nbytes: size of one request (`block_size`); a multiple of `ALIGN_NBYTES`.
        threads: `intra_op_parallelism` x `queue_depth`: number of simultaneous requests, one per thread.
        overlap: start a transfer before the previous one is complete (`overlap_events`).
        checksum: compute the CRC of every written block, and compare it when reading the block.
    """

    block_nbytes: int = 1 << 20
    threads: int = 8
    overlap: bool = True
    checksum: bool = False


@dataclass
class Traffic:
    """The transfers of one direction.

    nbytes: bytes transferred.
    seconds: time during which at least one transfer was in flight.
    in_flight: number of current transfers.
    since: time at which the first of them began.
    listener: a trace's callback, called with `since` when the last transfer in flight ends; None without a trace.
    """

    nbytes: int = 0
    seconds: float = 0.0
    in_flight: int = 0
    since: float = 0.0
    listener: Callable[[float], None] | None = None

    def begin(self) -> None:
        """Counts the start of a transfer."""
        if self.in_flight == 0:
            self.since = time.perf_counter()
        self.in_flight += 1

    def end(self, nbytes: int) -> None:
        """Counts the end of a transfer."""
        self.in_flight -= 1
        self.nbytes += nbytes
        if self.in_flight == 0:
            self.seconds += time.perf_counter() - self.since
            if self.listener is not None:
                self.listener(self.since)


class _Transfer:
    """The transfer of one buffer to or from one place in the file; complete with its last block."""

    def __init__(self, direction: Direction, data: Tensor, offset: int, done: _Done) -> None:
        self.direction = direction
        self.data = data
        self.view = data.numpy().data
        self.offset = offset
        self.done = done
        self.num_blocks_left = 0
        self.error: Exception | None = None


class BlockFile:
    """A file of fixed size in a folder. Life: `start` any number of times from any thread, `close` once.

    Args:
        folder: result of `examine_folder`.
        nbytes: size of the file; the space is reserved immediately.
        where: config key of the folder, for errors.
        settings: parameters for reading and writing.

    Attributes:
        direct: True if transfers bypass the page cache.
        traffic: bytes and seconds of each direction.

    Raises:
        ConfigError: files cannot be created in the folder, or it has less free space than `nbytes`.
    """

    def __init__(self, folder: OffloadFolder, nbytes: int, where: str, settings: IoSettings) -> None:
        self.folder = folder
        self.nbytes = aligned_nbytes(nbytes)
        self.settings = settings
        self.traffic: dict[Direction, Traffic] = {"read": Traffic(), "write": Traffic()}
        self._handle = _open_nameless(folder, where)
        try:
            self._reserve(where)
            self.direct = self._enable_direct_io()
        except BaseException:
            os.close(self._handle)
            raise
        self._sums: dict[int, tuple[int, int]] = {}  # offset of a block -> (length, checksum) of its last write
        self._lock = threading.Lock()
        self._backlog: deque[_Transfer] = deque()
        self._active = 0
        self._requests: queue.SimpleQueue[tuple[_Transfer, int, int] | None] = queue.SimpleQueue()
        self._threads = [
            start_thread(self._serve, f"zeroaccel-file-{index}", CPU, daemon=True) for index in range(settings.threads)
        ]
        # If a thread still runs while the interpreter is finalized, the process aborts.
        atexit.register(self.close)

    def start(self, direction: Direction, data: Tensor, offset: int, done: _Done) -> None:
        """Starts to transfer all of `data` to or from [offset, offset + len(data)).

        Args:
            data: (n,) uint8, aligned in address and length; it must not change until `done`.
            done: called once, by a thread of the file, with None or the error.
        """
        assert data.numel() % ALIGN_NBYTES == 0 and offset % ALIGN_NBYTES == 0 and data.data_ptr() % ALIGN_NBYTES == 0
        transfer = _Transfer(direction, data, offset, done)
        # Without overlap (`overlap_events`: false), transfers complete in the order in which they start.
        with self._lock:
            if self._active and not self.settings.overlap:
                self._backlog.append(transfer)
                return
            self._launch(transfer)

    def measure(self) -> tuple[float, float]:
        """Returns (write, read) rates in bytes per second, measured by overwriting at most 32 MiB of the file."""
        # Write first: reading reserved but unwritten space returns zeros without touching the disk.
        data = aligned_bytes(min(self.nbytes, _PROBE_NBYTES // 8))
        return self._rate("write", data), self._rate("read", data)

    def _rate(self, direction: Direction, data: Tensor) -> float:
        end = min(self.nbytes, _PROBE_NBYTES) // data.numel() * data.numel()
        start = time.perf_counter()
        for offset in range(0, end, data.numel()):
            transfer(self, direction, data, offset)
        return end / (time.perf_counter() - start)

    def close(self) -> None:
        """Completes the transfers in flight, ends the threads and frees the space. Idempotent."""
        threads, self._threads = self._threads, []
        # One end marker per thread, behind all requests.
        for _ in threads:
            self._requests.put(None)
        for thread in threads:
            thread.join()
        if threads:
            os.close(self._handle)
            atexit.unregister(self.close)

    # --- making the file

    def _reserve(self, where: str) -> None:
        if self.nbytes == 0:
            return
        try:
            # Reserved now: otherwise a full disk would end the training at some later step.
            os.posix_fallocate(self._handle, 0, self.nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = self.folder.free_nbytes
            raise ConfigError(
                f"{where} {self.folder.path}",
                expected=f"{self.nbytes} bytes of free space for this rank",
                got=f"{free} bytes ({error.strerror})",
                fix="free some space or name another folder; training has not started",
            ) from error

    def _enable_direct_io(self) -> bool:
        """Switches to direct I/O and tries it; on failure, returns to the page cache with a warning."""
        # The page cache would use the very memory that offload should save.
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        direct = getattr(os, "O_DIRECT", 0)
        try:
            # Some file systems accept the flag and refuse the transfer (EINVAL), so this writes and reads a block.
            if not direct:
                raise OSError(errno.EINVAL, "this system has no O_DIRECT")
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | direct)
            if self.nbytes:
                block = aligned_bytes(ALIGN_NBYTES)
                os.pwritev(self._handle, [block.numpy().data], 0)
                os.preadv(self._handle, [block.numpy().data], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags)
            log_once(
                logging.WARNING,
                f"{self.folder.path} ({self.folder.file_system}) does not support direct I/O ({error.strerror}), so "
                "offloaded data goes through the page cache and competes for memory there",
            )
            return False
        return True

    # --- transfers

    def _launch(self, transfer: _Transfer) -> None:
        """Queues the blocks for the threads. The caller holds the lock."""
        step, size = self.settings.block_nbytes, transfer.data.numel()
        # Blocks are aligned in the file, not in the buffer, so that each has one checksum for every reader.
        cuts = [0, *range(step - transfer.offset % step, size, step), size]
        transfer.num_blocks_left = len(cuts) - 1
        self._active += 1
        self.traffic[transfer.direction].begin()
        for start, stop in pairwise(cuts):
            self._requests.put((transfer, start, stop))

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            self._complete(*request)
            del request  # a waiting thread keeps no buffer alive

    def _complete(self, transfer: _Transfer, start: int, stop: int) -> None:
        # After an error the other blocks of the transfer are skipped, but counted: `done` is called exactly once.
        error: Exception | None = None
        try:
            if transfer.error is None:
                self._move(transfer, start, stop)
        except Exception as raised:
            error = raised
        with self._lock:
            transfer.error = transfer.error or error
            transfer.num_blocks_left -= 1
            if transfer.num_blocks_left:
                return
            self._active -= 1
            self.traffic[transfer.direction].end(transfer.data.numel())
            if self._backlog and not self._active:
                self._launch(self._backlog.popleft())
        # Outside the lock: the callback may start the next transfer.
        transfer.done(transfer.error)

    def _move(self, transfer: _Transfer, start: int, stop: int) -> None:
        block, offset = transfer.view[start:stop], transfer.offset + start
        call = os.preadv if transfer.direction == "read" else os.pwritev
        moved = 0
        # A call may transfer less than requested: repeat it from there. No progress at all is an error.
        try:
            if transfer.direction == "write" and self.settings.checksum:
                self._sums[offset] = len(block), zlib.crc32(block)
            while moved < len(block):
                count = call(self._handle, [block[moved:]], offset + moved)
                if count <= 0:
                    raise OffloadError(
                        f"{self._place(offset)}: a short {transfer.direction}",
                        expected=f"{len(block)} bytes",
                        got=moved,
                        fix="the file was truncated or its disk is failing; resume from the last checkpoint",
                    )
                moved += count
        except OSError as error:
            advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the disk"
            raise OffloadError(
                f"{self._place(offset)}: cannot {transfer.direction} ({error.strerror})",
                fix=f"{advice}, then resume from the last checkpoint, which is intact",
            ) from error
        if transfer.direction == "read" and self.settings.checksum:
            self._compare(block, offset)

    def _compare(self, block: memoryview, offset: int) -> None:
        """Raises if a block differs from the written one. A partial block has no checksum to compare."""
        length, expected = self._sums.get(offset, (0, 0))
        if length == len(block) and zlib.crc32(block) != expected:
            raise OffloadError(
                f"{self._place(offset)}: {len(block)} bytes are not what was written there: their checksum differs",
                fix="the disk or its cable is failing; resume from the last checkpoint on another one",
            )

    def _place(self, offset: int) -> str:
        return f"offloaded data in {self.folder.path}, byte {offset}"


def transfer(file: BlockFile, direction: Direction, data: Tensor, offset: int) -> None:
    """Starts a transfer, like `BlockFile.start`; returns when it is complete, and raises its error."""
    complete, errors = threading.Event(), []

    def done(error: Exception | None) -> None:
        errors.append(error)
        complete.set()

    file.start(direction, data, offset, done)
    complete.wait()
    if errors[0] is not None:
        raise errors[0]


def nameless_file(folder: Path) -> int:
    """Opens a file without a name, which the system deletes with its last descriptor or mapping.

    Only this user may open it. Made with O_TMPFILE; if the file system lacks that, the file has a name for a moment.

    Raises:
        OSError: the system's error.
    """
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    handle, name = tempfile.mkstemp(prefix="zeroaccel-offload-", dir=folder)
    os.unlink(name)
    return handle


def _open_nameless(folder: OffloadFolder, where: str) -> int:
    try:
        return nameless_file(folder.path)
    except OSError as error:
        raise ConfigError(
            where,
            expected="a folder in which files can be created",
            got=f"{folder.path} ({error.strerror})",
            fix="name a folder on a local disk that this user may write to",
        ) from error
