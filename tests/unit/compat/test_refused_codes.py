"""Weights of 8 bits and less in the files of a model without a quantization config are refused by name, never cast."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.refusals import refused
from zeroaccel.compat.transformers_loading import _refuse_codes
from zeroaccel.errors import CheckpointError, UsageError

safetensors = pytest.importorskip("safetensors.torch")
CODES = [
    dtype
    for name in ("int8", "uint8", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
    if (dtype := getattr(torch, name if "int" in name else f"float8_{name}", None))  # torch 2.6 lacks e8m0
]


def _saved(folder: Path, weight: Tensor, container: str) -> list[str]:
    state = {"weight": weight, "bias": torch.zeros(4), "mask": torch.ones(4, dtype=torch.uint8)}
    file = folder / f"model.{container}"
    safetensors.save_file(state, file) if container == "safetensors" else torch.save(state, file)
    return [str(file)]


@pytest.mark.parametrize("container", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_codes_without_scales(dtype: torch.dtype, container: str, tmp_path: Path) -> None:
    files = _saved(tmp_path, torch.ones(4, 4, dtype=torch.uint8).view(dtype), container)
    with refused(UsageError, f"{tmp_path} has weights in 8 bits", "weight: ", "quantization_config"):
        _refuse_codes(nn.Linear(4, 4), files)


def _quantizer(*operations: str, pre_quantized: bool = True) -> Any:
    """Returns what is read of a quantizer of transformers."""
    functions = dict.fromkeys(operations)
    return SimpleNamespace(pre_quantized=pre_quantized, get_load_operations=lambda: functions)


def test_codes_of_a_method_that_reads_them_need_scales(tmp_path: Path) -> None:
    weight, dense = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(4, 4)
    file = tmp_path / "model.safetensors"
    scaled = {
        "a.weight": weight,
        "a.weight_scale_inv": torch.ones(1),
        "b.weight": dense,
        "b.input_scale": torch.ones(1),
    }
    safetensors.save_file(scaled, file)
    _refuse_codes(nn.Linear(4, 4), [str(file)], _quantizer("dequantize"))
    safetensors.save_file({**scaled, "b.weight": weight.clone()}, file)
    with refused(UsageError, f"{tmp_path} has weights in 8 bits: b.weight: F8_E4M3: expected their scales"):
        _refuse_codes(nn.Linear(4, 4), [str(file)], _quantizer("dequantize"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_of_a_method_that_casts_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """quanto, for example, has no function for codes in files; a method that encodes on load expects no codes."""
    files = _saved(tmp_path, torch.ones(4, 4).to(dtype), "safetensors")
    for quantizer in (_quantizer(), _quantizer("deserialize", pre_quantized=False)):
        with refused(UsageError, f"{tmp_path} has weights in 8 bits", "weight: "):
            _refuse_codes(nn.Linear(4, 4), files, quantizer)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch lacks the dtype")
def test_floats_of_four_bits(tmp_path: Path) -> None:
    files = _saved(tmp_path, torch.ones(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "safetensors")
    with refused(CheckpointError, "dtype of tensor weight", "F4"):
        _refuse_codes(nn.Linear(4, 4), files)


@pytest.mark.parametrize("container", ["safetensors", "bin"])
def test_sixteen_bits_pass(container: str, tmp_path: Path) -> None:
    _refuse_codes(nn.Linear(4, 4), _saved(tmp_path, torch.ones(4, 4, dtype=torch.bfloat16), container))
