"""The kernels' bfloat16 and float16, against torch's casts: every pattern, and what lies between them.

A sum over one rank with scale 1 is a conversion, so `sum_ranks` shows them as they are.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeroaccel.ops import sum_ranks

DTYPES = [torch.bfloat16, torch.float16]


def converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(values, dtype=dtype)
    sum_ranks(out, values.unsqueeze(0), 1.0)
    return out


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the bit, but that one NaN is as good as another."""
    integer = torch.int32 if ours.element_size() == 4 else torch.int16
    return bool(((ours.view(integer) == theirs.view(integer)) | (ours.isnan() & theirs.isnan())).all())


def every_pattern(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    patterns = every_pattern(dtype)
    assert same(converted(patterns, torch.float32), patterns.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_and_its_midpoints_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    numbers = every_pattern(dtype).float().view(torch.int32)
    last_place = 1 << (16 if dtype is torch.bfloat16 else 13)
    half = last_place // 2
    for offset in (0, 1, half - 1, half, half + 1, last_place - 1):
        values = (numbers + offset).view(torch.float32)
        assert same(converted(values, dtype), values.to(dtype)), f"{offset} bits above a number"


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_patterns_and_small_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (300_000,), generator=random).to(torch.int32).view(torch.float32)
    subnormal = torch.rand(100_000, generator=random) * 2.0**-14  # of float16
    for values in (anything, subnormal, -subnormal):
        assert same(converted(values, dtype), values.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_and_overflow_is_inf(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    largest = torch.finfo(torch.float32).max
    out = converted(torch.tensor([nan, -nan, inf, -inf, largest, -largest]), dtype)
    assert out[:2].isnan().all()
    assert out[2:].tolist() == [inf, -inf, inf, -inf]
