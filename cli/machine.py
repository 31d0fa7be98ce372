"""What this machine offers a launch: cores, accelerators, ports and names. Looks, and changes nothing.

Read by `plan` and `estimate`. What asks for accelerators imports torch, and only when it is called.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import psutil

from zeroaccel.comm.cores import usable_cores

__all__ = [
    "accelerators",
    "device_memory_nbytes",
    "has_bf16",
    "is_known_host",
    "is_own_host",
    "memory_nbytes",
    "own_address_towards",
    "port_trouble",
    "usable_cores",
]


def accelerators() -> int:
    """How many CUDA devices the processes will see; CUDA_VISIBLE_DEVICES counts."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_memory_nbytes() -> int:
    """Memory of the smallest of the CUDA devices that the processes will see; there must be one."""
    import torch

    return min(int(torch.cuda.get_device_properties(i).total_memory) for i in range(torch.cuda.device_count()))


def has_bf16() -> bool:
    """Whether the CUDA devices compute in bf16 themselves; there must be one."""
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def memory_nbytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Memory of this machine, or of the container this process runs in if that has less."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(cgroup.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return total


def port_trouble(port: int) -> str:
    """Why a server of this machine could not listen on `port`; empty when it could."""
    families = [socket.AF_INET, socket.AF_INET6] if socket.has_dualstack_ipv6() else [socket.AF_INET]
    for family in families:
        # create_server sets SO_REUSEADDR as torch's store does: a port whose last job has just ended is free.
        try:
            socket.create_server(("", port), family=family).close()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):  # and not: no IPv6 here
                return os.strerror(error.errno).lower()
    return ""


def is_known_host(host: str) -> bool:
    """Whether `host` is an address or a name that resolves."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def is_own_host(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True


def own_address_towards(host: str) -> str:
    """The address of this machine by which `host` can reach it.

    Its own name would be simpler, but in many containers and clusters that means nothing, or means "localhost".
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing; the kernel only chooses a route
        own: str = probe.getsockname()[0]
        return own
