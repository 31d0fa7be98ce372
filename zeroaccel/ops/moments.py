"""Storage formats of optimizer moments: float32, bfloat16, or 8-bit blocks; in torch operations, on any device.

`updates` describes the formats and their rounding; its loops read and write them in one pass on the CPU. This module
creates and converts moments (checkpoints store one value per element), and updates them on other devices, with the same
bits as the kernels. It does not depend on the optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeroaccel.ops.updates import BLOCK_NUMEL

MOMENT_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
"""Name in configs -> dtype of the tensor with one value, or one code, per element."""

_WORD = 0xFFFFFFFF
_INF = 0x7F800000
_DROPPED_BITS = 20  # the low bits of a magnitude's 23-bit mantissa that a code does not store


def exponents_name(name: str) -> str:
    """Returns the state key of the block exponents of ``state[name]``: uint8, one per BLOCK_NUMEL elements."""
    return f"{name}_exponents"


def random_bits(weight: Tensor, moment: Tensor, key: int) -> Tensor:
    """Returns the hash of `updates`, (L,) int64 in [0, 2**32), from weights before and the moment after the step."""
    seed = _bits(weight) ^ ((_bits(moment) * 0x9E3779B9) & _WORD) ^ key
    seed = ((seed ^ (seed >> 16)) * 0x7FEB352D) & _WORD
    seed = ((seed ^ (seed >> 15)) * 0x846CA68B) & _WORD
    return seed ^ (seed >> 16)


def decode(codes: Tensor, exponents: Tensor, *, signed: bool) -> Tensor:
    """Returns the float32 values of 8-bit blocks.

    Args:
        codes: (L,) uint8.
        exponents: (ceil(L / BLOCK_NUMEL),) uint8.
        signed: True if a code's highest bit is a sign.
    """
    exponent = exponents.to(torch.int32).repeat_interleave(BLOCK_NUMEL)[: codes.numel()]
    reach = 15 if signed else 31
    wide = codes.to(torch.int32)
    magnitude = wide & 0x7F if signed else wide
    lowest = (exponent - reach + 1).clamp(min=1) << 23
    steps = magnitude << _DROPPED_BITS
    small = (lowest + steps).view(torch.float32) - lowest.view(torch.float32)
    large = (steps + lowest - (1 << 23)).view(torch.float32)
    values = torch.where(magnitude < 8, small, large)
    if signed:
        values = torch.where(wide >= 0x80, -values, values)
    return torch.where(exponent == 255, torch.nan, values)


def encode(values: Tensor, *, signed: bool, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (codes, exponents) of (L,) float32 values; exact for values that `decode` returned.

    Args:
        random: (L,) int64 whose low 16 bits decide the rounding; None rounds to nearest, ties to even.
    """
    numel, reach = values.numel(), 15 if signed else 31
    blocks = -(-numel // BLOCK_NUMEL)
    bits = _bits(values)
    magnitude = bits & 0x7FFFFFFF
    padded = torch.nn.functional.pad(magnitude, (0, blocks * BLOCK_NUMEL - numel))
    exponents = (padded.view(blocks, BLOCK_NUMEL).amax(1) + 0xFFFFF if blocks else padded) >> 23
    exponents = torch.where(exponents >= 254, 255, exponents.clamp(min=40))
    exponent = exponents.repeat_interleave(BLOCK_NUMEL)[:numel]
    lowest = (exponent - reach + 1) << 23
    small = _bits(_float(magnitude) + _float(lowest)) - lowest
    steps = torch.where(magnitude < lowest, small, magnitude - lowest + (1 << 23))
    if random is None:
        codes = (steps + ((1 << 19) - 1) + ((steps >> _DROPPED_BITS) & 1)) >> _DROPPED_BITS
    else:
        codes = (steps + ((random & 0xFFFF) << 4)) >> _DROPPED_BITS
    signs = (bits >> 24) & 0x80
    codes = (codes & 0x7F) | signs if signed else torch.where(values > 0, codes.clamp(min=1), codes)
    codes = torch.where(exponent == 255, 0, codes & 0xFF)
    return codes.to(torch.uint8), exponents.to(torch.uint8)


def write_rounded(out: Tensor, values: Tensor, random: Tensor) -> None:
    """Writes float32 `values` into the bfloat16 `out`, rounded up or down according to 16 bits of `random`."""
    bits = _bits(values)
    rounded = ((bits + (random & 0xFFFF)) >> 16) << 16
    finite = (bits & _INF) < _INF
    out.copy_(torch.where(finite, _float(rounded), values))


def to_format(value: Tensor, name: str, dtype: torch.dtype, *, signed: bool) -> dict[str, Tensor]:
    """Returns the state entries of `value` (any floating dtype, one value per element) in another format.

    Values that the format cannot represent are rounded to nearest, ties to even.
    """
    if dtype is not torch.uint8:
        return {name: value.to(dtype)}
    codes, exponents = encode(value.detach().to(torch.float32).contiguous().view(-1), signed=signed)
    return {name: codes.view(value.shape), exponents_name(name): exponents}


def per_element(state: Mapping[str, Any], name: str, *, signed: bool) -> Tensor:
    """Returns ``state[name]`` with one number per element; decodes 8-bit blocks to bfloat16, exactly."""
    moment: Tensor = state[name]
    if moment.dtype is not torch.uint8:
        return moment
    return decode(moment.view(-1), state[exponents_name(name)], signed=signed).to(torch.bfloat16).view(moment.shape)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).to(torch.int64) & _WORD


def _float(bits: Tensor) -> Tensor:
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)
