"""Saves with `requantize`: untouched codes are the source's bytes, changed weights are encoded and load elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.job import FACADE, run_job
from tests.support.libraries import NEEDS_CONVERSIONS

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = NEEDS_CONVERSIONS


def _saved(folder: Path, name: str) -> None:
    result = run_job(2, "tests/multi/compat/save_codes.py", [folder, name], timeout=150, imports=FACADE)
    assert result.returncode == 0, result.stderr
    row = next(json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    assert (row["name"], row["adapted"], row["values"], row["names"], row["converted"]) == (name, [], [], [], [])
    merged = {key.rpartition(".layers.")[2].partition(".")[2].split(".")[1] for key in row["merged"]}
    assert merged
    assert merged <= {"q_proj", "o_proj", "experts"}  # k_proj, v_proj and all others are the source's bytes
    error = 0.11 if "mxfp4" in name else 0.04
    assert min(row["moved"]) > 5 * error
    assert 0 < max(row["merged error"], row["trained error"]) < error
    assert all(0 < kind["mean relative error"] < error for kind in row["report"].values())


def test_an_mxfp4_model_is_saved_as_one(tmp_path: Path) -> None:
    _saved(tmp_path, "mxfp4/gpt_oss:GptOssForCausalLM")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "fp8-blocks/qwen3_moe:Qwen3MoeForCausalLM",
        "fp8-ue8m0/qwen3:Qwen3ForCausalLM",
        "fp8-channels/qwen3:Qwen3ForCausalLM",
        "fp8-tensors/qwen3:Qwen3ForCausalLM",
        "mxfp8/qwen3:Qwen3ForCausalLM",
    ],
)
def test_other_formats(name: str, tmp_path: Path) -> None:
    _saved(tmp_path, name)
