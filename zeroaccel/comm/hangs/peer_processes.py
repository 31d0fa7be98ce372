"""The processes of the other ranks as the operating system shows them: whether a silent rank is stopped, gone or stuck.

Only those on this machine can be seen. `topology.py` makes it from what the ranks exchange at the start, and
`watchdog.py` asks it once a rank does not answer. It does not communicate.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from zeroaccel.comm.hangs.hang_report import ProcessStatus

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeerProcess(NamedTuple):
    """Which process a rank is.

    Attributes:
        host: the machine's name, for messages.
        machine: the same for two processes if and only if one can see the other by its pid; "" where that is unknown.
    """

    host: str
    machine: str
    pid: int


def own_process() -> PeerProcess:
    """This process, as its peers are to know it."""
    machine = ""
    with suppress(OSError):  # there is no /proc but on Linux
        # Containers of one machine see each other only where they share these; a network of their own is another host.
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        machine = " ".join([_BOOT_ID.read_text().strip(), *spaces])
    return PeerProcess(socket.gethostname(), machine, os.getpid())


class PeerProcesses:
    """The other ranks' processes.

    Args:
        rank: this one.
        processes: of all ranks, alive now: psutil remembers their start, so that a pid used again is noticed.
        signals: whether `wake_and_end` does anything; False where a launcher does that.
    """

    def __init__(self, rank: int, processes: Mapping[int, PeerProcess], *, signals: bool) -> None:
        self._signals = signals
        own = processes[rank]
        self._hosts = {other: process.host for other, process in processes.items() if process.host != own.host}
        self._processes: dict[int, psutil.Process] = {}
        for other, process in processes.items():
            if other != rank and process.machine and process.machine == own.machine:
                with suppress(psutil.Error):
                    self._processes[other] = psutil.Process(process.pid)

    def status(self, rank: int) -> ProcessStatus:
        """What the operating system shows of a rank."""
        process = self._processes.get(rank)
        if process is None:
            return ProcessStatus("unseen", self._hosts.get(rank, ""))
        who = f"pid {process.pid}"
        try:
            if not process.is_running():
                return ProcessStatus("gone", who)
            status = process.status()
        except psutil.NoSuchProcess:
            return ProcessStatus("gone", who)
        except psutil.Error:
            return ProcessStatus("unseen", "")
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return ProcessStatus("stopped", who)
        return ProcessStatus("gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else "running", who)

    def cannot_answer(self, rank: int) -> bool:
        """Whether a rank is stopped or gone, so that waiting for its answer is in vain."""
        return self.status(rank).state in ("stopped", "gone")

    def any_stopped(self) -> bool:
        """Whether `wake_and_end` has something to do."""
        return self._signals and any(self.status(rank).state == "stopped" for rank in self._processes)

    def wake_and_end(self) -> bool:
        """Ends the ranks of this machine that are stopped, and returns whether there were any.

        SIGTERM and SIGCONT, without which a stopped process handles no signal but SIGKILL. A rank that handles SIGTERM
        in its own way is awake then, and its own watchdog ends it.
        """
        stopped = [rank for rank in self._processes if self._signals and self.status(rank).state == "stopped"]
        for rank in stopped:
            for number in (signal.SIGTERM, signal.SIGCONT):
                with suppress(psutil.Error):
                    self._processes[rank].send_signal(number)
        return bool(stopped)
