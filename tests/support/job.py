"""Complete programs in fresh processes: for tests that a pool cannot run, such as a job that must end by itself.

Output goes to files, so that a program that prints much does not block on its reader. A job that exceeds its limit is
killed with all its descendant processes.
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

FACADE = ("tests.support.facade",)  # `imports` of ranks that install the facade before they import transformers
Parameter = TypeVar("Parameter", bound=Hashable)
Result = TypeVar("Result")


@dataclass(frozen=True)
class JobResult:
    """Result of a job.

    Attributes:
        returncodes: exit code of each process, negative for a signal.
        stdout, stderr: output of the processes, concatenated in the order of their ranks.
        seconds: from the start of the last process to the end of all processes.
    """

    returncodes: tuple[int, ...]
    stdout: str
    stderr: str
    seconds: float

    @property
    def returncode(self) -> int:
        """Exit code of the first process that failed, 0 if no process failed."""
        return next((code for code in self.returncodes if code), 0)


class JobTimeout(Exception):
    """A job exceeded its limit and was killed. `result` holds its output."""

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
        timeout: limit in seconds of a quiet machine, after which the job is killed.
        env: variables set in addition to those of a rank.
        cwd: working folder.
        fresh: True if each rank must be a new interpreter instead of a fork (`tests/support/processes.py`).
        imports: modules that are already imported when the ranks start.

    Raises:
        JobTimeout: the job exceeded the limit.
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
    """Runs one command outside any job, as from a shell; the arguments are those of `run_job`."""
    return _run([str(word) for word in argv], [outside_any_job() | dict(env or {})], timeout, cwd, fresh, ())


class RunningJob:
    """Processes of a job that the test can signal and kill; they end with the context of `running_command`.

    Attributes:
        processes: one per rank, or the only one.
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
        """Returns the stderr output of the first process so far."""
        return Path(self._folder, "0.err").read_text(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def wait(self, timeout: float = 40.0) -> JobResult:
        """Waits for the job to end, at most `timeout` seconds of a quiet machine, and returns its result.

        Raises:
            JobTimeout: the job exceeded the limit and was killed.
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
    argv: Sequence[object], env: Mapping[str, str] | None = None, cwd: Path = ROOT, *, fresh: bool = False
) -> Iterator[RunningJob]:
    """Starts the command that `run_command` would run."""
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        job = RunningJob([str(word) for word in argv], [outside_any_job() | dict(env or {})], cwd, fresh, folder)
        try:
            yield job
        finally:
            job.kill()


@contextmanager
def side_by_side(
    request: pytest.FixtureRequest, name: str, run: Callable[[Parameter], Result], at_a_time: int = 2
) -> Iterator[Callable[[Parameter], Result]]:
    """Starts `run` for each value of the parameter `name` in the module's tests; yields a call that waits for a result.

    For jobs that spend their time starting and waiting. Tests that this session deselects start no job.
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
    # By descent, not by process group: a launcher starts each of its workers in a session of its own.
    if process.poll() is None:
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        process.kill()


def _joined(folder: str, suffix: str) -> str:
    files = sorted(Path(folder).glob(f"*.{suffix}"), key=lambda path: int(path.stem))
    return "".join(path.read_text(errors="replace") for path in files)
