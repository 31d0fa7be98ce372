"""Processes of the tests: forks of a `fork_server` if a fork can replace a new interpreter, otherwise new interpreters.

A test requests a new interpreter with `fresh` if it tests the interpreter's own start, end or memory.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from tests.support.environment import ROOT, outside_any_job
from tests.support.fork_server import Request, needs_interpreter


class Process(Protocol):
    """Common interface of the two kinds of processes."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def start(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: str | Path,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    passed: Sequence[int] = (),
    fresh: bool = False,
    imports: tuple[str, ...] = (),
) -> Process:
    """Starts a command in a session of its own, with an empty stdin.

    Args:
        stdout, stderr: None for those of this process.
        passed: descriptors that the process inherits.
        fresh: True if it must be a new interpreter.
        imports: modules that should already be imported; a separate server imports them once.
    """
    if fresh or needs_interpreter(words, environment, os.fspath(folder), _server_environment()):
        return subprocess.Popen(
            words,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=passed,
            start_new_session=True,
        )
    with _starting:
        server = _servers.get(imports)
        if server is None or not server.is_alive():
            server = _servers[imports] = _Server(imports)
            atexit.register(server.end)
    with open(os.devnull, "rb") as nothing:
        files = {0: nothing.fileno(), 1: _descriptor(stdout, 1), 2: _descriptor(stderr, 2)}
        files |= {file: file for file in passed}
        cores = sorted(os.sched_getaffinity(0))
        request = Request(list(words), dict(environment), os.fspath(folder), list(files), cores, session=True)
        return server.start(request, list(files.values()))


class _Fork:
    """A process that the server forked, with the interface of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], report: int) -> None:
        self._words = words
        self._report = os.fdopen(report)
        self.pid = int(self._report.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(list(self._words), timeout or 0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its report is on the way
                os.kill(self.pid, number)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout)[0]:
            line = self._report.readline()
            self._report.close()
            if not line:
                raise RuntimeError(f"the fork server has ended before {' '.join(self._words)}")
            self.returncode = int(line)
        return self.returncode


class _Server:
    """A fork server of this process; it ends with this process."""

    def __init__(self, imports: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *imports],
                env=_server_environment(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        if self._control.recv(16) != b"ready":
            raise RuntimeError(f"the fork server has not started: exit code {self._process.wait()}")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, request: Request, files: Sequence[int]) -> _Fork:
        report, theirs = os.pipe()
        try:
            socket.send_fds(self._control, [pickle.dumps(request)], [theirs, *files])
        finally:
            os.close(theirs)
        return _Fork(request.words, report)

    def end(self) -> None:
        self._control.close()
        self._process.wait()


_servers: dict[tuple[str, ...], _Server] = {}  # one for each set of modules imported beyond torch and the package
_starting = threading.Lock()


def _server_environment() -> dict[str, str]:
    return outside_any_job()


def _descriptor(file: IO[bytes] | int | None, default: int) -> int:
    if file is None:
        return default
    return file if isinstance(file, int) else file.fileno()
