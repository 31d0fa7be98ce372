"""How this machine stands in the network: its ports, its names, the names of others. Looks, and changes nothing."""

from __future__ import annotations

import errno
import os
import socket

__all__ = ["is_known_host", "is_own_host", "own_address_towards", "port_trouble"]


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
