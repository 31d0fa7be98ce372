"""Makes torch's elastic agent start ranks as forks of a process that has run their first imports (`fork_server`).

This is for jobs that may restart: most of a start is the import of torch and of the script's libraries, which a fork
does not repeat. If forks cannot replace new interpreters, the ranks are new interpreters, and a line gives the reason.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from .launch_plan import LaunchPlan

_PR_SET_CHILD_SUBREAPER = 36
_END_SECONDS = 5.0


class ForkedProcess:
    """A child of this process that `subprocess` has not started, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another part of this process has waited for it
                self.returncode = -signal.SIGKILL
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code


class ForkServer:
    """This end of a `fork_server`, which starts at once and imports while the machines meet.

    Args:
        words: words of the program for `runner`.
        environment: variables that all ranks have in common.
    """

    def __init__(self, words: list[str], environment: Mapping[str, str], log: Callable[[str], None]) -> None:
        self._log = log
        self._is_ready: bool | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = str(Path(__file__).with_name("fork_server.py"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", program, str(theirs.fileno()), *words],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # Waits at all times: without a wait, `ProcessWatch` would take the ended child for a rank.
        threading.Thread(target=self._process.wait, daemon=True).start()

    def start(
        self, environment: Mapping[str, str], stdout: IO[str] | None, stderr: IO[str] | None
    ) -> ForkedProcess | None:
        """Starts a rank. Returns None if it cannot, and then for all later ranks.

        Args:
            stdout, stderr: None for the streams of this process.
        """
        if self._is_ready is None:
            self._is_ready = self._has_become_ready()
        if not self._is_ready:
            return None
        files = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        try:
            with _adopting_orphans():
                socket.send_fds(self._control, [json.dumps(dict(environment)).encode()], files)
                answer = self._control.recv(64)
        except OSError as error:
            answer = str(error).encode()
        if answer.isdigit():
            return ForkedProcess(int(answer))
        self._give_up(answer.decode() or f"{self._process.args!r} has ended")
        return None

    def close(self) -> None:
        """Ends the server, but no rank."""
        self._control.close()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def _has_become_ready(self) -> bool:
        answer = self._control.recv(1024).decode()
        if answer != "ready":
            self._give_up(answer or "an import of the script ends the process")
        return answer == "ready"

    def _give_up(self, why: str) -> None:
        self._is_ready = False
        self._log(f"the ranks start as new interpreters, which takes longer: {why}")


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Makes descendants whose parents end during the block children of this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def ranks_are_forks(plan: LaunchPlan, environment: Mapping[str, str], log: Callable[[str], None]) -> Iterator[None]:
    """Lets the agent fork Python programs on Linux if the job may restart.

    Args:
        environment: variables that the launcher adds for the ranks.
    """
    if not plan.settings.max_restarts or plan.program.kind == "executable" or sys.platform != "linux":
        yield
        return
    words = list(plan.command[plan.command.index("-u") + 2 :])
    server = ForkServer(words, {**os.environ, **plan.environment, **environment}, log)
    popen = SubprocessHandler._popen

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return server.start(env, handler._stdout, handler._stderr) or popen(handler, args, env)

    SubprocessHandler._popen = start  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        SubprocessHandler._popen = popen  # type: ignore[method-assign]
        server.close()
