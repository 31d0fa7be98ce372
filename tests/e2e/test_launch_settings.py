"""The settings of a launch reach an `Accelerator`; contradictions are refused before any process starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.environment import ROOT
from tests.support.job import JobResult, run_command

SCRIPT = """\
import json

import torch
from torch import nn
from torch.utils.data import DataLoader

from zeroaccel import Accelerator

torch.manual_seed(0)
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.randn(40, 8), batch_size=2))
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch.to(next(model.parameters()).dtype)).float().pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(accelerator.state)
if accelerator.is_main_process:
    json.dump(accelerator.zero_config, open("resolved.json", "w"), default=str)
"""
ALL_AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "auto"},
    },
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def _launch(folder: Path, *flags: object) -> JobResult:
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", 2, *flags, "train.py"]
    return run_command(command, cwd=folder)


def test_a_launch_file_that_repeats_the_json_is_refused_before_any_process_starts(project: Path) -> None:
    (project / "train.py").write_text("open('started', 'w')\n")
    decided = {"gradient_clipping": 1.0, "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3}}
    (project / "ds.json").write_text(json.dumps(decided))
    (project / "zeroaccel.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
        "  gradient_accumulation_steps: 4\n  gradient_clipping: 1.0\n  zero_stage: 2\n  zero3_init_flag: true\n"
    )
    result = _launch(project)
    assert result.returncode == 2
    assert not (project / "started").exists()
    assert result.stderr.splitlines() == [
        "zeroaccel: 2 settings are given twice, here and in ds.json",
        "  zeroaccel.yaml:7:3: zero_stage 2: conflicts with ds.json:1:89: zero_optimization.stage 3; "
        'remove it here, or write "auto" there to use this one',
        "  zeroaccel.yaml:6:3: gradient_clipping 1.0: repeats ds.json:1:2: gradient_clipping 1.0; "
        'remove it here, or write "auto" there to use this one',
    ]


def test_a_launch_file_reaches_the_accelerator(project: Path) -> None:
    result = _launch(project, "--config_file", ROOT / "templates" / "cpu_one_machine.yaml", "--mixed_precision", "bf16")
    assert result.returncode == 0, result.stderr
    for line in (
        "Distributed environment: zeroaccel (distributed_type DEEPSPEED)  Backend: gloo",
        "Num processes: 2",
        "Mixed precision type: bf16",
    ):
        assert line in result.stdout
    resolved = json.loads((project / "resolved.json").read_text())
    assert resolved["zero_optimization"]["stage"] == 2
    assert "cpu_one_machine.yaml:10:3" in result.stdout  # source of the setting


def test_flags_fill_a_json_in_which_everything_is_auto(project: Path) -> None:
    (project / "nvme").mkdir()
    (project / "ds.json").write_text(json.dumps(ALL_AUTO))
    flags = (
        "--mixed_precision fp16 --zero_stage 3 --gradient_accumulation_steps 5 --gradient_clipping 1.0 "
        "--offload_param_device cpu --offload_optimizer_device nvme --zero3_save_16bit_model true"
    )
    result = _launch(
        project, "--deepspeed_config_file", "ds.json", "--offload_optimizer_nvme_path", "nvme", *flags.split()
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((project / "resolved.json").read_text()) == {
        "fp16": {"enabled": True},
        "bf16": {"enabled": False},
        "train_batch_size": 20,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 5,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"},
            "offload_param": {"device": "cpu"},
        },
    }
    for said in ("--mixed_precision", "--zero_stage", "--offload_param_device", "DataLoader(batch_size=2)"):
        assert f"({said})" in result.stdout


def test_a_file_for_fsdp_trains_at_the_stage_that_shards_the_same_way(project: Path) -> None:
    (project / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nmain_process_ip: 192.0.2.1\nfsdp_config:\n"
        "  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_offload_params: true\n"
    )
    result = _launch(project, "--config_file", "fsdp.yaml")
    assert result.returncode == 0, result.stderr
    resolved = json.loads((project / "resolved.json").read_text())["zero_optimization"]
    assert (resolved["stage"], resolved["offload_param"]["device"]) == (3, "cpu")
    assert "fsdp.yaml:6:3" in result.stdout  # source of the stage
    said = result.stderr.splitlines()
    assert said[:4] == [
        "zeroaccel: note: fsdp.yaml:1:1: distributed_type: FSDP -> DEEPSPEED, with the equivalent ZeRO stage",
        "zeroaccel: note: fsdp.yaml:6:3: fsdp_config.fsdp_reshard_after_forward: true -> zero_stage 3",
        "zeroaccel: note: fsdp.yaml:5:3: fsdp_config.fsdp_version: left out, because there is only one engine",
        "zeroaccel: note: fsdp.yaml:7:3: fsdp_config.fsdp_offload_params: true -> offload_optimizer_device and "
        "offload_param_device cpu",
    ]
    assert "zeroaccel: --main_process_ip 192.0.2.1: does nothing on one machine" in result.stderr
