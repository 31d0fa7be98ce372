"""Atomic, durable files, and locks on folders: protection against crashes and against other runs on the same disk.

`NewFile` writes under a temporary name, flushes to the disk and renames, so the file exists completely or not at all.
A temporary name belongs to one writer, which creates it exclusively (never opens an existing file, never follows a
link) in a folder that stays open until the file has its final name. `FolderLock` admits one save at a time to a
folder. This module depends on no file format, torch or ranks.
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
"""Age at which an unlocked temporary file counts as abandoned: a writer locks it right after creating it."""


@contextlib.contextmanager
def writing_to(place: Path, *, keeps_others: bool = False) -> Iterator[None]:
    """Converts an OSError in the block to a CheckpointError that names the place.

    Args:
        keeps_others: True if the error does not affect earlier checkpoints; the message says so.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{place}: cannot be written ({error.strerror})",
            fix="free some space or choose another folder"
            + ("; earlier checkpoints are unchanged" if keeps_others else ""),
        ) from error


class NewFile:
    """A file under a temporary name in its final folder. The context manager removes it if it was not published.

    Args:
        path: final path of the file.
        unique: if True, `path` may have several writers at a time, each with its own temporary name. Else the temporary
            name is `path` with TEMPORARY_SUFFIX, and an existing file of that name is an error.
        mode: permissions of the new file, before the umask.
        over: an obsolete file of the same file system, to rename to the temporary name and overwrite from its start.
            In a file system in memory this avoids new pages, which take longer than the copy. Not with `unique`.

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
            # Flush the content before the rename, else a crash could leave the final name on an empty file; and the
            # folder after it, else the name itself might not survive (fsync(2), NOTES).
            if self._over is not None:
                os.ftruncate(self.handle, os.lseek(self.handle, 0, os.SEEK_CUR))
            os.fsync(self.handle)
            os.replace(self._name, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._published = True
            os.fsync(self._folder)

    def close(self) -> None:
        """Closes the file, and removes it unless it is published; a second call does nothing."""
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
        with contextlib.suppress(OSError):  # without locks in the file system, `remove_abandoned` removes nothing
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path), None
            raise


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces `path` atomically by a file with `content`. Several processes may call it at the same time.

    Raises:
        OSError: the disk is full or fails. The previous file is unchanged, and no temporary file remains.

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
    """Removes temporary files of `path` whose writers were killed; a living writer holds a lock on its file.

    Call it right after publishing `path`, whose modification time is then the current time on the file system's clock.
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
        # Only if the name still belongs to the locked file: its writer may have published it, and another one begun.
        if os.path.samestat(os.fstat(handle), os.stat(name, dir_fd=folder, follow_symlinks=False)):
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(handle)


def begin_flush(handle: int, offset: int, nbytes: int) -> None:
    """Starts writeback of written bytes, so that the final fsync has less to do.

    On Linux, POSIX_FADV_DONTNEED starts to write dirty pages to the disk. Has no effect on other systems.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def write_all(handle: int, data: memoryview) -> None:
    """Writes all bytes; a single `os.write` may write fewer."""
    while data.nbytes:
        data = data[os.write(handle, data) :]


_LOCK_TIMEOUT_SECONDS = 10.0
"""How long a save waits for the lock: a run that is stopping may still hold it when its successor starts."""
_POLL_SECONDS = 0.05


class FolderLock:
    """An exclusive lock on `folder` until `release`: one save at a time, across all runs.

    The lock is flock(2) on the folder itself: it ends with its process, so a killed run leaves none behind. On file
    systems without such locks (some network file systems), every process gets it. The lock creates the folder if it
    does not exist, also if another run removes it in the meantime.

    Raises:
        CheckpointError: another save holds the lock, or the folder is a symbolic link.
        OSError: the folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = None
        deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while not self._acquire(folder):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{folder}: another save is writing into it",
                    fix="use a separate folder for each run; nothing was written",
                )
            folder.mkdir(parents=True, exist_ok=True)
            time.sleep(_POLL_SECONDS)

    @classmethod
    def if_free(cls, folder: Path, timeout_seconds: float = 0.0) -> FolderLock | None:
        """Locks an existing folder; returns None if it does not exist, or a save holds the lock until the timeout."""
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
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough if a child process inherited the handle
            os.close(handle)

    def _acquire(self, folder: Path) -> bool:
        """Tries once. Returns True if it got the lock and `folder` is still the name of the locked folder."""
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder}: a symbolic link",
                expected="a real folder, because writing through the link would overwrite its target",
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
