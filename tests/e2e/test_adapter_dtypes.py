"""TRL's trainers at stage 3 and the dtype of adapters: the line about it, and the setting that keeps fp32."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import run_command
from tests.support.libraries import TRL_1_0

NEEDS_CASTS = pytest.mark.skipif(TRL_1_0, reason="the trainers of TRL 1.0 leave the dtypes of adapters to PEFT")
BF16, FP32 = ["torch.bfloat16"], ["torch.float32"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program = Path(__file__).with_name("adapter_dtype_runs.py")
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", 2, "--engine", "zeroaccel"]
    result = run_command([*launch, program, tmp_path_factory.mktemp("adapters")], timeout=200)
    assert result.returncode == 0, result.stderr[-6000:]
    line: dict[str, Any] = next(json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"runs"'))
    return line


@NEEDS_CASTS
def test_the_call_and_the_cure_are_said_once(found: dict[str, Any]) -> None:
    (said,) = found["runs"]["default, stage 3"]["said"]
    assert "trl.trainer.sft_trainer:" in said
    assert "calls get_peft_model with autocast_adapter_dtype=False" in said
    assert "adapters (lora_A, lora_B) compute in torch.bfloat16 with fp32 masters" in said
    assert 'set "data_types": {"keep_in_fp32_modules": ["lora_A", "lora_B"]}' in said
    (said,) = found["runs"]["default, stage 2"]["said"]  # where PEFT's casts are on, and the engine casts back
    assert said.startswith("PEFT's adapters (lora_A, lora_B) compute in torch.bfloat16")


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_config_decides_at_each_stage(found: dict[str, Any], stage: str) -> None:
    cast, kept = found["runs"][f"default, stage {stage}"], found["runs"][f"fp32, stage {stage}"]
    assert (cast["inside"], cast["saved"]) == (BF16, BF16)
    assert (kept["inside"], kept["saved"]) == (FP32, FP32)
    assert kept["said"] == []
    assert kept["losses"] != cast["losses"]


@NEEDS_CASTS
def test_trl_changes_no_bits(found: dict[str, Any]) -> None:
    """Its call makes the adapters 16 bits at stage 3 only; the program's own are fp32 before the engine."""
    runs = found["runs"]
    assert (runs["fp32, stage 3"]["before"], runs["fp32, stage 3, the program's own"]["before"]) == (BF16, FP32)
    assert runs["fp32, stage 3"]["losses"] == runs["fp32, stage 3, the program's own"]["losses"]
    for dtype in ("default", "fp32"):
        assert runs[f"{dtype}, stage 3"]["losses"] == runs[f"{dtype}, stage 2"]["losses"]


@NEEDS_CASTS
def test_every_trainer_of_trl_makes_the_noted_call(found: dict[str, Any]) -> None:
    names = {name.rpartition(".")[2] for name in found["trainers"]}
    assert {f"{name}_trainer" for name in ("distillation", "dpo", "grpo", "kto", "reward", "rloo", "sft")} <= names
    assert all(found["trainers"].values())
