"""Checkpoints of torch.distributed.checkpoint as they lie on the disk: a `.metadata`, and tensors in `*.distcp`.

Says where the bytes of which tensor are, and reads plain values. The `.metadata` is a pickle, read by
`torch_pickle.py`'s restricted reader with stand-ins for torch's classes of it. What the names mean is
`dcp_import.py`'s matter. Reads no weights, and imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroaccel.checkpoint.manifest import ITEMSIZE, Piece, TensorRecord, check_tag
from zeroaccel.checkpoint.torch_file import TorchFile
from zeroaccel.checkpoint.torch_pickle import DtypeName, StoredTensor, load_pickle
from zeroaccel.errors import CheckpointError

__all__ = ["METADATA_NAME", "DcpFolder", "find_dcp"]

METADATA_NAME = ".metadata"
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


class _Record:
    """An object of one of torch's classes: its attributes, or its state as it was."""

    def __new__(cls, *_: Any) -> _Record:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            vars(self)["state"] = state

    def field(self, name: str) -> Any:
        """An attribute; CheckpointError if it is not there."""
        if name not in vars(self):
            raise CheckpointError(f"{METADATA_NAME}: {type(self).__name__} without {name}")
        return vars(self)[name]


def find_dcp(root: Path, tag: object = None) -> Path | None:
    """The folder of a DCP checkpoint: `root` itself, the tag in it, or what `latest` names; None if it is none."""
    if tag is None and (root / METADATA_NAME).is_file():
        return root
    try:
        name = (root / "latest").read_text(encoding="utf-8").strip() if tag is None else tag
        folder = root / check_tag(name)
    except (OSError, UnicodeDecodeError, CheckpointError):
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
            content = where.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from error
        metadata = load_pickle(content, str(where), _admitted())
        if not isinstance(metadata, _Record):
            raise CheckpointError(f"{where}", expected="torch.distributed.checkpoint's metadata", got=type(metadata))
        self._entries: Mapping[str, Any] = metadata.field("state_dict_metadata")
        paths = vars(metadata).get("planner_data") or {}
        self.paths = {key: tuple(paths.get(key) or key.split(".", 1)) for key in self._entries}
        self._items: dict[tuple[str, tuple[int, ...] | None], _Item] = {}
        for index, info in metadata.field("storage_data").items():
            if vars(info).get("transform_descriptors"):
                raise CheckpointError(f"{folder}: {index.field('fqn')} is compressed", expected="a plain *.distcp")
            name = info.field("relative_path")
            if Path(name).name != name or name in ("", ".", ".."):
                raise CheckpointError(f"{where}: a file name", expected="one in the same folder", got=name)
            offset = vars(index).get("offset")
            key = index.field("fqn"), None if offset is None else tuple(offset)
            self._items[key] = _Item(folder / name, info.field("offset"), info.field("length"))

    def is_tensor(self, key: str) -> bool:
        """Whether it is a tensor, rather than a plain value."""
        return "size" in vars(self._entries[key])

    def record(self, key: str) -> TensorRecord:
        """Where a tensor's elements are."""
        entry = self._entries[key]
        shape = tuple(entry.field("size"))
        pieces: list[Piece] = []
        dtype = ""
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
        self.files.append(TorchFile(item.path, (item.start, item.nbytes)))
        return len(self.files) - 1


def _admitted() -> dict[str, Any]:
    made: dict[str, Any] = {f"{_MODULE}.{name}": type(name, (_Record,), {}) for name in _CLASSES}
    made["torch.distributed.checkpoint.filesystem._StorageInfo"] = type("_StorageInfo", (_Record,), {})
    made["torch.serialization._get_layout"] = str
    made |= {f"pathlib.{name}": _path for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")}
    made |= {f"pathlib._local.{name}": _path for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")}
    return made | {f"torch.{name}": DtypeName(dtype) for name, dtype in _DTYPES.items()}


def _path(*parts: Any) -> str:
    return "/".join(str(part) for part in parts)


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
