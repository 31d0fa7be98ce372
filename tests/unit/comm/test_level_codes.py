"""Formats of frozen weights: error bounds, exact values, repeated encoding, and two implementations of the codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.unit.ops.kernels_on_host import host_kernels
from zeroaccel.comm import level_codes
from zeroaccel.comm.level_codes import FORMATS, MXFP4, NF4, LevelCodec, decode, encode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _code(values: Tensor, name: str) -> Tensor:
    code = torch.full((FORMATS[name].nbytes(values.numel()),), 99, dtype=torch.uint8)
    encode(values, FORMATS[name], code)
    return code


def _back(values: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((values.numel(),), 7.0, dtype=dtype)
    decode(_code(values, name), FORMATS[name], out)
    return out


def _spread(numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    powers = torch.randint(-9, 9, (numel // 64 + 1, 1), generator=generator).expand(-1, 64).reshape(-1)[:numel]
    return torch.ldexp(torch.randn(numel, generator=generator), powers)


@pytest.mark.parametrize("name", FORMATS)
def test_errors_are_below_the_stated_bound_and_reach_it(name: str) -> None:
    codec = FORMATS[name]
    rows = torch.linspace(-1, 1, 512 * 512).view(512, 512).t().reshape(-1, codec.block_numel)
    errors = (_back(rows.reshape(-1), name).view_as(rows).double() - rows.double()).abs().amax(dim=1)
    bounds = torch.tensor([codec.error_bound(float(row.abs().max())) for row in rows], dtype=torch.float64)
    assert (errors <= bounds).all()
    # The largest error of mxfp4 occurs in a block whose largest value is 5.
    worst = torch.zeros(codec.block_numel)
    worst[:2] = torch.tensor({"int8": [127.0, 0.4999], "nf4": [-1.0, -0.848], "mxfp4": [5.0, 0.0]}[name])
    assert (_back(worst, name) - worst).abs().max() > 0.99 * codec.error_bound(float(worst.abs().max()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoded_values_are_encoded_without_a_change(name: str, dtype: torch.dtype) -> None:
    values = _spread(64 * 999).to(dtype)
    once = _back(values, name, dtype)
    assert torch.equal(_back(once, name, dtype), once)


def test_levels_are_exact_and_ties_go_to_the_even_mantissa() -> None:
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.equal(_back(torch.cat((levels, -levels)) * 8, "mxfp4"), torch.cat((levels, -levels)) * 8)
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert _back(torch.cat((ties, -ties)), "mxfp4").tolist() == expected + [-value for value in expected]
    quantiles = torch.tensor(NF4.levels)
    assert torch.equal(_back(quantiles, "nf4"), quantiles)
    # The scale is the least power of two for which the block's largest value is at most 6 scales.
    for largest, scale in ((6.0, 1.0), (6.001, 2.0), (3.0, 0.5), (3.001, 1.0)):
        scales, _ = MXFP4.views(_code(torch.full((32,), largest), "mxfp4"), 32)
        assert 2.0 ** (int(scales[0]) - 127) == scale


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ends_of_the_range(name: str, dtype: torch.dtype) -> None:
    block = FORMATS[name].block_numel
    values = torch.ones(3 * block, dtype=dtype)
    for bad in (math.nan, math.inf, -math.inf):
        values[block + 5] = bad
        assert _back(values, name, dtype).isnan().tolist() == [block <= place < 2 * block for place in range(3 * block)]
    assert _back(torch.zeros(block, dtype=dtype), name, dtype).abs().max() == 0
    top = torch.full((block,), torch.finfo(dtype).max / 2, dtype=dtype)
    assert _back(top, name, dtype).isfinite().all()
    absent = torch.full((FORMATS[name].nbytes(block),), 0xFF, dtype=torch.uint8)
    out = torch.zeros(block, dtype=dtype)
    decode(absent, FORMATS[name], out)
    assert out.isnan().all()


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_operations_have_the_bits_of_compiled_loops(name: str, dtype: torch.dtype) -> None:
    codec = FORMATS[name]
    assert isinstance(codec, LevelCodec)
    values = _spread(64 * 501).to(dtype)
    values[:64] = 0
    values[100], values[200] = math.inf, math.nan
    code = _code(values, name)
    other = torch.zeros_like(code)
    level_codes._encode_in_torch(values, codec, *codec.views(other, values.numel()))
    assert torch.equal(code, other)
    out, expected = torch.empty_like(values), torch.empty_like(values)
    level_codes._decode_in_torch(code, codec, out)
    decode(code, codec, expected)
    assert torch.equal(out.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_the_kernel_has_the_bits_of_compiled_loops(name: str, dtype: torch.dtype, shift: int) -> None:
    """Compiled for the host: several rows in one launch, also not aligned to its loads and stores."""
    codec = FORMATS[name]
    assert isinstance(codec, LevelCodec)
    numel = 64 * 77
    values = _spread(numel).to(dtype)
    values[:64] = 0
    values[100], values[200] = math.inf, math.nan
    of_rows = [_code(each, name) for each in (values, values.flip(0), -values)]  # mxfp4's are not aligned to words
    expected, out = torch.zeros(3, numel, dtype=dtype), torch.zeros(3 * numel + shift, dtype=dtype)[shift:].view(3, -1)
    for code, row in zip(of_rows, expected, strict=True):
        decode(code, codec, row)
    layout, table = (codec.block_numel, codec.scales_nbytes(numel)), torch.from_numpy(level_codes._table(codec))
    exponents = codec.scale_dtype is torch.uint8
    host_kernels().decode_levels(torch.stack(of_rows), out, table, *layout, has_exponents=exponents)
    assert torch.equal(out.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_bytes_per_value() -> None:
    numel = 1 << 16
    assert [FORMATS[name].nbytes(numel) / numel for name in ("int8", "nf4", "mxfp4")] == [1 + 1 / 128, 0.5625, 0.53125]


def test_the_table_is_that_of_the_library() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    assert functional.get_4bit_type("nf4", device="cpu").tolist() == pytest.approx(NF4.levels, abs=0)
