"""Values for tests of arithmetic, and bitwise comparison."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Returns normally distributed values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_pattern(dtype: torch.dtype) -> Tensor:
    """Returns every number of a 16-bit format, including NaNs."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Returns True if both are bitwise equal, where all NaNs count as equal."""
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    integer = torch.int32 if ours.element_size() == 4 else torch.int16
    equal = ours.detach().view(integer) == theirs.detach().view(integer)
    return bool((equal | (ours.isnan() & theirs.isnan())).all())
