"""`from_pretrained` at stage 3: weights and names as transformers loads them on one process; each byte is read once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.job import run_job

pytest.importorskip("transformers")
SCRIPT = "tests/multi/compat/load_pretrained.py"
# Tied and sharded; experts merged into 3-D tensors; prefixes and a tower; legacy names; tied encoder and decoder.
FEW = (
    "llama:LlamaForCausalLM",
    "qwen3_moe:Qwen3MoeForCausalLM",
    "gemma3:Gemma3ForConditionalGeneration",
    "bert:BertForMaskedLM",
    "t5:T5ForConditionalGeneration",
)


def test_weights_and_names_are_those_of_one_process(tmp_path: Path) -> None:
    result = run_job(2, SCRIPT, [tmp_path, *FEW], timeout=120)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == list(FEW)
    for row in rows:
        read = row.pop("read")
        assert row == {"name": row["name"], "differs": [], "record": {}, "files": [], "again": []}
        assert read <= 1.05
