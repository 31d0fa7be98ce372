"""Blockwise symmetric 8- and 4-bit quantization of flat tensors, for quantized collectives and frozen weights.

Pure functions. A quantized tensor is called a code. Each block of `Codec.block_numel` values has a float32 scale, and a
value is an integer in [-levels, levels] times it. A code is one run of bytes, so that scales travel with the integers:

```text
code: (nbytes,) uint8   [ scales, float32, one per block | integers, 1 byte or a half per value | padding to 16 bytes ]
```

[Note: error] With s = max(absmax / levels, 2**-120) in a block, a decoded value is off by at most (0.5 + 2**-15) * s
before it is rounded to the dtype of the output: half a step, and the roundings of the float32 arithmetic. So int8 is
off by at most 0.4 % of its block's largest magnitude, int4 by 7.2 %. Rounding is to nearest, ties to even. Nothing
passes through a 16-bit float on the way, so a bfloat16 of 1e38 stays what it was. A block with an infinity or a NaN
decodes to NaN throughout: it shows as an overflow, never as a finite wrong number.

The two paths, compiled loops in host memory and torch elsewhere, differ by at most the last place of the float32
arithmetic, as a test on the CPU shows; on CUDA the second is written, not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroaccel.config.comm_plan import INT4_BLOCK_NUMEL, INT8_BLOCK_NUMEL, code_nbytes
from zeroaccel.ops import kernels
from zeroaccel.ops.dispatch import in_spans, unowned_array

QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that can be quantized."""

_TILE_BLOCKS = 1 << 13  # blocks at a time off the CPU: bounds the float32 temporaries to 16 MiB each


@dataclass(frozen=True)
class Codec:
    """A quantization format.

    Attributes:
        bits: 8 or 4 per value.
        block_numel: values that share a scale; even.
    """

    bits: int
    block_numel: int

    @property
    def levels(self) -> int:
        """The largest integer: 127 or 7."""
        return (1 << (self.bits - 1)) - 1

    def blocks(self, numel: int) -> int:
        """Scales of a code of `numel` values."""
        return -(-numel // self.block_numel)

    def nbytes(self, numel: int) -> int:
        """Bytes of the code of `numel` values, a multiple of 16: 4 per block, and `bits` per value."""
        return code_nbytes(numel, self.bits, self.block_numel)

    def error_bound(self, absmax: float) -> float:
        """The most by which a decoded float32 of a block with this largest magnitude is off; see [Note: error]."""
        return max(absmax / self.levels, kernels.SCALE_FLOOR) * (0.5 + 2.0**-15)


INT8 = Codec(bits=8, block_numel=INT8_BLOCK_NUMEL)
"""For weights: 0.8 % of the bytes are scales."""

INT4 = Codec(bits=4, block_numel=INT4_BLOCK_NUMEL)
"""For gradients: 3.1 % of the bytes are scales."""


def quantize(values: Tensor, codec: Codec, out: Tensor) -> None:
    """Writes the code of `values` into `out`.

    Example:
        >>> values = torch.linspace(-1, 1, 1000)
        >>> code = torch.empty(INT8.nbytes(1000), dtype=torch.uint8)
        >>> quantize(values, INT8, code)
        >>> decoded = torch.empty(1000)
        >>> dequantize(code, INT8, decoded)
        >>> bool((decoded - values).abs().max() <= INT8.error_bound(1.0))
        True

    Args:
        values: (n,) contiguous float32, bfloat16 or float16, any n.
        out: (codec.nbytes(n),) contiguous uint8 on the same device, starting at a multiple of 4 bytes.
    """
    # The padding is zeroed, so that equal values have equal codes, byte for byte.
    scales, codes = _views(values, codec, out)
    out[4 * scales.numel() + codes.numel() :].zero_()
    if values.device.type == "cpu":
        _run(kernels.encode8 if codec.bits == 8 else kernels.encode4, values, scales, codes, codec)
        return
    for first in range(0, scales.numel(), _TILE_BLOCKS):
        _quantize_tile(values, codec, scales, codes, first, min(first + _TILE_BLOCKS, scales.numel()))


def dequantize(code: Tensor, codec: Codec, out: Tensor) -> None:
    """out = the values of a code, rounded once to the dtype of `out`.

    Args:
        code: (codec.nbytes(n),) uint8, as `quantize` wrote it.
        out: (n,) contiguous float32, bfloat16 or float16 on the same device.
    """
    scales, codes = _views(out, codec, code)
    if out.device.type == "cpu":
        _run(kernels.decode8 if codec.bits == 8 else kernels.decode4, out, scales, codes, codec)
        return
    for part, values in _dequantized_tiles(out, scales, codes, codec):
        part.copy_(values)


def dequantize_add(code: Tensor, codec: Codec, total: Tensor) -> None:
    """total += the values of a code. `total`: (n,) float32; else as `dequantize`."""
    assert total.dtype is torch.float32, f"sums are made in float32, got {total.dtype}"
    scales, codes = _views(total, codec, code)
    if total.device.type == "cpu":
        _run(kernels.add8 if codec.bits == 8 else kernels.add4, total, scales, codes, codec)
        return
    for part, values in _dequantized_tiles(total, scales, codes, codec):
        part.add_(values)


def _views(values: Tensor, codec: Codec, code: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, integers): views of a code of `values`."""
    numel = values.numel()
    assert values.dtype in QUANTIZABLE, f"no code for {values.dtype}"
    assert code.dtype is torch.uint8 and code.numel() == codec.nbytes(numel), (
        f"the code of {numel} values has {codec.nbytes(numel)} bytes, got {code.numel()} of {code.dtype}"
    )
    cut = 4 * codec.blocks(numel)
    return code[:cut].view(torch.float32), code[cut : cut + -(-numel * codec.bits // 8)]


def _run(kernel: Callable[..., None], values: Tensor, scales: Tensor, codes: Tensor, codec: Codec) -> None:
    """One of the compiled loops, on several threads: a block is never divided between two."""
    flat, sizes, integers = unowned_array(values), unowned_array(scales), unowned_array(codes)
    block = codec.block_numel

    def work(start: int, stop: int) -> None:
        kernel(flat, sizes, integers, block, -(-start // block), -(-stop // block))

    in_spans(values.numel(), work)


# --- off the CPU, in torch


def _quantize_tile(values: Tensor, codec: Codec, scales: Tensor, codes: Tensor, first: int, last: int) -> None:
    block = codec.block_numel
    part = values[first * block : last * block].float()
    # The last block may be a partial one: it is a row of its own, so that all others are one 2-D operation.
    cut = part.numel() // block * block
    for rows, low in ((part[:cut].view(-1, block), 0), (part[cut:].view(1, -1), cut)):
        if rows.numel() == 0:
            continue
        # The kernels' arithmetic: multiply by the reciprocal of the scale, round to nearest even. A block with an inf
        # or a NaN gets a NaN scale, so that all of it decodes to NaN.
        absmax = rows.abs().amax(dim=1)
        size = (absmax / codec.levels).clamp_min(kernels.SCALE_FLOOR)
        size = torch.where(absmax.isfinite(), size, math.nan)
        integers = (rows * size.reciprocal()[:, None]).round().nan_to_num(nan=0.0).to(torch.int8)
        begin = first + low // block
        scales[begin : begin + rows.shape[0]] = size
        start = begin * block * codec.bits // 8
        packed = integers.view(torch.uint8) if codec.bits == 8 else _pack(integers)
        codes[start : start + packed.numel()] = packed.reshape(-1)


def _pack(integers: Tensor) -> Tensor:
    """(rows, n) int8 in [-7, 7] -> (rows, ceil(n / 2)) uint8."""
    half = (integers.shape[1] + 1) // 2
    unsigned = integers.view(torch.uint8) & 15
    packed = unsigned[:, :half].clone()
    packed[:, : integers.shape[1] - half] |= unsigned[:, half:] << 4
    return packed


def _dequantized_tiles(out: Tensor, scales: Tensor, codes: Tensor, codec: Codec) -> Iterator[tuple[Tensor, Tensor]]:
    """(a part of `out`, its float32 values), over all of it."""
    for first in range(0, scales.numel(), _TILE_BLOCKS):
        last = min(first + _TILE_BLOCKS, scales.numel())
        part = out[first * codec.block_numel : last * codec.block_numel]
        yield part, _dequantize_tile(part.numel(), codec, scales[first:last], codes, first)


def _dequantize_tile(numel: int, codec: Codec, scales: Tensor, codes: Tensor, first: int) -> Tensor:
    """(numel,) float32 values of the blocks from `first` on."""
    block = codec.block_numel
    start = first * block * codec.bits // 8
    packed = codes[start : start + -(-numel * codec.bits // 8)]
    num_full = numel // block
    cut = num_full * block * codec.bits // 8
    pieces = []
    for rows, sizes, length in (
        (packed[:cut].view(num_full, block * codec.bits // 8), scales[:num_full], block),
        (packed[cut:].view(1, packed.numel() - cut), scales[num_full:], numel - num_full * block),
    ):
        if rows.numel():
            integers = rows.view(torch.int8) if codec.bits == 8 else _unpack(rows, length)
            pieces.append((integers.float() * sizes[:, None]).reshape(-1))
    return torch.cat(pieces)


def _unpack(packed: Tensor, length: int) -> Tensor:
    """(rows, ceil(length / 2)) uint8 -> (rows, length) int8."""
    low = (packed << 4).view(torch.int8) >> 4
    high = packed.view(torch.int8) >> 4
    return torch.cat((low, high), dim=1)[:, :length]
