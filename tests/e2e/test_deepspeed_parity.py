"""Runs one script with DeepSpeed, if it is installed, and with zeroaccel in its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import run_command
from zeroaccel.compat import VERSION
from zeroaccel.compat.finder import real_location

pytestmark = pytest.mark.timeout(300)


def _run(engine: str, stage: int) -> dict[str, Any]:
    program = Path(__file__).with_name("deepspeed_script.py")
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", 2, "--engine", engine]
    result = run_command([*command, program, stage], timeout=140)
    assert result.returncode == 0, result.stderr[-6000:]
    printed: dict[str, Any] = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    return printed


@pytest.mark.slow
def test_a_deepspeed_script_runs_with_nothing_of_it_installed() -> None:
    ours = _run("zeroaccel", 3)
    assert ours["engine"] == VERSION
    assert len(ours["norms"]) == 20
    assert sum(ours["losses"][-8:]) < sum(ours["losses"][:8])


@pytest.mark.skipif(real_location() is None, reason="needs a real DeepSpeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_twenty_steps_are_those_of_deepspeed(stage: int) -> None:
    theirs, ours = _run("deepspeed", stage), _run("zeroaccel", stage)
    assert theirs["engine"] != ours["engine"] == VERSION
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-3)
