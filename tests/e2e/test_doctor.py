"""`zeroaccel env`, `doctor`, `test` and `verify` from outside, on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.multi.job import JobResult, run_command

SCRIPT = """
import sys
import torch
import zeroaccel
torch.manual_seed(0) if "seeded" in sys.argv else torch.seed()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2 if "twice" in sys.argv else 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}},
}
engine, *_ = zeroaccel.initialize(model=model, config=config)
for _ in range(100):
    loss = engine(torch.randn(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
raise AssertionError("it should have been ended")
"""


def _zeroaccel(folder: Path, *arguments: object, **environment: str) -> JobResult:
    command = [sys.executable, "-m", "zeroaccel.cli", *arguments]
    return run_command(command, timeout=200.0, cwd=folder, env=environment)


def _verify(folder: Path, *words: str) -> JobResult:
    (folder / "train.py").write_text(SCRIPT)
    return _zeroaccel(folder, "verify", "--steps", 3, "--num_processes", 2, "--cpu", "train.py", *words)


def test_every_stage_works_here(tmp_path: Path) -> None:
    result = _zeroaccel(tmp_path, "test", "--cpu")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 7
    assert all("works, the same losses as stage 0" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "stage"), [(("seeded",), 0), pytest.param(("seeded", "twice"), 2, marks=pytest.mark.slow)]
)
def test_a_script_that_shards_as_it_should(tmp_path: Path, words: tuple[str, ...], stage: int) -> None:
    result = _verify(tmp_path, *words)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"loss, stage {stage}" in lines[1]
    assert "loss, stage 3 as configured" in lines[1]
    assert len(lines) == 7
    assert lines[-2:] == ["largest difference of a loss or a gradient norm on any rank: 0", "the same to the last bit"]


@pytest.mark.slow
def test_a_script_without_seeds_is_found_out(tmp_path: Path) -> None:
    result = _verify(tmp_path, "random")
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1].endswith("the script does not set all its seeds")


def test_a_script_that_fails_ends_verification(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    assert _zeroaccel(tmp_path, "verify", "--cpu", "train.py").returncode == 7
    (tmp_path / "train.py").write_text("pass\n")
    result = _zeroaccel(tmp_path, "verify", "--cpu", "train.py")
    assert result.returncode == 2
    assert "the script took no step of a zeroaccel engine" in result.stderr


def test_doctor_finds_what_is_broken_and_says_what_mends_it(tmp_path: Path) -> None:
    (tmp_path / "zeroaccel.yaml").write_text("zero_stge: 3\n")
    result = _zeroaccel(tmp_path, "doctor", "--quick", "--json", XDG_CONFIG_HOME=str(tmp_path))
    assert result.returncode == 1, result.stderr
    seen = {one["feature"]: one for one in json.loads(result.stdout)}
    assert seen["launch file"]["verdict"] == "BROKEN"
    assert "zero_stge" in seen["launch file"]["detail"]
    assert seen["launch file"]["fix"]
    assert seen["native optimizer"]["verdict"] == "works"
    assert {one["verdict"] for one in seen.values()} <= {"works", "falls back", "missing", "BROKEN"}

    (tmp_path / "zeroaccel.yaml").unlink()
    result = _zeroaccel(tmp_path, "doctor", XDG_CONFIG_HOME=str(tmp_path), NO_COLOR="1")
    assert result.returncode == 0, result.stdout
    assert "by gloo, all-gather" in result.stdout or "by NCCL" in result.stdout
    assert "GB/s" in next(line for line in result.stdout.splitlines() if line.startswith("copies in memory"))
    assert result.stdout.isascii()


def test_env_is_for_reports_and_keeps_secrets(tmp_path: Path) -> None:
    result = _zeroaccel(tmp_path, "env", "--json", ACCELERATE_THING="x", ZEROACCEL_API_TOKEN="hidden")
    facts = json.loads(result.stdout)
    assert facts["torch"].startswith("2.")
    assert facts["ACCELERATE_THING"] == "x"
    assert facts["ZEROACCEL_API_TOKEN"] == "(set)"
    assert "hidden" not in result.stdout
