"""Two jobs that save into one folder: no save raises, and `latest` always names a complete checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.environment import ROOT
from tests.support.job import run_command


@pytest.mark.parametrize("saves", [5, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_two_jobs_save_into_one_root(tmp_path: Path, saves: int) -> None:
    script = ROOT / "tests" / "multi" / "checkpoint" / "saves_of_two_jobs.py"
    modes = ("apart", "kept", "same")
    result = run_command([sys.executable, script, tmp_path, saves, *modes], timeout=570, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    for mode, seen in json.loads(result.stdout.splitlines()[-1]).items():
        assert seen["codes"] == [0, 0], (mode, result.stderr)
        assert seen["raised"] == [], mode
        assert seen["wrong"] == [], mode
        assert seen["left"] == [], mode
        assert seen["looks"] > saves, mode
        assert seen["checkpoints"] == {"apart": 2 * saves, "same": 2}.get(mode, seen["checkpoints"])
        assert seen["checkpoints"] >= 2, mode
