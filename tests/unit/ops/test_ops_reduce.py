"""`sum_ranks`: float32 sums in rank order, rounded once, to bfloat16 and float16 as by torch's casts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.tensors import every_pattern, same_bits
from zeroaccel.ops import dispatch, sum_ranks
from zeroaccel.ops.reductions import scale_rounded_once

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(chunks: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    total = chunks[0].float()
    for chunk in chunks[1:]:
        total = total + chunk.float()
    return (total * torch.tensor(scale, dtype=torch.float32)).to(dtype)


def random_chunks(ranks: int, numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(ranks, numel, generator=torch.Generator().manual_seed(ranks)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_sum_is_float32_in_rank_order(ranks: int, dtype: torch.dtype) -> None:
    chunks = random_chunks(ranks, 5003, dtype)  # over two blocks, and a remainder
    out = torch.empty(5003, dtype=dtype)
    sum_ranks(out, chunks, 1 / 3)
    assert torch.equal(out, expected(chunks, 1 / 3, dtype))


def test_the_order_of_ranks_matters_and_the_sum_is_rounded_once() -> None:
    chunks = torch.tensor([[1e8], [-1e8], [1.0]])
    out = torch.empty(1)
    sum_ranks(out, chunks, 1.0)
    assert out.item() == 1.0
    sum_ranks(out, chunks.flip(0).contiguous(), 1.0)
    assert out.item() == 0.0
    narrow = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # in bfloat16, 256 + 1 is 256
    out = torch.empty(1, dtype=torch.bfloat16)
    sum_ranks(out, narrow, 1.0)
    assert out.item() == 258.0


@pytest.mark.parametrize("row", [0, 2])
def test_out_may_be_one_of_the_chunks(row: int) -> None:
    chunks = random_chunks(3, 4999, torch.bfloat16)
    wanted = expected(chunks, 0.5, torch.bfloat16)
    sum_ranks(chunks[row], chunks, 0.5)
    assert torch.equal(chunks[row], wanted)


def test_shapes_that_fit_and_one_that_does_not() -> None:
    sum_ranks(torch.empty(0), torch.empty(2, 0), 1.0)
    chunks = random_chunks(2, 100, torch.bfloat16)
    out = torch.empty(100)  # wider than the chunks
    sum_ranks(out, chunks, 1.0)
    assert torch.equal(out, expected(chunks, 1.0, torch.float32))
    with pytest.raises(AssertionError, match="shape of a chunk"):
        sum_ranks(torch.empty(3), torch.empty(2, 4), 1.0)


def test_threads_do_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = random_chunks(3, 10_007, torch.bfloat16)
    alone = torch.empty(10_007, dtype=torch.bfloat16)
    sum_ranks(alone, chunks, 1 / 3)
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(dispatch, "_MIN_SPAN_NUMEL", 100)
    monkeypatch.setattr(dispatch, "_num_threads", 3)
    dispatch.in_spans(10_007, lambda start, stop: calls.append((start, stop)))
    sum_ranks(chunks[1], chunks, 1 / 3)
    assert len(calls) == 3
    assert torch.equal(chunks[1], alone)


def _samples(dtype: torch.dtype) -> Tensor:
    """Returns every value of a 16-bit dtype, or a million float32 values including the special ones."""
    if dtype is not torch.float32:
        return every_pattern(dtype)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, 1.0, -1.0]
    patterns = torch.randint(-(2**31), 2**31 - 1, (10**6,), generator=torch.Generator().manual_seed(5))
    return torch.cat([torch.tensor(special), patterns.to(torch.int32).view(torch.float32)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_one_product_has_the_bits_of_a_sum_over_one_rank(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    flat = _samples(dtype)
    for scale in (1.0, 1 / 3, 1 / 8, 0.1, 1e-7, 3.0, 65536.0):
        out, wanted = torch.empty(flat.shape, dtype=out_dtype), torch.empty(flat.shape, dtype=out_dtype)
        scale_rounded_once(out, flat, scale)
        sum_ranks(wanted, flat.view(1, -1), scale)
        assert same_bits(out, wanted), scale


def test_a_product_may_be_in_place() -> None:
    flat = torch.tensor([3.0, 5.0], dtype=torch.bfloat16)
    scale_rounded_once(flat, flat, 0.5)
    assert flat.tolist() == [1.5, 2.5]


NARROW = [torch.bfloat16, torch.float16]


def converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(values, dtype=dtype)
    sum_ranks(out, values.unsqueeze(0), 1.0)
    return out


@pytest.mark.parametrize("dtype", NARROW)
def test_every_pattern_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    patterns = every_pattern(dtype)
    assert same_bits(converted(patterns, torch.float32), patterns.float())


@pytest.mark.parametrize("dtype", NARROW)
def test_every_number_and_its_midpoints_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    numbers = every_pattern(dtype).float().view(torch.int32)
    last_place = 1 << (16 if dtype is torch.bfloat16 else 13)
    half = last_place // 2
    for offset in (0, 1, half - 1, half, half + 1, last_place - 1):
        values = (numbers + offset).view(torch.float32)
        assert same_bits(converted(values, dtype), values.to(dtype)), f"{offset} float32 steps above a number"


@pytest.mark.parametrize("dtype", NARROW)
def test_random_patterns_and_small_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (300_000,), generator=random).to(torch.int32).view(torch.float32)
    subnormal = torch.rand(100_000, generator=random) * 2.0**-14  # in float16
    for values in (anything, subnormal, -subnormal):
        assert same_bits(converted(values, dtype), values.to(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_nan_and_inf_stay_and_overflow_is_inf(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    largest = torch.finfo(torch.float32).max
    out = converted(torch.tensor([nan, -nan, inf, -inf, largest, -largest]), dtype)
    assert out[:2].isnan().all()
    assert out[2:].tolist() == [inf, -inf, inf, -inf]
