"""transformers' Trainer with `autoep_size` in its DeepSpeed config, on an unedited program: saved, and resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.job import run_command

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_divided_experts_train_as_whole_ones_and_resume_on_any_ep(tmp_path: Path, kind: str) -> None:
    program = Path(__file__).with_name("expert_parallel_runs.py")
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", 4, "--engine", "zeroaccel"]
    first = f"{kind}-2-3"
    cases = [f"{kind}:2:3", f"{kind}:1:3", f"{kind}:1:3:{first}", f"{kind}:4:3:{first}"]
    result = run_command([*command, program, tmp_path, *cases], timeout=240)
    assert result.returncode == 0, result.stderr[-6000:]
    lines = (json.loads(text) for text in result.stdout.splitlines() if text.startswith('{"case"'))
    runs = {line["case"]: line for line in lines}
    divided, whole = runs[cases[0]], runs[cases[1]]
    for case in cases[1:]:
        assert runs[case]["losses"] == pytest.approx(divided["losses"], rel=1e-5), case
    weights = {case: load_file(Path(run["folder"]) / "final" / "model.safetensors") for case, run in runs.items()}
    for case in cases[1:]:
        assert weights[case].keys() == weights[cases[0]].keys()
    for name, value in load_file(Path(whole["folder"]) / "final" / "model.safetensors").items():
        for case in cases:
            assert torch.allclose(weights[case][name], value, rtol=1e-4, atol=3e-6), (case, name)
