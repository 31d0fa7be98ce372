"""Two simulated machines on this one: loopback addresses, reached by a program with ssh's arguments."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests import time_limits
from tests.support.environment import free_port
from tests.support.job import JobResult, RunningJob, run_command, running_command

HOSTS = ("127.0.0.1", "127.0.0.2")

# Like ssh: runs the command in a shell, in another folder, without our HF_SECRET; the host 127.0.0.9 is down.
_SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
if [ "$2" = "127.0.0.9" ]; then echo "connect to host $2: refused" >&2; exit 255; fi
cd / && exec env -u HF_SECRET sh -c "$3"
"""


def write_script(folder: Path, source: str) -> Path:
    path = folder / "train.py"
    path.write_text(source)
    return path


def run_machines(commands: Sequence[Sequence[object]], folder: Path, most_seconds: float) -> list[JobResult]:
    """Runs one command per machine at the same time; returns their results."""
    with ExitStack() as stack:
        machines = [stack.enter_context(running_command([*map(str, one)], cwd=folder)) for one in commands]
        return [machine.wait(most_seconds) for machine in machines]


def hostfile_flags(folder: Path, hosts: Sequence[str] = HOSTS, slots: int = 1) -> list[object]:
    """Writes a hostfile and the ssh replacement to `folder`; returns the flags of a launch on these hosts."""
    (folder / "hosts").write_text("".join(f"{host} slots={slots}\n" for host in hosts))
    ssh = folder / "ssh"
    ssh.write_text(_SSH)
    ssh.chmod(0o755)
    return ["--hostfile", folder / "hosts", "--main_process_port", free_port()]


def _command(folder: Path, arguments: Sequence[object]) -> list[str]:
    words = [*hostfile_flags(folder), *arguments]
    return [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", *map(str, words)]


def launch(folder: Path, *arguments: object, env: Mapping[str, str] | None = None) -> JobResult:
    """Runs `zeroaccel launch` in `folder`, on both hosts."""
    command = _command(folder, arguments)
    environment = {"ZEROACCEL_SSH": str(folder / "ssh"), **(env or {})}
    return run_command(command, timeout=120.0, env=environment, cwd=folder)


@contextmanager
def launching(folder: Path, *arguments: object) -> Iterator[RunningJob]:
    """Yields the same launch while it runs; ends it with SIGTERM if it is still running."""
    environment = {"ZEROACCEL_SSH": str(folder / "ssh")}
    with running_command(_command(folder, arguments), env=environment, cwd=folder) as job:
        try:
            yield job
        finally:
            if not job.has_ended():
                job.send_signal(signal.SIGTERM)
                job.wait()


def files_of(folder: Path, names: Sequence[str], seconds: float = 60.0) -> list[int]:
    """Waits for the files in which the ranks write their process ids; returns the ids."""
    files = [folder / name for name in names]
    limit = time_limits.Limit(seconds)
    while not all(file.exists() and file.read_text().endswith("\n") for file in files):
        assert not limit.is_over(), f"the ranks did not start: {[file.name for file in files]}"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def alive(pids: Sequence[int], seconds: float = 20.0) -> list[int]:
    """Returns those of the processes that are still alive after a while."""
    limit = time_limits.Limit(seconds)
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        if limit.is_over():
            break
        time.sleep(0.1)
    return left
