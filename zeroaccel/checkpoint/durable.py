"""Files that are there whole or not at all: written under a temporary name, flushed to the disk, renamed.

The only place that knows how bytes become durable; what they mean is others' matter. No torch.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["TEMPORARY_SUFFIX", "begin_flush", "publish", "sync_folder", "write_all", "write_durably"]

TEMPORARY_SUFFIX = ".tmp"


def write_durably(path: Path, content: bytes) -> None:
    """Replaces `path` by a file with `content`, in one step that a crash cannot divide."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(handle, memoryview(content))
        publish(handle, temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def publish(handle: int, temporary: Path, path: Path) -> None:
    """Flushes the open temporary file to the disk and gives it its name."""
    os.fsync(handle)
    os.replace(temporary, path)
    sync_folder(path.parent)


def begin_flush(handle: int, offset: int, nbytes: int) -> None:
    """Lets the disk begin with bytes that were written, so that less is left for the flush at the end.

    On Linux, advice that pages are not needed starts to write those that are not on the disk yet. Elsewhere nothing.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def write_all(handle: int, data: memoryview) -> None:
    """Writes all bytes, however many the system takes at a time."""
    while data.nbytes:
        data = data[os.write(handle, data) :]


def sync_folder(folder: Path) -> None:
    """Flushes a folder's list of names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
