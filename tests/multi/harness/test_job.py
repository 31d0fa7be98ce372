"""Complete programs as jobs: their output and exit codes, and that no process of a killed job survives."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import time_limits
from tests.support.job import JobTimeout, run_command, run_job


def _script(folder: Path, source: str) -> Path:
    path = folder / "script.py"
    path.write_text(source)
    return path


def test_every_rank_runs_the_script_with_its_arguments_and_environment(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os, sys\nprint(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])\n"
        "print('also', os.environ['EXTRA'], file=sys.stderr)\n",
    )
    result = run_job(2, script, ["--depth", 3], env={"EXTRA": "this"})
    assert result.stdout == "0 of 2 ['--depth', '3']\n1 of 2 ['--depth', '3']\n"
    assert result.stderr == "also this\nalso this\n"
    assert result.returncodes == (0, 0)
    assert result.returncode == 0
    assert 0 < result.seconds < time_limits.seconds(60)


def test_the_exit_code_is_that_of_the_first_rank_that_failed(tmp_path: Path) -> None:
    script = _script(tmp_path, "import os, sys\nsys.exit([0, 75, 3][int(os.environ['RANK'])])\n")
    result = run_job(3, script)
    assert result.returncodes == (0, 75, 3)
    assert result.returncode == 75


def test_a_job_that_does_not_end_is_killed_with_its_descendants(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n",
    )
    with pytest.raises(JobTimeout, match=r"killed after \d+(\.\d+)? s") as caught:
        run_job(2, script, timeout=1.0)
    children = [int(line) for line in caught.value.result.stdout.split()]
    assert len(children) == 2
    assert caught.value.result.returncodes == (-9, -9)
    limit = time_limits.Limit(10)  # a killed process takes a moment to exit
    while (alive := [pid for pid in children if _is_alive(pid)]) and not limit.is_over():
        time.sleep(0.02)
    assert not alive


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_a_command_sees_no_surrounding_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    result = run_command([sys.executable, "-c", "import os; print(os.environ.get('RANK'))"])
    assert result.stdout == "None\n"
