"""Adapters on a base in the FP8 or MXFP4 codes of its checkpoint: losses of the decoded model, shards of codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.job import FACADE, run_job
from tests.support.libraries import NEEDS_CONVERSIONS

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = NEEDS_CONVERSIONS
SCRIPT = "tests/multi/compat/train_codes.py"


def _trained(folder: Path, *names: str) -> None:
    result = run_job(2, SCRIPT, [folder, *names], timeout=150, imports=FACADE)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == list(names)
    for row in rows:
        assert row["stage 0"] == row["stage 2"] == row["stage 3"]
        assert row["stage 3"] == pytest.approx(row["plain"], rel=1e-6)
        assert len(set(row["plain"])) == 3
        assert (row["shards 0"], row["shards 2"], row["shards 3"]) == (2, 2, 1)
        assert row["bytes"] <= (0.55 if "mxfp4" in row["name"] else 1.15)  # blocks of 8 x 8, and rows of 32


def test_losses_are_those_of_the_decoded_model_at_every_stage(tmp_path: Path) -> None:
    _trained(tmp_path, "mxfp4/gpt_oss:GptOssForCausalLM")


def test_saves_resumes_tiers_and_reads_of_codes(tmp_path: Path) -> None:
    result = run_job(2, SCRIPT, [tmp_path, "life/fp8-channels/qwen3:Qwen3ForCausalLM"], timeout=150, imports=FACADE)
    assert result.returncode == 0, result.stderr
    row = next(json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    assert row["decoded"] == []
    assert row["gathered"]
    assert row["before"]
    assert row["resumed"] == row["more"] != row["first"]
    assert row["cpu"] == row["nvme"] == row["first"]
    assert "q_proj.base_layer.weight.codes: expected no read of its values while it is sharded" in row["outside"]
    assert 'load the model without "frozen_weights": "codes"' in row["write"]


@pytest.mark.slow
def test_losses_of_other_scales(tmp_path: Path) -> None:
    _trained(
        tmp_path,
        "fp8-blocks/qwen3_moe:Qwen3MoeForCausalLM",
        "fp8-ue8m0/qwen3:Qwen3ForCausalLM",
        "fp8-channels/qwen3:Qwen3ForCausalLM",
        "fp8-tensors/qwen3:Qwen3ForCausalLM",
        "mxfp8/qwen3:Qwen3ForCausalLM",
    )
