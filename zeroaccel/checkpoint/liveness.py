"""Whether the process of another rank is still there, for a save that waits for its file.

Known only of processes on this machine and in this container; of others nothing is said. No torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["RankProcess"]


@dataclass(frozen=True)
class RankProcess:
    """A process, as others can look for it; made in it, by `own`.

    Attributes:
        machine: equal for processes that see each other's numbers.
        pid, began: together nobody else's.
    """

    machine: str
    pid: int
    began: float

    @classmethod
    def own(cls) -> RankProcess:
        """Of this process."""
        return cls(_machine(), os.getpid(), psutil.Process().create_time())

    def is_gone(self) -> bool:
        """True if it has ended for certain."""
        if self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.create_time() != self.began or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.getpid()}"  # nobody else's: processes do not find each other here
