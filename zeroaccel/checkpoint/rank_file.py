"""One rank's file: a safetensors file whose last tensor is a table of checksums of everything before it.

This module defines the layout and reads and checks files; `rank_file_writer.py` writes them. docs/checkpoint_format.md
describes the format. Needs numpy, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zeroaccel.checkpoint.manifest import OTHER_CHECKPOINT, FileRecord, read_manifest
from zeroaccel.checkpoint.zero_to_fp32 import BLOCK_NBYTES, CHUNK_NBYTES, Bytes, RankFile, sums_of_blocks
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import FileLayout, lay_out_tensors

CHECKSUMS_KEY = "__checksums__"
"""The name of the table's tensor."""

_TEMPORARY = r"(\.[0-9a-f]{8})?\.tmp"
_NAME = re.compile(
    rf"rank\d{{5,}}-of-\d{{5,}}-[0-9a-f]{{8}}(\.safetensors|\.part\.json)({_TEMPORARY})?|manifest\.json{_TEMPORARY}"
)


def rank_file_name(rank: int, world_size: int, save_id: str) -> str:
    """Returns the name of a rank's file, which differs between saves."""
    return f"rank{rank:05d}-of-{world_size:05d}-{save_id}.safetensors"


def is_part_of_a_save(name: str) -> bool:
    """Returns True for names of files that a complete or interrupted save writes, except manifest.json itself."""
    return _NAME.fullmatch(name) is not None


def lay_out_rank_file(sizes: Sequence[tuple[str, str, int]]) -> FileLayout:
    """Returns the layout of a file of one-dimensional tensors and their table of checksums.

    Args:
        sizes: (key, dtype, numel), in descending order of the dtypes' item sizes.
    """
    tensors = [(key, dtype, (numel,)) for key, dtype, numel in sizes]
    num_blocks = 0
    while True:
        layout = lay_out_tensors([*tensors, (CHECKSUMS_KEY, "U64", (num_blocks,))], {"format": "pt"})
        needed = -(-layout.offsets[CHECKSUMS_KEY] // BLOCK_NBYTES)
        # The header contains the table's size, and the header's length affects the number of blocks. `needed` only
        # grows with `num_blocks`, and by at most a digit's width, so this ends, in practice in the second round.
        if needed == num_blocks:
            return layout
        num_blocks = needed


def block_sums(data: Bytes) -> NDArray[np.uint64]:
    """Returns the checksum of each block of `data`, (n,) uint8; the last block is padded with zeros."""
    full_nbytes = data.size // BLOCK_NBYTES * BLOCK_NBYTES
    sums = sums_of_blocks(data[:full_nbytes])
    if full_nbytes == data.size:
        return sums
    last = np.zeros(BLOCK_NBYTES, np.uint8)
    last[: data.size - full_nbytes] = data[full_nbytes:]
    return np.concatenate([sums, sums_of_blocks(last)])


class RankFileReader(RankFile):
    """A rank's file open for reading. The base class is part of the program that is copied beside checkpoints.

    Args:
        folder: folder of the checkpoint.
        record: the manifest's record of the file.

    Attributes:
        read_nbytes: number of bytes read from the disk so far.

    Raises:
        CheckpointError: the file is missing or its table is damaged; `read` raises it if the blocks are damaged.
    """

    def __init__(self, folder: Path, record: FileRecord) -> None:
        self.read_nbytes = 0
        super().__init__(folder / record.name, record.nbytes, record.table_sha256)

    def __enter__(self) -> RankFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def error(message: str) -> CheckpointError:
        return CheckpointError(message, fix=OTHER_CHECKPOINT)

    def verify(self) -> None:
        """Reads and checks the entire file."""
        for start in range(0, self._end, CHUNK_NBYTES):
            self.read(start, min(CHUNK_NBYTES, self._end - start))

    def _pread(self, start: int, nbytes: int, capacity: int = 0) -> Bytes:
        self.read_nbytes += nbytes
        return super()._pread(start, nbytes, capacity)


def check_file(path: Path) -> None:
    """Reads and checks a rank's file, by the manifest in its folder.

    Raises:
        CheckpointError: the file or the manifest is damaged, or the manifest does not name the file.
    """
    records = {record.name: record for record in read_manifest(path.parent, complete=False).files}
    if path.name not in records:
        raise CheckpointError(f"{path}: damaged: the manifest does not name it", fix=OTHER_CHECKPOINT)
    with RankFileReader(path.parent, records[path.name]) as file:
        file.verify()
