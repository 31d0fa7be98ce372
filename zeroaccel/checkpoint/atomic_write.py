"""Files that are there whole or not at all: written under a temporary name, flushed to the disk, renamed.

The only place that knows how bytes become durable; what they mean is others' matter. A temporary name belongs to one
writer: it is made anew (never opened if it is there, never through a link) in a folder that stays open until the file
has its final name. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["TEMPORARY_SUFFIX", "NewFile", "begin_flush", "remove_abandoned", "write_all", "write_durably"]

TEMPORARY_SUFFIX = ".tmp"

_TEMPORARY = re.compile(r"(?P<name>.+?)(\.[0-9a-f]{8})?\.tmp", re.DOTALL)
_ATTEMPTS = 8
_ABANDONED_SECONDS = 10.0
"""Age from which an unlocked temporary file counts as abandoned: a writer locks it right after it has made it."""


class NewFile:
    """A file under a temporary name beside its final one. A context manager: what was not published is removed.

    Args:
        path: its final name.
        unique: whether `path` may have several writers at a time, so that each takes a temporary name of its own; else
            the temporary name is `path` with TEMPORARY_SUFFIX, and one that is there already is an error.
        mode: permissions of the new file, before the umask.

    Attributes:
        handle: the open file, for reading and writing; closed at the end of the `with` block.

    Raises:
        OSError: also from `publish`; its `filename` is `path`.
    """

    def __init__(self, path: Path, *, unique: bool = True, mode: int = 0o666) -> None:
        self.path = path
        self.handle = -1
        self._published = False
        with self._named_errors():
            self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with self._named_errors():
                self._open(unique=unique, mode=mode)
        except BaseException:
            os.close(self._folder)
            raise

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(self) -> None:
        """Flushes the file to the disk and gives it its final name, in one step that a crash cannot divide."""
        with self._named_errors():
            os.fsync(self.handle)
            os.replace(self._name, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._published = True
            os.fsync(self._folder)

    def close(self) -> None:
        """Closes the file, and removes it where it was not published; a second call does nothing."""
        if self.handle < 0:
            return
        if not self._published:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
        os.close(self.handle)
        os.close(self._folder)
        self.handle = -1

    def _open(self, *, unique: bool, mode: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for attempt in range(_ATTEMPTS):
            self._name = f"{self.path.name}.{secrets.token_hex(4)}" if unique else self.path.name
            self._name += TEMPORARY_SUFFIX
            try:
                self.handle = os.open(self._name, flags, mode, dir_fd=self._folder)
                break
            except FileExistsError:
                if not unique or attempt == _ATTEMPTS - 1:
                    raise
        with contextlib.suppress(OSError):  # a file system without locks: then nothing is ever taken for abandoned
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path), None
            raise


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces `path` by a file with `content`, in one step that a crash cannot divide. Several may do so at a time.

    Raises:
        OSError: the disk is full or fails; what was there is as it was, and nothing else is left.
    """
    with NewFile(path, mode=mode) as file:
        write_all(file.handle, memoryview(content))
        file.publish()


def remove_abandoned(path: Path) -> None:
    """Removes temporary files of `path` whose writers were killed; one that is being written now stays.

    A living writer holds a lock on its file. To be called after `path` was published, whose time is the present one.
    """
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            now = os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mtime
            for name in os.listdir(folder):
                match = _TEMPORARY.fullmatch(name)
                if match is not None and match["name"] == path.name:
                    with contextlib.suppress(OSError):
                        _remove_if_abandoned(name, folder, now)
        finally:
            os.close(folder)


def _remove_if_abandoned(name: str, folder: int, now: float) -> None:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_mtime > now - _ABANDONED_SECONDS:
        return
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(name, dir_fd=folder, follow_symlinks=False)):
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(handle)


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
