"""Reads the tensors of one checkpoint by key or by element range, and only the blocks that hold those elements.

`fill` queues requests and `read` carries them out in the order of the files, so that it reads each file forward once.
`TensorStore` reads the rank files of this format, `TorchStore` torch's files in checkpoints of DeepSpeed and DCP.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.manifest import Manifest
from zeroaccel.checkpoint.rank_file import RankFileReader
from zeroaccel.checkpoint.zero_to_fp32 import BLOCK_NBYTES, CHUNK_NBYTES, Bytes
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import ITEMSIZE, dtype_of


@dataclass(frozen=True)
class _ElementRequest:
    """A request to read at most a chunk of elements of `dtype` at byte `offset` of a file into `into`, (n,)."""

    offset: int
    into: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.into.numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def deliver(self, data: Bytes) -> None:
        self.into.copy_(torch.from_numpy(data).view(self.dtype))


class TensorStore:
    """Reads from a checkpoint's folder. Use it as a context manager, which closes the files.

    Attributes:
        requested_nbytes: size of all requests so far, in bytes.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.requested_nbytes = 0
        self._folder = folder
        self._files: dict[int, RankFileReader] = {}
        self._pending: dict[int, list[_ElementRequest]] = {}
        self._used: dict[int, dict[str, tuple[str, int, int]]] = {}

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()

    @property
    def read_nbytes(self) -> int:
        """Number of bytes read from the disk so far: complete blocks, headers and tables."""
        return sum(file.read_nbytes for file in self._files.values())

    def fill(self, key: str, start: int, into: Tensor) -> None:
        """Queues a read of elements [start, start + into.numel()) into `into`, (n,), converted to its dtype.

        Raises:
            CheckpointError: the checkpoint has no tensor `key`, or it has fewer elements.
        """
        record = self.manifest.tensors.get(key)
        if record is None or start + into.numel() > record.numel:
            raise CheckpointError(f"tensor {key} of the checkpoint", expected=f"elements up to {start + into.numel()}")
        itemsize, dtype = ITEMSIZE[record.dtype], dtype_of(record.dtype)
        limit = CHUNK_NBYTES // itemsize
        self.requested_nbytes += into.numel() * itemsize
        cursor, end = start, start + into.numel()
        # The pieces cover the tensor in order: bisection finds the first one, and the others follow it.
        runs = record.runs
        index = bisect_right(runs, cursor, key=lambda piece: piece[1]) - 1
        while cursor < end:
            file, piece_start, length, offset = runs[index]
            count = min(piece_start + length - cursor, end - cursor, limit)
            target = into[cursor - start : cursor - start + count]
            request = _ElementRequest(offset + (cursor - piece_start) * itemsize, target, dtype)
            self._pending.setdefault(file, []).append(request)
            if record.split is None:
                self._used.setdefault(file, {})[key] = (record.dtype, length, offset)
            cursor += count
            if cursor == piece_start + length:
                index += 1
        if record.split is not None:  # the files' headers describe whole pieces, each of which has many runs
            for file, _, length, offset in record.pieces:
                self._used.setdefault(file, {})[key] = (record.dtype, length, offset)

    def read(self) -> None:
        """Carries out all queued requests.

        Raises:
            CheckpointError: a file is damaged. Targets of the queued requests may be partly filled.
        """
        pending, self._pending = self._pending, {}
        used, self._used = self._used, {}
        for file, requests in sorted(pending.items()):
            self._read(file, sorted(requests, key=lambda request: request.offset), used[file])

    def _read(self, file: int, requests: Sequence[_ElementRequest], pieces: Mapping[str, tuple[str, int, int]]) -> None:
        if file not in self._files:
            self._files[file] = RankFileReader(self._folder, self.manifest.files[file])
        self._files[file].check_pieces(pieces)
        for span in _spans(requests):
            start = span[0].offset
            data = self._files[file].read(start, max(request.end for request in span) - start)
            for request in span:
                request.deliver(data[request.offset - start : request.end - start])

    def fetch(self, key: str) -> Tensor:
        """Reads a full tensor into host memory."""
        record = self.manifest.tensors.get(key)
        if record is None:
            raise CheckpointError(f"tensor {key}: not in the checkpoint")
        flat = torch.empty(math.prod(record.shape), dtype=dtype_of(record.dtype))
        queued, self._pending, self._used = (self._pending, self._used), {}, {}
        self.fill(key, 0, flat)
        self.read()
        self._pending, self._used = queued
        return flat.view(record.shape)


def _spans(requests: Sequence[_ElementRequest]) -> Iterator[list[_ElementRequest]]:
    """Yields runs of requests without an unrequested block between them, each of at most two chunks."""
    span: list[_ElementRequest] = []
    end = 0
    for request in requests:
        if span and (
            request.offset // BLOCK_NBYTES * BLOCK_NBYTES > end or request.end - span[0].offset > 2 * CHUNK_NBYTES
        ):
            yield span
            span = []
        end = max(end, request.end) if span else request.end
        span.append(request)
    if span:
        yield span


class UnreadStore(TensorStore):
    """Records which files a load would read, without reading them. Targets may be on the meta device.

    Attributes:
        names: names of the files so far.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self.names: set[str] = set()

    def read(self) -> None:
        self.names.update(self.manifest.files[file].name for file in self._pending)
        self._pending, self._used = {}, {}


class TorchStore(TensorStore):
    """Reads tensors from torch's files, by the keys of a manifest from `deepspeed_resume.py` or `dcp_import.py`.

    Args:
        files: the files, indexed by the file numbers in the manifest's pieces.
    """

    def __init__(self, folder: Path, manifest: Manifest, files: Sequence[TorchFile]) -> None:
        super().__init__(folder, manifest)
        self.torch_files = files

    @property
    def read_nbytes(self) -> int:
        """Number of bytes read from the disk so far, without those read to verify torch's checksums."""
        return self.requested_nbytes

    def _read(self, file: int, requests: Sequence[_ElementRequest], pieces: Mapping[str, tuple[str, int, int]]) -> None:
        for request in requests:  # `pieces` need no check, because the manifest was made from the files
            request.deliver(self.torch_files[file].read(request.offset, request.nbytes))
