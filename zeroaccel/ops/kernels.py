"""Compiled loops over flat CPU arrays: gradient norms, sums over ranks, 8- and 4-bit codes.

`dispatch` views tensors as arrays and gives each thread its span; `updates` has the optimizers' loops.

Element i of a result depends on element i of the inputs and on the coefficients, never on i, on the length of the
call or on the threads. Do not add a reduction over floats: its result would depend on the order of the spans.
Reductions add integers, which are exact in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zeroaccel.ops.number_formats import (
    Array,
    bits_of,
    compiled,
    float_of,
    inlined,
    load,
    load_number,
    magnitude_pattern,
    of_pattern,
    store,
    store_number,
)

NORM_BITS = 25
"""`square_sums` splits sums of squares of 2 * NORM_BITS bits into two parts, the lower with this many bits."""

SCALE_FLOOR = 2.0**-120
"""Smallest scale of a block of codes: its reciprocal is finite, and values that it rounds to zero are below 2**-121."""

_BLOCK_NUMEL = 2048  # elements that several loops read in turn: 8 KiB of floats, which fit into any L1 cache


# ---- reductions ----


@inlined
def _largest(patterns: Array, mask: Any) -> Any:
    """Returns the largest of ``patterns & mask``; 0 for an empty array.

    `patterns` are floats viewed as integers of their width, and `mask` (of that dtype) clears the sign. Such integers
    order like the magnitudes, inf above every number and NaN above inf. The maximum is exact and vectorises.
    """
    largest = mask & 0
    for i in range(patterns.size):
        largest = max(largest, patterns[i] & mask)
    return largest


@inlined
def _squares(values: Array, scale: np.float64) -> Any:
    """Sums the integers ``rint((value * scale)**2)`` of at most `_BLOCK_NUMEL` values, each at most 2**(2 * NORM_BITS).

    Computes in float64. The square of a float32 has at most 48 bits, so only the rint rounds (ties to even). Adding
    2**52 does it: the low 52 bits of the pattern are then the integer. AVX2 has no conversion to int64.
    """
    total = np.int64(0)
    for i in range(values.size):
        root = np.float64(load(values, i)) * scale
        total += np.float64(root * root + np.float64(2.0**52)).view(np.int64) & (2**52 - 1)
    return total


@compiled
def square_sums(values: Array, scale: np.float64) -> tuple[int, int]:
    """Adds the squares of all blocks, their upper and lower bits apart; see `_squares`."""
    high = np.int64(0)
    low = np.int64(0)
    for begin in range(0, values.size, _BLOCK_NUMEL):
        total = _squares(values[begin : begin + _BLOCK_NUMEL], scale)
        high += total >> NORM_BITS
        low += total & (2**NORM_BITS - 1)
    return int(high), int(low)


@compiled
def examine(values: Array, patterns: Array, mask: Any, scales: Array, sums: Array) -> int:
    """Returns the largest of ``patterns & mask``, and does the work of `square_sums` for each scale, in one pass.

    Args:
        values, patterns: two views of the same memory.
        scales: (K,) float64.
        sums: (K, 2) int64, to which the pass adds; meaningless for a scale at which the largest square is too large.
    """
    largest = mask & 0
    for begin in range(0, values.size, _BLOCK_NUMEL):
        largest = max(largest, _largest(patterns[begin : begin + _BLOCK_NUMEL], mask))
        block = values[begin : begin + _BLOCK_NUMEL]
        for k in range(scales.size):
            total = _squares(block, scales[k])
            sums[k, 0] += total >> NORM_BITS
            sums[k, 1] += total & (2**NORM_BITS - 1)
    return int(largest)


@compiled
def sum_rows(out: Array, flat: Array, row_numel: int, start: int, stop: int, scale: np.float32) -> None:
    """Computes ``out[j] = scale * (((c0[j] + c1[j]) + c2[j]) + ...)`` for j in [start, stop).

    Row cr is ``flat[r * row_numel : (r + 1) * row_numel]``. The sum is float32, in the order of the rows, and rounded
    once into `out`, which may be one of the rows: the loop writes a block after it has read that block of every row.
    """
    total = np.empty(_BLOCK_NUMEL, np.float32)
    for begin in range(start, stop, _BLOCK_NUMEL):
        count = min(_BLOCK_NUMEL, stop - begin)
        first = flat[begin : begin + count]
        for j in range(count):
            total[j] = load(first, j)
        for offset in range(begin + row_numel, flat.size, row_numel):
            row = flat[offset : offset + count]
            for j in range(count):
                total[j] += load(row, j)
        block = out[begin : begin + count]
        for j in range(count):
            store(block, j, total[j] * scale)


# ---- codes: blocks of values as small integers times one float32 scale ----
# `comm/quantized.py` states the format and its error bounds. Blocks [first, last) of `values` are read or written.


@inlined
def _block_scale(numbers: Any, highest: Any) -> Any:
    """Returns the scale that maps the largest magnitude to `highest`; NaN if the block contains an inf or a NaN."""
    scale = _exact_scale(numbers, highest)
    # With 17 significant bits, products with the integers are exact in float32: decoded values have the same scale.
    return float_of(bits_of(scale) & np.uint32(0xFFFFFF80)) if not np.isnan(scale) else scale


@inlined
def _exact_scale(numbers: Any, highest: Any) -> Any:
    """Like `_block_scale`, without rounding."""
    largest = magnitude_pattern(numbers, numbers[0])
    for i in range(1, numbers.size):
        largest = max(largest, magnitude_pattern(numbers, numbers[i]))
    absmax = of_pattern(numbers, largest)
    if not absmax < np.float32(np.inf):
        return np.float32(np.nan)
    return max(absmax / highest, np.float32(SCALE_FLOOR))


@inlined
def _to_integer(value: Any) -> Any:
    """Rounds a float32 below 2**22 to an integer, ties to even; returns its two's complement in the low bits.

    The last place of 1.5 * 2**23 is 1 and its low bits are 0: adding it rounds and puts the integer in the low bits.
    """
    return bits_of(value + np.float32(12582912.0))


@compiled
def encode8(values: Array, scales: Array, codes: Array, block: int, first: int, last: int) -> None:
    """Writes ``codes[i] = rint(values[i] / scale)`` in [-127, 127]; a block with an inf or a NaN gets the scale NaN."""
    for index in range(first, last):
        numbers = values[index * block : min((index + 1) * block, values.size)]
        target = codes[index * block : index * block + numbers.size]
        scale = _block_scale(numbers, np.float32(127.0))
        scales[index] = scale
        inverse = np.float32(1.0) / scale
        for i in range(numbers.size):
            target[i] = np.uint8(_to_integer(load_number(numbers, i) * inverse))


@inlined
def _put(numbers: Any, index: Any, value: Any, adds: Any) -> None:
    if adds is None:  # the compiler sees only one of the two
        store_number(numbers, index, value)
    else:
        numbers[index] += value


@compiled
def decode8(out: Array, scales: Array, codes: Array, block: int, first: int, last: int, adds: bool | None) -> None:
    """Writes ``out[i] = codes[i] * scale``; with `adds`, which is None or True, adds to the float32 `out`."""
    for index in range(first, last):
        numbers = out[index * block : min((index + 1) * block, out.size)]
        source = codes[index * block : index * block + numbers.size]
        scale = scales[index]
        if np.isnan(scale):
            store(numbers, 0, scale)
            numbers[:] = numbers[0]
            continue
        for i in range(numbers.size):
            _put(numbers, i, np.float32(np.int8(source[i])) * scale, adds)


@compiled
def encode4(values: Array, scales: Array, codes: Array, block: int, first: int, last: int) -> None:
    """Like `encode8`, in [-7, 7]: byte i of a block of n values has value i (low) and value i + ceil(n / 2) (high)."""
    for index in range(first, last):
        numbers = values[index * block : min((index + 1) * block, values.size)]
        half = (numbers.size + 1) // 2
        target = codes[index * block // 2 : index * block // 2 + half]
        scale = _block_scale(numbers, np.float32(7.0))
        scales[index] = scale
        inverse = np.float32(1.0) / scale
        pairs = numbers.size - half
        upper = numbers[half:]
        for i in range(pairs):
            low = np.uint32(_to_integer(load_number(numbers, i) * inverse) & np.uint32(15))
            high = np.uint32(_to_integer(load_number(upper, i) * inverse) << np.uint32(4))
            target[i] = np.uint8(np.uint32(low | high))
        if pairs < half:
            target[pairs] = np.uint8(np.uint32(_to_integer(load_number(numbers, pairs) * inverse)) & np.uint32(15))


@compiled
def decode4(out: Array, scales: Array, codes: Array, block: int, first: int, last: int, adds: bool | None) -> None:
    """Like `decode8`, for the codes of `encode4`."""
    for index in range(first, last):
        numbers = out[index * block : min((index + 1) * block, out.size)]
        half = (numbers.size + 1) // 2
        source = codes[index * block // 2 : index * block // 2 + half]
        upper = numbers[half:]
        scale = scales[index]
        if np.isnan(scale):
            store(numbers, 0, scale)
            numbers[:] = numbers[0]
            continue
        for i in range(half):
            _put(numbers, i, np.float32(np.int8(source[i] << 4) >> 4) * scale, adds)
        for i in range(upper.size):
            _put(upper, i, np.float32(np.int8(source[i]) >> 4) * scale, adds)


# ---- codes that are indices of levels: `comm/level_codes.py` states formats and error bounds ----


@compiled
def encode_levels(
    values: Array, scales: Array, codes: Array, block: int, highest: Any, bounds: Array, first: int, last: int
) -> None:
    """Writes for each value of the blocks the number of `bounds` below ``value / scale``, two per byte as `encode4`.

    Args:
        scales: gets ``largest / highest``, rounded to the array's format; NaN for a block with an inf or a NaN.
        bounds: (15,) ascending.
    """
    for index in range(first, last):
        numbers = values[index * block : min((index + 1) * block, values.size)]
        half = (numbers.size + 1) // 2
        target = codes[index * block // 2 : index * block // 2 + half]
        store(scales, index, _exact_scale(numbers, highest))
        scale = load(scales, index)
        inverse = np.float32(1.0) / scale
        target[:] = 0
        for i in range(numbers.size):
            value = load_number(numbers, i) * inverse
            code = np.uint8(0)
            for bound in bounds:
                code += np.uint8(value > bound)
            if i < half:
                target[i] = code
            else:
                target[i - half] |= np.uint8(code << 4)


@compiled
def decode_levels(out: Array, scales: Array, codes: Array, block: int, levels: Array, first: int, last: int) -> None:
    """Writes ``out[i] = levels[codes[i]] * scale``, for the codes of `encode_levels`."""
    for index in range(first, last):
        numbers = out[index * block : min((index + 1) * block, out.size)]
        half = (numbers.size + 1) // 2
        source = codes[index * block // 2 : index * block // 2 + half]
        scale = load(scales, index)
        if np.isnan(scale):
            store(numbers, 0, scale)
            numbers[:] = numbers[0]
            continue
        for i in range(half):
            store_number(numbers, i, levels[source[i] & 15] * scale)
        for i in range(half, numbers.size):
            store_number(numbers, i, levels[source[i - half] >> 4] * scale)


@compiled
def look_up(out: Array, table: Array, codes: Array, first: int, last: int) -> None:
    """Writes ``out[i] = table[codes[i]]``; `codes` are bytes, and the table has an entry for each of them."""
    for i in range(first, last):
        out[i] = table[codes[i]]
