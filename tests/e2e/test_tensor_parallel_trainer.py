"""transformers' Trainer with `autotp_size` in its DeepSpeed config, on an unedited program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.job import run_command
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS
from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@NEEDS_SPLIT_LAYERS
@pytest.mark.slow
def test_layers_split_by_the_json_train_as_whole_ones(tmp_path: Path) -> None:
    program = Path(__file__).with_name("tensor_parallel_runs.py")
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", 2, "--engine", "zeroaccel"]
    result = run_command([*command, program, tmp_path, "2:2", "2:3", "1:2"], timeout=120)
    assert result.returncode == 0, result.stderr[-6000:]
    runs = {
        line["case"]: line
        for line in (json.loads(text) for text in result.stdout.splitlines() if text.startswith('{"case"'))
    }
    split, sharded, whole = runs["2:2"], runs["2:3"], runs["1:2"]
    assert split["losses"] == sharded["losses"]
    assert split["losses"] == pytest.approx(whole["losses"], rel=2e-6)
    assert split["evaluated"] == pytest.approx(whole["evaluated"], rel=2e-6)
    weights = {case: load_file(Path(run["folder"]) / "final" / "model.safetensors") for case, run in runs.items()}
    assert weights["2:2"].keys() == weights["2:3"].keys() == weights["1:2"].keys()
    for name, value in weights["1:2"].items():
        assert torch.equal(weights["2:2"][name], weights["2:3"][name]), name
        assert torch.allclose(weights["2:2"][name], value, rtol=1e-4, atol=3e-6), name
    saved = get_fp32_state_dict_from_zero_checkpoint(Path(split["folder"]) / "checkpoint-4")
    assert all(torch.equal(saved[name], value) for name, value in weights["2:2"].items())
