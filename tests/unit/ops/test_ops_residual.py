"""Masters as a bfloat16 weight and a residual: every float32 pattern is restored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.tensors import same_bits
from zeroaccel.ops.dispatch import use_threads
from zeroaccel.ops.residual import join, split, ties_nbytes


def _round_trip(values: Tensor) -> Tensor:
    residuals = torch.full((values.numel(),), 77, dtype=torch.int16)
    ties = torch.full((ties_nbytes(values.numel()),), 0xA5, dtype=torch.uint8)
    split(values, residuals, ties)
    out = torch.empty_like(values)
    join(values.to(torch.bfloat16), residuals, ties, out)
    return out


def _patterns(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).view(torch.float32)


def test_every_low_half_comes_back_over_every_kind_of_upper_half() -> None:
    """Ties in both directions, subnormals, signed zeros, values that round to inf, inf, and NaN."""
    uppers = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]
    lows = torch.arange(1 << 16)
    for upper in uppers + [upper | 0x8000 for upper in uppers]:
        values = _patterns((upper << 16) + lows)
        assert same_bits(_round_trip(values), values), hex(upper)


@pytest.mark.parametrize("threads", [1, 3])
def test_random_patterns_come_back(threads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 1 << 32, (1_500_003,), generator=generator)
    words[::3] = (words[::3] >> 16 << 16) + 0x8000  # ties, half of them even
    values = _patterns(words)
    use_threads(threads)
    try:
        assert same_bits(_round_trip(values), values)
    finally:
        use_threads(None)


def test_a_part_leaves_its_neighbours_alone() -> None:
    """A part may start anywhere and have any length; parts that share a byte of ties keep each other's bits."""
    tie = _patterns(torch.tensor([0x3F808000, 0x3F818000, 0xC0008000]).repeat(20))
    for first in range(9):
        for length in (0, 1, 5, 8, 17, 40):
            residuals = torch.zeros(60, dtype=torch.int16)
            ties = torch.zeros(ties_nbytes(60), dtype=torch.uint8)
            split(tie, residuals, ties)
            new = torch.full((length,), 3.14159)
            split(new, residuals[first : first + length], ties, first)
            expected = tie.clone()
            expected[first : first + length] = new
            out = torch.empty(60)
            join(expected.to(torch.bfloat16), residuals, ties, out)
            assert torch.equal(out, expected), (first, length)
            part = torch.empty(length)
            span = slice(first, first + length)
            join(new.to(torch.bfloat16), residuals[span], ties, part, first)
            assert torch.equal(part, new), (first, length)
