"""The gradient norm: correct, and equal to the last bit for any distribution of the elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from zeroaccel.ops import dispatch, l2_norm, reductions
from zeroaccel.ops.reductions import examine, exponents_around, max_abs, norm_exponent, norm_from, square_sums

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gradient(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns normal values over six orders of magnitude, with some zeros."""
    random = torch.Generator().manual_seed(numel)
    scale = 10.0 ** (torch.rand(numel, generator=random) * 6 - 4)
    values = torch.randn(numel, generator=random) * scale
    values[::7] = 0
    return values.to(dtype)


def packed(sums: Sequence[int]) -> int:
    """Returns the sum of squares, which does not depend on its division in two parts."""
    high, low = sums
    return (high << 25) + low


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_the_l2_norm(dtype: torch.dtype) -> None:
    tensors = [gradient(numel, dtype) for numel in (1, 1000, 20_011)]
    wanted = torch.cat(tensors).double().norm().item()
    assert l2_norm(tensors) == pytest.approx(wanted, rel=1e-13)


def test_any_spread_gives_the_same_bits() -> None:
    values = gradient(9001)
    whole = l2_norm([values])
    shuffled = values[torch.randperm(9001, generator=torch.Generator().manual_seed(1))]
    assert l2_norm(list(shuffled.split(17))) == whole
    assert l2_norm([torch.cat([values, torch.zeros(63)])]) == whole  # padding
    parts = [list(shuffled[:1234].split(100)), [shuffled[1234:]]]  # two ranks; the lines below are their exchange
    exponent = norm_exponent(max(max_abs(part) for rank in parts for part in rank))
    sums = [[square_sums(part, exponent) for part in rank] for rank in parts]
    high = sum(high for rank in sums for high, _ in rank)
    low = sum(low for rank in sums for _, low in rank)
    assert norm_from(high, low, exponent) == whole


def test_a_sum_of_floats_depends_on_the_order() -> None:
    """The values of the test above are hard enough: torch's norm depends on their order."""
    values = gradient(9001)
    random = torch.Generator().manual_seed(1)
    orders = {values[torch.randperm(9001, generator=random)].norm().item() for _ in range(20)}
    assert len(orders) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_torch_path_gives_equal_integers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "_TILE_NUMEL", 1000)
    values = gradient(10_007, dtype)
    exponent = norm_exponent(max_abs(values))
    totals = torch.zeros(2, dtype=torch.int64)
    reductions._add_square_sums(values, math.ldexp(1.0, 25 - exponent), totals)
    assert packed(totals.tolist()) == packed(square_sums(values, exponent))
    assert min(totals.tolist()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_equal_integers(dtype: torch.dtype) -> None:
    values = gradient(10_007, dtype)
    values[5] = 0.1
    exponent = norm_exponent(max_abs(values))
    assert max_abs(values.cuda()) == max_abs(values)
    assert packed(square_sums(values.cuda(), exponent)) == packed(square_sums(values, exponent))
    values[5] = math.nan
    assert max_abs(values.cuda()) == math.inf


def test_threads_do_not_change_the_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    values = gradient(10_007)
    alone = max_abs(values), packed(square_sums(values, 10))
    monkeypatch.setattr(dispatch, "_MIN_SPAN_NUMEL", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert (max_abs(values), packed(square_sums(values, 10))) == alone
    found = examine(values, [10])
    assert (found.largest, packed(found.sums[10])) == alone


@pytest.mark.parametrize("numel", [0, 1, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_pass_finds_what_two_find(dtype: torch.dtype, numel: int) -> None:
    values = gradient(numel, dtype)
    exponents = exponents_around(max_abs(values))
    found = examine(values, exponents)
    assert found.largest == max_abs(values)
    assert list(found.sums) == list(exponents)
    for exponent in exponents[1:]:  # those above the largest magnitude
        assert packed(found.sums[exponent]) == packed(square_sums(values, exponent))
    values[numel // 2 :] = math.nan
    assert examine(values, exponents).largest == (math.inf if numel else 0.0)
    assert examine(values, []).sums == {}


def test_exponents_stay_in_the_range_of_float32() -> None:
    assert exponents_around(2.0**-149) == (-148, -147)
    assert exponents_around(torch.finfo(torch.float32).max) == (127, 128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_abs_is_the_largest_magnitude(dtype: torch.dtype) -> None:
    values = gradient(1003, dtype)
    assert max_abs(values) == values.abs().max().item()
    values[500] = -values.abs().max() * 2
    assert max_abs(values) == -values[500].item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_are_seen_and_survive_a_max(dtype: torch.dtype, bad: float) -> None:
    values = gradient(1003, dtype)
    values[1001] = bad
    assert max_abs(values) == math.inf
    assert max(1.0, max_abs(values)) == max(max_abs(values), 1.0) == math.inf
    assert l2_norm([gradient(10, dtype), values]) == math.inf


def test_the_ends_of_the_range_neither_vanish_nor_overflow() -> None:
    assert l2_norm([]) == l2_norm([torch.empty(0)]) == l2_norm([torch.zeros(5), torch.empty(0)]) == 0.0
    for value in (2.0**-149, 1e-38, 1.0, torch.finfo(torch.float32).max):
        values = torch.full((400,), value)
        assert l2_norm([values]) == 20 * values[0].item()
    for value in gradient(300).tolist():
        assert l2_norm([torch.tensor([value])]) == pytest.approx(abs(value), rel=1e-14)


@pytest.mark.parametrize("exponent", [-140, 0, 7, 128])
def test_two_to_the_38_elements_fit_in_two_int64(exponent: int) -> None:
    largest = torch.nextafter(torch.tensor([2.0**exponent]), torch.zeros(1))  # for inf, the largest finite number
    assert norm_exponent(largest.item()) == exponent
    high, low = square_sums(largest, exponent)
    assert high * 2**38 < 2**63
    assert high > 2**24  # the range is used to the last bit
    assert 0 <= low < 2**25


def test_small_elements_beside_a_large_one_keep_the_stated_bound() -> None:
    values = torch.full((100_001,), 2.0**-26)  # each square is a quarter of the unit and rounds to 0
    values[0] = 1.0
    wanted = values.double().norm().item()
    assert abs(l2_norm([values]) / wanted - 1) <= len(values) * 2.0**-50


def test_an_exponent_of_something_infinite_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        norm_exponent(math.inf)
