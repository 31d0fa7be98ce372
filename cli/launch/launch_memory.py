"""The memory that a launcher keeps for its ranks while it restarts them: a folder of a file system in memory.

The folder outlives the ranks and ends with the launcher. If the launcher is killed, the folder stays until the next
launch of the same user: a launcher locks its own folder, and removes folders without a lock.
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
from zeroaccel.errors import ConfigError

MEMORY = Path("/dev/shm")
VARIABLE = "ZEROACCEL_MEMORY_FOLDER"
_PREFIX = "zeroaccel-memory-"


@contextmanager
def launch_memory(settings: LaunchSettings, memory: Path = MEMORY) -> Iterator[dict[str, str]]:
    """Creates a folder in memory for a job that may restart, until the end of the block; for other jobs, does nothing.

    Removes folders of killed launchers. Yields the variable that gives the folder to the ranks.
    """
    if not settings.max_restarts or not os.access(memory, os.W_OK):
        yield {}
        return
    for left in memory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if os.lstat(left).st_uid == os.getuid() and (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
    try:
        new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=memory))
    except OSError as error:
        raise ConfigError(
            f"{settings.where('max_restarts')}: no folder for states in {memory}",
            expected="a folder in memory",
            got=error.strerror,
            fix="remove files there (df -h and df -i show what is full), or launch without --max_restarts",
        ) from error
    lock = _locked(new)  # its name is one that no other launcher searches
    folder = new.rename(memory / new.name[1:])
    try:
        yield {VARIABLE: str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Returns a handle that locks the folder until the handle or its process ends; None if it is already locked."""
    # Other users may write to the file system: a pipe would block, and a link lead to a folder of the user.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
