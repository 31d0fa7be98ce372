"""Reads files of `torch.save` (zip archives) as a plain object and the offsets of its tensors, without unpacking.

It reads only the pickle. Tensors stay in the file until a caller requests their bytes by the offsets found here, which
is possible because torch stores them uncompressed. Needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor, load_pickle
from zeroaccel.config.bounds import open_regular
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import ITEMSIZE, pread_into

_LOCAL_HEADER_NBYTES = 30
_PICKLE_LIMIT_NBYTES = 128 << 20
_MOST_RUNS = 1 << 20
_CHUNK_NBYTES = 1 << 22
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, EOFError, ValueError, LookupError)
"""Exceptions of zipfile for archives that are cut off or inconsistent; RuntimeError includes NotImplementedError."""


class _Window(io.RawIOBase):
    """A file object for zipfile with bytes [start, start + nbytes) of an open file, which it closes."""

    def __init__(self, file: io.RawIOBase, start: int, nbytes: int) -> None:
        self._file = file
        self._start, self._nbytes, self._at = start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._nbytes - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class TorchFile:
    """A file of `torch.save`, or one of several such files that are concatenated in a larger file.

    Args:
        region: (first byte, number of bytes) in the larger file; None for a separate file.

    Attributes:
        path: path of the file, or of the larger file.
        nbytes: size of the file.
        content: the unpickled object, with a `StoredTensor` for each tensor.

    Raises:
        CheckpointError: the file is missing, cut off, damaged or in torch's old format, or its pickle has a forbidden
            name.
    """

    def __init__(self, path: Path, region: tuple[int, int] | None = None) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            self._origin, self.nbytes = region if region is not None else (0, size)
            if self._origin + self.nbytes > size:
                raise CheckpointError(f"{path}: ends at byte {size}", expected=f"{self._origin + self.nbytes} bytes")
            with self._archive() as archive:
                self._records = {record.filename: record for record in archive.infolist()}
                self._check_records()
                self._prefix = self._find_prefix()
                order = self._prefix + "byteorder"
                if order in self._records and archive.read(order).strip() != b"little":
                    raise CheckpointError(f"{path}: written on a big-endian machine", expected="little-endian")
                if (pickle_nbytes := self._records[self._prefix + "data.pkl"].file_size) > _PICKLE_LIMIT_NBYTES:
                    raise CheckpointError(
                        f"{path}: its pickle",
                        expected=f"at most {_PICKLE_LIMIT_NBYTES} bytes",
                        got=pickle_nbytes,
                        fix="save large data as tensors",
                    )
                content = archive.read(self._prefix + "data.pkl")  # checks its CRC
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except _DAMAGE as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{path}: cut off, damaged, or not a file of torch.save's zip format ({error})",
                fix="copy it again, or use another checkpoint",
            ) from error
        self.content: Any = load_pickle(content, str(path))
        self._starts: dict[str, int] = {}
        self._checked: set[str] = set()
        self._checking = Lock()

    @contextlib.contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        # Open the file before making the window: Python 3.13 warns about a window that has no file to close.
        window = _Window(io.FileIO(open_regular(self.path)), self._origin, self.nbytes)
        with io.BufferedReader(window) as file, zipfile.ZipFile(file) as archive:
            yield archive

    @property
    def fingerprint(self) -> str:
        """A digest of all records, from the checksums that torch wrote with them."""
        parts = [f"{name} {record.file_size} {record.CRC}" for name, record in sorted(self._records.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _check_records(self) -> None:
        """Rejects compressed records, which torch does not write; so no record is larger than its file."""
        for name, record in self._records.items():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                raise CheckpointError(f"{self.path}: {name[:200]} is compressed", expected="a file of torch.save")
            if record.file_size > self.nbytes:
                raise CheckpointError(f"{self.path}: ends at byte {self._origin + self.nbytes}, inside {name[:200]}")

    def _find_prefix(self) -> str:
        """Returns the archive's top folder, which has the original name of the file."""
        pickles = [name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{self.path}: not a file of torch.save", expected="one data.pkl in it", got=pickles)
        return pickles[0].removesuffix("data.pkl")

    def runs(self, tensor: StoredTensor) -> Iterator[tuple[int, int, int]]:
        """Yields (start, length, byte offset in the file) for each contiguous run of a tensor's elements, in order.

        Raises:
            CheckpointError: its record is missing or too short, or it has too many runs.
        """
        if tensor.numel == 0:
            return
        origin = self._start(tensor)
        itemsize = ITEMSIZE[tensor.dtype]
        length, outer = _inner_run(tensor)
        if (count := math.prod(tensor.shape[:outer])) > _MOST_RUNS:
            raise CheckpointError(
                f"{self.path}: a tensor of shape {tensor.shape}",
                expected=f"a tensor of at most {_MOST_RUNS} contiguous pieces",
                got=count,
                fix="save it after .contiguous()",
            )
        start = 0
        for element in _offsets(tensor.shape[:outer], tensor.strides[:outer], tensor.offset):
            yield start, length, origin + element * itemsize
            start += length

    def _start(self, tensor: StoredTensor) -> int:
        """Returns the byte at which the storage of a tensor begins."""
        name = f"{self._prefix}data/{tensor.storage}"
        # The directory at the end of an archive has only the offset of a record's local header. The data follows a
        # name and an extra field (torch's alignment padding), whose lengths are in that header.
        if name not in self._starts:
            record = self._records.get(name)
            if record is None:
                raise CheckpointError(f"{self.path}: the bytes of a tensor ({name}) are missing")
            with self.path.open("rb") as file:
                file.seek(self._origin + record.header_offset)
                header = file.read(_LOCAL_HEADER_NBYTES)
            if len(header) != _LOCAL_HEADER_NBYTES or header[:4] != b"PK\x03\x04":
                raise CheckpointError(f"{self.path}: damaged at byte {record.header_offset}: no record of {name}")
            name_nbytes, extra_nbytes = struct.unpack_from("<HH", header, 26)
            start = self._origin + record.header_offset + _LOCAL_HEADER_NBYTES + name_nbytes + extra_nbytes
            if start + record.file_size > self._origin + self.nbytes:
                raise CheckpointError(f"{self.path}: ends at byte {self._origin + self.nbytes}, inside {name}")
            self._starts[name] = start
        numel = self._records[name].file_size // ITEMSIZE[tensor.dtype]
        if tensor.storage_numel > numel:
            raise CheckpointError(f"{self.path}: {name}", expected=f"{tensor.storage_numel} elements", got=numel)
        return self._starts[name]

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Reads bytes [start, start + nbytes) of a tensor, (nbytes,); threads may call it at the same time.

        Before the first read from a record, it compares the entire record with its checksum.

        Raises:
            CheckpointError: reading fails, or the record is damaged.
        """
        self._check(start)
        data = np.empty(nbytes, np.uint8)
        try:
            with self.path.open("rb", buffering=0) as file:  # open it for each read: there can be thousands of files
                count = pread_into(file.fileno(), data.data, start)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
        if count < nbytes:
            raise CheckpointError(f"{self.path}: ends at byte {start + count}", expected=f"{start + nbytes}")
        return data

    def _check(self, start: int) -> None:
        """Compares the record that contains a byte with its checksum, on its first use."""
        name = max(
            (name for name, first in self._starts.items() if first <= start), key=lambda name: self._starts[name]
        )
        with self._checking:
            if name not in self._checked:
                self._verify(name)
                self._checked.add(name)

    def _verify(self, name: str) -> None:
        """Reads a record; zipfile compares its CRC-32 at the end."""
        try:
            with self._archive() as archive, archive.open(self._records[name]) as content:
                while content.read(_CHUNK_NBYTES):
                    pass
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
        except _DAMAGE as error:
            raise CheckpointError(f"{self.path}: damaged ({error})", fix="copy it again") from error

    def verify(self) -> None:
        """Reads the entire file and compares it with torch's checksums (CRC-32).

        Raises:
            CheckpointError: a record is damaged; the message names it.
        """
        for name in self._records:
            self._verify(name)


def _inner_run(tensor: StoredTensor) -> tuple[int, int]:
    """Returns (number of elements in the longest contiguous inner run, number of the dims outside of it)."""
    length = 1
    for dim in range(len(tensor.shape) - 1, -1, -1):
        if tensor.shape[dim] != 1 and tensor.strides[dim] != length:
            return length, dim + 1
        length *= tensor.shape[dim]
    return length, 0


def _offsets(shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> Iterator[int]:
    if not shape:
        yield first
        return
    for index in range(shape[0]):
        yield from _offsets(shape[1:], strides[1:], first + index * strides[0])
