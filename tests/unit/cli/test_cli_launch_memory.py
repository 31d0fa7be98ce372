"""The launcher's memory folder: it exists while the launcher runs; folders of killed launchers are removed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import time_limits
from tests.support.environment import outside_any_job
from zeroaccel.cli.launch.launch_memory import VARIABLE, launch_memory
from zeroaccel.config.launch.launch_settings import launch_settings
from zeroaccel.errors import ConfigError

RESTARTED = launch_settings({"max_restarts": 1})
KEEPS = """
import sys, time
from pathlib import Path
from zeroaccel.cli.launch.launch_memory import VARIABLE, launch_memory
from zeroaccel.config.launch.launch_settings import launch_settings
with launch_memory(launch_settings({"max_restarts": 1}), Path(sys.argv[1])) as variables:
    print(variables[VARIABLE], flush=True)
    time.sleep(600)
"""


def test_a_job_that_does_not_start_again_has_none(tmp_path: Path) -> None:
    with launch_memory(launch_settings({}), tmp_path) as variables:
        assert (variables, list(tmp_path.iterdir())) == ({}, [])


def test_launchers_leave_the_memory_of_others(tmp_path: Path) -> None:
    with launch_memory(RESTARTED, tmp_path) as own:
        folder = Path(own["ZEROACCEL_MEMORY_FOLDER"])
        with launch_memory(RESTARTED, tmp_path) as others:
            assert sorted(tmp_path.iterdir()) == sorted([folder, Path(others[VARIABLE])])
            assert folder.stat().st_mode & 0o777 == 0o700
            Path(others[VARIABLE], "state").write_text("kept")
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_launcher_is_removed(tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", KEEPS, tmp_path], stdout=subprocess.PIPE, text=True, env=outside_any_job()
    )
    assert job.stdout is not None
    left = Path(job.stdout.readline().strip())
    (left / "state").write_text("of a job that is gone")
    os.kill(job.pid, signal.SIGKILL)
    job.wait(time_limits.seconds(10.0))
    job.stdout.close()
    with launch_memory(RESTARTED, tmp_path) as variables:
        assert list(tmp_path.iterdir()) == [Path(variables[VARIABLE])]


def test_files_of_other_users_do_not_stop_a_launch(tmp_path: Path) -> None:
    memory, elsewhere = tmp_path / "memory", tmp_path / "elsewhere"
    for folder in (memory, elsewhere):
        folder.mkdir()
    (elsewhere / "file").touch()
    os.mkfifo(memory / "zeroaccel-memory-pipe")
    (memory / "zeroaccel-memory-link").symlink_to(elsewhere)
    with launch_memory(RESTARTED, memory):
        assert len(list(memory.iterdir())) == 3
    assert (elsewhere / "file").exists()


def test_a_memory_without_room_for_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ConfigError, match=r"--max_restarts: no folder for states in .* got .No space left on device"):
        launch_memory(RESTARTED, tmp_path).__enter__()
