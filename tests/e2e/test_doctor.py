"""`zeroaccel env`, `doctor`, `test` and `verify` on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda_model.fake_cupy import FakeCupy
from tests.support.job import JobResult, run_command
from zeroaccel.cli import doctor
from zeroaccel.cli.machine import Device, Machine
from zeroaccel.offload import page_locked
from zeroaccel.ops import cupy_kernels, device_kernels
from zeroaccel.ops.cupy_kernels import KernelError

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
    return run_command([sys.executable, "-m", "zeroaccel.cli", *arguments], 100.0, environment, folder)


def test_every_stage_works_here_without_a_compiler(tmp_path: Path) -> None:
    for name in ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "ninja"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho $0 >>{tmp_path}/called\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    result = _zeroaccel(tmp_path, "test", "--cpu", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "called").exists()
    lines = result.stdout.splitlines()
    assert len(lines) == 7
    assert "works; the others must have its losses" in lines[0]
    assert all("works, the same losses as stage 0" in line for line in lines[1:])


def test_a_script_that_shards_as_it_should(tmp_path: Path) -> None:
    # With two micro-steps per step, stages 0 and 1 sum in another order, so the plain run uses stage 2.
    (tmp_path / "train.py").write_text(SCRIPT)
    result = _zeroaccel(tmp_path, "verify", "--steps", 3, "--num_processes", 2, "--cpu", "train.py", "seeded", "twice")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "loss, stage 2" in lines[1]
    assert "loss, stage 3 as configured" in lines[1]
    assert len(lines) == 7
    assert lines[-2:] == ["largest difference of a loss or a gradient norm on any rank: 0", "the same to the last bit"]


def test_doctor_finds_what_is_broken_and_says_what_mends_it(tmp_path: Path) -> None:
    (tmp_path / "zeroaccel.yaml").write_text("zero_stge: 3\n")
    result = _zeroaccel(tmp_path, "doctor", "--quick", "--json", XDG_CONFIG_HOME=str(tmp_path))
    assert result.returncode == 1, result.stderr
    seen = {one["feature"]: one for one in json.loads(result.stdout)}
    assert seen["launch file"]["verdict"] == "BROKEN"
    assert "zero_stge" in seen["launch file"]["detail"]
    assert seen["launch file"]["fix"] == "zeroaccel config validate zeroaccel.yaml"
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
    result = _zeroaccel(tmp_path, "env", "--json", ZEROACCEL_CONFIG="nowhere.yaml")
    shown = json.loads(result.stdout)["launch file"]
    assert shown == "nowhere.yaml (environment ZEROACCEL_CONFIG), which is not a file"


WORKS = {"device memory": "works"}
GPU = Device("NVIDIA H100 80GB HBM3", 80 << 30, has_bf16=True)


@pytest.mark.parametrize(
    ("trouble", "verdict"), [("", "works"), ("CUDA error 2: out of memory", "falls back")], ids=["room", "none"]
)
def test_memory_that_cannot_be_locked_is_found(trouble: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked, "lock_trouble", lambda nbytes: trouble)
    seen = {one.feature: one for one in doctor._accelerators(Machine(devices=(GPU,)))}
    locked = seen["page-locked memory"]
    assert locked.verdict == verdict
    assert f"{trouble}" in locked.detail
    assert "`ulimit -l` is" in locked.detail
    assert bool(locked.fix) == bool(trouble)


@pytest.mark.parametrize("has_device", [True, False])
def test_a_row_names_the_kernels(has_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise KernelError("CuPy is not installed", "pip install 'zeroaccel[cuda13]'")

    monkeypatch.setattr(page_locked, "lock_trouble", lambda nbytes: "")
    monkeypatch.setattr(device_kernels, "compile_kernels", fail)
    monkeypatch.setattr(cupy_kernels, "installed_cupy", lambda: ["cupy-cuda12x"])
    rows = {one.feature: one for one in doctor._accelerators(Machine(devices=(GPU,) if has_device else ()))}
    row = rows["device kernels"]
    assert row.verdict == "falls back"
    if has_device:
        assert row.detail.endswith("several times the memory traffic: CuPy is not installed")
        assert row.fix == "pip install 'zeroaccel[cuda13]'"
        monkeypatch.setattr(device_kernels, "compile_kernels", lambda device: None)
        monkeypatch.setattr(cupy_kernels, "open_cupy", FakeCupy)
        on_host = doctor._adam_on(torch.device("cpu"))
        monkeypatch.setattr(doctor, "_adam_on", lambda device: on_host)
        works = doctor._device_kernels()
        assert works.detail.startswith(f"by CuPy {FakeCupy().__version__}, in 0.")
        assert works.verdict == "works"
        monkeypatch.setattr(doctor, "_adam_on", lambda device: on_host + (device.type == "cuda"))
        broken = doctor._device_kernels()
        assert broken.verdict == "BROKEN"
        assert broken.detail == "an AdamW step has other bits than on the host"
        assert broken.fix.startswith("pip uninstall cupy-cuda12x; ")
    else:
        assert row.detail.startswith("cupy-cuda12x is installed, but there is no device")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"device memory": "falls back"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, {"device memory": "falls back"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8, expandable_segments: True"}, WORKS),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, WORKS),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}, WORKS),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            {**WORKS, "streams": "falls back"},
        ),
    ],
)
def test_settings_of_a_device_are_looked_at(environ: dict[str, str], expected: dict[str, str]) -> None:
    seen = list(doctor._device_settings(environ))
    assert {one.feature: one.verdict for one in seen} == expected
    assert all(bool(one.fix) == (one.verdict != "works") for one in seen)
