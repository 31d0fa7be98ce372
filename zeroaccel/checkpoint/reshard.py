"""Rewrites a checkpoint as files for another world size, with bit-identical values.

Loading does not need this, because any number of ranks reads any checkpoint; use it to get fewer or smaller files.
It streams, with a few chunks in memory. No torch, no ranks.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zeroaccel.checkpoint.atomic_write import NewFile, write_all, write_durably, writing_to
from zeroaccel.checkpoint.find import find_checkpoint
from zeroaccel.checkpoint.manifest import (
    LATEST_NAME,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Piece,
    TensorRecord,
    check_new_tag,
    write_manifest,
)
from zeroaccel.checkpoint.rank_file import RankFileReader, block_sums, lay_out_rank_file, rank_file_name
from zeroaccel.checkpoint.zero_to_fp32 import CHUNK_NBYTES, ByteFile, Bytes
from zeroaccel.errors import UsageError
from zeroaccel.zero.access.safetensors_file import ITEMSIZE, FileLayout
from zeroaccel.zero.layout import FlatRange


@dataclass(frozen=True)
class _WriteItem:
    """A range of a tensor's elements, for one rank's file."""

    key: str
    tensor: TensorRecord
    elements: FlatRange


def reshard(
    source: Path, out: Path, world_size: int | None = None, tag: str | None = None, new_tag: str | None = None
) -> Path:
    """Rewrites the checkpoint in `source` with `tag`, or the tag in `latest`, into `out` for `world_size` ranks.

    If the number of ranks changes, the new checkpoint has no states of random number generators.

    Args:
        world_size: number of ranks; None for that of the source.
        new_tag: tag of the new checkpoint; None for that of the source.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: the source is damaged, or the disk is full.
        UsageError: the checkpoint is already in `out`.
    """
    folder, manifest = find_checkpoint(source, tag)
    manifest = manifest if new_tag is None else replace(manifest, tag=new_tag)
    world_size = manifest.world_size if world_size is None else world_size
    if world_size != manifest.world_size:
        manifest = replace(manifest, random_state=None)
    files: list[RankFileReader] = []
    try:
        for record, pieces in zip(manifest.files, manifest.pieces_by_file(), strict=True):
            files.append(RankFileReader(folder, record))
            files[-1].check_pieces(pieces)
        return rewrite(manifest, files, out, world_size)
    finally:
        for file in files:
            file.close()


def rewrite(manifest: Manifest, files: Sequence[ByteFile], out: Path, world_size: int) -> Path:
    """Copies the tensors of `manifest` from `files` into `out/<tag>` for `world_size` ranks; returns that folder.

    Raises:
        CheckpointError: a file is damaged, or the disk is full.
        UsageError: the checkpoint is already in `out`.
    """
    target = out / check_new_tag(manifest.tag)
    if world_size < 1:
        raise UsageError("world_size", expected="a number above 0", got=world_size)
    if (target / MANIFEST_NAME).exists():
        raise UsageError(f"{target}", expected="a folder without a checkpoint", fix="choose another folder")
    save_id = secrets.token_hex(4)
    with writing_to(target):
        target.mkdir(parents=True, exist_ok=True)
        # Compute all layouts first: offsets depend on the sizes alone, so each file can be written front to back.
        plans = list(_plan_ranks(manifest, world_size))
        layouts = [
            lay_out_rank_file([(item.key, item.tensor.dtype, item.elements.numel) for item in plan]) for plan in plans
        ]
        records = []
        for rank, (plan, layout) in enumerate(zip(plans, layouts, strict=True)):
            path = target / rank_file_name(rank, world_size, save_id)
            records.append(_write_file(path, rank, layout, _contents(layout, plan, files)))
        write_manifest(target, _resharded(manifest, save_id, world_size, records, plans, layouts))
        write_durably(out / LATEST_NAME, manifest.tag.encode())
    return target


def _plan_ranks(manifest: Manifest, world_size: int) -> Iterator[list[_WriteItem]]:
    """Yields the items of each rank: an equal range of every weight and state; rank 0 also has the other tensors."""
    referenced = set(_referenced([manifest.client_state, manifest.lr_scheduler, manifest.loss_scale]))
    referenced |= set(_referenced([manifest.optimizer, manifest.random_state, manifest.config]))
    # `reshard` drops the random states if the world size changes, so their tensors are no longer referenced.
    tensors = {
        key: tensor for key, tensor in manifest.tensors.items() if key in referenced or not key.startswith("plain/")
    }
    for rank in range(world_size):
        items = []
        for key, tensor in tensors.items():
            sharded = key.startswith(("master/", "value/", "state/"))
            shard_numel = -(-tensor.numel // world_size) if sharded else tensor.numel
            elements = FlatRange(0, tensor.numel) & FlatRange(rank * shard_numel, (rank + 1) * shard_numel)
            if elements or rank == 0:
                items.append(_WriteItem(key, tensor, elements))
        yield sorted(items, key=lambda item: -ITEMSIZE[item.tensor.dtype])


def _referenced(encoded: Any) -> Iterator[str]:
    """Yields the keys of the tensors in encoded plain data."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from _referenced(item)
    elif isinstance(encoded, dict):
        if encoded.get("$") == "tensor":
            yield encoded["key"]
        else:
            yield from _referenced(list(encoded.values()))


def _contents(layout: FileLayout, plan: list[_WriteItem], files: Sequence[ByteFile]) -> Iterator[Bytes]:
    """Yields the bytes of a file before its table, at most a chunk at a time."""
    yield np.frombuffer(layout.header, np.uint8)
    for item in plan:
        itemsize = ITEMSIZE[item.tensor.dtype]
        most = CHUNK_NBYTES // itemsize
        for file, start, length, offset in item.tensor.runs:
            interval = item.elements & FlatRange(start, start + length)
            for low in range(interval.start, interval.end, most):
                nbytes = (min(low + most, interval.end) - low) * itemsize
                yield files[file].read(offset + (low - start) * itemsize, nbytes)


def _write_file(path: Path, rank: int, layout: FileLayout, contents: Iterator[Bytes]) -> FileRecord:
    with NewFile(path) as file:
        sums = []
        chunk, used = np.empty(CHUNK_NBYTES, np.uint8), 0
        # Regroup into chunks of 64 blocks, because a checksum covers one block of the file.
        for data in contents:
            while data.size:
                head = data[: CHUNK_NBYTES - used]
                chunk[used : used + head.size] = head
                used, data = used + head.size, data[head.size :]
                if used == CHUNK_NBYTES:
                    sums.append(block_sums(chunk))
                    write_all(file.handle, chunk.data)
                    used = 0
        sums.append(block_sums(chunk[:used]))
        write_all(file.handle, chunk[:used].data)
        table = np.concatenate(sums).astype("<u8").tobytes()
        write_all(file.handle, memoryview(table))
        file.publish()
    return FileRecord(path.name, layout.nbytes, rank, hashlib.sha256(table).hexdigest())


def _resharded(
    manifest: Manifest,
    save_id: str,
    world_size: int,
    records: list[FileRecord],
    plans: list[list[_WriteItem]],
    layouts: list[FileLayout],
) -> Manifest:
    """Returns the manifest of the new files."""
    pieces: dict[str, list[Piece]] = {}
    for rank, (plan, layout) in enumerate(zip(plans, layouts, strict=True)):
        for item in plan:
            runs = pieces.setdefault(item.key, [])
            if item.elements:
                runs.append((rank, item.elements.start, item.elements.numel, layout.offsets[item.key]))
    return replace(
        manifest,
        id=save_id,
        saved_at=time.time(),
        world_size=world_size,
        files=tuple(records),
        tensors={key: replace(manifest.tensors[key], pieces=tuple(runs), split=None) for key, runs in pieces.items()},
    )
