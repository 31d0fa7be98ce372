"""The memory that a launcher keeps for its ranks while it starts them again: a folder of a file system in memory.

The folder outlives the ranks and ends with the launcher. One whose launcher was killed stays until the next launch of
the same user: a launcher locks its own, and removes those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from zeroaccel.config.launch.launch_settings import LaunchSettings

MEMORY = Path("/dev/shm")
_PREFIX = "zeroaccel-memory-"


class LaunchMemory:
    """A folder in memory from now until `close`; none where `folder` is None.

    Attributes:
        variables: tell the ranks of it.
    """

    def __init__(self, folder: Path | None, lock: int | None = None) -> None:
        self.folder = folder
        self.variables = {} if folder is None else {"ZEROACCEL_MEMORY_FOLDER": str(folder)}
        self._lock = lock

    @classmethod
    def of(cls, settings: LaunchSettings, memory: Path = MEMORY) -> LaunchMemory:
        """For a job that may be started again; removes what killed launchers have left."""
        if not settings.max_restarts or not os.access(memory, os.W_OK):
            return cls(None)
        for left in memory.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if left.stat().st_uid == os.getuid() and (lock := _locked(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)
        new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=memory))
        lock = _locked(new)  # under a name that no other launcher looks for
        return cls(new.rename(memory / new.name[1:]), lock)

    def close(self) -> None:
        """Removes the folder."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self.folder = self._lock = None


def _locked(folder: Path) -> int | None:
    """A handle that locks the folder until it is closed, or its process ends; None where another one has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
