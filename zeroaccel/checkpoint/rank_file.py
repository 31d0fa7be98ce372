"""One rank's file: a safetensors file whose last tensor is a table of checksums of everything before it.

Lays files out and checks what is read back; `rank_file_writer.py` fills them. numpy only: docs/checkpoint_format.md is
the contract, and a reader needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroaccel.checkpoint.manifest import ITEMSIZE, FileRecord
from zeroaccel.errors import CheckpointError

__all__ = [
    "BLOCK_NBYTES",
    "CHUNK_NBYTES",
    "FileLayout",
    "RankFileReader",
    "ReadRequest",
    "block_sums",
    "is_part_of_a_save",
    "lay_out_file",
    "rank_file_name",
]

BLOCK_NBYTES = 1 << 16
"""Bytes that one checksum stands for."""
CHUNK_NBYTES = 64 * BLOCK_NBYTES
"""Bytes written and read at a time."""

_MOST_HEADER_NBYTES = 256 << 20

Bytes = NDArray[np.uint8]
_TEMPORARY = r"(\.[0-9a-f]{8})?\.tmp"
_NAME = re.compile(
    rf"rank\d{{5,}}-of-\d{{5,}}-[0-9a-f]{{8}}(\.safetensors|\.part\.json)({_TEMPORARY})?|manifest\.json{_TEMPORARY}"
)


def rank_file_name(rank: int, world_size: int, save_id: str) -> str:
    """The name of a rank's file, new in every save."""
    return f"rank{rank:05d}-of-{world_size:05d}-{save_id}.safetensors"


def is_part_of_a_save(name: str) -> bool:
    """Whether a save, complete or interrupted, made the file of this name (manifest.json itself aside)."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class FileLayout:
    """Where everything lies in a file, known before a byte is written.

    Attributes:
        header: the bytes before the data.
        offsets: key -> first byte, in the order of the file.
        table_offset: where the checksums begin; nbytes: the size of the file.
    """

    header: bytes
    offsets: dict[str, int]
    table_offset: int
    nbytes: int


def lay_out_file(sizes: Sequence[tuple[str, str, int]]) -> FileLayout:
    """The layout of a file of one-dimensional tensors.

    Args:
        sizes: (key, dtype, numel), in descending order of the dtypes' item sizes.
    """
    entries: dict[str, Any] = {}
    cursor = 0
    for key, dtype, numel in sizes:
        end = cursor + numel * ITEMSIZE[dtype]
        entries[key] = {"dtype": dtype, "shape": [numel], "data_offsets": [cursor, end]}
        cursor = end
    blocks = 0
    while True:  # the table is listed in the header, whose size decides how many blocks there are
        table = {"dtype": "U64", "shape": [blocks], "data_offsets": [cursor, cursor + 8 * blocks]}
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries, "__checksums__": table}).encode()
        text += b" " * (-(len(text) + 8) % 8)
        start = 8 + len(text)
        needed = -(-(start + cursor) // BLOCK_NBYTES)
        if needed == blocks:  # `needed` only grows with `blocks`, so this comes
            break
        blocks = needed
    header = len(text).to_bytes(8, "little") + text
    offsets = {key: start + entry["data_offsets"][0] for key, entry in entries.items()}
    return FileLayout(header, offsets, start + cursor, start + cursor + 8 * blocks)


@lru_cache(maxsize=1)
def _weights() -> NDArray[np.uint64]:
    """(8192,) odd numbers: splitmix64 of 1, 2, ..."""
    with np.errstate(over="ignore"):
        z = np.arange(1, BLOCK_NBYTES // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def block_sums(data: Bytes) -> NDArray[np.uint64]:
    """The checksum of each block of `data`, (n,) uint8; the last block counts as padded with zeros."""
    whole = data.size // BLOCK_NBYTES * BLOCK_NBYTES
    sums = _sums_of_blocks(data[:whole])
    if whole == data.size:
        return sums
    last = np.zeros(BLOCK_NBYTES, np.uint8)
    last[: data.size - whole] = data[whole:]
    return np.concatenate([sums, _sums_of_blocks(last)])


def _sums_of_blocks(data: Bytes) -> NDArray[np.uint64]:
    words = data.view("<u8").reshape(-1, BLOCK_NBYTES // 8)
    result: NDArray[np.uint64] = np.einsum("ij,j->i", words, _weights())
    return result


@dataclass(frozen=True)
class ReadRequest:
    """Bytes [offset, offset + nbytes) of a file, at most CHUNK_NBYTES, and who gets them.

    `deliver` is called with an aligned (nbytes,) uint8 array that is only lent.
    """

    offset: int
    nbytes: int
    deliver: Callable[[Bytes], None]


class RankFileReader:
    """A rank's file open for reading; every byte it hands out has been checked.

    Args:
        folder: of the checkpoint.
        record: what the manifest says of the file.

    Attributes:
        read_nbytes: read from the disk so far.

    Raises:
        CheckpointError: the file is missing or its table is damaged; from `read`, what is read is damaged.
    """

    def __init__(self, folder: Path, record: FileRecord) -> None:
        self.path = folder / record.name
        self.read_nbytes = 0
        self._header: tuple[int, dict[str, Any]] | None = None
        try:
            self._handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
        try:
            blocks = -(-record.nbytes // (BLOCK_NBYTES + 8))  # as 8 bytes of the table follow from each block
            self._end = record.nbytes - 8 * blocks
            table = self._pread(self._end, 8 * blocks)
            if hashlib.sha256(table.tobytes()).hexdigest() != record.table_sha256:
                raise CheckpointError(f"{self.path}: damaged: its table of checksums is not the one that was written")
            self._table = table.view("<u8")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._handle)

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Reads, checks and delivers in the order of the file; neighbours come from the disk together, once."""
        for span in _spans(sorted(requests, key=lambda request: request.offset)):
            start = span[0].offset // BLOCK_NBYTES * BLOCK_NBYTES
            end = min(-(-max(r.offset + r.nbytes for r in span) // BLOCK_NBYTES) * BLOCK_NBYTES, self._end)
            data = self._checked(start, end)
            for request in span:
                request.deliver(data[request.offset - start : request.offset - start + request.nbytes])

    def check_pieces(self, pieces: Mapping[str, tuple[str, int, int]]) -> None:
        """Compares what a manifest says of the file with the file's own header.

        Args:
            pieces: key -> (dtype, elements, first byte).

        Raises:
            CheckpointError: they differ: bytes would be taken for numbers of another kind, or of another tensor.
        """
        if self._header is None:
            self._header = self._read_header()
        start, entries = self._header
        for key, (dtype, length, offset) in pieces.items():
            first = offset - start
            wanted = {"dtype": dtype, "shape": [length], "data_offsets": [first, first + length * ITEMSIZE[dtype]]}
            if entries.get(key) != wanted:
                raise CheckpointError(
                    f"{self.path}: tensor {key}",
                    expected=f"{wanted}, as the manifest has it",
                    got=entries.get(key),
                    fix="the two are not of one save; load another checkpoint",
                )

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        """(first byte of the data, name -> entry)."""
        first = self._checked(0, min(BLOCK_NBYTES, self._end))
        start = 8 + int.from_bytes(first[:8].tobytes(), "little")
        if not 8 < start <= min(self._end, _MOST_HEADER_NBYTES):
            raise CheckpointError(f"{self.path}: damaged: a header of {start - 8} bytes")
        rest = self._checked(BLOCK_NBYTES, min(-(-start // BLOCK_NBYTES) * BLOCK_NBYTES, self._end))
        try:
            entries = json.loads((first.tobytes() + rest.tobytes())[8:start])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: damaged: its header is not JSON ({error})") from error
        if not isinstance(entries, dict):
            raise CheckpointError(f"{self.path}: damaged: its header", expected="an object", got=entries)
        return start, entries

    def verify(self) -> None:
        """Reads and checks the whole file."""
        for start in range(0, self._end, CHUNK_NBYTES):
            self._checked(start, min(start + CHUNK_NBYTES, self._end))

    def _checked(self, start: int, end: int) -> Bytes:
        if start >= end:
            return np.empty(0, np.uint8)
        data = self._pread(start, end - start)
        expected = self._table[start // BLOCK_NBYTES : -(-end // BLOCK_NBYTES)]
        wrong = np.flatnonzero(block_sums(data) != expected)
        if wrong.size:
            first = start + int(wrong[0]) * BLOCK_NBYTES
            raise CheckpointError(
                f"{self.path}: damaged between bytes {first} and {min(first + BLOCK_NBYTES, self._end)}: "
                "they are not the ones that were written",
                fix='load another checkpoint, or pass tag="auto" for the newest valid one',
            )
        return data

    def _pread(self, offset: int, nbytes: int) -> Bytes:
        data = np.empty(nbytes, np.uint8)
        view = data.data
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._handle, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: ends at byte {offset + done}", expected=f"{offset + nbytes}")
            done += count
        self.read_nbytes += nbytes
        return data


def _spans(requests: Sequence[ReadRequest]) -> Iterator[list[ReadRequest]]:
    """Runs of requests with no block between them, of at most twice a chunk."""
    span: list[ReadRequest] = []
    end = 0
    for request in requests:
        if span and (
            request.offset // BLOCK_NBYTES * BLOCK_NBYTES > end
            or request.offset + request.nbytes - span[0].offset > 2 * CHUNK_NBYTES
        ):
            yield span
            span = []
        end = max(end, request.offset + request.nbytes) if span else request.offset + request.nbytes
        span.append(request)
    if span:
        yield span
