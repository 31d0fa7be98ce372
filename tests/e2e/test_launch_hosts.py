"""One job on two simulated machines: started from one place by a hostfile, and by the same command on each.

Ranks import torch only in tests of torch's rendezvous; the launchers' preflight rendezvous always imports it.
"""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from tests import time_limits
from tests.e2e.hosts import HOSTS, alive, files_of, hostfile_flags, launch, launching, run_machines, write_script
from tests.support.environment import free_port
from tests.support.job import running_command
from zeroaccel.cli.main import main

# Rank 1 kills itself once, without a traceback; the ranks print their environment and arguments.
DIE_ONCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 1 and not os.path.exists("died"):
    open("died", "w").close()
    os.kill(os.getpid(), 9)
dist.all_reduce(total)
print(dist.get_rank(), total.item(), sys.argv[1:], repr(sys.stdin.read()), os.getcwd(),
      [os.environ.get(name) for name in ("HF_THING", "HF_SECRET", "OTHER_THING")], flush=True)
dist.destroy_process_group()
"""
WAIT = """
import os, time
open(os.environ["RANK"], "w").write(f"{os.getpid()}\\n")
time.sleep(600)
"""
FAIL = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("no labels")
time.sleep(600)
"""
FAIL_ON_DEMAND = """
import os, time
open(os.environ["RANK"], "w").write(f"{os.getpid()}\\n")
while not os.path.exists("fail"):
    time.sleep(0.05)
if os.environ["RANK"] == "0":
    raise ValueError("no labels")
time.sleep(600)
"""
# Fails like a collective when the process on the other machine has ended.
LOSE = """
import os, time
size, place = os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"]
open(f"{size}{place}", "w").write(f"{os.getpid()}\\n")
while size == "2":
    time.sleep(0.1)
    if place == "0" and os.path.exists("21") and (pid := open("21").read()):
        os.kill(int(pid), 0)
"""


def test_a_rank_is_killed_and_the_job_from_a_hostfile_completes(tmp_path: Path) -> None:
    words = ["a 'b' \"c\"", "$HOME", "--x=;ls", "\\"]
    variables = {"HF_THING": "x; echo 'y'", "HF_SECRET": "s", "OTHER_THING": "o"}
    result = launch(tmp_path, "--max_restarts", 1, write_script(tmp_path, DIE_ONCE), *words, env=variables)
    assert result.returncode == 0, result.stderr
    # The launcher passes HF_* variables on; the other machine has OTHER_THING itself.
    given = ["x; echo 'y'", "s", "o"]
    assert sorted(result.stdout.splitlines()) == [
        f"[{host}] {rank} 4.0 {words} '' {tmp_path} {given}" for rank, host in enumerate(HOSTS)
    ]
    assert "zeroaccel: 127.0.0.2: machine 1 of 2: 1 of 2 processes on cpu" in result.stderr


def test_the_failure_is_reported_last_and_once_with_its_host(tmp_path: Path) -> None:
    result = launch(tmp_path, write_script(tmp_path, FAIL))
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    lines = result.stderr.splitlines()
    first = next(index for index, line in enumerate(lines) if "failed first" in line)
    assert lines[first].startswith("zeroaccel: rank 1 (host 127.0.0.2, pid ")
    assert lines[-1] == "ValueError: no labels"


def test_a_c10d_job_is_started_on_each_machine(tmp_path: Path) -> None:
    script = write_script(tmp_path, DIE_ONCE)
    port = str(free_port())
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_machines", 2, "--num_processes", 2]
    command += ["--main_process_ip", HOSTS[0], "--main_process_port", port, "--rdzv_backend", "c10d"]
    command += ["--max_restarts", 1, "--machine_rank"]
    results = run_machines([[*command, rank, script] for rank in range(2)], tmp_path, 90)
    assert [result.returncode for result in results] == [0, 0], results
    assert sorted(result.stdout.split(" [")[0] for result in results) == [f"{rank} 4.0" for rank in range(2)]


@pytest.mark.slow
def test_a_lost_machine_of_an_elastic_job(tmp_path: Path) -> None:
    # Two machines where one is enough: the test kills one with all its processes, and the other continues.
    script = write_script(tmp_path, LOSE)
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu"]
    command += ["--num_machines", "1:2", "--num_processes", "2", "--max_restarts", "1"]
    command += ["--main_process_ip", HOSTS[0], "--main_process_port", str(free_port())]
    command += ["--rdzv_conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"]
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(running_command([*command, "--machine_rank", rank, script], cwd=tmp_path))
            for rank in range(2)
        )
        files_of(tmp_path, ["20", "21"])
        second.kill()
        assert first.wait(60).returncode == 0
        assert (tmp_path / "10").exists()


def test_a_signal_reaches_every_rank(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGKILL)
    folders = [tmp_path / number.name for number in numbers]
    for folder in folders:
        folder.mkdir()
    one, other = (launching(folder, write_script(folder, WAIT)) for folder in folders)
    with one as interrupted, other as killed:  # at the same time: they mostly wait
        pids = [files_of(folder, ["0", "1"]) for folder in folders]
        for launcher, number in zip((interrupted, killed), numbers, strict=True):
            launcher.send_signal(number)
        result = interrupted.wait()
        assert [alive(ranks) for ranks in pids] == [[], []]
    assert result.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT; all machines have ended" in result.stderr


def test_a_machine_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with launching(tmp_path, write_script(tmp_path, FAIL_ON_DEMAND)) as launcher:
        _, rank = files_of(tmp_path, ["0", "1"])
        node = psutil.Process(rank).parent()
        assert node is not None
        try:
            node.suspend()  # simulates a network without a route to that machine
            (tmp_path / "fail").touch()
            result = launcher.wait(60)
            assert result.seconds < time_limits.seconds(15.0)
        finally:
            node.kill()
            psutil.Process(rank).kill()
    assert result.returncode == 1
    assert "127.0.0.2: no answer within 4 s; the network there is cut, or the machine is down." in result.stderr
    assert "127.0.0.2: ended with the job" not in result.stderr
    assert result.stderr.endswith("ValueError: no labels\n")


def _here(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object, **layout: object) -> Result:
    """Runs the same command in this process, for launches that start no rank."""
    monkeypatch.chdir(folder)
    flags = hostfile_flags(folder, **layout)  # type: ignore[arg-type]
    environment = {"ZEROACCEL_SSH": str(folder / "ssh")}
    return CliRunner().invoke(main, ["launch", "--cpu", *map(str, [*flags, *arguments])], env=environment)


@pytest.mark.parametrize(
    ("hosts", "arguments", "code", "message"),
    [
        (["127.0.0.1", "no.such.host.example"], [], 2, "hosts: unknown host no.such.host.example; check the name"),
        (HOSTS, ["--num_processes", "3"], 2, "--num_processes: expected a multiple of the 2 machines of the hostfile"),
        (HOSTS, ["--num_processes", "4"], 2, "--num_processes: expected at most 2, as the hostfile has slots=1, got 4"),
        (HOSTS, ["--inclusion_filter", "node1"], 2, "--inclusion_filter: expected machines of the hostfile"),
        (["127.0.0.1", "127.0.0.9"], [], 1, "127.0.0.9: ssh could not start anything there"),
    ],
)
def test_mistakes_start_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[str], arguments: list[str], code: int, message: str
) -> None:
    result = _here(tmp_path, monkeypatch, *arguments, write_script(tmp_path, WAIT), hosts=hosts)
    assert result.exit_code == code
    assert message in result.stderr.splitlines()[-1]
    assert not (tmp_path / "0").exists()


def test_a_script_that_is_not_there_is_reported_once(tmp_path: Path) -> None:
    result = launch(tmp_path, "nothing.py")
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert "there is no such script in" in last
    assert result.stderr.count("there is no such script") == 1


def test_the_dry_run_shows_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SECRET", "secret")
    result = _here(tmp_path, monkeypatch, "--dry_run", write_script(tmp_path, WAIT), "a b", slots=2)
    assert result.exit_code == 0, result.stderr
    assert [line.split(",")[0] for line in result.stdout.splitlines() if line.startswith("# on")] == [
        f"# on {host}" for host in HOSTS
    ]
    for rank in range(4):
        assert f"RANK={rank} " in result.stdout
    assert result.stdout.count("'a b'") == 4
    assert "secret" not in result.stdout
