"""Splits a float32 into its bfloat16 and a 16-bit residual, with one more bit for ambiguous values.

[Note: residual] Let w be x rounded to bfloat16 (nearest, ties to even), and r the low 16 bits of x as a signed number.
Then, as integers, bits(x) = (bits(w) << 16) + r: if r is negative, x was rounded up to w, and the sum subtracts it
again. One pattern fails: low bits 0x8000 are half way, and an even upper half is not rounded up. For these few elements
the bit in `ties`, which has one per element, adds 1 << 16 again. So 17 bits per element in addition to the weight
restore every float32 except a NaN, of which they restore the sign and the upper bits.

`number_formats` rounds; `ResidualMasters` (`swapped_masters.py`) stores masters in this form.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from zeroaccel.ops.dispatch import array_of, launch
from zeroaccel.ops.number_formats import Array, bits_of, compiled, float_of, inlined

_BYTES = 16  # bytes of ties that one test covers: their 128 elements rarely contain a tie
_TIE = 0x8000  # the low 17 bits of a number half way with an even upper half
_TILE_NUMEL = 1 << 16  # joined values at a time: 256 KiB stay in a core's cache from `join` to `split`
_scratch = threading.local()


def ties_nbytes(numel: int) -> int:
    """Returns the number of bytes of tie bits for `numel` elements."""
    return -(-numel // 8)


def join(weights: Tensor, residuals: Tensor, ties: Tensor, out: Tensor, first: int = 0) -> None:
    """Writes the float32 values that consist of these parts.

    Args:
        weights: (L,) bfloat16.
        residuals: (L,) int16.
        ties: uint8; bit i % 8 of byte i // 8 belongs to element i.
        out: (L,) float32.
        first: position of the first element's bit in `ties`.
    """

    def bind() -> Callable[[int, int], None]:
        w, r, t, x = [array_of(tensor) for tensor in (weights, residuals, ties, out)]
        return lambda start, stop: _join(w[start:stop], r[start:stop], t, x[start:stop], first + start)

    launch("join", out.numel(), bind, reads=[weights, residuals, ties], writes=[out])


def split(values: Tensor, residuals: Tensor, ties: Tensor, first: int = 0) -> None:
    """Writes the residuals and ties of rounding `values` to bfloat16; the inverse of `join`, with the same arguments.

    Bits of `ties` that belong to other elements do not change.
    """

    def bind() -> Callable[[int, int], None]:
        x, r, t = [array_of(tensor) for tensor in (values, residuals, ties)]
        return lambda start, stop: _split(x[start:stop], r[start:stop], t, first + start)

    numel = values.numel()
    # If the first element's bit is within a byte of `ties`, spans would share bytes.
    reads = [values, ties] if first % 8 or numel % 8 else [values]  # other elements' bits in the first and last byte
    launch("split", numel, bind, reads=reads, writes=[residuals, ties], divisible=first % 8 == 0)


@dataclass(frozen=True)
class SplitMasters:
    """Float32 masters in their parts, (L,), for an update that joins them tile by tile in the cache of its core.

    Attributes:
        weights, residuals, ties, first: see `join`; an update that divides them into spans needs `first` % 8 == 0.
    """

    weights: Tensor
    residuals: Tensor
    ties: Tensor
    first: int = 0

    def cut(self, elements: slice) -> SplitMasters:
        """Returns the masters of a part."""
        return SplitMasters(self.weights[elements], self.residuals[elements], self.ties, self.first + elements.start)

    def bind(self, update: Callable[[Array, int, int], None]) -> Callable[[int, int], None]:
        """Returns a function that joins the masters [start, stop), updates them, and splits them again.

        Args:
            update: (masters, start, stop) changes the masters [start, stop) in place. It may write their rounded values
                over the weights.
        """
        w, r, t = [array_of(tensor) for tensor in (self.weights, self.residuals, self.ties)]

        def work(start: int, stop: int) -> None:
            memory = _tile()
            for begin in range(start, stop, _TILE_NUMEL):
                end = min(begin + _TILE_NUMEL, stop)
                masters = memory[: end - begin]
                _join(w[begin:end], r[begin:end], t, masters, self.first + begin)
                update(masters, begin, end)
                _split(masters, r[begin:end], t, self.first + begin)

        return work


def _tile() -> Array:
    """Returns memory for one tile that belongs to the calling thread."""
    memory: Array | None = getattr(_scratch, "memory", None)
    if memory is None:
        memory = _scratch.memory = np.empty(_TILE_NUMEL, np.float32)
    return memory


@compiled
def _join(weights: Array, residuals: Array, ties: Array, out: Array, first: int) -> None:
    for i in range(out.size):
        upper = np.uint32(np.uint32(weights[i]) << 16)
        joined = np.uint32(upper + np.uint32(np.int32(residuals[i])))
        out[i] = float_of(upper if _is_nan(upper) else joined)
    # A second pass adds the ties, which few blocks have. The first pass vectorises because it has no branches.
    first_byte, end_byte = first >> 3, (first + out.size + 7) >> 3
    for begin in range(first_byte, end_byte, _BYTES):
        block = ties[begin : min(begin + _BYTES, end_byte)]
        any_tie = np.uint8(0)
        for byte in range(block.size):
            any_tie |= block[byte]
        if any_tie:
            for i in range(max(begin * 8 - first, 0), min((begin + block.size) * 8 - first, out.size)):
                upper = np.uint32(np.uint32(weights[i]) << 16)
                if (ties[(first + i) >> 3] >> ((first + i) & 7)) & 1 and not _is_nan(upper):
                    out[i] = float_of(np.uint32(bits_of(out[i]) + 0x10000))


@compiled
def _split(values: Array, residuals: Array, ties: Array, first: int) -> None:
    for i in range(values.size):
        residuals[i] = np.int16(bits_of(values[i]))
    head = min((8 - (first & 7)) & 7, values.size)
    for i in range(head):
        _set_tie(ties, first + i, values[i])
    for begin in range(head, values.size, 8 * _BYTES):
        chunk = values[begin : min(begin + 8 * _BYTES, values.size)]
        any_tie = np.uint32(0)
        for i in range(chunk.size):
            any_tie |= _is_tie(chunk[i])
        if any_tie or chunk.size < 8 * _BYTES:
            for i in range(chunk.size):
                _set_tie(ties, first + begin + i, chunk[i])
        else:
            ties[(first + begin) >> 3 : ((first + begin) >> 3) + _BYTES] = 0


@inlined
def _is_nan(bits: Any) -> Any:
    return np.uint32(bits & 0x7FFFFFFF) > 0x7F800000


@inlined
def _is_tie(value: Any) -> Any:
    return np.uint32(np.uint32(bits_of(value) & 0x1FFFF) == _TIE)


@inlined
def _set_tie(ties: Any, place: Any, value: Any) -> None:
    others = np.uint32(ties[place >> 3]) & np.uint32(0xFF ^ (1 << (place & 7)))
    ties[place >> 3] = np.uint8(others | np.uint32(_is_tie(value) << np.uint32(place & 7)))
