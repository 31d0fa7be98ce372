"""Makes the ranks' files one checkpoint: the manifest, `latest`, the script beside it, then a clean-up.

Runs on rank 0 only, after every rank's file is on the disk; nothing here waits for ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroaccel.checkpoint.atomic_write import remove_abandoned, write_durably
from zeroaccel.checkpoint.consolidate import drop_script
from zeroaccel.checkpoint.find import checkpoint_folders
from zeroaccel.checkpoint.folder_lock import FolderLock
from zeroaccel.checkpoint.latest import LATEST_NAME, read_latest
from zeroaccel.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Piece,
    TensorRecord,
    read_manifest,
    write_manifest,
)
from zeroaccel.checkpoint.rank_file import is_part_of_a_save
from zeroaccel.checkpoint.rank_file_writer import RankFileWriter
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import logger

__all__ = ["CommitRules", "commit", "describe_part", "merge_parts"]

Part = Mapping[str, Any]
"""What rank 0 needs to know of a rank's file: plain data, made by `describe_part`."""


@dataclass(frozen=True)
class CommitRules:
    """What follows a manifest.

    Attributes:
        latest: whether `latest` names it.
        keep_last: how many checkpoints stay in the folder; None for all.
    """

    latest: bool = True
    keep_last: int | None = None


def describe_part(writer: RankFileWriter, record: FileRecord, scalars: Mapping[str, Any], random_state: Any) -> Part:
    """What a rank tells rank 0 about its file."""
    tensors = {
        entry.key: (entry.dtype, entry.shape, entry.start, entry.data.numel(), writer.layout.offsets[entry.key])
        for entry in writer.entries
    }
    file = (record.name, record.nbytes, record.rank, record.table_sha256)
    return {"file": file, "tensors": tensors, "scalars": scalars, "random_state": random_state}


def merge_parts(parts: Sequence[Part], common: Mapping[str, Any]) -> Manifest:
    """The manifest of the ranks' parts, by rank.

    Args:
        common: the fields that rank 0 knows; its `optimizer` gets the scalars.
    """
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    scalars: dict[str, Any] = {}
    for index, part in enumerate(parts):
        for key, (dtype, shape, start, length, offset) in part["tensors"].items():
            kinds[key] = (dtype, tuple(shape))
            held = pieces.setdefault(key, [])
            if length:
                held.append((index, start, length, offset))
        for fqn, values in part["scalars"].items():
            if scalars.setdefault(fqn, values) != values and "plain/" not in str(values):
                raise CheckpointError(
                    f"optimizer, state of {fqn}", expected=f"the same on all ranks, {scalars[fqn]}", got=values
                )
    fields = dict(common)
    if fields["optimizer"] is not None:
        fields["optimizer"] = {**fields["optimizer"], "scalars": scalars}
    states = [part["random_state"] for part in parts]
    return Manifest(
        **fields,
        files=tuple(FileRecord(*part["file"]) for part in parts),
        tensors={
            key: TensorRecord(dtype, shape, tuple(sorted(pieces[key], key=lambda piece: piece[1])))
            for key, (dtype, shape) in kinds.items()
        },
        random_state=None if any(state is None for state in states) else states,
    )


def commit(root: Path, manifest: Manifest, rules: CommitRules) -> None:
    """Finishes the checkpoint in `root/<tag>`. From the moment its manifest is there it is complete.

    Raises:
        CheckpointError: the disk is full or fails; what was there before stays valid.
    """
    folder = root / manifest.tag
    try:
        for record in manifest.files:
            _check_visible(folder / record.name, record.nbytes)
        write_manifest(folder, manifest)
        if rules.latest:
            write_durably(root / LATEST_NAME, manifest.tag.encode())
            drop_script(root)
            remove_abandoned(root / LATEST_NAME)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written ({error.strerror})",
            fix="free some space or choose another folder; earlier checkpoints are as they were",
        ) from error
    _clear_leftovers(folder, manifest)
    if rules.keep_last is not None:
        _prune(root, manifest, rules.keep_last)


def _check_visible(path: Path, nbytes: int) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != nbytes:
        raise CheckpointError(
            f"{path}, written by another rank",
            expected=f"{nbytes} bytes",
            got=size,
            fix="save into a folder that all ranks share",
        )


def _clear_leftovers(folder: Path, manifest: Manifest) -> None:
    """Removes what earlier saves, complete or interrupted, left under the same tag."""
    wanted = {record.name for record in manifest.files}
    for path in folder.iterdir():
        if is_part_of_a_save(path.name) and path.name not in wanted:
            with contextlib.suppress(OSError):
                path.unlink()


def _prune(root: Path, newest: Manifest, keep: int) -> None:
    """Removes the oldest checkpoints, and saves that were never finished; nothing that is not a checkpoint of ours."""
    complete: list[tuple[float, Path]] = []
    for folder in checkpoint_folders(root):
        if folder.name == newest.tag:
            continue
        try:
            complete.append((read_manifest(folder).saved_at, folder))
        except CheckpointError:
            if not (folder / MANIFEST_NAME).exists():
                _remove(folder)
    for _, folder in sorted(complete, reverse=True)[max(0, keep - 1) :]:
        if _remove(folder):
            logger.info("keep_last = %d: removed checkpoint %s", keep, folder)


def _remove(folder: Path) -> bool:
    """Removes a checkpoint, its manifest first; files that are not a checkpoint's stay, and the folder with them.

    What another run is writing stays, and what it has written last: a run holds the folder's lock until `latest` names
    it, so under the lock `latest` is either that of this folder already or never will be.
    """
    lock = FolderLock.if_free(folder)
    if lock is None:
        return False
    try:
        with contextlib.suppress(CheckpointError):
            if read_latest(folder.parent) == folder.name:
                return False
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        for path in folder.iterdir():
            if is_part_of_a_save(path.name):
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        logger.warning("checkpoint %s could not be removed: %s", folder, error)
        return False
    finally:
        lock.release()
    return True
