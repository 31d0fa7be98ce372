"""Codes and scales of `requantize`: the source's bytes for its values, and transformers' for others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from zeroaccel.checkpoint.requantize import requantized
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.zero.access.lazy_tensors import materialized, read_into

# name -> (block of transformers' quantizer, format of scales)
KINDS: dict[str, tuple[tuple[int, int] | None, str | None]] = {
    "blocks": ((8, 8), None),
    "tensor": (None, None),
    "rows": ((1, 32), None),
    "ue8m0": ((8, 8), "ue8m0"),
}


def raw_bytes(value: Tensor) -> list[int]:
    raw: list[int] = value.contiguous().view(-1).view(torch.uint8).tolist()
    return raw


def _encoded(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    library = pytest.importorskip("transformers.integrations.finegrained_fp8")
    block, form = KINDS[kind]
    config = SimpleNamespace(weight_block_size=block, scale_fmt=form)
    made = library.Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"x.weight": values})
    return made["x.weight"], made["x.weight_scale_inv"]


def _files(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Writes codes; returns them, and values that transformers decodes."""
    library: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
    mxfp4: Any = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    stored = {
        "experts_blocks": torch.randint(0, 256, (3, 40, 2, 16), dtype=torch.uint8),
        "experts_scales": torch.randint(100, 130, (3, 40, 2), dtype=torch.uint8),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "tensor.input_scale": torch.ones(1),
    }
    for kind in KINDS:
        stored[f"{kind}.weight"], stored[f"{kind}.weight_scale_inv"] = _encoded(torch.randn(48, 32), kind)
    stored["list.weight"] = stored["rows.weight"]
    stored["list.weight_scale"] = stored["rows.weight_scale_inv"].view(-1).bfloat16()
    stored["one.weight"] = stored["tensor.weight"]
    stored["one.weight_scale"] = stored["tensor.weight_scale_inv"].view(())
    stored = {name: value.contiguous().clone() for name, value in stored.items()}
    save_file(stored, folder / "model.safetensors")
    decode = library.Fp8Dequantize(None)._dequantize_one
    values = {"norm.weight": torch.ones(4)}
    values["experts"] = mxfp4._convert_moe_packed_tensors(stored["experts_blocks"], stored["experts_scales"])
    for kind in (*KINDS, "list", "one"):
        scales = stored.get(f"{kind}.weight_scale_inv", stored.get(f"{kind}.weight_scale"))
        assert scales is not None
        grid = scales if scales.dim() == 2 else scales.view(-1, 1)
        values[f"{kind}.weight"] = decode(stored[f"{kind}.weight"], grid, torch.bfloat16)
    return stored, values


def test_values_of_the_source_get_its_bytes(tmp_path: Path) -> None:
    stored, values = _files(tmp_path)
    made, errors = requantized(values, tmp_path)
    assert made.keys() == stored.keys()
    for name, value in made.items():
        whole = materialized(value)
        assert (whole.dtype, whole.shape) == (stored[name].dtype, stored[name].shape)
        assert raw_bytes(whole) == raw_bytes(stored[name]), name
        if value.numel() > 10:  # a part that begins and ends within a block
            part = torch.empty(7, dtype=value.dtype)
            read_into(value, 3, part)
            assert raw_bytes(part) == raw_bytes(stored[name].flatten()[3:10]), name
    errors.report(tmp_path)
    report = json.loads((tmp_path / "requantized.json").read_text())
    assert {(row["mean relative error"], row["unchanged blocks"]) for row in report.values()} == {(0.0, 1.0)}


def test_other_values_are_encoded_by_the_rule_of_the_library(tmp_path: Path) -> None:
    _, values = _files(tmp_path)
    values = {name: value.float() + torch.randn_like(value.float()) for name, value in values.items()}
    values["blocks.weight"][:8, :8] = 0
    made, _ = requantized(values, tmp_path)
    for kind in KINDS:
        codes, scales = _encoded(values[f"{kind}.weight"], kind)
        assert raw_bytes(materialized(made[f"{kind}.weight"])) == raw_bytes(codes), kind
        assert raw_bytes(materialized(made[f"{kind}.weight_scale_inv"])) == raw_bytes(scales), kind
    assert made["norm.weight"].dtype is torch.bfloat16


def test_mxfp4_rounds_to_the_nearest_code_and_to_even_ones(tmp_path: Path) -> None:
    mxfp4: Any = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = torch.zeros(1, 1, 1, 16, dtype=torch.uint8), torch.zeros(1, 1, 1, dtype=torch.uint8)
    save_file({"experts_blocks": blocks, "experts_scales": scales}, tmp_path / "model.safetensors")
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.26, 0.74, 4.9, 5.1, 6.0, -2.5, -0.1])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.5, 0.5, 4.0, 6.0, 6.0, -2.0, -0.0])
    value = torch.zeros(1, 32, 1)
    value[0, : len(values), 0] = values / 16
    made = {name: materialized(each) for name, each in requantized({"experts": value}, tmp_path)[0].items()}
    decoded = mxfp4._convert_moe_packed_tensors(made["experts_blocks"], made["experts_scales"], dtype=torch.float32)
    assert torch.equal(decoded[0, : len(values), 0] * 16, expected)


def test_other_formats_and_values_are_refused_by_name(tmp_path: Path) -> None:
    _, values = _files(tmp_path)
    with pytest.raises(UsageError, match=r"requantize: blocks.weight: expected values of the shape"):
        requantized({**values, "blocks.weight": torch.ones(3, 4)}, tmp_path)
    made, _ = requantized({**values, "blocks.weight": torch.full((48, 32), torch.nan)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"blocks.weight: expected finite values"):
        materialized(made["blocks.weight"])
    other = tmp_path / "other"
    other.mkdir()
    save_file(
        {"x.weight": torch.ones(4, 4, dtype=torch.int8), "x.weight_scale": torch.ones(4, 1)}, other / "m.safetensors"
    )
    with pytest.raises(UsageError, match=r"got 'x.weight: I8'"):
        requantized({"x.weight": torch.ones(4, 4)}, other)
    save_file({"x.weight": torch.ones(4, 4)}, other / "m.safetensors")
    with pytest.raises(UsageError, match="files without such codes"):
        requantized({"x.weight": torch.ones(4, 4)}, other)
