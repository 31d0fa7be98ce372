"""One job on two "machines": started from one place by a hostfile, and by the same command on each."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.hosts import HOSTS, alive, files_of, launch, launching, write_script
from tests.multi.environment import free_port, outside_any_job

MEET = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
"""
# Rank 1 dies once, a death that no traceback explains.
DIE_ONCE = (
    MEET
    + """
if dist.get_rank() == 1 and not os.path.exists("died"):
    open("died", "w").close()
    os.kill(os.getpid(), 9)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} total {total.item():g}", flush=True)
dist.destroy_process_group()
"""
)
WAIT = """
import os, time
open(os.environ["RANK"], "w").write(f"{os.getpid()}\\n")
time.sleep(60)
"""


def test_a_job_from_a_hostfile(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        MEET + "print(dist.get_rank(), total.item(), sys.argv[1:], sys.stdin.read(), os.getcwd(),"
        " os.environ.get('HF_THING'), os.environ.get('HF_SECRET'), os.environ.get('OTHER_THING'))\n"
        "dist.destroy_process_group()\n",
    )
    words = ["a 'b' \"c\"", "$HOME", "--x=;ls", "\\"]
    result = launch(tmp_path, script, *words, env={"HF_THING": "x; echo 'y'", "HF_SECRET": "s", "OTHER_THING": "o"})
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[{host}] {rank} 2.0 {words}  {tmp_path} x; echo 'y' s o" for rank, host in enumerate(HOSTS)
    ]
    assert "zeroaccel: 127.0.0.2: machine 1 of 2: 1 of 2 processes on cpu" in result.stderr


def test_the_failure_is_told_last_and_once_with_its_host(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, MEET + "if dist.get_rank() == 1:\n    raise ValueError('no labels')\ndist.all_reduce(total)\n"
    )
    result = launch(tmp_path, script)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    lines = result.stderr.splitlines()
    first = next(index for index, line in enumerate(lines) if "failed first" in line)
    assert lines[first].startswith("zeroaccel: rank 1 (host 127.0.0.2, pid ")
    assert lines[-1] == "ValueError: no labels"


def test_one_killed_rank_and_the_job_completes(tmp_path: Path) -> None:
    result = launch(tmp_path, "--max_restarts", 1, write_script(tmp_path, DIE_ONCE))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{host}] rank {rank} total 4" for rank, host in enumerate(HOSTS)]


def test_the_same_by_c10d_from_each_machine(tmp_path: Path) -> None:
    script = write_script(tmp_path, DIE_ONCE)
    port = str(free_port())
    launchers = []
    for rank in range(2):
        command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_machines", "2", "--machine_rank"]
        command += [str(rank), "--main_process_ip", HOSTS[0], "--main_process_port", port, "--num_processes", "2"]
        command += ["--rdzv_backend", "c10d", "--max_restarts", "1", str(script)]
        pipe = subprocess.PIPE
        launchers.append(
            subprocess.Popen(command, env=outside_any_job(), stdout=pipe, stderr=pipe, text=True, cwd=tmp_path)
        )
    said = [launcher.communicate(timeout=90) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert sorted(out for out, _ in said) == [f"rank {rank} total 4\n" for rank in range(2)]


@pytest.mark.slow
def test_a_lost_machine_of_an_elastic_job(tmp_path: Path) -> None:
    # Two machines where one is enough: the other is killed with all it runs, and the rest goes on.
    script = write_script(
        tmp_path,
        MEET + "size, place = dist.get_world_size(), os.environ['GROUP_RANK']\n"
        "open(f'{size}{place}', 'w').write(f'{os.getpid()}\\n')\n"
        "if size == 2:\n"
        "    import time\n"
        "    time.sleep(60 if place == '1' else 0)\n"
        "    dist.all_reduce(total)\n"
        "dist.destroy_process_group()\n",
    )
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu"]
    command += ["--num_machines", "1:2", "--num_processes", "2", "--max_restarts", "1"]
    command += ["--main_process_ip", HOSTS[0], "--main_process_port", str(free_port())]
    command += ["--rdzv_conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"]
    env = outside_any_job()
    first, second = (
        subprocess.Popen([*command, "--machine_rank", str(rank), str(script)], env=env, cwd=tmp_path)
        for rank in range(2)
    )
    try:
        files_of(tmp_path, ["20", "21"])
        second.kill()
        assert first.wait(60) == 0
        assert (tmp_path / "10").exists()
    finally:
        for launcher in (first, second):
            if launcher.poll() is None:
                launcher.terminate()
            launcher.wait(30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    with launching(tmp_path, write_script(tmp_path, WAIT)) as launcher:
        pids = files_of(tmp_path, ["0", "1"])
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=40)
    assert alive(pids) == []
    if number != signal.SIGKILL:
        assert launcher.returncode == 128 + number
        assert f"stopped by {number.name}; all machines have ended" in said


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
    tmp_path: Path, hosts: list[str], arguments: list[str], code: int, message: str
) -> None:
    result = launch(tmp_path, *arguments, write_script(tmp_path, WAIT), hosts=hosts)
    assert result.returncode == code
    assert message in result.stderr.splitlines()[-1]
    assert not (tmp_path / "0").exists()


def test_a_script_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    result = launch(tmp_path, "nothing.py")
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert "there is no such script in" in last
    assert result.stderr.count("there is no such script") == 1


def test_the_dry_run_shows_every_machine(tmp_path: Path) -> None:
    result = launch(tmp_path, "--dry_run", write_script(tmp_path, WAIT), "a b", slots=2)
    assert result.returncode == 0, result.stderr
    assert [line.split(",")[0] for line in result.stdout.splitlines() if line.startswith("# on")] == [
        f"# on {host}" for host in HOSTS
    ]
    for rank in range(4):
        assert f"RANK={rank} " in result.stdout
    assert result.stdout.count("'a b'") == 4
    assert json.dumps("secret") not in result.stdout
