"""torch's dtypes under safetensors' names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroaccel.errors import CheckpointError

__all__ = ["dtype_name", "dtype_of"]

_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name; CheckpointError for a dtype it has none for."""
    if dtype not in _NAMES:
        raise CheckpointError(f"dtype {dtype}", expected=f"one of {', '.join(_NAMES.values())}")
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name; CheckpointError for one that is not known."""
    if name not in _DTYPES:
        raise CheckpointError(f"dtype {name!r}", expected=f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
