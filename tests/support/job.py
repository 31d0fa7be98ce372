"""Complete programs in fresh processes: for what a pool cannot show, such as a job that has to end by itself.

Output goes to files, so that a program that prints much never waits for its reader. A job that outlives its limit is
killed, and with it every process descended from it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from tests import time_limits
from tests.support.environment import ROOT, free_port, outside_any_job, rank_environment
from tests.support.processes import Process, start

Parameter = TypeVar("Parameter", bound=Hashable)
Result = TypeVar("Result")


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
    imports: tuple[str, ...] = (),
) -> JobResult:
    """Runs a Python script as ranks 0 ... `nproc` - 1 of one job and waits for all of them.

    Args:
        timeout: seconds of a quiet machine after which the job is killed.
        env: variables set on top of those of a rank.
        cwd: the folder it runs in.
        fresh: whether each rank has to be a new interpreter, rather than a fork of one (`tests/support/processes.py`).
        imports: modules that the ranks have imported when they start.

    Raises:
        JobTimeout: the job had not ended by itself.
    """
    port = free_port()
    command = [sys.executable, os.fspath(script_path), *map(str, args)]
    environments = [rank_environment(rank, nproc, port) | dict(env or {}) for rank in range(nproc)]
    return _run(command, environments, timeout, cwd, fresh, imports)


def run_command(
    argv: Sequence[object],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    fresh: bool = False,
) -> JobResult:
    """Runs one command outside any job, as a person at a shell would; arguments as in `run_job`."""
    return _run([str(word) for word in argv], [outside_any_job() | dict(env or {})], timeout, cwd, fresh, ())


class RunningJob:
    """The processes of a job that its test acts upon; they end with the context of `running_command`.

    Attributes:
        processes: by rank, or the only one.
    """

    def __init__(
        self,
        command: list[str],
        environments: list[dict[str, str]],
        cwd: Path,
        fresh: bool,
        folder: str,
        imports: tuple[str, ...] = (),
    ) -> None:
        self._command, self._folder = command, folder
        self.processes: list[Process] = []
        try:
            for rank, environment in enumerate(environments):
                output = Path(folder, str(rank))
                with open(output.with_suffix(".out"), "wb") as out, open(output.with_suffix(".err"), "wb") as err:
                    self.processes.append(start(command, environment, cwd, out, err, fresh=fresh, imports=imports))
        except BaseException:
            self.kill()
            raise

    def said(self) -> str:
        """What the first process has written to stderr by now."""
        return Path(self._folder, "0.err").read_text(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def wait(self, timeout: float = 40.0) -> JobResult:
        """What the job leaves behind when it has ended, which takes at most so many seconds of a quiet machine.

        Raises:
            JobTimeout: it had to be killed.
        """
        limit = time_limits.Limit(timeout)
        try:
            timed_out = not _all_ended(self.processes, limit)
        finally:
            self.kill()
        result = JobResult(
            returncodes=tuple(process.wait() for process in self.processes),
            stdout=_joined(self._folder, "out"),
            stderr=_joined(self._folder, "err"),
            seconds=limit.elapsed,
        )
        if timed_out:
            raise JobTimeout(f"{' '.join(self._command)}: killed after {limit.total:g} s", result)
        return result

    def has_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            _kill_tree(process)


@contextmanager
def running_command(
    argv: Sequence[object], env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Iterator[RunningJob]:
    """Starts what `run_command` runs."""
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        job = RunningJob([str(word) for word in argv], [outside_any_job() | dict(env or {})], cwd, False, folder)
        try:
            yield job
        finally:
            job.kill()


@contextmanager
def side_by_side(
    request: pytest.FixtureRequest, name: str, run: Callable[[Parameter], Result], at_a_time: int = 2
) -> Iterator[Callable[[Parameter], Result]]:
    """Starts `run` for each value that the parameter `name` has in the module's tests; gives a call that waits for one.

    For jobs that spend their time starting and waiting. Tests that this session leaves out start nothing.
    """
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    values = dict.fromkeys(item.callspec.params[name] for item in items if name in item.callspec.params)
    with ThreadPoolExecutor(at_a_time) as executor:
        jobs = {value: executor.submit(run, value) for value in values}
        yield lambda value: jobs[value].result()


def _run(
    command: list[str],
    environments: list[dict[str, str]],
    timeout: float,
    cwd: Path,
    fresh: bool,
    imports: tuple[str, ...],
) -> JobResult:
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        return RunningJob(command, environments, cwd, fresh, folder, imports).wait(timeout)


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
