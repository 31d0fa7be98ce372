"""Blockwise symmetric 8- and 4-bit quantization of flat tensors, for quantized collectives and frozen weights.

Pure functions. A quantized tensor is called a code. Each block of `Codec.block_numel` values has a float32 scale, and a
value is the scale times an integer in [-levels, levels]. A code is one run of bytes, so scales travel with integers:

```text
code: (nbytes,) uint8   [ scales, float32, one per block | integers, 1 byte or a half per value | padding to 16 bytes ]
```

[Note: error] With s = max(absmax / levels, 2**-120) in a block, cut to 17 significant bits, a decoded value is off by
at most (0.5 + 2**-15) * s before it is rounded to the dtype of the output: half a step, plus rounding errors of the
float32 arithmetic. So int8 is off by at most 0.4 % of its block's largest magnitude, int4 by 7.2 %. Rounding is to
nearest, ties to even. No intermediate value is a 16-bit float, so a bfloat16 of 1e38 is preserved. A block with an
infinity or a NaN decodes to NaN throughout: it shows as an overflow, never as a finite wrong number. With 17 bits the
product of a scale and an integer is exact, so encoding decoded values and decoding them again returns the same values.

In e4m3, with s = max(absmax / 448, 2**-120), a decoded value x is off by at most |x| / 16 or s / 1024, whichever is
larger, and so by at most 16 s, 3.6 % of the largest magnitude of its block; again plus rounding errors of the float32
arithmetic. On CPUs torch operations make these codes.

Codes and values have the same bits in host memory, on CUDA and from torch operations, except for the payload of a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from zeroaccel.config.comm_plan import INT4_BLOCK_NUMEL, INT8_BLOCK_NUMEL, code_nbytes
from zeroaccel.ops import kernels
from zeroaccel.ops.device_kernels import kernels_for, load_kernels
from zeroaccel.ops.dispatch import LOOP_DEVICES, array_of, launch

QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that can be quantized."""

_TILE_BLOCKS = 1 << 13  # blocks at a time off the CPU: bounds the float32 temporaries to 16 MiB each


class CodeLayout:
    """Layout of the scales and codes of values in a run of bytes.

    Attributes:
        bits: 8 or 4 per value.
        block_numel: number of values that share a scale; even.
        scale_dtype: dtype of a scale.
    """

    bits: int
    block_numel: int
    scale_dtype: torch.dtype

    def blocks(self, numel: int) -> int:
        """Number of scales in a code of `numel` values."""
        return -(-numel // self.block_numel)

    def scales_nbytes(self, numel: int) -> int:
        """Number of bytes of the scales, which a code of `numel` values begins with."""
        return self.scale_dtype.itemsize * self.blocks(numel)

    def nbytes(self, numel: int) -> int:
        """Number of bytes in a code of `numel` values, a multiple of 16."""
        return code_nbytes(numel, self.bits, self.block_numel, self.scale_dtype.itemsize)

    def views(self, code: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Returns (scales, codes): views of a code of `numel` values."""
        assert code.dtype is torch.uint8 and code.numel() == self.nbytes(numel), (
            f"the code of {numel} values has {self.nbytes(numel)} bytes, got {code.numel()} of {code.dtype}"
        )
        cut = self.scales_nbytes(numel)
        return code[:cut].view(self.scale_dtype), code[cut : cut + -(-numel * self.bits // 8)]


@dataclass(frozen=True)
class Codec(CodeLayout):
    """A quantization format.

    Attributes:
        floating: True for codes in e4m3 (float8_e4m3fn), with 8 bits; False for integers.
    """

    bits: int
    block_numel: int
    floating: bool = False
    scale_dtype: torch.dtype = field(default=torch.float32, repr=False)

    @property
    def format(self) -> tuple[int, int]:
        """`levels` and `block_numel`."""
        return self.levels, self.block_numel

    @property
    def levels(self) -> int:
        """The largest number of a code: 127, 7, or 448 in e4m3."""
        return 448 if self.floating else (1 << (self.bits - 1)) - 1

    def error_bound(self, absmax: float) -> float:
        """Returns the maximum error of a decoded float32 in a block with this largest magnitude; see [Note: error]."""
        off = 16 + 2.0**-10 if self.floating else 0.5 + 2.0**-15
        return max(absmax / self.levels, kernels.SCALE_FLOOR) * off


INT8 = Codec(bits=8, block_numel=INT8_BLOCK_NUMEL)
"""For weights: 0.8 % of the bytes are scales."""

FP8 = Codec(bits=8, block_numel=INT8_BLOCK_NUMEL, floating=True)
"""For weights: as many bytes as INT8. Values much smaller than the largest of their block keep their leading bits."""

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
    scales, codes = _views(values, codec, out)
    device_kernels = kernels_for(values.device)
    if device_kernels is not None:
        device_kernels.encode(values.detach().view(1, -1), out.view(1, -1), codec.format)
        return
    # The padding is zeroed, so that equal values have equal codes, byte for byte.
    out[4 * scales.numel() + codes.numel() :].zero_()
    if values.device.type in LOOP_DEVICES and not codec.floating:
        _run("encode", values, scales, codes, codec)
        return
    for first in range(0, scales.numel(), _TILE_BLOCKS):
        _quantize_tile(values, codec, scales, codes, first, min(first + _TILE_BLOCKS, scales.numel()))


def dequantize(code: Tensor, codec: Codec, out: Tensor) -> None:
    """out = the values of a code, rounded once to the dtype of `out`.

    Args:
        code: (codec.nbytes(n),) uint8, written by `quantize`.
        out: (n,) contiguous float32, bfloat16 or float16 on the same device.
    """
    scales, codes = _views(out, codec, code)
    device_kernels = kernels_for(out.device)
    if device_kernels is not None:
        device_kernels.decode(code.view(1, -1), out.detach().view(1, -1), codec.format)
        return
    if out.device.type in LOOP_DEVICES and not codec.floating:
        _run("decode", out, scales, codes, codec)
        return
    for tile, values in _dequantized_tiles(out, scales, codes, codec):
        tile.copy_(values)


def dequantize_add(code: Tensor, codec: Codec, total: Tensor) -> None:
    """total += the values of a code. `total`: (n,) float32; otherwise like `dequantize`."""
    assert total.dtype is torch.float32, f"sums need float32 totals, got {total.dtype}"
    scales, codes = _views(total, codec, code)
    device_kernels = kernels_for(total.device)
    if device_kernels is not None:
        device_kernels.decode(code.view(1, -1), total.view(1, -1), codec.format, adds=True)
        return
    if total.device.type in LOOP_DEVICES and not codec.floating:
        _run("add", total, scales, codes, codec)
        return
    for tile, values in _dequantized_tiles(total, scales, codes, codec):
        tile.add_(values)


# --- several codes at once: one launch for all of them on CUDA


class RowOrder:
    """Maps codes to rows of values.

    Args:
        rows: (K,) the row of each code.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the rows, (K,) int32, on a device; copied there once."""
        if device not in self._on:
            self._on[device] = torch.tensor(self.rows, dtype=torch.int32, device=device)
        return self._on[device]


def quantize_rows(
    values: Tensor, codec: Codec, codes: Tensor, order: RowOrder | None = None, skip: tuple[int, int] = (0, 0)
) -> None:
    """Quantizes several rows, as `quantize` does.

    Args:
        values: (M, n) contiguous.
        codes: (K, codec.nbytes(n)) contiguous.
        order: the row of each code; None if code k is for row k.
        skip: (first, end) of the codes that are left unchanged.
    """
    device_kernels = kernels_for(values.device)
    if device_kernels is not None:
        places = None if order is None else order.on(values.device)
        device_kernels.encode(values.detach(), codes, codec.format, places, skip)
        return
    for place, code in enumerate(codes):
        if not skip[0] <= place < skip[1]:
            quantize(values[place if order is None else order.rows[place]], codec, code)


def load_kernels_of_sums(codec: Codec, device: torch.device) -> None:
    """Loads the kernels of `quantize_rows` and `sum_rows` for each dtype; see `device_kernels.load_kernels`.

    Reductions run beside gathers, whose order may differ on another rank, so that two ranks that wait for their devices
    would wait for each other.
    """

    def launch() -> None:
        for dtype in QUANTIZABLE:
            values = torch.zeros(1, codec.block_numel, dtype=dtype, device=device)
            codes = torch.zeros(1, codec.nbytes(codec.block_numel), dtype=torch.uint8, device=device)
            quantize_rows(values, codec, codes)
            sum_rows(codes[None], codec, values, 0, torch.empty(values.shape, device=device))

    load_kernels(device, launch)


def dequantize_rows(codes: Tensor, codec: Codec, out: Tensor) -> None:
    """Dequantizes several codes, as `dequantize` does: (K, codec.nbytes(n)) into (K, n), both contiguous."""
    device_kernels = kernels_for(out.device)
    if device_kernels is not None:
        device_kernels.decode(codes, out.detach(), codec.format)
        return
    for code, row in zip(codes, out, strict=True):
        dequantize(code, codec, row)


def sum_rows(
    codes: Tensor, codec: Codec, values: Tensor, own_row: int, totals: Tensor, order: RowOrder | None = None
) -> None:
    """``totals[i] = ((0 + c0) + c1) + ...`` in float32: row i of every rank; this rank's row comes from `values`.

    Args:
        codes: (W, R, codec.nbytes(n)) contiguous uint8; row `own_row` is unused.
        values: (M, n) contiguous float32, bfloat16 or float16, as for `quantize_rows` with W * R codes.
        own_row: this rank's row.
        totals: (R, n) contiguous float32.
        order: as in `quantize_rows`.
    """
    runs = totals.shape[0]
    device_kernels = kernels_for(totals.device)
    if device_kernels is not None:
        places = None if order is None else order.on(values.device)
        device_kernels.sum_codes(codes, values.detach(), own_row, totals, codec.format, places)
        return
    for index, total in enumerate(totals):
        total.zero_()
        for rank, received in enumerate(codes):
            if rank == own_row:
                place = own_row * runs + index
                total.add_(values[place if order is None else order.rows[place]])
            else:
                dequantize_add(received[index], codec, total)


def _views(values: Tensor, codec: Codec, code: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (scales, integers): views of a code of `values`."""
    assert values.dtype in QUANTIZABLE, f"{values.dtype} cannot be quantized"
    return codec.views(code, values.numel())


def _run(kind: Literal["encode", "decode", "add"], values: Tensor, scales: Tensor, codes: Tensor, codec: Codec) -> None:
    """Runs one of the compiled loops on several threads, which never divide a block."""
    encode, decode = (kernels.encode8, kernels.decode8) if codec.bits == 8 else (kernels.encode4, kernels.decode4)
    block, code, adds = codec.block_numel, [scales, codes], True if kind == "add" else None

    def bind() -> Callable[[int, int], None]:
        flat, sizes, integers = [array_of(tensor) for tensor in (values, scales, codes)]

        def work(start: int, stop: int) -> None:
            first, last = -(-start // block), -(-stop // block)
            if kind == "encode":
                encode(flat, sizes, integers, block, first, last)
            else:
                decode(flat, sizes, integers, block, first, last, adds)

        return work

    reads = [values] if kind == "encode" else code if kind == "decode" else [*code, values]
    launch(f"{kind}{codec.bits}", values.numel(), bind, reads=reads, writes=code if kind == "encode" else [values])


# --- off the CPU, in torch


def _quantize_tile(values: Tensor, codec: Codec, scales: Tensor, codes: Tensor, first: int, last: int) -> None:
    block = codec.block_numel
    tile = values[first * block : last * block].float()
    # The last block may be partial: it is a separate row, so that all other blocks are one 2-D operation.
    cut = tile.numel() // block * block
    for rows, low in ((tile[:cut].view(-1, block), 0), (tile[cut:].view(1, -1), cut)):
        if rows.numel() == 0:
            continue
        # Same arithmetic as the kernels: multiply by the reciprocal of the scale, round to nearest even. A block with
        # an inf or a NaN gets a NaN scale, so that all of it decodes to NaN.
        absmax = rows.abs().amax(dim=1)
        levels = torch.full((), codec.levels, dtype=torch.float32, device=absmax.device)
        size = (absmax / levels).clamp_min(kernels.SCALE_FLOOR)  # CUDA divides by a tensor only, not by a number
        size = (size.view(torch.int32) & ~0x7F).view(torch.float32)
        size = torch.where(absmax.isfinite(), size, math.nan)
        scaled = rows * size.reciprocal()[:, None]
        if codec.floating:
            integers = scaled.nan_to_num(nan=0.0).to(torch.float8_e4m3fn)  # rounds to nearest even
        else:
            integers = scaled.round().nan_to_num(nan=0.0).to(torch.int8)
        begin = first + low // block
        scales[begin : begin + rows.shape[0]] = size
        start = begin * block * codec.bits // 8
        packed = integers.view(torch.uint8) if codec.bits == 8 else pack(integers)
        codes[start : start + packed.numel()] = packed.reshape(-1)


def pack(integers: Tensor) -> Tensor:
    """Packs (rows, n) int8 in [-7, 7] into (rows, ceil(n / 2)) uint8."""
    half = (integers.shape[1] + 1) // 2
    unsigned = integers.view(torch.uint8) & 15
    packed = unsigned[:, :half].clone()
    packed[:, : integers.shape[1] - half] |= unsigned[:, half:] << 4
    return packed


def _dequantized_tiles(out: Tensor, scales: Tensor, codes: Tensor, codec: Codec) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (a part of `out`, its float32 values), over all of it."""
    for first in range(0, scales.numel(), _TILE_BLOCKS):
        last = min(first + _TILE_BLOCKS, scales.numel())
        tile = out[first * codec.block_numel : last * codec.block_numel]
        yield tile, _dequantize_tile(tile.numel(), codec, scales[first:last], codes, first)


def _dequantize_tile(numel: int, codec: Codec, scales: Tensor, codes: Tensor, first: int) -> Tensor:
    """Returns the float32 values, (numel,), of the blocks starting at `first`."""
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
            kind = torch.float8_e4m3fn if codec.floating else torch.int8
            integers = rows.view(kind) if codec.bits == 8 else _unpack(rows, length)
            pieces.append((integers.float() * sizes[:, None]).reshape(-1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _unpack(packed: Tensor, length: int) -> Tensor:
    """Unpacks (rows, ceil(length / 2)) uint8 into (rows, length) int8."""
    low = (packed << 4).view(torch.int8) >> 4
    high = packed.view(torch.int8) >> 4
    return torch.cat((low, high), dim=1)[:, :length]
