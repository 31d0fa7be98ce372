"""The compiled loops over flat CPU arrays: optimizer updates, gradient norms, sums over ranks, 8- and 4-bit codes.

They see NumPy arrays, never tensors; `dispatch` views tensors as arrays and gives each thread its span. Everything
Numba compiles is in this one file because Numba's disk cache notices a change of a function's own file only, not of a
file it calls into.

Element i of a result depends on element i of the inputs and on the coefficients, never on i, on the length of the
call or on the threads: no fast-math, no contraction into FMA (Numba's default), so the vector body and the scalar
tail round alike. Every scalar is float32 unless a docstring says otherwise; a Python float here would silently
promote the arithmetic to float64. Do not add a float reduction: its order would be an accident. Reductions are over
integers, which are exact in any order.

The dtype of a gradient or of a rounded copy is told by the array: float32 is itself, uint16 holds bfloat16 bits,
int16 float16 bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from zeroaccel.logs import log_once

__all__ = [
    "NORM_BITS",
    "SCALE_FLOOR",
    "Array",
    "adagrad",
    "adam",
    "add4",
    "add8",
    "decode4",
    "decode8",
    "encode4",
    "encode8",
    "largest_pattern",
    "lion",
    "sgd",
    "square_sums",
    "sum_rows",
]

Array = npt.NDArray[Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])

NORM_BITS = 25
"""`square_sums` cuts a square of 2 * NORM_BITS bits into two halves of this many."""

SCALE_FLOOR = 2.0**-120
"""The least scale of a block of codes: its reciprocal is finite, and what it rounds to zero is below 2**-121."""

_BLOCK_NUMEL = 2048  # floats that `sum_rows` holds at once: 8 KiB, well inside any L1 cache


def _inlined(function: _Function) -> _Function:
    """For the scalar functions that the loops are built of."""
    return cast(_Function, numba.njit(error_model="numpy")(function))


def _compiled(function: _Function) -> _Function:
    """For a loop: compiled at the first call for each set of dtypes, then loaded from disk; it runs without the GIL.

    Numba keeps what it compiles where `NUMBA_CACHE_DIR` says, else beside this file, else in the user's cache folder.
    `error_model="numpy"` makes a division by zero inf or NaN; Python's model has a branch there, and no vectors.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return cast(_Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # Numba's way to say that none of those folders can be written
        log_once(
            logging.WARNING,
            "no folder for compiled kernels can be written: each process compiles its own; set NUMBA_CACHE_DIR",
        )
        return cast(_Function, numba.njit(**options)(function))


# ---- 16-bit floats ----


# Numba computes integers in 64 bits; a cast at the end of each line lets the compiler narrow it to more lanes.


@_inlined
def _bits(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@_inlined
def _float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@_inlined
def _decode_bfloat16(pattern: Any) -> Any:
    return _float(np.uint32(pattern) << 16)


@_inlined
def _round_bfloat16(value: Any) -> Any:
    """Nearest, ties to even, of a number. A mantissa that rounds over carries into the exponent, as it should."""
    bits = _bits(value)
    return np.uint16(np.uint32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@_inlined
def _encode_bfloat16(value: Any) -> Any:
    """As `_round_bfloat16`, and NaN stays NaN."""
    bits = _bits(value)
    rounded = _round_bfloat16(value)
    quiet_nan = np.uint32((bits >> 16) | 0x40)
    return np.uint16(quiet_nan if np.uint32(bits & 0x7FFFFFFF) > 0x7F800000 else rounded)


@_inlined
def _decode_float16(pattern: Any) -> Any:
    magnitude = np.uint32(pattern & 0x7FFF)
    sign = np.uint32((pattern & 0x8000) << 16)
    subnormal = _bits(np.float32(np.int32(magnitude)) * np.float32(2.0**-24))
    normal = np.uint32((magnitude << 13) + ((127 - 15) << 23))
    inf_or_nan = np.uint32((magnitude << 13) + ((255 - 31) << 23))
    return _float(sign | (subnormal if magnitude < 0x0400 else (normal if magnitude < 0x7C00 else inf_or_nan)))


@_inlined
def _decode_finite_float16(pattern: Any) -> Any:
    """Of a number: its bits in the places of a float32 are too small by 2**112, subnormal ones as well."""
    return _float(np.uint32((np.int32(pattern) << 13) & 0x8FFFE000)) * np.float32(2.0**112)


@_inlined
def _round_float16(value: Any) -> Any:
    """As `_encode_float16`, of a number that is not beyond the range."""
    magnitude = np.uint32(_bits(value) & 0x7FFFFFFF)
    sign = np.uint32((_bits(value) >> 16) & 0x8000)
    normal = np.uint32(np.uint32(magnitude + 0x0FFF + ((magnitude >> 13) & 1) - ((127 - 15) << 23)) >> 13)
    subnormal = np.uint32(_bits(_float(magnitude) + np.float32(0.5)) - _bits(np.float32(0.5)))
    return np.int16(sign | (subnormal if magnitude < (127 - 14) << 23 else normal))


@_inlined
def _encode_float16(value: Any) -> Any:
    """Nearest, ties to even; from 65520 on it is inf."""
    magnitude = np.uint32(_bits(value) & 0x7FFFFFFF)
    sign = np.uint32((_bits(value) >> 16) & 0x8000)
    normal = np.uint32(np.uint32(magnitude + 0x0FFF + ((magnitude >> 13) & 1) - ((127 - 15) << 23)) >> 13)
    # In [0.5, 1) a float32's last place is worth 2**-24, as in a subnormal float16: the addition does the rounding.
    subnormal = np.uint32(_bits(_float(magnitude) + np.float32(0.5)) - _bits(np.float32(0.5)))
    if magnitude > 0x7F800000:
        return np.int16(sign | 0x7E00)
    if magnitude >= (127 + 16) << 23:  # 2**16; what rounds up to it from below becomes inf by itself
        return np.int16(sign | 0x7C00)
    return np.int16(sign | (subnormal if magnitude < (127 - 14) << 23 else normal))


def _load(array: Any, index: Any) -> Any:
    """``array[index]`` as a float32, whichever of the three formats the array holds. Exists only in compiled code."""
    raise NotImplementedError


def _store(array: Any, index: Any, value: Any) -> None:
    """Writes a float32 to ``array[index]``, rounded to the array's format; nothing where the array is None."""
    raise NotImplementedError


def _load_number(array: Any, index: Any) -> Any:
    """As `_load`, of what is neither inf nor NaN: faster for float16."""
    raise NotImplementedError


def _store_number(array: Any, index: Any, value: Any) -> None:
    """As `_store`, of a number within the range of the format: faster for 16 bits."""
    raise NotImplementedError


def _magnitude_pattern(array: Any, index: Any) -> Any:
    """``array[index]`` without its sign, as an unsigned integer of its width."""
    raise NotImplementedError


def _of_pattern(array: Any, pattern: Any) -> Any:
    """The float32 that a `_magnitude_pattern` of the array stands for."""
    raise NotImplementedError


def _load_for(array: Any, index: Any) -> Callable[..., Any] | None:
    """Numba asks it, with types for arguments, what `_load` is; it compares the annotations of both, too."""

    def plain(array: Any, index: Any) -> Any:
        return array[index]

    def bfloat16(array: Any, index: Any) -> Any:
        return _decode_bfloat16(array[index])

    def float16(array: Any, index: Any) -> Any:
        return _decode_float16(array[index])

    return {types.float32: plain, types.uint16: bfloat16, types.int16: float16}.get(array.dtype)


def _store_for(array: Any, index: Any, value: Any) -> Callable[..., None] | None:
    """As `_load_for`, of `_store`."""

    def nothing(array: Any, index: Any, value: Any) -> None:
        pass

    def plain(array: Any, index: Any, value: Any) -> None:
        array[index] = value

    def bfloat16(array: Any, index: Any, value: Any) -> None:
        array[index] = _encode_bfloat16(value)

    def float16(array: Any, index: Any, value: Any) -> None:
        array[index] = _encode_float16(value)

    if isinstance(array, types.NoneType):
        return nothing
    return {types.float32: plain, types.uint16: bfloat16, types.int16: float16}.get(array.dtype)


def _store_number_for(array: Any, index: Any, value: Any) -> Callable[..., None] | None:
    """As `_load_for`, of `_store_number`."""

    def bfloat16(array: Any, index: Any, value: Any) -> None:
        array[index] = _round_bfloat16(value)

    def float16(array: Any, index: Any, value: Any) -> None:
        array[index] = _round_float16(value)

    return {types.uint16: bfloat16, types.int16: float16}.get(array.dtype) or _store_for(array, index, value)


def _load_number_for(array: Any, index: Any) -> Callable[..., Any] | None:
    """As `_load_for`, of `_load_number`."""

    def float16(array: Any, index: Any) -> Any:
        return _decode_finite_float16(array[index])

    return float16 if array.dtype == types.int16 else _load_for(array, index)


def _magnitude_pattern_for(array: Any, index: Any) -> Callable[..., Any]:
    """As `_load_for`, of `_magnitude_pattern`."""

    def wide(array: Any, index: Any) -> Any:
        return np.uint32(_bits(array[index]) & 0x7FFFFFFF)

    def narrow(array: Any, index: Any) -> Any:
        return np.uint16(array[index] & 0x7FFF)

    return wide if array.dtype == types.float32 else narrow


def _of_pattern_for(array: Any, pattern: Any) -> Callable[..., Any] | None:
    """As `_load_for`, of `_of_pattern`."""

    def plain(array: Any, pattern: Any) -> Any:
        return _float(pattern)

    def bfloat16(array: Any, pattern: Any) -> Any:
        return _decode_bfloat16(pattern)

    def float16(array: Any, pattern: Any) -> Any:
        return _decode_float16(pattern)

    return {types.float32: plain, types.uint16: bfloat16, types.int16: float16}.get(array.dtype)


overload(_load)(_load_for)
overload(_load_number)(_load_number_for)
overload(_magnitude_pattern)(_magnitude_pattern_for)
overload(_of_pattern)(_of_pattern_for)
overload(_store)(_store_for)
overload(_store_number)(_store_number_for)


# ---- optimizer updates: (master, states..., grad, out, grad_scale, coefficients...) ----
# In the formulas x is the master, d the gradient after `grad_scale`; each operator is one rounding to float32.


@_compiled
def adam(
    master: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    grad: Array,
    out: Array | None,
    grad_scale: np.float32,
    decay: np.float32,
    l2: np.float32,
    weight1: np.float32,
    beta2: np.float32,
    weight2: np.float32,
    inverse_root: np.float32,
    eps: np.float32,
    negative_step: np.float32,
) -> None:
    """Adam (Kingma & Ba 2015, Algorithm 1) and AdamW (Loshchilov & Hutter 2019, Algorithm 2).

    ```text
    d = grad * grad_scale + l2 * x          l2    = weight_decay, or 0 in decoupled mode
    x = x * decay                           decay = 1 - lr * weight_decay, or 1 in L2 mode
    m = m + weight1 * (d - m)               weight1 = 1 - beta1
    v = v * beta2 + (weight2 * d) * d       weight2 = 1 - beta2
    x = x + (negative_step * m) / (sqrt(v) * inverse_root + eps)
                                            negative_step = -lr / (1 - beta1**t), inverse_root = 1 / sqrt(1 - beta2**t)
    ```
    The order of torch.optim.AdamW(foreach=False), but that it divides by the root, and that its line for m is one FMA.
    """
    for i in range(master.size):
        x = master[i]
        d = _load(grad, i) * grad_scale + l2 * x
        m = exp_avg[i]
        m = m + weight1 * (d - m)
        v = exp_avg_sq[i] * beta2 + (weight2 * d) * d
        x = x * decay + (negative_step * m) / (np.sqrt(v) * inverse_root + eps)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        master[i] = x
        _store(out, i, x)


@_compiled
def lion(
    master: Array,
    exp_avg: Array,
    grad: Array,
    out: Array | None,
    grad_scale: np.float32,
    decay: np.float32,
    beta1: np.float32,
    weight1: np.float32,
    beta2: np.float32,
    weight2: np.float32,
    negative_lr: np.float32,
) -> None:
    """Lion (Chen et al. 2023, Algorithm 2).

    ```text
    d = grad * grad_scale
    c = beta1 * m + weight1 * d             weight1 = 1 - beta1
    x = x * decay + negative_lr * sign(c)   decay = 1 - lr * weight_decay; sign(NaN) = NaN
    m = beta2 * m + weight2 * d             weight2 = 1 - beta2
    ```
    """
    for i in range(master.size):
        d = _load(grad, i) * grad_scale
        m = exp_avg[i]
        c = beta1 * m + weight1 * d
        direction = np.float32(1) if c > np.float32(0) else (np.float32(-1) if c < np.float32(0) else c)
        x = master[i] * decay + negative_lr * direction
        exp_avg[i] = beta2 * m + weight2 * d
        master[i] = x
        _store(out, i, x)


@_compiled
def adagrad(
    master: Array,
    square_sum: Array,
    grad: Array,
    out: Array | None,
    grad_scale: np.float32,
    l2: np.float32,
    eps: np.float32,
    negative_lr: np.float32,
) -> None:
    """Adagrad (Duchi et al. 2011, the diagonal form of Figure 1).

    ```text
    d = grad * grad_scale + l2 * x
    s = s + d * d
    x = x + (negative_lr * d) / (sqrt(s) + eps)
    ```
    """
    for i in range(master.size):
        x = master[i]
        d = _load(grad, i) * grad_scale + l2 * x
        s = square_sum[i] + d * d
        x = x + (negative_lr * d) / (np.sqrt(s) + eps)
        square_sum[i] = s
        master[i] = x
        _store(out, i, x)


@_compiled
def sgd(
    master: Array,
    momentum_buffer: Array | None,
    grad: Array,
    out: Array | None,
    grad_scale: np.float32,
    l2: np.float32,
    momentum: np.float32,
    weight: np.float32,
    grad_weight: np.float32,
    buffer_weight: np.float32,
    negative_lr: np.float32,
) -> None:
    """SGD with momentum (Sutskever et al. 2013, in the form of torch.optim.SGD).

    ```text
    d = grad * grad_scale + l2 * x
    b = momentum * b + weight * d           weight = 1 - dampening, or 1 at the first step
    d = grad_weight * d + buffer_weight * b (0, 1), or with Nesterov (1, momentum)
    x = x + negative_lr * d
    ```
    Without a buffer the two lines in the middle are left out.
    """
    for i in range(master.size):
        x = master[i]
        d = _load(grad, i) * grad_scale + l2 * x
        if momentum_buffer is not None:
            b = momentum * momentum_buffer[i] + weight * d
            momentum_buffer[i] = b
            d = grad_weight * d + buffer_weight * b
        x = x + negative_lr * d
        master[i] = x
        _store(out, i, x)


# ---- reductions ----


@_compiled
def largest_pattern(patterns: Array, mask: Any) -> int:
    """The largest of ``patterns & mask``; 0 for none.

    `patterns` are floats seen as integers of their width, and `mask` (of that dtype) clears the sign. Such integers
    order like the magnitudes, inf above every number and NaN above inf: nothing is lost, and the maximum vectorises.
    """
    largest = mask & 0
    for i in range(patterns.size):
        largest = max(largest, patterns[i] & mask)
    return int(largest)


@_compiled
def square_sums(values: Array, scale: np.float64) -> tuple[int, int]:
    """Of the integers ``rint((value * scale)**2)``, at most ``2**(2 * NORM_BITS)``, sums the upper and the lower bits.

    float64 inside. The square of a float32 has at most 48 bits, so that only the rint rounds (ties to even): it is the
    addition of 2**52, after which the low 52 bits of the pattern are the integer. AVX2 has no conversion to int64.
    """
    high = np.int64(0)
    low = np.int64(0)
    for i in range(values.size):
        root = np.float64(_load(values, i)) * scale
        square = np.float64(root * root + np.float64(2.0**52)).view(np.int64) & (2**52 - 1)
        high += square >> NORM_BITS
        low += square & (2**NORM_BITS - 1)
    return int(high), int(low)


@_compiled
def sum_rows(out: Array, flat: Array, row_numel: int, start: int, stop: int, scale: np.float32) -> None:
    """``out[j] = scale * (((c0[j] + c1[j]) + c2[j]) + ...)`` for j in [start, stop).

    Row cr is ``flat[r * row_numel : (r + 1) * row_numel]``. The sum is float32, in the order of the rows, and rounded
    once into `out`, which may be one of the rows: a block of it is written when that block of every row has been read.
    """
    total = np.empty(_BLOCK_NUMEL, np.float32)
    for begin in range(start, stop, _BLOCK_NUMEL):
        count = min(_BLOCK_NUMEL, stop - begin)
        first = flat[begin : begin + count]
        for j in range(count):
            total[j] = _load(first, j)
        for offset in range(begin + row_numel, flat.size, row_numel):
            row = flat[offset : offset + count]
            for j in range(count):
                total[j] += _load(row, j)
        block = out[begin : begin + count]
        for j in range(count):
            _store(block, j, total[j] * scale)


# ---- codes: blocks of values as small integers times one float32 scale ----
# `codecs` of `comm` states the format and its error bounds. Blocks [first, last) of `values` are read or written.


@_inlined
def _block_scale(part: Any, highest: Any) -> Any:
    """The scale that maps the largest magnitude to `highest`; NaN where the block holds an inf or a NaN."""
    largest = _magnitude_pattern(part, 0)
    for i in range(1, part.size):
        largest = max(largest, _magnitude_pattern(part, i))
    absmax = _of_pattern(part, largest)
    if not absmax < np.float32(np.inf):
        return np.float32(np.nan)
    return max(absmax / highest, np.float32(SCALE_FLOOR))


@_inlined
def _to_integer(value: Any) -> Any:
    """The bits of a float32 below 2**22 rounded to an integer, ties to even, in two's complement.

    1.5 * 2**23 has a last place of 1 and low bits of 0: the addition rounds, and leaves the integer in the low bits.
    """
    return _bits(value + np.float32(12582912.0))


@_compiled
def encode8(values: Array, scales: Array, codes: Array, block: int, first: int, last: int) -> None:
    """``codes[i] = rint(values[i] / scale)`` in [-127, 127]; the scale of a block with an inf or a NaN is NaN."""
    for index in range(first, last):
        part = values[index * block : min((index + 1) * block, values.size)]
        target = codes[index * block : index * block + part.size]
        scale = _block_scale(part, np.float32(127.0))
        scales[index] = scale
        inverse = np.float32(1.0) / scale
        for i in range(part.size):
            target[i] = np.uint8(_to_integer(_load_number(part, i) * inverse))


@_compiled
def decode8(out: Array, scales: Array, codes: Array, block: int, first: int, last: int) -> None:
    """``out[i] = codes[i] * scale``."""
    for index in range(first, last):
        part = out[index * block : min((index + 1) * block, out.size)]
        source = codes[index * block : index * block + part.size]
        scale = scales[index]
        if np.isnan(scale):
            _store(part, 0, scale)
            part[:] = part[0]
            continue
        for i in range(part.size):
            _store_number(part, i, np.float32(np.int8(source[i])) * scale)


@_compiled
def add8(total: Array, scales: Array, codes: Array, block: int, first: int, last: int) -> None:
    """``total[i] += codes[i] * scale``, in float32."""
    for index in range(first, last):
        part = total[index * block : min((index + 1) * block, total.size)]
        source = codes[index * block : index * block + part.size]
        scale = scales[index]
        for i in range(part.size):
            part[i] += np.float32(np.int8(source[i])) * scale


@_compiled
def encode4(values: Array, scales: Array, codes: Array, block: int, first: int, last: int) -> None:
    """As `encode8`, in [-7, 7]: byte i of a block of n values holds value i low and value i + ceil(n / 2) high."""
    for index in range(first, last):
        part = values[index * block : min((index + 1) * block, values.size)]
        half = (part.size + 1) // 2
        target = codes[index * block // 2 : index * block // 2 + half]
        scale = _block_scale(part, np.float32(7.0))
        scales[index] = scale
        inverse = np.float32(1.0) / scale
        pairs = part.size - half
        upper = part[half:]
        for i in range(pairs):
            low = np.uint32(_to_integer(_load_number(part, i) * inverse) & np.uint32(15))
            high = np.uint32(_to_integer(_load_number(upper, i) * inverse) << np.uint32(4))
            target[i] = np.uint8(np.uint32(low | high))
        if pairs < half:
            target[pairs] = np.uint8(np.uint32(_to_integer(_load_number(part, pairs) * inverse)) & np.uint32(15))


@_compiled
def decode4(out: Array, scales: Array, codes: Array, block: int, first: int, last: int) -> None:
    """As `decode8`, of what `encode4` wrote."""
    for index in range(first, last):
        part = out[index * block : min((index + 1) * block, out.size)]
        half = (part.size + 1) // 2
        source = codes[index * block // 2 : index * block // 2 + half]
        upper = part[half:]
        scale = scales[index]
        if np.isnan(scale):
            _store(part, 0, scale)
            part[:] = part[0]
            continue
        for i in range(half):
            _store_number(part, i, np.float32(np.int8(source[i] << 4) >> 4) * scale)
        for i in range(upper.size):
            _store_number(upper, i, np.float32(np.int8(source[i]) >> 4) * scale)


@_compiled
def add4(total: Array, scales: Array, codes: Array, block: int, first: int, last: int) -> None:
    """As `add8`, of what `encode4` wrote."""
    for index in range(first, last):
        part = total[index * block : min((index + 1) * block, total.size)]
        half = (part.size + 1) // 2
        source = codes[index * block // 2 : index * block // 2 + half]
        upper = part[half:]
        scale = scales[index]
        for i in range(half):
            part[i] += np.float32(np.int8(source[i] << 4) >> 4) * scale
        for i in range(upper.size):
            upper[i] += np.float32(np.int8(source[i]) >> 4) * scale
