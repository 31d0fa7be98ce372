"""Whether a folder will do for offload, asked before training: that it is one, on which file system, with what space.

Only looks. Errors name the config key that gave the folder.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger

__all__ = ["OffloadFolder", "examine_folder"]

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "afs",
    "fuse.sshfs",
    "fuse.glusterfs",
}


@dataclass(frozen=True)
class OffloadFolder:
    """A folder that will do.

    Attributes:
        path: absolute.
        file_system: its type, "ext4"; "unknown" where the system does not tell.
        free_nbytes: for this user, now.
    """

    path: Path
    file_system: str
    free_nbytes: int


def examine_folder(path: str | os.PathLike[str], where: str) -> OffloadFolder:
    """What is known of the folder.

    Args:
        where: the config key that names it, for errors.

    Raises:
        ConfigError: it is missing, not a folder, read-only, not writable, or in memory.
    """
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    if not folder.is_dir():
        got = f"{folder}, which {'is a file' if folder.exists() else 'does not exist'}"
        raise ConfigError(where, expected="a folder on a local disk", got=got, fix="create it or name another")
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        got = f"{folder}, which is on a read-only file system"
        raise ConfigError(where, expected="a folder one may write to", got=got, fix="name another, or mount it anew")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(where, expected="a folder one may write to", got=str(folder), fix="change its permissions")
    kind = _file_system(folder)
    if kind in _IN_MEMORY:
        raise ConfigError(
            where,
            expected="a folder on a disk",
            got=f"{folder}, which is a {kind}: its files take the memory that offload is to save",
            fix='name a folder on a disk, or set device to "cpu"',
        )
    if kind in _NETWORK:
        logger.warning("%s: %s is on a network file system (%s); expect its speed", where, folder, kind)
    return OffloadFolder(folder, kind, shutil.disk_usage(folder).free)


def _file_system(folder: Path) -> str:
    """The type of the file system at `folder`, by the kernel's table of mounts."""
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return "unknown"
    best, found = "", "unknown"
    for line in table.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if (folder == Path(point) or Path(point) in folder.parents) and len(point) >= len(best):
            best, found = point, after.split()[0]  # of two mounted on one point the later hides the earlier
    return found
