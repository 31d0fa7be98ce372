"""accelerate's and transformers' sequence parallelism on the facade: losses of whole sequences in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import run_command

pytest.importorskip("transformers")

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


def _losses(folder: Path, ranks: int) -> Any:
    program = Path(__file__).with_name("sequence_parallel_runs.py")
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", ranks, "--engine", "zeroaccel"]
    if ranks > 1:
        launch += ["--distributed_type", "DEEPSPEED", "--zero_stage", 2, "--sp_size", ranks]
    result = run_command([*launch, program, folder], timeout=110)
    assert result.returncode == 0, result.stderr[-6000:]
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"trainer"')))


def test_losses_are_those_of_whole_sequences(tmp_path: Path) -> None:
    whole, cut = _losses(tmp_path, 1), _losses(tmp_path, 2)
    assert len(cut["trainer"]) == 6
    assert len(cut["by hand"]) == 8
    for program, losses in whole.items():
        assert cut[program] == pytest.approx(losses, rel=2e-6), program
