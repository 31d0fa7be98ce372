"""Inspects the processes of the other ranks through the operating system: is a silent rank stopped, gone or stuck?

Only processes on this machine are visible. `topology.py` makes it from data that the ranks exchange at the start, and
`watchdog.py` queries it when a rank does not answer. It does not communicate.
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
    """Identifies the process of a rank.

    Attributes:
        host: name of the machine, for messages.
        machine: equal for two processes if and only if each can see the other by its pid; "" if that is unknown.
    """

    host: str
    machine: str
    pid: int


def own_process() -> PeerProcess:
    """Returns the identity of this process, for its peers."""
    machine = ""
    with suppress(OSError):  # /proc exists only on Linux
        # Containers on one machine see each other only if they share these namespaces.
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        machine = " ".join([_BOOT_ID.read_text().strip(), *spaces])
    return PeerProcess(socket.gethostname(), machine, os.getpid())


class PeerProcesses:
    """The processes of the other ranks.

    Args:
        rank: this rank.
        processes: of all ranks, running now: psutil stores their start times, so that it detects a reused pid.
        signals: True if `wake_and_end` may send signals; False if the launcher wakes stopped ranks.
    """

    def __init__(self, rank: int, processes: Mapping[int, PeerProcess], *, signals: bool) -> None:
        self._signals = signals
        this_rank = processes[rank]
        self._hosts = {other: process.host for other, process in processes.items() if process.host != this_rank.host}
        self._processes: dict[int, psutil.Process] = {}
        for other, process in processes.items():
            if other != rank and process.machine and process.machine == this_rank.machine:
                with suppress(psutil.Error):
                    self._processes[other] = psutil.Process(process.pid)

    def status(self, rank: int) -> ProcessStatus:
        """Returns the state of a rank's process."""
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
        """True if a rank is stopped or gone, so that it cannot answer."""
        return self.status(rank).state in ("stopped", "gone")

    def any_stopped(self) -> bool:
        """True if `wake_and_end` would end a rank."""
        return self._signals and any(self.status(rank).state == "stopped" for rank in self._processes)

    def wake_and_end(self) -> bool:
        """Ends the ranks of this machine that are stopped; returns True if there were any.

        Sends SIGTERM and SIGCONT; without the latter a stopped process handles no signal except SIGKILL. If a rank
        handles SIGTERM itself, it is awake afterwards, and its own watchdog ends it.
        """
        stopped = [rank for rank in self._processes if self._signals and self.status(rank).state == "stopped"]
        for rank in stopped:
            for number in (signal.SIGTERM, signal.SIGCONT):
                with suppress(psutil.Error):
                    self._processes[rank].send_signal(number)
        return bool(stopped)
