"""Codes of quantized collectives: error bounds, any length, NaN and infinity."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zeroaccel.comm import quantized
from zeroaccel.comm.quantized import FP8, INT4, INT8, Codec, dequantize, dequantize_add, quantize

CODECS = [INT8, INT4, FP8, Codec(8, 32), Codec(4, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 5000, 30_001]
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _code(values: Tensor, codec: Codec) -> Tensor:
    code = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    quantize(values, codec, code)
    return code


def _back(values: Tensor, codec: Codec, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((values.numel(),), 7.0, dtype=dtype)
    dequantize(_code(values, codec), codec, out)
    return out


def _absmax(values: Tensor, codec: Codec) -> Tensor:
    """Returns, (n,), the largest magnitude in each element's block."""
    padded = torch.zeros(codec.blocks(values.numel()) * codec.block_numel)
    padded[: values.numel()] = values.float().abs()
    rows = padded.view(-1, codec.block_numel)
    return rows.amax(dim=1, keepdim=True).expand_as(rows).reshape(-1)[: values.numel()]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_below_the_bound(codec: Codec, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for numel in LENGTHS:
        # Magnitudes over many powers of two: blocks differ, and small values next to large ones become 0.
        spread = torch.randint(-12, 12, (numel,), generator=generator)
        values = torch.ldexp(torch.randn(numel, generator=generator), spread).to(dtype)
        absmax = _absmax(values, codec)
        bound = torch.tensor([codec.error_bound(float(m)) for m in absmax.unique()], dtype=torch.float64)
        bounds = dict(zip(absmax.unique().tolist(), bound.tolist(), strict=True))
        allowed = torch.tensor([bounds[m] for m in absmax.tolist()], dtype=torch.float64)
        exact = values.double()
        assert ((_back(values, codec).double() - exact).abs() <= allowed).all(), numel
        rounded = _back(values, codec, dtype).double()
        assert ((rounded - exact).abs() <= allowed + ROUNDING[dtype] * rounded.abs() + 1e-7).all(), numel


def test_numbers_in_e4m3_keep_their_leading_bits() -> None:
    values = torch.ldexp(torch.randn(5000), torch.randint(-12, 12, (5000,)))
    step = _absmax(values, FP8) / 448
    error = (_back(values, FP8) - values).abs()
    assert (error <= torch.maximum(values.abs() / 16, step / 1024) * (1 + 2.0**-15)).all()
    # In a block with one large value, int8 rounds the small values to 0; fp8 keeps them in as many bytes.
    outlier = torch.full((512,), 0.01)
    outlier[3] = 10.0
    assert (_back(outlier, INT8)[4:] == 0).all()
    assert ((_back(outlier, FP8) - outlier).abs() <= outlier / 16).all()
    assert FP8.nbytes(513) == INT8.nbytes(513)
    # The error bound is reached: the largest numbers are 32 apart, and ties go to even.
    ties = torch.tensor([448.0, 432.0, 400.0])
    assert _back(ties, FP8).tolist() == [448.0, 448.0, 384.0]
    assert 16 < FP8.error_bound(448.0) < 16.01


@pytest.mark.parametrize("codec", [INT8, INT4], ids=str)
def test_the_bound_is_reached_and_ties_go_to_even(codec: Codec) -> None:
    top = float(codec.levels)
    values = torch.tensor([top, 0.499, 1.499])  # the scale is 1
    assert (_back(values, codec) - values).abs().max() > 0.99 * codec.error_bound(codec.levels)
    assert _back(values, codec).tolist() == [codec.levels, 0.0, 1.0]
    values = torch.tensor([top, -top, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0])
    assert _back(values, codec).tolist() == [top, -top, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 0.0]


@pytest.mark.parametrize("codec", [INT8, INT4], ids=str)
def test_the_ends_of_the_range(codec: Codec) -> None:
    values = torch.tensor([3e38, -65536.0, 1e5], dtype=torch.bfloat16)
    decoded = _back(values, codec, torch.bfloat16)
    assert decoded.isfinite().all()
    assert decoded[0] == values[0]
    assert _back(torch.zeros(700), codec).abs().max() == 0
    tiny = torch.full((5,), 2.0**-140)
    assert (_back(tiny, codec) - tiny).abs().max() <= codec.error_bound(2.0**-140)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_makes_its_block_nan(codec: Codec, dtype: torch.dtype, bad: float) -> None:
    values = torch.ones(3 * codec.block_numel + 1, dtype=dtype)
    for place in (0, codec.block_numel, 3 * codec.block_numel):
        hurt = values.clone()
        hurt[place] = bad
        lost = torch.arange(hurt.numel()) // codec.block_numel == place // codec.block_numel
        decoded = _back(hurt, codec, dtype)
        assert decoded[lost].isnan().all()
        assert (decoded[~lost] - 1).abs().max() < 2.0**-16
        total = torch.zeros(hurt.numel())
        dequantize_add(_code(hurt, codec), codec, total)
        assert total[lost].isnan().all()
        assert (total[~lost] - 1).abs().max() < 2.0**-16


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_adding_is_decoding_and_adding(codec: Codec) -> None:
    values, total = torch.randn(2, 1237)
    expected = total + _back(values, codec)
    dequantize_add(_code(values, codec), codec, total)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_survive_being_coded_again(codec: Codec, dtype: torch.dtype) -> None:
    """A frozen weight stored as int8 has the same codes after saving and loading."""
    values = torch.randn(3001).to(dtype)
    once = _back(values, codec, dtype)
    assert torch.equal(_code(once, codec), _code(values, codec))


def test_the_size_of_a_code() -> None:
    assert [INT8.nbytes(n) for n in (0, 1, 512, 513)] == [0, 16, 528, 528]
    assert [INT4.nbytes(n) for n in (0, 1, 256, 257)] == [0, 16, 144, 144]
    assert INT8.nbytes(1 << 20) / (1 << 20) == 1 + 4 / 512
    assert INT4.nbytes(1 << 20) / (1 << 20) == 0.5 + 4 / 256


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_threads_and_length_change_nothing(codec: Codec) -> None:
    threads = torch.get_num_threads()
    values = torch.randn(700_003)
    try:
        torch.set_num_threads(1)
        one = _code(values, codec)
        torch.set_num_threads(3)
        assert torch.equal(_code(values, codec), one)
    finally:
        torch.set_num_threads(threads)
    # A block's code does not depend on its neighbours.
    alone, cut = values[: codec.block_numel], codec.block_numel * codec.bits // 8
    start, start_alone = 4 * codec.blocks(values.numel()), 4
    code = _code(alone, codec)
    assert torch.equal(one[start : start + cut], code[start_alone : start_alone + cut])


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_the_path_without_compiled_loops_agrees(codec: Codec, numel: int) -> None:
    values = torch.randn(numel)
    if numel > 300:
        values[7] = math.inf
    code = _code(values, codec)
    other = torch.zeros_like(code)
    scales, integers = quantized._views(values, codec, other)
    for first in range(0, scales.numel(), 1000):
        quantized._quantize_tile(values, codec, scales, integers, first, min(first + 1000, scales.numel()))
    assert torch.equal(other, code)
    out = torch.empty(numel)
    for part, decoded in quantized._dequantized_tiles(out, *quantized._views(values, codec, code), codec):
        part.copy_(decoded)
    assert torch.equal(out.nan_to_num(nan=9.0), _back(values, codec).nan_to_num(nan=9.0))
