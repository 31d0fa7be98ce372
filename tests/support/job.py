"""Complete programs in fresh processes: for what a pool cannot show, such as a job that has to end by itself.

Output goes to files, so that a program that prints much never waits for its reader. A job that outlives its limit is
killed, and with it every process descended from it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import time_limits
from tests.support.environment import ROOT, free_port, outside_any_job, rank_environment
from tests.support.processes import Process, start

__all__ = ["JobResult", "JobTimeout", "run_command", "run_job"]


@dataclass(frozen=True)
class JobResult:
    """What a job left behind.

    Attributes:
        returncodes: per process its exit code, negative for a signal.
        stdout, stderr: what the processes printed, one after another in the order of their ranks.
        seconds: from the start of the last process until all had ended.
    """

    returncodes: tuple[int, ...]
    stdout: str
    stderr: str
    seconds: float

    @property
    def returncode(self) -> int:
        """The exit code of the first process that failed, 0 when none did."""
        return next((code for code in self.returncodes if code), 0)


class JobTimeout(Exception):
    """A job had to be killed. `result` holds what it had printed."""

    def __init__(self, headline: str, result: JobResult) -> None:
        self.result = result
        super().__init__(f"{headline}\n--- stdout\n{result.stdout}\n--- stderr\n{result.stderr}")


def run_job(
    nproc: int,
    script_path: str | os.PathLike[str],
    args: Sequence[object] = (),
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    fresh: bool = False,
) -> JobResult:
    """Runs a Python script as ranks 0 ... `nproc` - 1 of one job and waits for all of them.

    Args:
        timeout: seconds of a quiet machine after which the job is killed.
        env: variables set on top of those of a rank.
        cwd: the folder it runs in.
        fresh: whether each rank has to be a new interpreter, rather than a fork of one (`tests/support/processes.py`).

    Raises:
        JobTimeout: the job had not ended by itself.
    """
    port = free_port()
    command = [sys.executable, os.fspath(script_path), *map(str, args)]
    environments = [rank_environment(rank, nproc, port) | dict(env or {}) for rank in range(nproc)]
    return _run(command, environments, timeout, cwd, fresh)


def run_command(
    argv: Sequence[object],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    fresh: bool = False,
) -> JobResult:
    """Runs one command outside any job, as a person at a shell would; arguments as in `run_job`."""
    return _run([str(word) for word in argv], [outside_any_job() | dict(env or {})], timeout, cwd, fresh)


def _run(command: list[str], environments: list[dict[str, str]], timeout: float, cwd: Path, fresh: bool) -> JobResult:
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        processes: list[Process] = []
        try:
            for rank, environment in enumerate(environments):
                output = Path(folder, str(rank))
                with open(output.with_suffix(".out"), "wb") as out, open(output.with_suffix(".err"), "wb") as err:
                    processes.append(start(command, environment, cwd, out, err, fresh=fresh))
            limit = time_limits.Limit(timeout)
            timed_out = not _all_ended(processes, limit)
        finally:
            for process in processes:
                _kill_tree(process)
        result = JobResult(
            returncodes=tuple(process.wait() for process in processes),
            stdout=_joined(folder, "out"),
            stderr=_joined(folder, "err"),
            seconds=limit.elapsed,
        )
    if timed_out:
        raise JobTimeout(f"{' '.join(command)}: killed after {limit.total:g} s", result)
    return result


def _all_ended(processes: list[Process], limit: time_limits.Limit) -> bool:
    for process in processes:
        while process.poll() is None:
            if (left := limit.left()) <= 0:
                return False
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(left)
    return True


def _kill_tree(process: Process) -> None:
    # By descent, not by process group: a launcher gives each of its workers a session of its own.
    if process.poll() is None:
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        process.kill()


def _joined(folder: str, suffix: str) -> str:
    files = sorted(Path(folder).glob(f"*.{suffix}"), key=lambda path: int(path.stem))
    return "".join(path.read_text(errors="replace") for path in files)
