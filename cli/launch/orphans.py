"""Processes that torch's elastic agent does not see or does not end: orphans of a job, stopped ranks, lost stores.

`end_orphans` finds processes that ranks have started by an inherited variable, which survives a new session and the
death of a parent. `ProcessWatch` supplements the agent, which waits for processes to end: a rank that is stopped
(SIGSTOP) never does. And with `c10d` the agent asks the store every second; if the store no longer answers, the agent
checks no process until the kernel closes the connection, a quarter of an hour after the network was cut.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import psutil

LAUNCH_ID = "ZEROACCEL_LAUNCH_ID"
"""Variable that marks the processes of a launch; its value is different for each launch."""


def end_orphans(launch_id: str, grace_seconds: float = 3.0) -> int:
    """Ends the processes of a launch by SIGTERM, and by SIGKILL those that stay. Returns their number."""
    orphans = list(_marked(launch_id))
    for process in orphans:
        _signal(process, kill=False)
    _, alive = psutil.wait_procs(orphans, timeout=grace_seconds)
    for process in alive:
        _signal(process, kill=True)
    psutil.wait_procs(alive, timeout=grace_seconds)
    return len(orphans)


def wake_stopped(processes: Iterable[psutil.Process], number: int) -> None:
    """Sends a signal to those processes that are stopped (SIGSTOP), and wakes them so that they receive it."""
    for process in processes:
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)


def _marked(launch_id: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(LAUNCH_ID) == launch_id:
                yield process
        except psutil.Error:  # it has ended, or belongs to another user
            continue


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            process.kill()
        else:
            process.terminate()
            wake_stopped([process], signal.SIGTERM)
    except psutil.NoSuchProcess:
        pass


_MOST_FILES = 1 << 16
_LOOK_SECONDS = 0.5
_OTHERS_SECONDS = 6.0  # after the limit, for the other ranks' hang report
_BLIND_SECONDS = 4.0  # for the agent to notice an ended process; it checks ten times a second


@contextmanager
def ended_with_the_launcher(launch_id: str, grace_seconds: float) -> Iterator[None]:
    """Ends the processes of a launch if the launcher is killed during the block, and so cannot end them itself.

    The kernel sends SIGTERM to the ranks at the launcher's death; they may ignore it, or save their state for too long.
    A small process, a fork of the launcher, waits for this, and ends those that remain after the grace time.
    """
    launcher = os.getpid()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, whose locks the fork does not use
        between = os.fork()
    if not between:
        try:
            _guard(launcher, reader, launch_id, grace_seconds)
        finally:
            os._exit(0)
    os.waitpid(between, 0)
    os.close(reader)
    try:
        yield
    finally:
        with suppress(OSError):
            os.write(writer, b".")
        os.close(writer)


def _guard(launcher: int, reader: int, launch_id: str, grace_seconds: float) -> None:
    os.setsid()
    if os.fork():  # not a child of the launcher, which watches its children
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(nothing, target)
    os.closerange(3, reader)
    os.closerange(reader + 1, _MOST_FILES)
    if not _says_that_it_ends(launcher, reader):
        end_orphans(launch_id, grace_seconds)


def _says_that_it_ends(launcher: int, reader: int) -> bool:
    """Waits for the launcher. Returns True if it writes to the pipe, False if it dies before."""
    ends: list[int] = [reader]
    try:
        if sys.platform == "linux":
            ends.append(os.pidfd_open(launcher))  # because other forks of the launcher may keep the pipe open
    except ProcessLookupError:
        return False
    except OSError:  # an old kernel
        pass
    select.select(ends, [], [])
    return bool(select.select([reader], [], [], 0)[0] and os.read(reader, 1))


class ProcessWatch:
    """Watches the child processes of this process, from `__enter__` to `__exit__`.

    Args:
        limit: seconds that a collective may wait, `math.inf` for no limit. The watch wakes and ends a process that is
            stopped for this time and a few seconds more, which the other ranks need.
        port: port of the store on the main machine. The watch breaks connections to it if the thread of the agent does
            not notice the end of a process for some seconds.
        monitor_interval: interval in seconds at which the agent checks its processes.
        log: prints a line for the user.
    """

    def __init__(self, limit: float, port: int, monitor_interval: float, log: Callable[[str], None]) -> None:
        self._limit = limit
        self._port = port
        self._blind_seconds = _BLIND_SECONDS + 2 * monitor_interval
        self._log = log
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zeroaccel-process-watch", daemon=True)
        self._stopped: dict[psutil.Process, float] = {}  # seconds for which each has been stopped
        self._ended: dict[psutil.Process, float] = {}  # seconds for which the agent has not noticed its end

    def __enter__(self) -> ProcessWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        launcher = psutil.Process()
        while not self._over.wait(_LOOK_SECONDS):
            with suppress(psutil.Error):
                self._look(launcher.children())

    def _look(self, children: list[psutil.Process]) -> None:
        states = {child: _status(child) for child in children}
        # Counts checks instead of reading the clock: a launcher that was itself stopped has checked nothing.
        self._stopped = _counted(self._stopped, [child for child in children if states[child] == psutil.STATUS_STOPPED])
        self._ended = _counted(self._ended, [child for child in children if states[child] == psutil.STATUS_ZOMBIE])
        for child, seconds in self._stopped.items():
            if seconds > self._limit + _OTHERS_SECONDS:
                self._log(
                    f"the process {child.pid} has been stopped (SIGSTOP) for {seconds:.0f} s (the limit is "
                    f"{self._limit:g} s); the launcher wakes and ends it"
                )
                wake_stopped([child], signal.SIGTERM)
        if max(self._ended.values(), default=0.0) > self._blind_seconds:
            self._ended = {}
            if break_connections(self._port):
                self._log(f"the rendezvous store at port {self._port} has not answered since a process ended")


def _counted(before: dict[psutil.Process, float], now: list[psutil.Process]) -> dict[psutil.Process, float]:
    return {process: before.get(process, 0.0) + _LOOK_SECONDS for process in now}


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.Error:
        return "gone"


def break_connections(port: int) -> int:
    """Breaks this process's TCP connections to a port of any machine, so threads that wait for an answer fail.

    Returns:
        Number of connections; 0 if the system does not show a process its files.
    """
    broken = 0
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        with suppress(OSError):
            copy = os.dup(int(name))
            try:
                connection = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with connection:
                if connection.type == socket.SOCK_STREAM and connection.getpeername()[1:2] == (port,):
                    connection.shutdown(socket.SHUT_RDWR)
                    broken += 1
    return broken
