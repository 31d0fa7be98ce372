"""Runs a Python program on a machine of `fault_injection.py`: ``inside_machine.py NAMESPACE HOSTNAME [-m] PROGRAM``.

It runs the program in this process; `ip netns exec` would replace the process by a new interpreter.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


def enter(namespace: str, hostname: str) -> None:
    """Moves this process, which must have one thread, into a network namespace, with a host name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(file, _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(file)
    socket.sethostname(hostname)


if __name__ == "__main__":
    namespace, hostname, *words = sys.argv[1:]
    enter(namespace, hostname)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
