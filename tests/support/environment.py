"""The environment a rank is started with, in one place for the pool's ranks and for scripts.

What the surrounding shell says of other jobs (RANK, MASTER_PORT, TORCHELASTIC_...) is taken out first.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAIT_LIMIT = "TEST_WAIT_LIMIT"  # seconds that a collective may wait, once a script has called `begin`
_JOB_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


def free_port() -> int:
    """A TCP port of the loopback interface that no process listens on now, and that no connection will be given.

    Systems give connections ports from 32768 on: one of those is often taken before a job has started and listens.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def outside_any_job() -> dict[str, str]:
    """This process's environment without any job's variables, with the root of the tree importable."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _JOB_VARIABLES and not name.startswith(("ACCELERATE_", "TORCHELASTIC_", "ZEROACCEL_"))
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of one CPU rank of a job on this machine, with one thread and gloo on the loopback interface."""
    return outside_any_job() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def begin() -> None:
    """Limits waits from here on, and prints when that was. On a busy machine a first step takes longer than a limit."""
    from zeroaccel.comm.topology import current_topology

    current_topology(timeout=float(os.environ[WAIT_LIMIT]))
    print(f"begins {time.time()}", flush=True)
