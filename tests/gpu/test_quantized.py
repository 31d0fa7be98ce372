"""Codes of quantized collectives on a CUDA device equal those in host memory bitwise."""

from __future__ import annotations

import math

import pytest
import torch

from zeroaccel.comm import level_codes, quantized
from zeroaccel.comm.quantized import FP8, INT4, INT8, Codec, RowOrder, dequantize, dequantize_add, quantize

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test with the kernels, and with the torch operations that replace them where they do not compile."""
    if request.param == "torch":
        for module in (quantized, level_codes):
            monkeypatch.setattr(module, "kernels_for", lambda device: None)


@pytest.mark.parametrize("codec", [INT8, FP8, INT4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 257, 5_000_001])
def test_both_devices_give_the_same_codes(codec: Codec, dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel).to(dtype)
    if numel > 257:
        values[300] = math.inf
    found = []
    for device in ("cpu", "cuda"):
        code = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=device)
        quantize(values.to(device), codec, code)
        out, total = torch.empty(numel, dtype=dtype, device=device), torch.ones(numel, device=device)
        dequantize(code, codec, out)
        dequantize_add(code, codec, total)
        # The payload of a NaN scale depends on the device, so the test compares only that it is a NaN.
        scales = code[: 4 * codec.blocks(numel)].view(torch.float32)
        found.append([t.cpu().nan_to_num(nan=7.0) for t in (scales, code[4 * codec.blocks(numel) :], out, total)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert bool((found[0][2] == 7.0).any()) == (numel > 257)


def test_rows_are_coded_and_summed_together() -> None:
    ranks, runs, numel, own = 3, 2, 12_345, 1
    values = torch.randn(6, numel).bfloat16()
    order, found = RowOrder([5, 0, 4, 1, 3, 2]), []
    for device in ("cpu", "cuda"):
        here = values.to(device)
        codes = torch.zeros(ranks * runs, INT4.nbytes(numel), dtype=torch.uint8, device=device)
        quantized.quantize_rows(here, INT4, codes, order, (2, 4))
        totals, out = torch.zeros(runs, numel, device=device), torch.zeros(6, numel, device=device)
        quantized.sum_rows(codes.view(ranks, runs, -1), INT4, here, own, totals, order)
        quantized.dequantize_rows(codes, INT4, out)
        found.append([tensor.cpu() for tensor in (codes, totals, out)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_levels_are_the_same_on_both_devices(name: str, dtype: torch.dtype) -> None:
    codec, values = level_codes.FORMATS[name], torch.randn(64 * 30_011).to(dtype)
    values[100] = math.nan
    found = []
    for device in ("cpu", "cuda"):
        code = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8, device=device)
        out = torch.empty_like(values, device=device)
        level_codes.encode(values.to(device), codec, code)
        level_codes.decode(code, codec, out)
        found.append([code.cpu(), out.cpu().nan_to_num(nan=7.0)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
