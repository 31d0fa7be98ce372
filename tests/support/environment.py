"""The environment in which a rank starts: one definition for the pool's ranks and for scripts.

Variables of another job in the surrounding shell (RANK, MASTER_PORT, TORCHELASTIC_...) are removed first.
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
WAIT_LIMIT = "TEST_WAIT_LIMIT"  # timeout of a collective in seconds, once a script has called `begin`
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
    """Returns a TCP port of the loopback interface on which no process listens, and which no connection will receive.

    Systems assign the ports from 32768 on to connections: another process often takes such a port before a job
    listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def outside_any_job() -> dict[str, str]:
    """Returns this process's environment without the variables of any job, with the tree's root on the import path."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _JOB_VARIABLES and not name.startswith(("ACCELERATE_", "TORCHELASTIC_", "ZEROACCEL_"))
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the environment of a CPU rank of a job on this machine: one thread, gloo on the loopback interface."""
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
    """Applies the short timeout from now on, and prints the time. On a busy machine a first step can exceed it."""
    from zeroaccel.comm.topology import current_topology

    current_topology(timeout=float(os.environ[WAIT_LIMIT]))
    print(f"begins {time.time()}", flush=True)
