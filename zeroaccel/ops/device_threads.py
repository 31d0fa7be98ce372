"""Starts the package's threads, each on the device of its work. No other module starts threads.

The current CUDA device of a new thread is number 0, whichever device its parent uses. Leaving `torch.cuda.stream()`
selects device 0 again, and calls without a tensor use it: CUDA then creates a context of about half a GiB on GPU 0 for
each rank of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread

import torch

CPU = torch.device("cpu")


def start_thread(run: Callable[[], object], name: str, device: torch.device, *, daemon: bool = False) -> Thread:
    """Starts a thread that selects `device` and then calls `run`."""
    thread = Thread(target=partial(_begin, device, run), name=name, daemon=daemon)
    thread.start()
    return thread


def executor(workers: int, name: str, device: torch.device) -> ThreadPoolExecutor:
    """Returns an executor whose threads have `device` as their current device."""
    return ThreadPoolExecutor(workers, name, initializer=partial(_select, device))


def _begin(device: torch.device, run: Callable[[], object]) -> None:
    _select(device)
    run()


def _select(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
