"""Ranks that are killed under `zeroaccel launch`: the run goes on from the memory of the machine."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.support.environment import free_port
from tests.support.job import run_command, run_job, running_command

LAUNCH = (sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", "2", "--cpu")


def test_a_killed_rank_is_started_again_from_memory(tmp_path: Path) -> None:
    program = Path(__file__).with_name("lost_ranks.py")
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    whole.mkdir()
    lost.mkdir()
    plain = run_job(2, program, [whole, 12, "off", 3], env={"TORCHELASTIC_RESTART_COUNT": "0"})
    assert plain.returncode == 0, plain.stderr
    words = ["--max_restarts", 1, "--timeout", 5, program, lost, 12, 2, 3, "kill:5:1"]
    result = run_command([*LAUNCH, *words], timeout=150.0)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("resuming from the memory of the machine, step 4;") == 1
    assert [len(list(folder.glob("resumed.*"))) for folder in (whole, lost)] == [1, 2]
    assert (whole / "digest").read_text() == (lost / "digest").read_text()


def test_a_lost_machine_leaves_copies_and_the_other_one_goes_on(tmp_path: Path) -> None:
    command = [*LAUNCH, "--num_machines", "1:2", "--max_restarts", 1, "--timeout", 5]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    command += ["--rdzv_conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2", "--machine_rank"]
    words = [Path(__file__).with_name("lost_ranks.py"), tmp_path, 12, 2, 3, "machine:5:1"]
    with ExitStack() as stack:
        machines = [
            stack.enter_context(running_command([*map(str, [*command, rank, *words])], cwd=tmp_path)) for rank in (0, 1)
        ]
        first, second = (machine.wait(90) for machine in machines)
    assert (first.returncode, second.returncode) == (0, -signal.SIGKILL), first.stderr
    assert first.stderr.count("resuming from the memory of the machine, step 4; there is no other") == 1
    assert (tmp_path / "resumed.1").read_text().split()[1] == "4"
    assert (tmp_path / "digest").exists()
