"""Codes of quantized collectives on a CUDA device: those of host memory, to the last place of their arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from zeroaccel.comm.quantized import INT4, INT8, Codec, dequantize, dequantize_add, quantize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("codec", [INT8, INT4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 257, 5_000_001])
def test_both_devices_say_the_same(codec: Codec, dtype: torch.dtype, numel: int) -> None:
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
        found.append((out.float().cpu(), total.cpu()))
    (host, host_total), (device_out, device_total) = found
    assert torch.equal(host.isnan(), device_out.isnan())
    step = values[values.isfinite()].float().abs().max() / codec.levels
    off = (host - device_out).abs().nan_to_num()
    assert (off <= 1.01 * step).all()
    assert (off > 0.01 * step).sum() <= numel / 1000  # a tie that falls the other way
    assert torch.allclose(device_total - 1, device_out, atol=3e-2, equal_nan=True)
    assert torch.equal(host_total.isnan(), device_total.isnan())
