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

TEMPORARY_SUFFIX = ".tmp"

_TEMPORARY = re.compile(r"(?P<name>.+?)(\.[0-9a-f]{8})?\.tmp", re.DOTALL)
_ATTEMPTS = 8
_ABANDONED_SECONDS = 10.0
"""Age from which an unlocked temporary file counts as abandoned: a writer locks it right after creating it."""


@contextlib.contextmanager
def writing_to(place: Path, *, keeps_others: bool = False) -> Iterator[None]:
    """Makes an OSError of the block a CheckpointError with the place.

    Args:
        keeps_others: nothing that was written earlier is lost by it.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{place}: cannot be written ({error.strerror})",
            fix="free some space or choose another folder"
            + ("; earlier checkpoints are as they were" if keeps_others else ""),
        ) from error


class NewFile:
    """A file under a temporary name in the folder of its final one. A context manager; unpublished files are removed.

    Args:
        path: its final name.
        unique: whether `path` may have several writers at a time, each with a temporary name of its own; else the
            temporary name is `path` with TEMPORARY_SUFFIX, and it is an error if that file exists.
        mode: permissions of the new file, before the umask.
        over: a file of the same file system that is not needed: it gets the temporary name and is overwritten from its
            begin. In memory that saves fresh pages, which take longer than the copy. Not with `unique`.

    Attributes:
        handle: the open file, for reading and writing; closed at the end of the `with` block.

    Raises:
        OSError: also from `publish`; its `filename` is `path`.
    """

    def __init__(self, path: Path, *, unique: bool = True, mode: int = 0o666, over: Path | None = None) -> None:
        self.path = path
        self.handle = -1
        self._published = False
        self._over = over
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
        """Flushes the file to the disk and renames it to its final name, atomically."""
        with self._named_errors():
            # The content before the name, else a crash could leave the final name on an empty file; and the folder
            # after it, else the name itself might not survive (fsync(2), NOTES).
            if self._over is not None:
                os.ftruncate(self.handle, os.lseek(self.handle, 0, os.SEEK_CUR))
            os.fsync(self.handle)
            os.replace(self._name, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._published = True
            os.fsync(self._folder)

    def close(self) -> None:
        """Closes the file, and removes it if it was not published; a second call does nothing."""
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
            if self._over is not None:
                os.rename(self._over, self._name, dst_dir_fd=self._folder)
                flags &= ~os.O_EXCL
            try:
                self.handle = os.open(self._name, flags, mode, dir_fd=self._folder)
                break
            except FileExistsError:
                if not unique or attempt == _ATTEMPTS - 1:
                    raise
        with contextlib.suppress(OSError):  # a file system without locks, where `remove_abandoned` removes nothing
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path), None
            raise


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces `path` atomically by a file with `content`. Several processes may do so at a time.

    Raises:
        OSError: the disk is full or fails; the previous file is unchanged, and nothing else is left.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "latest"
        >>> write_durably(path, b"global_step10")
        >>> path.read_text(), [file.name for file in path.parent.iterdir()]
        ('global_step10', ['latest'])
    """
    with NewFile(path, mode=mode) as file:
        write_all(file.handle, memoryview(content))
        file.publish()


def remove_abandoned(path: Path) -> None:
    """Removes temporary files of `path` whose writers were killed; a living writer holds a lock on its own.

    To be called after `path` was published: its modification time is the present by the clock of the file system.
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
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode) or status.st_mtime > now - _ABANDONED_SECONDS:
        return
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only if the name is still that of the locked file: its writer may have published it and another begun.
        if os.path.samestat(os.fstat(handle), os.stat(name, dir_fd=folder, follow_symlinks=False)):
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(handle)


def begin_flush(handle: int, offset: int, nbytes: int) -> None:
    """Starts writeback of bytes that were written, so that less is left for the fsync at the end.

    On Linux, POSIX_FADV_DONTNEED starts to write dirty pages to the disk. Does nothing elsewhere.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def write_all(handle: int, data: memoryview) -> None:
    """Writes all bytes; `os.write` may write fewer at a time."""
    while data.nbytes:
        data = data[os.write(handle, data) :]


_LOCK_TIMEOUT_SECONDS = 10.0
"""How long a save waits for the lock: a run that is being stopped may still hold it while its successor begins."""
_POLL_SECONDS = 0.05


class FolderLock:
    """An exclusive lock on `folder` until `release`: one save at a time, also of several runs.

    The lock is flock(2) on the folder itself: it ends with its process, so a killed run leaves none behind. A file
    system without such locks (some network ones) grants it to every process. The folder is created if it does not
    exist, also if another run removes it meanwhile.

    Raises:
        CheckpointError: another save holds it, or it is a symbolic link. OSError: it cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = None
        deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while not self._acquire(folder):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{folder}: another save is writing into it",
                    fix="give each run a folder of its own; nothing was written",
                )
            folder.mkdir(parents=True, exist_ok=True)
            time.sleep(_POLL_SECONDS)

    @classmethod
    def if_free(cls, folder: Path, timeout_seconds: float = 0.0) -> FolderLock | None:
        """The lock of an existing folder; None if there is no such folder, or a save holds it that long."""
        lock = cls.__new__(cls)  # without waiting, and without creating the folder
        lock._handle = None
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(OSError, CheckpointError):
            while not lock._acquire(folder):
                if time.monotonic() >= deadline or not folder.is_dir():
                    return None
                time.sleep(_POLL_SECONDS)
            return lock
        return None

    def release(self) -> None:
        """Unlocks the folder; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough where a child inherited the handle
            os.close(handle)

    def _acquire(self, folder: Path) -> bool:
        """Tries once; True if the lock is this object's, and of the folder that has this name now."""
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder}: a symbolic link",
                expected="a real folder: writing through the link would overwrite its target",
                fix="remove the link or choose another tag; nothing was written",
            )
        try:
            self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            if _try_flock(self._handle) and os.path.samestat(os.fstat(self._handle), os.lstat(folder)):
                return True
        except FileNotFoundError:  # another run removed it between the open and the lock
            pass
        self.release()
        return False


def _try_flock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the file system has no such locks
    return True
