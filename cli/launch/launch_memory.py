"""The memory that a launcher keeps for its ranks while it starts them again: a folder of a file system in memory.

The folder outlives the ranks and ends with the launcher. One whose launcher was killed stays until the next launch of
the same user: a launcher locks its own, and removes those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroaccel.config.launch.launch_settings import LaunchSettings

MEMORY = Path("/dev/shm")
VARIABLE = "ZEROACCEL_MEMORY_FOLDER"
_PREFIX = "zeroaccel-memory-"


@contextmanager
def launch_memory(settings: LaunchSettings, memory: Path = MEMORY) -> Iterator[dict[str, str]]:
    """A folder in memory for a job that may be started again, until the end of the block; others have none.

    Removes what killed launchers have left. Yields the variables that tell the ranks of the folder.
    """
    if not settings.max_restarts or not os.access(memory, os.W_OK):
        yield {}
        return
    for left in memory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if left.stat().st_uid == os.getuid() and (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
    new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=memory))
    own = _locked(new)  # under a name that no other launcher looks for
    folder = new.rename(memory / new.name[1:])
    try:
        yield {VARIABLE: str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if own is not None:
            os.close(own)


def _locked(folder: Path) -> int | None:
    """A handle that locks the folder until it is closed, or its process ends; None where another one has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
