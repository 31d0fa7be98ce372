"""Atomic, durable files, and locks on folders: what several runs and a crash can do to each other on one disk.

A file is written under a temporary name, flushed to the disk and renamed, so it is there completely or not at all. A
temporary name belongs to one writer: it is created exclusively (never opened if it exists, never through a link) in a
folder that stays open until the file has its final name. `FolderLock` admits one save at a time to a folder.
Knows nothing of what the bytes mean. No torch, no ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zeroaccel.errors import CheckpointError

__all__ = [
    "TEMPORARY_SUFFIX",
    "FolderLock",
    "NewFile",
    "begin_flush",
    "is_locked",
    "remove_abandoned",
    "write_all",
    "write_durably",
]

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


_PATIENCE_SECONDS = 10.0
"""How long a save waits for another's end: that of a run which is being stopped while its successor begins."""
_POLL_SECONDS = 0.05


class FolderLock:
    """Holds `folder` until `release`. The folder is made if it is not there, also if another run removes it meanwhile.

    Raises:
        CheckpointError: another save holds it, or it is a symbolic link. OSError: it cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = None
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._held(folder):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{folder}: another save is writing into it",
                    fix="give each run a folder of its own; nothing was written",
                )
            folder.mkdir(parents=True, exist_ok=True)
            time.sleep(_POLL_SECONDS)

    @classmethod
    def if_free(cls, folder: Path, patience_seconds: float = 0.0) -> FolderLock | None:
        """The lock of a folder that is there; None if it is not there, or a save holds it that long."""
        lock = cls.__new__(cls)
        lock._handle = None
        deadline = time.monotonic() + patience_seconds
        with contextlib.suppress(OSError, CheckpointError):
            while not lock._held(folder):
                if time.monotonic() >= deadline or not folder.is_dir():
                    return None
                time.sleep(_POLL_SECONDS)
            return lock
        return None

    def release(self) -> None:
        """Lets others in; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # for a child too, which has the handle as well
            os.close(handle)

    def _held(self, folder: Path) -> bool:
        """Whether the lock is ours now, and of the folder that is under this name now."""
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder}: a symbolic link",
                expected="a folder of its own, as what is behind the link would be overwritten",
                fix="remove the link or choose another tag; nothing was written",
            )
        try:
            self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            if _take(self._handle) and os.path.samestat(os.fstat(self._handle), os.lstat(folder)):
                return True
        except FileNotFoundError:  # it was removed between the two
            pass
        self.release()
        return False


def is_locked(folder: Path) -> bool:
    """Whether a save is writing into a folder now."""
    lock = FolderLock.if_free(folder)
    if lock is not None:
        lock.release()
    return lock is None


def _take(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no such locks here
    return True
