"""The `deepspeed` command: its flags on real processes, and the commands and package that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import time_limits
from tests.support.environment import outside_any_job
from tests.support.job import JobResult, run_command

CLI = (sys.executable, "-m", "zeroaccel.cli")
SCRIPT = """\
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
options = parser.parse_args()
import deepspeed
facts = [options.local_rank, os.environ["LOCAL_RANK"], os.environ["LOCAL_SIZE"], os.environ["MASTER_PORT"]]
print("facts", *facts, options.deepspeed_config, deepspeed.__version__.partition("+")[2])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _facts(result: JobResult | subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert result.returncode == 0, result.stderr
    return sorted(line.split()[1:] for line in result.stdout.splitlines() if line.startswith("facts"))


def test_processes_of_num_gpus_get_their_local_rank(script: Path) -> None:
    words = [*CLI, "launch", "--num_gpus", "2", "--cpu", script, "--deepspeed", "--deepspeed_config", "c.json"]
    result = run_command(words, timeout=60.0)
    facts = _facts(result)
    assert len(facts) == 2, (result.stdout, result.stderr)
    ports = {one.pop(3) for one in facts}
    assert len(ports) == 1
    assert facts == [["0", "0", "2", "c.json", "zeroaccel"], ["1", "1", "2", "c.json", "zeroaccel"]]


def _shell(variables: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """Returns a command as a shell with these variables resolves it."""
    limit = time_limits.seconds(60.0)
    return subprocess.run(
        [*map(str, words)], env=outside_any_job() | variables, capture_output=True, text=True, timeout=limit
    )


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Returns variables under which the installed commands and the package are found."""
    folder = tmp_path / "shims"
    done = run_command([*CLI, "compat", "install", folder], timeout=60.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"export PATH={folder}/bin:$PATH",
        f"export PYTHONPATH={folder}/lib:$PYTHONPATH",
    ]
    return {"PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": f"{folder}/lib"}


def test_the_installed_commands_are_launches(script: Path, installed: dict[str, str]) -> None:
    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return _shell(installed, *words)

    facts = _facts(run("deepspeed", "--num_gpus", 2, "--cpu", "--no_local_rank", script))
    assert [(one[0], one[1]) for one in facts] == [("-1", "0"), ("-1", "1")]
    assert {one[-1] for one in facts} == {"zeroaccel"}
    facts = _facts(run(sys.executable, "-m", "deepspeed.launcher.runner", "--cpu", "--num_gpus=1", script))
    assert [one[0] for one in facts] == ["0"]
    assert run("ds_report").stdout.startswith("zeroaccel ")
    wrong = run("deepspeed", "--autotuning", "run", script)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("zeroaccel: --autotuning run: zeroaccel has no autotuner")


def test_import_deepspeed_finds_the_facade_through_the_installed_package(installed: dict[str, str]) -> None:
    code = "import deepspeed.comm, deepspeed; print(deepspeed.__version__, deepspeed.init_distributed.__module__)"
    done = _shell(installed, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0].endswith("+zeroaccel")
    assert done.stdout.split()[1].startswith("zeroaccel.")


def test_install_keeps_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "deepspeed").write_text("#!/bin/sh\n")
    result = run_command([*CLI, "compat", "install", tmp_path], timeout=60.0)
    assert result.returncode == 2
    assert f"{tmp_path}/bin/deepspeed: exists, but not from `zeroaccel compat install`" in result.stderr
    assert not (tmp_path / "lib").exists()
    (tmp_path / "file").touch()
    result = run_command([*CLI, "compat", "install", tmp_path / "file"], timeout=60.0)
    assert (result.returncode, "not a directory; name a folder" in result.stderr) == (2, True)
