"""The safetensors format: dtypes, writing and parsing the header, and reading bytes at an offset.

The module is in `zero/access/`, the lowest folder that reads weights (`load_safetensors.py`); `checkpoint/` uses it for
rank files and exported models, `accelerate/run_state.py` for its own file. The `safetensors` package does not suffice:
it slices rows, while a flat shard begins and ends anywhere in a tensor, and a rank file is checked block by block as it
is read. `checkpoint/zero_to_fp32.py` has a parser of its own on purpose: it is copied into checkpoints and cannot
import this package. Only `dtype_name` and `dtype_of` import torch.

Layout of a file: 8 bytes with the header's length (little-endian); the header in JSON: name -> dtype, shape and
data_offsets; the tensors' bytes, row-major. Offsets count from the first of these bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroaccel.config.bounds import is_size, open_regular, parse_plain_json
from zeroaccel.errors import CheckpointError

if TYPE_CHECKING:
    import torch


TORCH_NAMES: Mapping[str, str] = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
    **{"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
    **{"I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16"},
    **{"I32": "int32", "U32": "uint32", "F32": "float32"},
    **{"C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64"},
}
"""safetensors' name of a dtype -> torch's name."""

ITEMSIZE: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
}
"""Bytes per element of safetensors' dtypes."""

MOST_HEADER_NBYTES = 100_000_000
"""Limit of the safetensors format for the header's size in bytes."""


@lru_cache(maxsize=1)
def _dtypes() -> Mapping[str, torch.dtype]:
    import torch  # here, because readers of headers and manifests do not need torch

    # torch 2.6 lacks float8_e8m0fnu.
    return {name: getattr(torch, of_torch) for name, of_torch in TORCH_NAMES.items() if hasattr(torch, of_torch)}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns safetensors' name of a dtype; raises CheckpointError if the format does not support it."""
    for name, candidate in _dtypes().items():
        if candidate is dtype:
            return name
    raise CheckpointError(f"dtype {dtype}", expected=f"one of {', '.join(TORCH_NAMES)}")


def are_other_codes(saved: str, dtype: str) -> bool:
    """Returns True if one of two dtypes is an 8-bit float and the other is not: a cast would need the codes' scale."""
    return saved != dtype and "F8" in (saved[:2], dtype[:2])


def dtype_of(name: str) -> torch.dtype:
    """Returns the torch dtype of a safetensors name; raises CheckpointError for an unknown name."""
    if name not in _dtypes():
        raise CheckpointError(f"dtype {name!r}", expected=f"one of {', '.join(_dtypes())}")
    return _dtypes()[name]


@dataclass(frozen=True)
class FileLayout:
    """The layout of a file, computed before writing it.

    Attributes:
        header: bytes before the data.
        offsets: name -> offset of the tensor's first byte in the file, in the order of the file.
        nbytes: size of the file.
    """

    header: bytes
    offsets: dict[str, int]
    nbytes: int


def lay_out_tensors(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> FileLayout:
    """Returns the layout of a file whose tensors follow each other without gaps.

    Args:
        tensors: (name, dtype, shape); in descending order of item size, each is aligned to its own item size.
        metadata: text for the header's `__metadata__`.

    Example:
        >>> layout = lay_out_tensors([("w", "F32", (2, 3)), ("b", "BF16", (3,))], {"format": "pt"})
        >>> layout.nbytes - len(layout.header), layout.offsets["b"] - layout.offsets["w"]
        (30, 24)
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    cursor = 0
    for name, dtype, shape in tensors:
        end = cursor + math.prod(shape) * ITEMSIZE[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [cursor, end]}
        starts[name], cursor = cursor, end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, so that every dtype can be mapped in place
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + cursor)


def parse_header(text: bytes) -> dict[str, Any]:
    """Returns the entries of a header, given without the 8 bytes of its length; ValueError if it is no JSON object."""
    entries = parse_plain_json(text)
    if not isinstance(entries, dict):
        raise ValueError(f"the header is not a JSON object but {str(entries)[:100]!r}")
    return entries


@dataclass(frozen=True)
class TensorLocation:
    """A tensor in a file; `offset` is the position of its first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def tensor_locations(path: Path) -> Iterator[tuple[str, TensorLocation]]:
    """Yields name and location of each tensor of a file; reads only the header.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the file is not a safetensors file, or is truncated.
        OSError: the file cannot be read.
        CheckpointError: a tensor has an unknown dtype.
    """
    size = path.stat().st_size
    with open(open_regular(path), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError("the header does not fit into the file")
        if length > MOST_HEADER_NBYTES:
            raise ValueError(f"the header has {length} bytes; the limit is {MOST_HEADER_NBYTES}")
        entries = parse_header(file.read(length))
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if not all(is_size(number) for number in (start, end, *entry["shape"])):
            raise ValueError(f"tensor {name}: offsets or shape are not whole numbers")
        if entry["dtype"] not in ITEMSIZE:  # "F4" and other floats of less than 8 bits
            raise CheckpointError(f"{path}: dtype of tensor {name}", expected=", ".join(ITEMSIZE), got=entry["dtype"])
        location = TensorLocation(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start)
        # Sizes first: a shape of 2**62 elements must not reach an allocation.
        if end - start != math.prod(location.shape) * ITEMSIZE[location.dtype] or 8 + length + end > size:
            raise ValueError(f"tensor {name}: its length does not match its shape, or it extends beyond the file")
        yield name, location


def pread_into(handle: int, buffer: memoryview, offset: int) -> int:
    """Fills `buffer` from byte `offset` of a file; returns the number of bytes read, which is less at the file's end.

    One `preadv` returns at most 0x7ffff000 bytes on Linux, and fewer if interrupted. The file position does not move,
    so threads may share `handle`.
    """
    done = 0
    while done < buffer.nbytes and (count := os.preadv(handle, [buffer[done:]], offset + done)):
        done += count
    return done
