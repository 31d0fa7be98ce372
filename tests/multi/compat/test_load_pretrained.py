"""`from_pretrained` at stage 3: weights and names as transformers loads them on one process; each byte is read once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.job import FACADE, run_job
from tests.support.libraries import NEEDS_CONVERSIONS

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
    result = run_job(2, SCRIPT, [tmp_path, *FEW], timeout=120, imports=FACADE)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == list(FEW)
    for row in rows:
        read, _ = row.pop("read"), row.pop("nodes")
        assert row == {"name": row["name"], "sharded": True, "differs": [], "record": {}, "files": [], "again": []}
        assert read <= 1.05


@NEEDS_CONVERSIONS
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"zero_hpz_partition_size": 2}, marks=pytest.mark.slow), {"mics_shard_size": 2}]
)
def test_two_nodes_read_each_byte_once(tmp_path: Path, settings: dict[str, int]) -> None:
    env = {"RANKS_PER_NODE": "2", "ZERO3": json.dumps(settings)}
    result = run_job(4, SCRIPT, [tmp_path, FEW[1]], env=env, timeout=120, imports=FACADE)
    assert result.returncode == 0, result.stderr
    row = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert (row["nodes"], row["sharded"], row["differs"]) == (2, True, [])
    assert row["read"] <= 1.05


SAID = {
    "truncated": "ROOT/truncated/model-00002-of-00006.safetensors: not a valid safetensors file",
    "flipped_header": "ROOT/flipped_header/model-00001-of-00006.safetensors: not a valid safetensors file",
    "missing_file": "model-00001-of-00006.safetensors: missing, although model.safetensors.index.json lists it",
    "downloading": "A download of ROOT/downloading is not complete: ROOT/downloading/0123.incomplete",
    "missing_tensor": "ROOT/missing_tensor: the index lists tensors that its files do not have: ",
    "wrong_shape": "You set `ignore_mismatched_sizes` to `False`",  # after the report that names it
    "other_config": "21 tensors, 1 of which the model has: ",
    "codes_without_scales": "model.layers.0.mlp.up_proj.weight: F8_E4M3",
    "misshapen_scales": "issues during automatic conversion of the weights",  # after the report that names it
    "missing_scale": "has weights in 8 bits: model.layers.1.mlp.up_proj.weight: F8_E4M3: expected their scales",
    "pickle_with_code": "unsupported GLOBAL posix.abort",
    "duplicate_names": "expected one file that has it",
    "truncated_bin": "ROOT/truncated_bin/model-00002-of-00006.bin: not a valid file of weights",
    "missing_bin": "model-00002-of-00006.bin: missing, although pytorch_model.bin.index.json lists it",
    "empty_file": "ROOT/empty_file/model-00002-of-00006.safetensors: not a valid safetensors file",
    "other_machine": "elsewhere: expected the folder that other ranks have",
}


@NEEDS_CONVERSIONS
@pytest.mark.parametrize("stage", [2, 3])
def test_damaged_checkpoints_are_named_on_every_rank(tmp_path: Path, stage: int) -> None:
    result = run_job(2, "tests/multi/compat/load_damaged.py", [tmp_path, stage], timeout=90, imports=FACADE)
    assert result.returncode == 0, result.stderr
    first, second = (json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    assert first.keys() == SAID.keys()
    for case, words in SAID.items():
        if case == "other_machine" and stage < 3:  # ranks do not wait for each other
            assert (first[case], "elsewhere" in second[case]) == ("", True)
            continue
        assert words in first[case], case
        assert words in second[case], case


PICKLES = ("bin/qwen3_moe:Qwen3MoeForCausalLM", "one-bin/bert:BertForMaskedLM", "old-bin/t5:T5ForConditionalGeneration")


@NEEDS_CONVERSIONS
def test_pickles_are_read_as_on_one_process(tmp_path: Path) -> None:
    result = run_job(2, SCRIPT, [tmp_path, *PICKLES], timeout=120, imports=FACADE)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == list(PICKLES)
    for row in rows:
        assert (row.get("error"), row["differs"], row["record"], row["again"]) == (None, [], {}, [])
        assert row["sharded"]


QUANTIZED = ("fp8-blocks/qwen3_moe:Qwen3MoeForCausalLM", "mxfp4/gpt_oss:GptOssForCausalLM")
OTHER_SCALES = tuple(f"fp8-{scales}/qwen3:Qwen3ForCausalLM" for scales in ("ue8m0", "channels", "tensors"))


@NEEDS_CONVERSIONS
@pytest.mark.parametrize("names", [QUANTIZED, pytest.param(OTHER_SCALES, marks=pytest.mark.slow)])
def test_quantized_checkpoints_are_dequantized_as_on_one_process(tmp_path: Path, names: tuple[str, ...]) -> None:
    result = run_job(2, SCRIPT, [tmp_path, *names], timeout=120, imports=FACADE)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == list(names)
    for row in rows:
        assert (row.get("error"), row["differs"], row["record"], row["again"]) == (None, [], {}, [])
        assert row["sharded"]
        assert row["read"] <= 1.05
