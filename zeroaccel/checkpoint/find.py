"""Finds the checkpoint to load from a folder: by tag, by the file `latest`, or the newest valid one.

Reads only folders and manifests; no torch, no ranks.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from zeroaccel.checkpoint.formats.deepspeed_checkpoint import has_files
from zeroaccel.checkpoint.manifest import (
    LATEST_NAME,
    MANIFEST_NAME,
    Manifest,
    check_tag,
    read_latest,
    read_manifest,
)
from zeroaccel.checkpoint.rank_file import is_part_of_a_save
from zeroaccel.errors import CheckpointError, listed
from zeroaccel.logs import logger

DCP_METADATA_NAME = ".metadata"
"""The file that makes a folder a checkpoint of torch.distributed.checkpoint."""


def find_checkpoint(root: Path, tag: object = None, *, complete: bool = True) -> tuple[Path, Manifest]:
    """Returns the folder and the checked manifest of a tag, or of the tag in `latest`.

    Args:
        complete: see `read_manifest`.

    Raises:
        CheckpointError: the checkpoint does not exist, or is damaged or incomplete.
    """

    def there() -> str:
        return f"checkpoints in {root}: {listed(sorted(path.name for path in checkpoint_folders(root))) or 'none'}"

    if tag is None:
        if not (root / LATEST_NAME).exists():
            refuse_trainers_folder(root)
        tag = read_latest(root, fix=f'{there()}; pass a tag, or tag="auto" for the newest valid one')
    folder = root / check_tag(tag)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint", fix=there())
    return folder, read_manifest(folder, complete=complete)


def newest_first(root: Path) -> tuple[list[Path], list[str]]:
    """Returns the checkpoints with a valid manifest, the newest first, and a reason for each skipped one.

    A save that was interrupted before it wrote its manifest does not count as skipped. Checkpoints of DeepSpeed and of
    torch.distributed.checkpoint are included without a check, dated by their newest file.
    """
    dated: list[tuple[float, Path]] = []
    skipped: list[str] = []
    for folder in checkpoint_folders(root):
        if not (folder / MANIFEST_NAME).exists():
            logger.info("checkpoint %s: incomplete", folder)
            continue
        try:
            dated.append((read_manifest(folder).saved_at, folder))
        except CheckpointError as error:
            skipped.append(str(error))
    for folder in _folders(root):
        with contextlib.suppress(OSError):  # another program may be removing it
            if not _is_ours(folder) and (has_files(folder) or (folder / DCP_METADATA_NAME).is_file()):
                dated.append((max(path.stat().st_mtime for path in folder.iterdir()), folder))
    return [folder for _, folder in sorted(dated, reverse=True)], skipped


def has_checkpoints(root: Path) -> bool:
    """Returns True if `root` has a `latest` or a checkpoint of any format, or is itself a checkpoint.

    Also True if `root` is not a folder or cannot be read, so that a load raises an error that names it.
    """
    if not root.is_dir():
        return root.exists()
    try:
        folders = [root, *_folders(root)]
        foreign = any(has_files(folder) or (folder / DCP_METADATA_NAME).is_file() for folder in folders)
        return foreign or (root / LATEST_NAME).exists() or any(map(_is_ours, folders))
    except OSError:
        return True


def checkpoint_folders(root: Path) -> list[Path]:
    """Returns the folders in `root` that are checkpoints of this format or interrupted saves."""
    return [path for path in _folders(root) if _is_ours(path)]


def refuse_trainers_folder(root: Path) -> None:
    """Raises CheckpointError if the folders in `root`, such as checkpoint-20, are folders of checkpoints."""
    below = [path for path in _folders(root) if (path / LATEST_NAME).is_file()]
    if below:
        numbers = {path: [int(digits) for digits in re.findall(r"\d+", path.name)] for path in below}
        below.sort(key=numbers.__getitem__)
        names = listed([path.name for path in below])
        raise CheckpointError(
            f"{root}: its folders have the checkpoints: {names}", fix=f"pass one, such as {below[-1]}"
        )


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return [path for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink()]


def _is_ours(folder: Path) -> bool:
    try:
        return any(path.name == MANIFEST_NAME or is_part_of_a_save(path.name) for path in folder.iterdir())
    except OSError:  # another run may be removing it, or this user may not read it
        return False
