"""Ranks that are killed under `zeroaccel launch`: the run goes on from the memory of the machine."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.job import run_command

LAUNCH = (sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", "2", "--cpu")


def test_a_killed_rank_is_started_again_from_memory(tmp_path: Path) -> None:
    digests = []
    for name, faults in (("whole", ""), ("lost", "kill:5:1")):
        folder = tmp_path / name
        folder.mkdir()
        program = Path(__file__).with_name("lost_ranks.py")
        words = ["--max_restarts", 1, "--timeout", 5, program, folder, 12, 2, 3, faults]
        result = run_command([*LAUNCH, *words], timeout=150.0)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("resuming from the memory of the machine, step 4;") == bool(faults)
        assert len(list(folder.glob("resumed.*"))) == 1 + bool(faults)
        digests.append((folder / "digest").read_text())
    assert digests[0] == digests[1]
