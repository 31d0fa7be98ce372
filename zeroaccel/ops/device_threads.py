"""Threads of the package: each begins on the device that its work is for. No other module starts one.

A thread's current CUDA device is number 0, whatever that of the thread which starts it. Leaving `torch.cuda.stream()`
selects it again, and a call that belongs to no tensor goes there: CUDA then makes a context on GPU 0, of about half a
GiB, for each rank of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread

import torch

CPU = torch.device("cpu")


def start_thread(run: Callable[[], object], name: str, device: torch.device, *, daemon: bool = False) -> Thread:
    """Starts a thread that calls `run` once its current device is `device`."""
    thread = Thread(target=partial(_begin, device, run), name=name, daemon=daemon)
    thread.start()
    return thread


def executor(workers: int, name: str, device: torch.device) -> ThreadPoolExecutor:
    """Threads for calls, each with `device` as its current one."""
    return ThreadPoolExecutor(workers, name, initializer=partial(_select, device))


def _begin(device: torch.device, run: Callable[[], object]) -> None:
    _select(device)
    run()


def _select(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
