"""Meshes that only the launch sets: pipeline stages and split layers train like one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import JobResult, run_command
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES

pytest.importorskip("transformers")

PROGRAM = Path(__file__).with_name("mesh_runs.py")


def _launched(how: str, *flags: object) -> JobResult:
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", *flags]
    return run_command([*launch, PROGRAM, how], timeout=110)


def _outcome(result: JobResult) -> Any:
    assert result.returncode == 0, result.stderr[-6000:]
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))


@NEEDS_SPLIT_LAYERS
@NEEDS_STAGES
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_script_does_not_know_of_the_mesh() -> None:
    whole = _outcome(_launched("loop", "--num_processes", 1))
    assert whole["batch"] == 4
    split = _outcome(_launched("loop", "--num_processes", 2, "--tp_size", 2))
    assert split["batch"] == 4
    assert split["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    # The mean over the two micro-batches of a step.
    means = [sum(whole["losses"][at : at + 2]) / 2 for at in (0, 2, 4)]
    staged = _outcome(_launched("engine", "--num_processes", 2, "--pp_size", 2))
    assert staged["losses"] == pytest.approx(means, rel=1e-6)
    both = _outcome(_launched("engine", "--num_processes", 4, "--pp_size", 2))
    assert both["batch"] == 8


@NEEDS_STAGES
def test_a_loop_that_cannot_run_stages_says_so() -> None:
    result = _launched("loop", "--num_processes", 2, "--pp_size", 2)
    assert result.returncode != 0
    assert "train_batch" in result.stderr


def test_sizes_that_do_not_fit_start_nothing() -> None:
    result = _launched("loop", "--num_processes", 4, "--pp_size", 3)
    assert result.returncode == 2
    assert "--pp_size: pp 3 = 3, but the mesh needs sizes that divide the job's 4 ranks" in result.stderr
