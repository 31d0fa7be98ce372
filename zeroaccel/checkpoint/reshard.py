"""Writes a checkpoint again as files of another number of ranks; the values, bit by bit, stay.

Loading needs none of this, since any number of ranks reads any checkpoint; it makes fewer files, or smaller ones.
Streams: in memory are a few chunks. No torch, no ranks.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zeroaccel.checkpoint.atomic_write import NewFile, write_all, write_durably
from zeroaccel.checkpoint.find import find_checkpoint
from zeroaccel.checkpoint.manifest import (
    ITEMSIZE,
    LATEST_NAME,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Piece,
    TensorRecord,
    check_new_tag,
    write_manifest,
)
from zeroaccel.checkpoint.rank_file import (
    CHUNK_NBYTES,
    Bytes,
    FileLayout,
    RankFileReader,
    ReadRequest,
    block_sums,
    lay_out_file,
    rank_file_name,
)
from zeroaccel.errors import CheckpointError, UsageError

__all__ = ["reshard", "write_again"]


class ReshardedFile(Protocol):
    """A file to copy from; `read` checks what it hands out."""

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Delivers each request."""


@dataclass(frozen=True)
class _Part:
    """Elements [start, start + length) of a tensor."""

    key: str
    tensor: TensorRecord
    start: int
    length: int


def reshard(source: Path, out: Path, world_size: int, tag: str | None = None) -> Path:
    """Writes the checkpoint of `source` (of `tag`, or the one `latest` names) into `out` for `world_size` ranks.

    The states of random number generators are kept only where the number of ranks stays the same.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: the source is damaged, or the disk is full. UsageError: the checkpoint is already in `out`.
    """
    folder, manifest = find_checkpoint(source, tag)
    if world_size != manifest.world_size:
        manifest = replace(manifest, random_state=None)
    files: list[RankFileReader] = []
    try:
        for record, pieces in zip(manifest.files, manifest.pieces_by_file(), strict=True):
            files.append(RankFileReader(folder, record))
            files[-1].check_pieces(pieces)
        return write_again(manifest, files, out, world_size)
    finally:
        for file in files:
            file.close()


def write_again(manifest: Manifest, files: Sequence[ReshardedFile], out: Path, world_size: int) -> Path:
    """Writes what `manifest` says is in `files` into `out/<tag>` for `world_size` ranks; returns that folder.

    Raises:
        CheckpointError: a file is damaged, or the disk is full. UsageError: the checkpoint is already in `out`.
    """
    target = out / check_new_tag(manifest.tag)
    if world_size < 1:
        raise UsageError("world_size", expected="a number above 0", got=world_size)
    if (target / MANIFEST_NAME).exists():
        raise UsageError(f"{target}", expected="no checkpoint there", fix="choose another folder")
    save_id = secrets.token_hex(4)
    try:
        target.mkdir(parents=True, exist_ok=True)
        parts = list(_divide(manifest, world_size))
        layouts = [lay_out_file([(part.key, part.tensor.dtype, part.length) for part in of_rank]) for of_rank in parts]
        records = []
        for rank, (of_rank, layout) in enumerate(zip(parts, layouts, strict=True)):
            path = target / rank_file_name(rank, world_size, save_id)
            records.append(_write_file(path, rank, layout, _contents(layout, of_rank, files)))
        write_manifest(target, _moved(manifest, save_id, world_size, records, parts, layouts))
        write_durably(out / LATEST_NAME, manifest.tag.encode())
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror})", fix="free some space or choose another folder"
        ) from error
    return target


def _divide(manifest: Manifest, world_size: int) -> Iterator[list[_Part]]:
    """What each rank gets: an equal interval of every tensor, and rank 0 what is not of the model's weights."""
    wanted = set(_referenced([manifest.client_state, manifest.lr_scheduler, manifest.loss_scale]))
    wanted |= set(_referenced([manifest.optimizer, manifest.random_state, manifest.config]))
    tensors = {key: tensor for key, tensor in manifest.tensors.items() if key in wanted or not key.startswith("plain/")}
    for rank in range(world_size):
        parts = []
        for key, tensor in tensors.items():
            shared = key.startswith(("master/", "value/", "state/"))
            share = -(-tensor.numel // world_size) if shared else tensor.numel
            start = min(rank * share, tensor.numel)
            length = min(share, tensor.numel - start)
            if length or rank == 0:
                parts.append(_Part(key, tensor, start, length))
        yield sorted(parts, key=lambda part: -ITEMSIZE[part.tensor.dtype])


def _referenced(encoded: Any) -> Iterator[str]:
    """The keys of tensors in encoded plain data."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from _referenced(item)
    elif isinstance(encoded, dict):
        if encoded.get("$") == "tensor":
            yield encoded["key"]
        else:
            yield from _referenced(list(encoded.values()))


def _contents(layout: FileLayout, parts: list[_Part], files: Sequence[ReshardedFile]) -> Iterator[Bytes]:
    """The bytes of a file up to its table, a chunk or less at a time."""
    yield np.frombuffer(layout.header, np.uint8)
    for part in parts:
        itemsize = ITEMSIZE[part.tensor.dtype]
        most = CHUNK_NBYTES // itemsize
        for file, start, length, offset in part.tensor.pieces:
            first, end = max(start, part.start), min(start + length, part.start + part.length)
            for low in range(first, end, most):
                taken: list[Bytes] = []
                nbytes = (min(low + most, end) - low) * itemsize
                files[file].read([ReadRequest(offset + (low - start) * itemsize, nbytes, taken.append)])
                yield from taken


def _write_file(path: Path, rank: int, layout: FileLayout, contents: Iterator[Bytes]) -> FileRecord:
    with NewFile(path) as file:
        sums = []
        chunk, used = np.empty(CHUNK_NBYTES, np.uint8), 0
        for data in contents:
            while data.size:
                part = data[: CHUNK_NBYTES - used]
                chunk[used : used + part.size] = part
                used, data = used + part.size, data[part.size :]
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


def _moved(
    manifest: Manifest,
    save_id: str,
    world_size: int,
    records: list[FileRecord],
    parts: list[list[_Part]],
    layouts: list[FileLayout],
) -> Manifest:
    pieces: dict[str, list[Piece]] = {}
    for rank, (of_rank, layout) in enumerate(zip(parts, layouts, strict=True)):
        for part in of_rank:
            held = pieces.setdefault(part.key, [])
            if part.length:
                held.append((rank, part.start, part.length, layout.offsets[part.key]))
    return replace(
        manifest,
        id=save_id,
        saved_at=time.time(),
        world_size=world_size,
        files=tuple(records),
        tensors={key: replace(manifest.tensors[key], pieces=tuple(held)) for key, held in pieces.items()},
    )
