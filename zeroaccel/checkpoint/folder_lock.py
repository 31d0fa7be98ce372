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
    """Holds `folder` until `release`.

    Raises:
        CheckpointError: another save holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = os.open(folder, os.O_RDONLY)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _take(self._handle):
            if time.monotonic() > deadline:
                self.release()
                raise CheckpointError(
                    f"{folder}: another save is writing into it",
                    fix="give each run a folder of its own; nothing was written",
                )
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Lets others in; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # for a child too, which has the handle as well
            os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether a save is writing into a folder now."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        return not _take(handle)
    finally:
        os.close(handle)


def _take(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no such locks here
    return True
