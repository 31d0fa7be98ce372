"""Marks 16-bit elements whose bits have changed, with one bit per element, in one pass without a copy.

`zero/changed_bits.py` keeps the bits. A device without kernels computes the same with torch operations, in tiles.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from zeroaccel.ops.device_kernels import kernels_for
from zeroaccel.ops.dispatch import array_of, launch
from zeroaccel.ops.number_formats import Array, compiled

_TILE_NUMEL = 1 << 24  # limits temporary memory on a device to 32 MiB


def mark_changed(before: Tensor, after: Tensor, bits: Tensor) -> None:
    """Sets the bit of each element that differs; the other bits do not change.

    Args:
        before, after: (N,) tensors of the same 16-bit dtype on the same device.
        bits: (N / 8 rounded up,) uint8; bit i % 8 of byte i // 8 belongs to element i.

    Example:
        >>> bits = torch.zeros(2, dtype=torch.uint8)
        >>> before = torch.zeros(9, dtype=torch.bfloat16)
        >>> after = before.clone()
        >>> after[8], after[1] = 1.0, -0.0
        >>> mark_changed(before, after, bits)
        >>> bits
        tensor([2, 1], dtype=torch.uint8)
    """
    old, new = before.view(torch.int16), after.view(torch.int16)
    if old.device.type != "cpu":
        kernels = kernels_for(old.device)
        mark = _mark_in_torch if kernels is None else kernels.mark_changed
        if old.numel():
            mark(old, new, bits)
        return

    def bind() -> Callable[[int, int], None]:
        x, y, b = [array_of(tensor) for tensor in (old, new, bits)]
        return lambda start, stop: _mark(x[start:stop], y[start:stop], b[start // 8 : (stop + 7) // 8])

    launch("mark changed", old.numel(), bind, reads=[old, new, bits], writes=[bits])


@compiled
def _mark(before: Array, after: Array, bits: Array) -> None:
    for byte in range(bits.size):
        marks = np.uint32(0)
        for i in range(byte * 8, min(byte * 8 + 8, before.size)):
            marks |= np.uint32(np.uint32(before[i] != after[i]) << np.uint32(i & 7))
        bits[byte] |= np.uint8(marks)


def _mark_in_torch(before: Tensor, after: Tensor, bits: Tensor) -> None:
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)  # created on the device, without a copy
    for first in range(0, before.numel(), _TILE_NUMEL):
        differs = before[first : first + _TILE_NUMEL] != after[first : first + _TILE_NUMEL]
        padded = torch.nn.functional.pad(differs, (0, -differs.numel() % 8))
        marks = (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        bits[first // 8 : first // 8 + marks.numel()].bitwise_or_(marks)
