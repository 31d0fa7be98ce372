"""One save at a time in a checkpoint's folder, whichever run it is of. No torch, no ranks.

A lock of the system on the folder itself: it ends with its process, so a killed run leaves none. Where a file system
has no such locks (some network ones), everybody gets it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from zeroaccel.errors import CheckpointError

__all__ = ["FolderLock", "is_locked"]

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
