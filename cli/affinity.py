"""Which cores each process of this machine keeps for itself: runs of neighbours, no run wider than it must be.

Asked by `plan` when cores are to be divided; `runner` binds its process to the answer. Looks at the machine's topology
where the system shows it, and changes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from zeroaccel.errors import ConfigError

__all__ = ["divide_cores", "neighbouring_cores"]


def divide_cores(cores: list[int], num_local: int) -> tuple[str, ...]:
    """Divides cores evenly into one run per process, written as a list of numbers with commas.

    Args:
        cores: numbers of cores, neighbours beside each other.

    Raises:
        ConfigError: there are fewer cores than processes.
    """
    share = len(cores) // num_local
    if not share:
        expected = f"at most {len(cores)} processes, one for each core"
        raise ConfigError("--enable_cpu_affinity", expected=expected, got=num_local, fix="leave it out")
    return tuple(",".join(map(str, sorted(cores[rank * share : (rank + 1) * share]))) for rank in range(num_local))


def neighbouring_cores(topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """The cores this process may use, those of one package together, and hardware threads of one core side by side."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("--enable_cpu_affinity: this system does not bind processes to cores", fix="leave it out")

    def place(core: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{core}" / "topology"
        try:
            return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), core
        except (OSError, ValueError):  # a container that does not show them; numbers are neighbours then
            return 0, core, core

    return sorted(os.sched_getaffinity(0), key=place)
