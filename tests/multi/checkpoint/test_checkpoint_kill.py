"""SIGKILL at any moment of a save: the run resumes from a step that was saved, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.environment import ROOT
from tests.support.job import run_command


def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    script = ROOT / "tests" / "multi" / "checkpoint" / "checkpoint_kills.py"
    result = run_command([sys.executable, script, tmp_path, 30], timeout=240, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["kinds"] == {"alone": 10, "one": 10, "all": 10, "call": 10}
    assert told["wrong"] == []
    assert told["interrupted"] >= 8, "too few kills came in the middle of a save"
