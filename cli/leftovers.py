"""Ending whatever a job leaves running: the processes its processes had started, wherever they have moved since.

They are known by a variable of their environment, which children inherit: neither a new session nor the death of a
parent hides them. Used by `agent` when a job has failed or was interrupted; after a success nothing is ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil

__all__ = ["LAUNCH_ID", "end_leftovers", "wake_stopped"]

LAUNCH_ID = "ZEROACCEL_LAUNCH_ID"
"""The variable; its value is different for each launch."""


def end_leftovers(launch_id: str, grace_seconds: float = 3.0) -> int:
    """Ends the processes of a launch: SIGTERM, and SIGKILL for those that stay. Returns how many there were."""
    leftovers = list(_marked(launch_id))
    for process in leftovers:
        _signal(process, kill=False)
    _, alive = psutil.wait_procs(leftovers, timeout=grace_seconds)
    for process in alive:
        _signal(process, kill=True)
    psutil.wait_procs(alive, timeout=grace_seconds)
    return len(leftovers)


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
        except psutil.Error:  # gone meanwhile, or somebody else's
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
