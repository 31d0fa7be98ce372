"""Cores of this machine: those a process may use, and its part where several processes share them. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["core_set", "fair_threads", "usable_cores"]


def core_set() -> frozenset[int]:
    """The numbers of the cores this process may run on, as far as the system tells; else of all."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many cores this process may use, at least 1: its affinity, and below that the quota of its container."""
    cores = len(core_set())
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def fair_threads(usable: int, own: frozenset[int], local: Iterable[frozenset[int]]) -> int:
    """The threads of one process among those of its machine, so that together they are as many as cores.

    Processes that are bound to cores of their own do not share them, and are not divided by again.

    Args:
        usable: `usable_cores` of this process.
        own: its `core_set`.
        local: those of all processes of the job on this machine, itself included.
    """
    sharing = sum(bool(own & other) for other in local)
    return max(1, usable // max(1, sharing))
