"""Checks a folder for offload before training: existence, file system and free space. No torch.

Creates nothing. Errors name the config key of the folder.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger

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
    """A folder that passed the checks.

    Attributes:
        path: absolute path.
        file_system: type of its file system, such as "ext4"; "unknown" without /proc.
        free_nbytes: space that this user may use now.
    """

    path: Path
    file_system: str
    free_nbytes: int


def examine_folder(path: str | os.PathLike[str], where: str) -> OffloadFolder:
    """Checks a folder.

    Args:
        where: config key that names it, for errors.

    Raises:
        ConfigError: it is missing, not a folder, read-only, not writable, or in memory.
    """
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    if not folder.is_dir():
        got = f"{folder}, which {'is a file' if folder.exists() else 'does not exist'}"
        raise ConfigError(where, expected="a folder on a local disk", got=got, fix="create it or name another")
    # os.access alone would not show the reason: a read-only mount needs another fix than permissions.
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        got = f"{folder}, which is on a read-only file system"
        raise ConfigError(where, expected="a writable folder", got=got, fix="name another, or remount it writable")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(where, expected="a writable folder", got=str(folder), fix="change its permissions")
    # A folder in memory is an error, because offload to it frees nothing; a network file system is only slow.
    kind = _file_system(folder)
    if kind in _IN_MEMORY:
        raise ConfigError(
            where,
            expected="a folder on a disk",
            got=f"{folder}, which is a {kind}: its files use the memory that offload should save",
            fix='name a folder on a disk, or set device to "cpu"',
        )
    if kind in _NETWORK:
        logger.warning("%s: %s is on a network file system (%s), which limits the speed", where, folder, kind)
    return OffloadFolder(folder, kind, shutil.disk_usage(folder).free)


def _file_system(folder: Path) -> str:
    """Returns the type of the file system at `folder` from the kernel's mount table."""
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return "unknown"
    # The longest mount point above the folder. Of two mounts on one point, the later one hides the earlier one.
    best, kind = "", "unknown"
    for line in table.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if (folder == Path(point) or Path(point) in folder.parents) and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind
