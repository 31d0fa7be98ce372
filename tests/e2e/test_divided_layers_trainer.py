"""transformers' Trainer with `autotp_size` or `autoep_size` in its DeepSpeed config, in an unedited program."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.job import run_command
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS
from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow


def _runs(
    folder: Path, ranks: int, cases: list[str], flags: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Returns the printed results and the weights of each case."""
    program = Path(__file__).with_name("divided_layers_runs.py")
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", ranks, "--engine", "zeroaccel"]
    if cases[0].startswith("ddp"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", ranks]
    command += flags
    result = run_command([*command, program, folder, *cases], timeout=240)
    assert result.returncode == 0, result.stderr[-6000:]
    lines = (json.loads(text) for text in result.stdout.splitlines() if text.startswith('{"case"'))
    runs = {line["case"]: line for line in lines}
    return runs, {case: load_file(Path(runs[case]["folder"]) / "final" / "model.safetensors") for case in cases}


@NEEDS_SPLIT_LAYERS
def test_layers_split_by_the_json_train_as_whole_ones(tmp_path: Path) -> None:
    cases = ["tp:Llama:2:2", "tp:Llama:2:3", "tp:Llama:1:2"]
    runs, weights = _runs(tmp_path, 2, cases)
    split, sharded, whole = cases
    assert runs[split]["losses"] == runs[sharded]["losses"]
    assert runs[split]["losses"] == pytest.approx(runs[whole]["losses"], rel=2e-6)
    assert runs[split]["evaluated"] == pytest.approx(runs[whole]["evaluated"], rel=2e-6)
    assert weights[split].keys() == weights[sharded].keys() == weights[whole].keys()
    for name, value in weights[whole].items():
        assert torch.equal(weights[split][name], weights[sharded][name]), name
        assert torch.allclose(weights[split][name], value, rtol=1e-4, atol=3e-6), name
    saved = get_fp32_state_dict_from_zero_checkpoint(Path(runs[split]["folder"]) / "checkpoint-4")
    assert all(torch.equal(saved[name], value) for name, value in weights[split].items())


@pytest.mark.parametrize(
    ("kind", "stage"), [("Mixtral", 3), ("GptOss", 3), ("Mixtral", 0), ("Mixtral", 1), ("GptOss", 2)]
)
def test_divided_experts_train_as_whole_ones_and_resume_on_any_ep(tmp_path: Path, kind: str, stage: int) -> None:
    first = f"ep-{kind}-2-{stage}"
    cases = [
        f"ep:{kind}:2:{stage}",
        f"ep:{kind}:1:{stage}",
        f"ep:{kind}:1:{stage}:{first}",
        f"ep:{kind}:4:{stage}:{first}",
    ]
    runs, weights = _runs(tmp_path, 4, cases)
    plain, plain_weights = _runs(tmp_path, 4, [f"ddp:{kind}:1:0"])
    runs, weights = runs | plain, weights | plain_weights
    divided, whole, *_ = cases
    for case in runs:
        assert runs[case]["losses"] == pytest.approx(runs[divided]["losses"], rel=1e-5), case
        assert weights[case].keys() == weights[divided].keys()
    for name, value in weights[whole].items():
        for case in runs:
            assert torch.allclose(weights[case][name], value, rtol=1e-4, atol=3e-6), (case, name)


def test_the_launcher_says_how_many_ranks_divide_experts(tmp_path: Path) -> None:
    flags = ["--ep_size", "2"]
    cases = ["launched:Mixtral:2:1", "launched:Mixtral:2:3"]
    runs, weights = _runs(tmp_path, 4, cases, flags)
    assert runs[cases[0]]["losses"] == runs[cases[1]]["losses"]
    assert all(torch.equal(value, weights[cases[1]][name]) for name, value in weights[cases[0]].items())
    manifests = [path.read_text() for path in Path(runs[cases[0]]["folder"]).rglob("manifest.json")]
    assert manifests
    assert all(", ep 2" in text for text in manifests)
