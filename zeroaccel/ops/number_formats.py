"""Compilation of the loops, and loads and stores of 16-bit floats as float32 inside them.

`kernels` and `updates` contain the loops, on NumPy arrays and never tensors. An array's dtype identifies its number
format: float32; uint16 for bfloat16 bits, int16 for float16 bits, uint8 for powers of two (E8M0 of the OCP
specification of microscaling formats: the exponent of a float32, 255 for NaN).

There is no fast-math and no contraction into FMA (Numba's default), so that the vector body and the scalar tail of a
loop round in the same way. Every scalar is float32 unless a docstring states another type; a Python float would
silently promote the arithmetic to float64.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from zeroaccel.logs import log_once

Array = npt.NDArray[Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def inlined(function: _Function) -> _Function:
    """Decorates a scalar function that the loops call."""
    return cast(_Function, numba.njit(error_model="numpy")(function))


def compiled(function: _Function) -> _Function:
    """Decorates a loop: compiles it at the first call per set of dtypes, then loads it from disk; releases the GIL.

    Numba caches in `NUMBA_CACHE_DIR`, else next to the function's file, else in the user's cache folder. With
    `error_model="numpy"` a division by zero gives inf or NaN; Python's model needs a branch, and does not vectorise.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # from Numba, if it cannot write to any of these folders
        log_once(
            logging.WARNING,
            "no cache folder for compiled kernels is writable, so each process compiles its own; set NUMBA_CACHE_DIR",
        )
        return cast(_Function, numba.njit(**options)(function))
    dispatcher._cache._cache_file._source_stamp = _stamp()
    return cast(_Function, dispatcher)


def _stamp() -> list[tuple[float, int]]:
    """Returns a stamp of all files of a cached loop; Numba itself checks only the function's own file."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [(status.st_mtime, status.st_size) for status in (file.stat() for file in files)]


# ---- 16-bit floats ----


# Numba computes integers in 64 bits; casts at the end of each line let the compiler narrow them and use more lanes.


@inlined
def bits_of(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@inlined
def float_of(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@inlined
def decode_bfloat16(pattern: Any) -> Any:
    return float_of(np.uint32(pattern) << 16)


@inlined
def _round_bfloat16(value: Any) -> Any:
    """Rounds a number to nearest, ties to even. A mantissa that overflows carries into the exponent, as required."""
    bits = bits_of(value)
    return np.uint16(np.uint32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@inlined
def encode_bfloat16(value: Any) -> Any:
    """Like `_round_bfloat16`, and keeps NaN."""
    bits = bits_of(value)
    rounded = _round_bfloat16(value)
    quiet_nan = np.uint32((bits >> 16) | 0x40)
    return np.uint16(quiet_nan if np.uint32(bits & 0x7FFFFFFF) > 0x7F800000 else rounded)


@inlined
def _decode_float16(pattern: Any) -> Any:
    magnitude = np.uint32(pattern & 0x7FFF)
    sign = np.uint32((pattern & 0x8000) << 16)
    subnormal = bits_of(np.float32(np.int32(magnitude)) * np.float32(2.0**-24))
    normal = np.uint32((magnitude << 13) + ((127 - 15) << 23))
    inf_or_nan = np.uint32((magnitude << 13) + ((255 - 31) << 23))
    return float_of(sign | (subnormal if magnitude < 0x0400 else (normal if magnitude < 0x7C00 else inf_or_nan)))


@inlined
def _decode_finite_float16(pattern: Any) -> Any:
    """Decodes a finite number: its bits, shifted into a float32, are too small by 2**112, subnormal ones too."""
    return float_of(np.uint32((np.int32(pattern) << 13) & 0x8FFFE000)) * np.float32(2.0**112)


@inlined
def _round_float16(value: Any) -> Any:
    """Like `_encode_float16`, for a number within the range."""
    magnitude = np.uint32(bits_of(value) & 0x7FFFFFFF)
    sign = np.uint32((bits_of(value) >> 16) & 0x8000)
    normal = np.uint32(np.uint32(magnitude + 0x0FFF + ((magnitude >> 13) & 1) - ((127 - 15) << 23)) >> 13)
    # In [0.5, 1) a float32's last place is 2**-24, as in a subnormal float16, so the addition rounds.
    subnormal = np.uint32(bits_of(float_of(magnitude) + np.float32(0.5)) - bits_of(np.float32(0.5)))
    return np.int16(sign | (subnormal if magnitude < (127 - 14) << 23 else normal))


@inlined
def _encode_float16(value: Any) -> Any:
    """Rounds to nearest, ties to even; values from 65520 become inf."""
    magnitude = np.uint32(bits_of(value) & 0x7FFFFFFF)
    sign = np.uint32((bits_of(value) >> 16) & 0x8000)
    rounded = _round_float16(value)
    if magnitude > 0x7F800000:
        return np.int16(sign | 0x7E00)
    if magnitude >= (127 + 16) << 23:  # 2**16; rounding up to it gives the bits of inf
        return np.int16(sign | 0x7C00)
    return rounded


@inlined
def _decode_power(exponent: Any) -> Any:
    return float_of(np.uint32(exponent) << 23) if exponent < 255 else np.float32(np.nan)


@inlined
def _encode_power(value: Any) -> Any:
    """Encodes the smallest power of two that is at least a positive normal float32."""
    return np.uint8(np.uint32(bits_of(value) + 0x7FFFFF) >> 23) if not np.isnan(value) else np.uint8(255)


# ---- elements of arrays ----


def _decoded(array: Any, element: Any) -> Any:
    raise NotImplementedError


def _decoded_number(array: Any, element: Any) -> Any:
    raise NotImplementedError


def _encoded(array: Any, value: Any) -> Any:
    raise NotImplementedError


def _encoded_number(array: Any, value: Any) -> Any:
    raise NotImplementedError


def magnitude_pattern(array: Any, element: Any) -> Any:
    """Returns an element of the array without its sign, as an unsigned integer of the same width.

    Exists only in compiled code, like all functions of this section.
    """
    raise NotImplementedError


def of_pattern(array: Any, pattern: Any) -> Any:
    """Returns the float32 value of a `magnitude_pattern` of the array."""
    raise NotImplementedError


@inlined
def load(array: Any, index: Any) -> Any:
    """Returns ``array[index]`` as a float32 for every format."""
    return _decoded(array, array[index])


@inlined
def load_number(array: Any, index: Any) -> Any:
    """Like `load`, for a finite number: faster for float16."""
    return _decoded_number(array, array[index])


@inlined
def store(array: Any, index: Any, value: Any) -> None:
    """Writes a float32 to ``array[index]``, rounded to the array's format; does nothing if the array is None."""
    if array is not None:
        array[index] = _encoded(array, value)


@inlined
def store_number(array: Any, index: Any, value: Any) -> None:
    """Like `store`, for a number within the range of the format: faster for 16 bits."""
    array[index] = _encoded_number(array, value)


# Function -> implementations by the dtype of the array.
_DECODED = {
    types.float32: lambda array, element: element,
    types.uint16: lambda array, element: decode_bfloat16(element),
    types.int16: lambda array, element: _decode_float16(element),
    types.uint8: lambda array, element: _decode_power(element),
}
_ENCODED = {
    types.float32: lambda array, value: value,
    types.uint16: lambda array, value: encode_bfloat16(value),
    types.int16: lambda array, value: _encode_float16(value),
    types.uint8: lambda array, value: _encode_power(value),
}
_IMPLEMENTATIONS: Mapping[Callable[..., Any], Mapping[Any, Callable[..., Any]]] = {
    _decoded: _DECODED,
    _decoded_number: {**_DECODED, types.int16: lambda array, element: _decode_finite_float16(element)},
    _encoded: _ENCODED,
    _encoded_number: {
        **_ENCODED,
        types.uint16: lambda array, value: _round_bfloat16(value),
        types.int16: lambda array, value: _round_float16(value),
    },
    magnitude_pattern: {
        types.float32: lambda array, element: np.uint32(bits_of(element) & 0x7FFFFFFF),
        **dict.fromkeys((types.uint16, types.int16), lambda array, element: np.uint16(element & 0x7FFF)),
    },
    of_pattern: {**_DECODED, types.float32: lambda array, pattern: float_of(pattern)},
}


def implement(function: Callable[..., Any], by_dtype: Mapping[Any, Callable[..., Any]]) -> None:
    """Gives a function of compiled code an implementation for each dtype of its first argument, an array."""
    overload(function, strict=False)(lambda array, *others: by_dtype.get(array.dtype))


for _function, _by_dtype in _IMPLEMENTATIONS.items():
    implement(_function, _by_dtype)
