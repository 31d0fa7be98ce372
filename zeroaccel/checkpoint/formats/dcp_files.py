"""Checkpoints of torch.distributed.checkpoint as they lie on the disk: a `.metadata`, and tensors in `*.distcp`.

Says where the bytes of which tensor are, and reads plain values. The `.metadata` is a pickle, read by
`torch_pickle.py`'s restricted reader with stand-ins for torch's classes of it. What the names mean is
`dcp_import.py`'s matter. Reads no weights, and imports no torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroaccel.checkpoint.formats.pickle_machine import Attributed
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import DtypeName, StoredTensor, load_pickle
from zeroaccel.checkpoint.latest import read_latest
from zeroaccel.checkpoint.manifest import ITEMSIZE, Piece, TensorRecord, check_tag
from zeroaccel.config.bounds import read_at_most
from zeroaccel.errors import CheckpointError

__all__ = ["METADATA_NAME", "DcpFolder", "dcp_errors", "find_dcp"]

METADATA_NAME = ".metadata"
_MOST_METADATA_NBYTES = 128 << 20
_LONGEST_PATH = 4096
_MOST_PIECES = 1 << 21
_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_MODULE = "torch.distributed.checkpoint.metadata"
_DTYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32", "uint64": "U64"}


class _Record(Attributed):
    """An object of one of torch's classes: its attributes, or its state as it was."""

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name

    def take_state(self, state: Any) -> None:
        if not isinstance(state, dict):
            vars(self)["state"] = state
        elif "class_name" in state or not all(type(name) is str for name in state):
            raise TypeError("expected a dict of names")
        else:
            vars(self).update(state)

    def field(self, name: str) -> Any:
        """An attribute; CheckpointError if it is not there."""
        if name not in vars(self):
            raise CheckpointError(f"{METADATA_NAME}: {self.class_name} without {name}")
        return vars(self)[name]


def find_dcp(root: Path, tag: object = None) -> Path | None:
    """The folder of a DCP checkpoint: `root` itself, the tag in it, or what `latest` names; None if it is none."""
    if tag is None and (root / METADATA_NAME).is_file():
        return root
    try:
        folder = root / (read_latest(root) if tag is None else check_tag(tag))
    except CheckpointError:
        return None
    return folder if (folder / METADATA_NAME).is_file() else None


@dataclass(frozen=True)
class _Item:
    """One stored object of a `*.distcp`."""

    path: Path
    start: int
    nbytes: int


class DcpFolder:
    """One checkpoint.

    Attributes:
        paths: key -> the keys of the nested dicts that lead to it: ("model", "layers.0.weight").
        tensors: key -> record, as in our manifest; pieces count the entries of `files`.
        files: of all tensors opened so far; each is one stored object.

    Raises:
        CheckpointError: it is damaged or incomplete, or its pickle names what is not admitted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[TorchFile] = []
        where = folder / METADATA_NAME
        try:
            content = read_at_most(where, _MOST_METADATA_NBYTES, regular=True)
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from error
        metadata = load_pickle(content, str(where), _admitted())
        if not isinstance(metadata, _Record):
            raise CheckpointError(f"{where}", expected="torch.distributed.checkpoint's metadata", got=type(metadata))
        self._entries: Mapping[str, Any] = metadata.field("state_dict_metadata")
        self._opened: dict[_Item, int] = {}
        self._items: dict[tuple[str, tuple[int, ...] | None], _Item] = {}
        with dcp_errors(folder):
            paths = vars(metadata).get("planner_data") or {}
            self.paths = {key: tuple(paths.get(key) or key.split(".", 1)) for key in self._entries}
            self._read_places(metadata, where)

    def _read_places(self, metadata: _Record, where: Path) -> None:
        folder = self.folder
        for index, info in metadata.field("storage_data").items():
            if vars(info).get("transform_descriptors"):
                raise CheckpointError(f"{folder}: {index.field('fqn')} is compressed", expected="a plain *.distcp")
            name = info.field("relative_path")
            if Path(name).name != name or name in ("", ".", ".."):
                raise CheckpointError(f"{where}: a file name", expected="one in the same folder", got=name)
            offset = vars(index).get("offset")
            key = index.field("fqn"), None if offset is None else tuple(offset)
            start, nbytes = info.field("offset"), info.field("length")
            if type(start) is not int or type(nbytes) is not int or min(start, nbytes) < 0:
                raise CheckpointError(f"{where}: place of {key[0]}", expected="an offset and a length", got=start)
            self._items[key] = _Item(folder / name, start, nbytes)

    def is_tensor(self, key: str) -> bool:
        """Whether it is a tensor, rather than a plain value."""
        return "size" in vars(self._entries[key])

    def record(self, key: str) -> TensorRecord:
        """Where a tensor's elements are."""
        entry = self._entries[key]
        shape = tuple(entry.field("size"))
        pieces: list[Piece] = []
        dtype = ""
        if len({tuple(chunk.field("offsets")) for chunk in entry.field("chunks")}) != len(entry.field("chunks")):
            raise CheckpointError(f"{self.folder}: tensor {key}: its parts do not cover it once")
        for chunk in entry.field("chunks"):
            offsets, sizes = tuple(chunk.field("offsets")), tuple(chunk.field("sizes"))
            if not math.prod(sizes):
                continue
            file = self._open(key, offsets)
            stored = self.files[file].content
            if not isinstance(stored, StoredTensor) or stored.shape != sizes:
                raise CheckpointError(f"{self.folder}: tensor {key}", expected=f"a part of shape {sizes}", got=stored)
            dtype = stored.dtype
            pieces += _pieces(file, shape, offsets, sizes, list(self.files[file].runs(stored)), ITEMSIZE[dtype])
        pieces.sort(key=lambda piece: piece[1])
        end = 0
        for _, start, length, _ in pieces:
            if start != end:
                raise CheckpointError(f"{self.folder}: tensor {key}: its parts do not cover it once")
            end += length
        if end != math.prod(shape):
            raise CheckpointError(f"{self.folder}: tensor {key}", expected=f"{math.prod(shape)} elements", got=end)
        return TensorRecord(dtype or _dtype_of(entry), shape, tuple(pieces))

    def value(self, key: str) -> Any:
        """A plain value."""
        return self.files[self._open(key, None)].content

    def _open(self, key: str, offset: tuple[int, ...] | None) -> int:
        item = self._items.get((key, offset)) or (self._items.get((key, None)) if not offset else None)
        if item is None:
            raise CheckpointError(f"{self.folder}: incomplete: {key} at {offset} is in no file")
        if item not in self._opened:
            self.files.append(TorchFile(item.path, (item.start, item.nbytes)))
            self._opened[item] = len(self.files) - 1
        return self._opened[item]


@contextlib.contextmanager
def dcp_errors(folder: Path) -> Iterator[None]:
    """What a folder that torch did not write like this makes fail, as one error with its name."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise CheckpointError(
            f"{folder}: not as torch.distributed.checkpoint writes it ({type(error).__name__}: {str(error)[:200]})",
            fix="use another checkpoint",
        ) from error


def _admitted() -> dict[str, Any]:
    made: dict[str, Any] = {f"{_MODULE}.{name}": _record_of(name) for name in _CLASSES}
    made["torch.distributed.checkpoint.filesystem._StorageInfo"] = _record_of("_StorageInfo")
    made["torch.serialization._get_layout"] = _path
    made |= {f"pathlib.{name}": _path for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")}
    made |= {f"pathlib._local.{name}": _path for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")}
    return made | {f"torch.{name}": DtypeName(dtype) for name, dtype in _DTYPES.items()}


def _record_of(name: str) -> Callable[..., _Record]:
    return lambda *_: _Record(name)


def _path(*parts: Any) -> str:
    if any(type(part) is not str for part in parts) or sum(map(len, parts)) > _LONGEST_PATH:
        raise TypeError("expected the parts of a path")
    return "/".join(parts)


def _dtype_of(entry: Any) -> str:
    """Of a tensor without elements, which no file need have."""
    state = vars(entry.field("properties")).get("state") or ()
    return next((str(value) for value in state if isinstance(value, DtypeName)), "F32")


def _pieces(
    file: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    runs: list[tuple[int, int, int]],
    itemsize: int,
) -> list[Piece]:
    """The pieces of a box of a tensor: its elements are contiguous in the file in the order of `runs`."""
    inner = 1  # elements of the box that follow each other in the whole tensor as well
    dim = len(shape)
    while dim and inner == math.prod(shape[dim:]):
        dim -= 1
        inner *= sizes[dim]
    outer = sizes[:dim]
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    found: list[Piece] = []
    if math.prod(outer) * len(runs) > _MOST_PIECES:
        raise ValueError(f"a part of shape {sizes} lies in {math.prod(outer)} times {len(runs)} pieces")
    for number in range(math.prod(outer)):
        start, rest = base, number
        for d in range(dim - 1, -1, -1):
            rest, index = divmod(rest, outer[d])
            start += index * strides[d]
        low, high = number * inner, (number + 1) * inner
        for first, length, place in runs:
            a, b = max(low, first), min(high, first + length)
            if a < b:
                found.append((file, start + a - low, b - a, place + (a - first) * itemsize))
    return found
