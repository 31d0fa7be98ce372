"""Formats of frozen weights: 4-bit codes that index a table of levels, and int8. Pure functions of flat tensors.

A block of values has one scale. Each value is rounded to the scale times the nearest of at most 16 levels (ties go to
the even mantissa in mxfp4, to the lower level in nf4). A code is one run of bytes, as in `quantized.py`, which has
int8:

```text
code: (nbytes,) uint8   [ scales, one per block | 4-bit indices, two to a byte | padding to 16 bytes ]
```

- **nf4**: the quantiles of a normal distribution from QLoRA (Dettmers et al., 2023, arXiv:2305.14314, appendix E)
  between -1 and 1, in blocks of 64. Scale: float32, the largest magnitude of the block. 0.5625 bytes per value.
- **mxfp4**: E2M1 numbers in blocks of 32 with scales that are powers of two (OCP Microscaling Formats 1.0, 2023,
  section 5.3): the smallest scale that keeps the block within +-6. 0.53125 bytes per value.

[Note: levels' error] The error of a decoded float32 is at most half the widest gap, 0.152 absmax in nf4, and 0.2 absmax
in mxfp4 (5 between 4 and 6), plus rounding errors of 2**-20 absmax. A block with an infinity or a NaN decodes to NaN.
Encoding decoded values and decoding them again returns the same values. Compiled loops and torch operations, which run
off the CPU, produce codes with the same bits; a CUDA device decodes with one kernel (`ops/device_kernels.cu`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from zeroaccel.comm.quantized import INT8, Codec, CodeLayout, dequantize, dequantize_rows, pack, quantize
from zeroaccel.ops import kernels
from zeroaccel.ops.device_kernels import kernels_for
from zeroaccel.ops.dispatch import LOOP_DEVICES, array_of, launch

_TILE_BLOCKS = 1 << 15  # blocks at a time off the CPU: bounds the float32 temporaries to 8 MiB each


@dataclass(frozen=True)
class LevelCodec(CodeLayout):
    """A format that maps codes to levels.

    Attributes:
        levels: ascending, at most 16.
        bounds: thresholds between the levels; a value above a bound has a higher level.
        scale_dtype: float32, or uint8 for powers of two.
        error: bound of the error in a block whose largest magnitude is 1.
    """

    block_numel: int
    levels: tuple[float, ...]
    bounds: tuple[float, ...]
    scale_dtype: torch.dtype
    error: float
    bits: int = 4

    @property
    def highest(self) -> float:
        """The level for the largest magnitude, if the scale is not rounded up."""
        return self.levels[-1]

    def error_bound(self, absmax: float) -> float:
        """Returns the maximum error of a decoded float32 in a block with this largest magnitude."""
        return max(absmax, self.highest * kernels.SCALE_FLOOR) * (self.error + 2.0**-20)


def _midway(levels: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(float(np.float32((low + high) / 2)) for low, high in pairwise(levels))


def _to_even(levels: tuple[float, ...], mantissas: tuple[int, ...]) -> tuple[float, ...]:
    """Returns bounds that round a value midway between two levels to the one with the even mantissa."""
    bounds = []
    for index, bound in enumerate(_midway(levels)):
        is_upper = mantissas[index + 1] % 2 == 0
        bounds.append(float(np.nextafter(np.float32(bound), np.float32(-np.inf))) if is_upper else bound)
    return tuple(bounds)


_QUANTILES = """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
    -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
"""
_NF4 = tuple(float(level) for level in _QUANTILES.split())
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4 = (*(-level for level in reversed(_E2M1[1:])), *_E2M1)
_MANTISSAS = (*reversed(range(1, 8)), *range(8))

NF4 = LevelCodec(64, _NF4, _midway(_NF4), torch.float32, (_NF4[1] - _NF4[0]) / 2)
"""4-bit codes for normally distributed weights."""

MXFP4 = LevelCodec(32, _MXFP4, _to_even(_MXFP4, _MANTISSAS), torch.uint8, 0.2)
"""4-bit floating-point numbers with shared exponents."""

AnyCodec = Codec | LevelCodec

FORMATS: Mapping[str, AnyCodec] = {"int8": INT8, "nf4": NF4, "mxfp4": MXFP4}
"""Formats of frozen weights, by their name in a config."""


def encode(values: Tensor, codec: AnyCodec, out: Tensor) -> None:
    """Writes the code of `values` into `out`.

    Example:
        >>> values = torch.linspace(-1, 1, 64)
        >>> code, decoded = torch.empty(NF4.nbytes(64), dtype=torch.uint8), torch.empty(64)
        >>> encode(values, NF4, code)
        >>> decode(code, NF4, decoded)
        >>> bool((decoded - values).abs().max() <= NF4.error_bound(1.0))
        True

    Args:
        values: (n,) contiguous float32, bfloat16 or float16.
        out: (codec.nbytes(n),) contiguous uint8 on the same device, starting at a multiple of 4 bytes.
    """
    if isinstance(codec, Codec):
        quantize(values, codec, out)
        return
    scales, codes = codec.views(out, values.numel())
    out[scales.nbytes + codes.numel() :].zero_()  # equal values have equal codes, byte for byte
    if values.device.type not in LOOP_DEVICES:
        _encode_in_torch(values.detach(), codec, scales, codes)
        return
    block, highest = codec.block_numel, np.float32(codec.highest)
    bounds = np.array(codec.bounds, np.float32)

    def bind() -> Callable[[int, int], None]:
        flat, sizes, indices = array_of(values), array_of(scales), array_of(codes)
        return lambda start, stop: kernels.encode_levels(
            flat, sizes, indices, block, highest, bounds, -(-start // block), -(-stop // block)
        )

    launch("encode_levels", values.numel(), bind, reads=[values], writes=[scales, codes])


def decode(code: Tensor, codec: AnyCodec, out: Tensor) -> None:
    """out = the values of a code, rounded once to the dtype of `out`; arguments as in `encode`."""
    if isinstance(codec, Codec):
        dequantize(code, codec, out)
        return
    if out.device.type not in LOOP_DEVICES:
        decode_rows(code.view(1, -1), codec, out.view(1, -1))
        return
    scales, codes = codec.views(code, out.numel())
    block, levels = codec.block_numel, _table(codec)

    def bind() -> Callable[[int, int], None]:
        flat, sizes, indices = array_of(out), array_of(scales), array_of(codes)
        return lambda start, stop: kernels.decode_levels(
            flat, sizes, indices, block, levels, -(-start // block), -(-stop // block)
        )

    launch("decode_levels", out.numel(), bind, reads=[scales, codes], writes=[out])


def decode_rows(codes: Tensor, codec: AnyCodec, out: Tensor) -> None:
    """Decodes several codes, as `decode` does: (K, codec.nbytes(n)) into (K, n), both contiguous.

    On CUDA, one launch for all of them.
    """
    device_kernels = None if isinstance(codec, Codec) else kernels_for(out.device)
    if isinstance(codec, Codec):
        dequantize_rows(codes, codec, out)
    elif device_kernels is not None:
        layout = codec.block_numel, codec.scales_nbytes(out.shape[1])
        exponents = codec.scale_dtype is torch.uint8
        levels = _table_on(out.device, codec)
        device_kernels.decode_levels(codes, out.detach(), levels, *layout, has_exponents=exponents)
    else:
        into = decode if out.device.type in LOOP_DEVICES else _decode_in_torch
        for code, row in zip(codes, out.detach(), strict=True):
            into(code, codec, row)


def _table(codec: LevelCodec) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Returns the levels, (16,), padded with zeros."""
    table = np.zeros(16, np.float32)
    table[: len(codec.levels)] = codec.levels
    return table


_TABLES: dict[tuple[LevelCodec, torch.device], Tensor] = {}


def _table_on(device: torch.device, codec: LevelCodec) -> Tensor:
    """Returns the levels, (16,) float32, on a device; copied there once, and the host waits for the copy."""
    if (codec, device) not in _TABLES:
        _TABLES[codec, device] = torch.from_numpy(_table(codec)).to(device)
    return _TABLES[codec, device]


# --- off the CPU, in torch: whole blocks only, which shards consist of


def _encode_in_torch(values: Tensor, codec: LevelCodec, scales: Tensor, codes: Tensor) -> None:
    assert values.numel() % codec.block_numel == 0, f"{values.numel()} values are not whole blocks"
    rows, half = values.view(-1, codec.block_numel), codec.block_numel // 2
    bounds = torch.tensor(codec.bounds, device=values.device)
    highest = torch.tensor(codec.highest, device=values.device)
    for first in range(0, rows.shape[0], _TILE_BLOCKS):
        tile = rows[first : first + _TILE_BLOCKS].float()
        absmax = tile.abs().amax(dim=1)
        size = torch.where(absmax.isfinite(), (absmax / highest).clamp_min(kernels.SCALE_FLOOR), math.nan)
        if codec.scale_dtype is torch.uint8:
            exponents = ((size.view(torch.int32) + 0x7FFFFF) >> 23).to(torch.uint8)
            scales[first : first + _TILE_BLOCKS] = torch.where(size.isnan(), 255, exponents)
            size = _powers(scales[first : first + _TILE_BLOCKS])
        else:
            scales[first : first + _TILE_BLOCKS] = size
        scaled = (tile * size.reciprocal()[:, None]).nan_to_num(nan=-math.inf)
        start = first * half
        packed = pack(torch.bucketize(scaled, bounds).to(torch.int8)).reshape(-1)
        codes[start : start + packed.numel()] = packed


def _decode_in_torch(code: Tensor, codec: LevelCodec, out: Tensor) -> None:
    scales, codes = codec.views(code, out.numel())
    assert out.numel() % codec.block_numel == 0, f"{out.numel()} values are not whole blocks"
    rows, packed = out.view(-1, codec.block_numel), codes.view(-1, codec.block_numel // 2)
    levels = _table_on(out.device, codec)
    for first in range(0, rows.shape[0], _TILE_BLOCKS):
        tile = packed[first : first + _TILE_BLOCKS]
        size = scales[first : first + _TILE_BLOCKS]
        size = _powers(size) if codec.scale_dtype is torch.uint8 else size
        indices = torch.cat((tile & 15, tile >> 4), dim=1).int()
        values = levels[indices] * size[:, None]
        rows[first : first + _TILE_BLOCKS].copy_(torch.where(size.isnan()[:, None], math.nan, values))


def _powers(exponents: Tensor) -> Tensor:
    """Returns the powers of two that uint8 scales encode, in float32."""
    powers = (exponents.int() << 23).view(torch.float32)
    return torch.where(exponents == 255, math.nan, powers)
