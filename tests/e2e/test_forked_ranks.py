"""Ranks of a job with restarts are forks of one process that has imported the packages for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.job import run_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are new interpreters")

LAUNCH = (sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", "2", "--cpu", "--max_restarts", "1")
SLOWER = "the ranks start as new interpreters, which takes longer: "

FACTS = '''"""A script."""
import json
import os
import sys
import torch
from torch import nn

facts = {
    "rank": int(os.environ["RANK"]),
    "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    "argv": sys.argv,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path[0],
    "foreign": [name for name in ("runner", "fork_server", "ast") if name in sys.modules],
    "leads": os.getsid(0) == os.getpid(),
    "is_fork": any("fork_server" in word for word in sys.orig_argv),
    "draws": [float(torch.rand(())), __import__("random").random()],
    "threads": torch.get_num_threads(),
}
print(json.dumps(facts), flush=True)
if facts["attempt"] == 0 and facts["rank"] == 1:
    raise ValueError("once")
if facts["attempt"] == 0:
    import time
    time.sleep(60)
'''


def test_a_fork_is_what_a_new_interpreter_would_be(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FACTS)
    result = run_command([*LAUNCH, "--num_cpu_threads_per_process", 1, script, "--lr", "1"], timeout=60.0)
    assert result.returncode == 0, result.stderr
    assert SLOWER not in result.stderr
    assert "local rank 1 failed first: ValueError: once; starting again (1 of at most 1)" in result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted((facts["attempt"], facts["rank"]) for facts in found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for facts in found:
        assert facts["argv"] == [str(script), "--lr", "1"]
        assert facts["path"] == str(tmp_path)
        assert (facts["main"], facts["leads"], facts["is_fork"], facts["threads"]) == (True, True, True, 1)
        assert "runner" not in facts["foreign"]
    assert len({facts["draws"][0] for facts in found}) == 1  # torch's seed is a constant
    assert len({facts["draws"][1] for facts in found}) == 4


@pytest.mark.parametrize(
    ("imported", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
            "start threads",
        ),
        ("import os, sys\n'fork_server' in str(sys.orig_argv) and os._exit(3)", "ends the process"),
    ],
)
def test_where_forks_cannot_stand_in(tmp_path: Path, imported: str, why: str) -> None:
    (tmp_path / "datasets.py").write_text(imported)
    script = tmp_path / "train.py"
    script.write_text("import datasets\nimport os\nprint('rank', os.environ['RANK'], flush=True)\nos._exit(0)\n")
    result = run_command([*LAUNCH, script], timeout=60.0)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0", "rank 1"]
    assert result.stderr.count(SLOWER) == 1
    assert why in result.stderr
