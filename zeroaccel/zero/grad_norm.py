"""The global gradient norm, the overflow check and the clipping factor, with two small collectives a step.

The norm is a sum over all elements on all ranks, and a floating-point sum depends on its order. So squares are added
as integers (`ops/reductions.py`): the result is the same bits for every layout, world size and stage.

The first of the two also carries what ranks have to agree on before an update, as numbers that sum it up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Collectives
from zeroaccel.ops.reductions import max_abs, norm_exponent, norm_from, square_sums

__all__ = ["GradStats", "clip_factor", "examine"]


@dataclass(frozen=True)
class GradStats:
    """What one step's gradients look like, equal on all ranks.

    Attributes:
        finite: no infinity and no NaN on any rank.
        norm: the global L2 norm as held, i.e. still multiplied by the loss scale; NaN when not computed or not finite.
        agreed: every rank went through the same collectives since the beginning.
        alike: every rank's optimizer has the same settings.
    """

    finite: bool
    norm: float
    agreed: bool
    alike: bool


def examine(
    shards: Sequence[Tensor],
    counted: Sequence[Tensor],
    collectives: Collectives,
    *,
    history: int,
    settings: int,
    norm: bool,
) -> GradStats:
    """Looks at the reduced gradients of this rank's shards; collective over all ranks.

    Args:
        shards: the mean gradients of this rank's own elements, any float dtype, any number.
        counted: those of them that are in the norm; what several ranks hold is in that of one of them.
        history: a number below 2^52 that sums up the collectives this rank has issued.
        settings: likewise, the settings that its optimizer goes by.
        norm: whether to compute the norm too.
    """
    largest = max((max_abs(shard) for shard in shards), default=0.0)
    facts = torch.tensor([largest, history, -history, settings, -settings], dtype=torch.float64)
    collectives.all_reduce(facts, "max", "gradient overflow check")
    largest, latest, earliest, highest, lowest = facts.tolist()
    agreed, alike = latest == -earliest, highest == -lowest
    finite = math.isfinite(largest)
    if not (finite and agreed and alike and norm):
        return GradStats(finite, math.nan, agreed, alike)
    if largest == 0.0:
        return GradStats(True, 0.0, agreed, alike)
    exponent = norm_exponent(largest)
    sums = torch.zeros(2, dtype=torch.int64)
    for shard in counted:
        sums += torch.tensor(square_sums(shard, exponent), dtype=torch.int64)
    collectives.all_reduce(sums, "sum", "gradient norm")
    return GradStats(True, norm_from(int(sums[0]), int(sums[1]), exponent), agreed, alike)


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients of this norm with so that it is at most `max_norm`; 1 when `max_norm` is 0 (off)."""
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
