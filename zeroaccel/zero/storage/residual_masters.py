"""Masters that are kept as what rounding to the parameters' bfloat16 took (`ops/residual.py`), within a slab.

    [ residuals: L int16 | ties: L bits | the slab's states ... ]

The other part of each master is the weight itself, so whoever changes weights or masters has to change both. Reads and
writes parts of a slab; knows no optimizer and no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroaccel.offload.tier import Tier
from zeroaccel.ops.residual import join, split, ties_nbytes

__all__ = ["ResidualMasters", "SplitRange", "split_nbytes"]

Weights = Callable[[int, int], Tensor]
"""(start, end) -> (end - start,) bfloat16, the weights between two places of the flat buffer, as they are now."""

_LINE_NBYTES = 64


def split_nbytes(numel: int) -> int:
    """Bytes of residuals and ties of so many elements, up to where the states begin."""
    return -(-(2 * numel + ties_nbytes(numel)) // _LINE_NBYTES) * _LINE_NBYTES


@dataclass(frozen=True)
class ResidualMasters:
    """The masters of elements [start, start + numel) of a flat buffer.

    Attributes:
        weights: where their other part is.
    """

    start: int
    numel: int
    weights: Weights

    def read(self, slab: Tensor, out: Tensor) -> None:
        """Writes the masters into `out`, (numel,) fp32."""
        residuals, ties = self._parts(slab)
        join(self.weights(self.start, self.start + self.numel), residuals, ties, out)

    def write(self, slab: Tensor, values: Tensor, first: int = 0) -> None:
        """Keeps `values`, fp32, for the elements from `first` on; their weights are, or will be, what they round to."""
        residuals, ties = self._parts(slab)
        split(values, residuals[first : first + values.numel()], ties, first)

    def _parts(self, slab: Tensor) -> tuple[Tensor, Tensor]:
        end = 2 * self.numel
        return slab[:end].view(torch.int16), slab[end : end + ties_nbytes(self.numel)]


@dataclass(frozen=True)
class SplitRange:
    """Some of the masters of a slab, for who reads them a piece at a time; as `TierRange`.

    Attributes:
        first: of the elements, counted from that of the slab.
        length: elements.
    """

    tier: Tier
    key: str
    masters: ResidualMasters
    first: int
    length: int

    def chunks(self, limit_nbytes: int) -> Iterator[Tensor]:
        """Their bytes in order, (n,) uint8 with n <= limit_nbytes, each read when it is asked for."""
        step = max(limit_nbytes // 4 // 8 * 8, 8)
        for low in range(self.first, self.first + self.length, step):
            high = min(low + step, self.first + self.length)
            residuals = self.tier.read(self.key, 2 * low, 2 * (high - low)).view(torch.int16)
            begin = 2 * self.masters.numel
            ties = self.tier.read(self.key, begin + low // 8, ties_nbytes(high) - low // 8)
            out = torch.empty(high - low)
            start = self.masters.start
            join(self.masters.weights(start + low, start + high), residuals, ties, out, low % 8)
            yield out.view(torch.uint8)
