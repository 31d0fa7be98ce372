"""One rank's file: a safetensors file whose last tensor is a table of checksums of everything before it.

Lays files out and checks what is read back; `rank_file_writer.py` writes them. numpy only: docs/checkpoint_format.md is
the contract, and a reader needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeroaccel.checkpoint.manifest import FileRecord
from zeroaccel.checkpoint.zero_to_fp32 import block_weights
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import ITEMSIZE, FileLayout, lay_out_tensors, parse_header, pread_into

BLOCK_NBYTES = 1 << 16
"""Bytes that one checksum covers."""
CHUNK_NBYTES = 64 * BLOCK_NBYTES
"""Bytes written and read at a time."""
CHECKSUMS_KEY = "__checksums__"
"""The table's name among the tensors of a file."""

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


def lay_out_rank_file(sizes: Sequence[tuple[str, str, int]]) -> FileLayout:
    """The layout of a file of one-dimensional tensors and their table of checksums.

    Args:
        sizes: (key, dtype, numel), in descending order of the dtypes' item sizes.
    """
    tensors = [(key, dtype, (numel,)) for key, dtype, numel in sizes]
    num_blocks = 0
    while True:
        layout = lay_out_tensors([*tensors, (CHECKSUMS_KEY, "U64", (num_blocks,))], {"format": "pt"})
        needed = -(-layout.offsets[CHECKSUMS_KEY] // BLOCK_NBYTES)
        # The header contains the table's size, and its own length decides how many blocks there are. `needed` only
        # grows with `num_blocks`, and by at most a digit's width, so this ends: in practice at the second round.
        if needed == num_blocks:
            return layout
        num_blocks = needed


def block_sums(data: Bytes) -> NDArray[np.uint64]:
    """The checksum of each block of `data`, (n,) uint8; the last block counts as padded with zeros.

    A weighted sum modulo 2**64 of the block's 64-bit words. The weights are odd, so invertible modulo 2**64: a change
    of any single word changes the sum; that they differ makes swapped words visible.
    """
    full_nbytes = data.size // BLOCK_NBYTES * BLOCK_NBYTES
    sums = _sums_of_full_blocks(data[:full_nbytes])
    if full_nbytes == data.size:
        return sums
    last = np.zeros(BLOCK_NBYTES, np.uint8)
    last[: data.size - full_nbytes] = data[full_nbytes:]
    return np.concatenate([sums, _sums_of_full_blocks(last)])


def _sums_of_full_blocks(data: Bytes) -> NDArray[np.uint64]:
    words = data.view("<u8").reshape(-1, BLOCK_NBYTES // 8)
    result: NDArray[np.uint64] = np.einsum("ij,j->i", words, block_weights())
    return result


@dataclass(frozen=True)
class ReadRequest:
    """Bytes [offset, offset + nbytes) of a file, at most CHUNK_NBYTES, and the callback that receives them.

    `deliver` is called with an aligned (nbytes,) uint8 array, which is valid during the call only.
    """

    offset: int
    nbytes: int
    deliver: Callable[[Bytes], None]


class CheckedFile(Protocol):
    """A file of a checkpoint of any format; every byte `read` delivers has been compared with a checksum."""

    read_nbytes: int

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Delivers each request; CheckpointError if something is damaged."""

    def close(self) -> None:
        """Closes the file."""


class RankFileReader:
    """A rank's file open for reading; every byte it delivers has been checked.

    Args:
        folder: of the checkpoint.
        record: the manifest's record of the file.

    Attributes:
        read_nbytes: read from the disk so far.

    Raises:
        CheckpointError: the file is missing or its table is damaged; from `read`, the blocks read are damaged.
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
            num_blocks = -(-record.nbytes // (BLOCK_NBYTES + 8))  # as 8 bytes of the table follow from each block
            self._end = record.nbytes - 8 * num_blocks
            table = self._pread(self._end, 8 * num_blocks)
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
        """Reads, checks and delivers in the order of the file; requests in adjacent blocks are one disk read."""
        for span in _spans(sorted(requests, key=lambda request: request.offset)):
            start = span[0].offset // BLOCK_NBYTES * BLOCK_NBYTES
            end = min(-(-max(r.offset + r.nbytes for r in span) // BLOCK_NBYTES) * BLOCK_NBYTES, self._end)
            data = self._checked(start, end)
            for request in span:
                request.deliver(data[request.offset - start : request.offset - start + request.nbytes])

    def check_pieces(self, pieces: Mapping[str, tuple[str, int, int]]) -> None:
        """Compares the manifest's pieces of the file with the file's own header.

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
            expected = {"dtype": dtype, "shape": [length], "data_offsets": [first, first + length * ITEMSIZE[dtype]]}
            if entries.get(key) != expected:
                raise CheckpointError(
                    f"{self.path}: tensor {key}",
                    expected=f"{expected}, as the manifest has it",
                    got=entries.get(key),
                    fix="the two are not of one save; load another checkpoint",
                )

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        """(first byte of the data, name -> entry)."""
        # Complete blocks, since only those can be checked: the first has the header's length, the rest follow from it.
        first = self._checked(0, min(BLOCK_NBYTES, self._end))
        start = 8 + int.from_bytes(first[:8].tobytes(), "little")
        if not 8 < start <= min(self._end, _MOST_HEADER_NBYTES):
            raise CheckpointError(f"{self.path}: damaged: a header of {start - 8} bytes")
        rest = self._checked(BLOCK_NBYTES, min(-(-start // BLOCK_NBYTES) * BLOCK_NBYTES, self._end))
        try:
            return start, parse_header((first.tobytes() + rest.tobytes())[8:start])
        except ValueError as error:
            raise CheckpointError(f"{self.path}: damaged: its header is not JSON ({error})") from error

    def verify(self) -> None:
        """Reads and checks the entire file."""
        for start in range(0, self._end, CHUNK_NBYTES):
            self._checked(start, min(start + CHUNK_NBYTES, self._end))

    def _checked(self, start: int, end: int) -> Bytes:
        if start >= end:
            return np.empty(0, np.uint8)
        data = self._pread(start, end - start)
        expected = self._table[start // BLOCK_NBYTES : -(-end // BLOCK_NBYTES)]
        damaged = np.flatnonzero(block_sums(data) != expected)
        if damaged.size:
            first = start + int(damaged[0]) * BLOCK_NBYTES
            raise CheckpointError(
                f"{self.path}: damaged between bytes {first} and {min(first + BLOCK_NBYTES, self._end)}: "
                "their checksum does not match",
                fix='load another checkpoint, or pass tag="auto" for the newest valid one',
            )
        return data

    def _pread(self, offset: int, nbytes: int) -> Bytes:
        data = np.empty(nbytes, np.uint8)
        try:
            count = pread_into(self._handle, data.data, offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
        if count < nbytes:
            raise CheckpointError(f"{self.path}: ends at byte {offset + count}", expected=f"{offset + nbytes}")
        self.read_nbytes += nbytes
        return data


def _spans(requests: Sequence[ReadRequest]) -> Iterator[list[ReadRequest]]:
    """Runs of requests with no unrequested block between them, each of at most twice a chunk."""
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
