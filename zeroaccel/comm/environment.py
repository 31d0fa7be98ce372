"""Reads the environment variables of the launcher and the user, and the limits of this process. No torch.

No other module of `comm` reads the environment. The names are those of torchrun, which every launcher of PyTorch jobs
sets, and ZEROACCEL_COLLECTIVE_TIMEOUT.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from zeroaccel.config.launch.launch_sources import check_variables
from zeroaccel.errors import ConfigError
from zeroaccel.logs import log_once, logger

_Order = TypeVar("_Order")
_DEFAULT_LIMIT_SECONDS = 600.0
_FILES_PER_RANK, _OTHER_FILES = 5, 512  # the others: files of the program and its libraries
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # set by mpirun: Open MPI, MPICH
_HOW_TO_START = "start the script with `zeroaccel launch --num_processes N script.py`, or set them on every rank"


def allow_connections(world_size: int) -> None:
    """Raises the limit on open files for connections to all other ranks, or warns that it cannot.

    gloo connects all pairs of ranks when it makes a group. Measured: 5 sockets per other rank, and a few more.
    """
    needed = _OTHER_FILES + _FILES_PER_RANK * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        text = "%d ranks need about %d open files per process, but the hard limit is %d: raise it with `ulimit -Hn %d`"
        logger.warning(text, world_size, needed, hard, needed)


def warn_of_one_queue() -> None:
    """Warns that all streams of a device share one queue. Called where several communicators are made."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        log_once(
            logging.WARNING,
            "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams of a device share one queue, so gathers wait for computation,"
            " and two NCCL communicators can deadlock where ranks launch collectives in different orders; unset it",
        )


def check_own_variables() -> None:
    """Checks for variables with this package's prefix that no code reads.

    Raises:
        ConfigError: there are some; the message names each with the closest existing variable.
    """
    check_variables(os.environ)


def command_order(variable: str, command: str, read: Callable[[Any], _Order]) -> _Order | None:
    """Returns the order that a zeroaccel command passes to the script that it runs, or None.

    Args:
        variable: environment variable in which the command writes JSON.
        command: name of the command, for messages.
        read: converts the parsed JSON to the order, or raises ValueError, KeyError or TypeError.

    Raises:
        ConfigError: the command did not write this value.

    Example:
        >>> command_order("ZEROACCEL_TRACE", "trace", lambda order: int(order["steps"])) is None
        True
    """
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return read(json.loads(text))
    except (ValueError, KeyError, TypeError):
        fix = f"unset it; `zeroaccel {command}` sets it for its own runs"
        raise ConfigError(f"environment: {variable}", expected=f"a value from `{command}`", got=text, fix=fix) from None


def rank_and_world_size() -> tuple[int, int]:
    """Returns (rank, world size) from RANK and WORLD_SIZE; (0, 1) if neither is set.

    Raises:
        ConfigError: only some of the variables that are needed to find the other ranks are set.
    """
    environ = os.environ
    if not environ.get("WORLD_SIZE") and not environ.get("RANK"):
        _refuse_mpi()
        return 0, 1
    if environ.get("WORLD_SIZE") == "1" and environ.get("RANK", "0") == "0":
        return 0, 1  # there is no other rank to find
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        present = " and ".join(f"{name}={environ[name]}" for name in _NEEDED if environ.get(name))
        raise ConfigError(
            f"environment: {present} set, but not {', '.join(missing)}",
            fix=f"{_HOW_TO_START}; to run as one process, unset RANK and WORLD_SIZE",
        )
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    _integer("MASTER_PORT")
    if not 0 <= rank < world_size:
        raise ConfigError("environment: RANK", expected=f"0 to {world_size - 1} (WORLD_SIZE - 1)", got=rank)
    return rank, world_size


def _refuse_mpi() -> None:
    """Raises under mpirun without torchrun's variables: each rank would run as the only one."""
    for name in _MPI_SIZES:
        if os.environ.get(name, "1") != "1":
            raise ConfigError(
                f"environment: {name}={os.environ[name]} set, as by mpirun, but not {', '.join(_NEEDED)}",
                fix=f"{_HOW_TO_START}; to run as one process, set WORLD_SIZE=1",
            )


def rendezvous_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def local_rank_and_size() -> tuple[int, int] | None:
    """Returns (local rank, local world size), or None if the launcher has not set both."""
    if os.environ.get("LOCAL_RANK") and os.environ.get("LOCAL_WORLD_SIZE"):
        return _integer("LOCAL_RANK"), _integer("LOCAL_WORLD_SIZE")
    return None


def local_size() -> int | None:
    """Returns the number of ranks on this machine, from LOCAL_WORLD_SIZE or DeepSpeed's LOCAL_SIZE, or None."""
    return next((_integer(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if os.environ.get(name)), None)


def started_in_notebook() -> bool:
    """True in a process that `notebook_launcher` or `debug_launcher` started, here or in accelerate."""
    return os.environ.get("FORK_LAUNCHED", "0") != "0"


def ranks_may_share_devices() -> bool:
    """True if NCCL is configured for several ranks on one GPU, or to treat ranks as on different machines."""
    return bool(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") or os.environ.get("NCCL_HOSTID"))


def avoid_record_streams(torch_version: tuple[int, int]) -> None:
    """Makes torch below 2.8 free the tensors of a collective in stream order. Call it before making NCCL groups.

    Otherwise torch polls on the host for the end of the collective, and a host that runs ahead finds no free memory.
    Later versions free in stream order by default. A value in the environment takes precedence.
    """
    if torch_version < (2, 8):
        os.environ.setdefault("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")


def launcher_owns_store() -> bool:
    """True if the launcher hosts the rendezvous store; False if rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launcher_memory() -> Path | None:
    """Returns the in-memory folder that the launcher keeps until the job ends, or None."""
    folder = os.environ.get("ZEROACCEL_MEMORY_FOLDER")
    return Path(folder) if folder and os.path.isdir(folder) else None


def rack() -> str:
    """Returns the name of this machine's rack or switch: ZEROACCEL_RACK, or SLURM's path of switches; else ""."""
    return os.environ.get("ZEROACCEL_RACK") or os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


def is_in_launcher_memory(folder: str | os.PathLike[str]) -> bool:
    """True if `folder` is in the launcher's memory, where each machine has its own folder."""
    memory = launcher_memory()
    return memory is not None and memory in Path(folder).parents


def launcher_wakes_stopped_ranks() -> bool:
    """True if the launcher is `zeroaccel launch`, which can also end ranks that are stopped (SIGSTOP)."""
    return "ZEROACCEL_LAUNCH_ID" in os.environ


def omp_threads_chosen(parent: Path | None = None) -> bool:
    """True if the user chose OMP_NUM_THREADS; torchrun sets it to 1 if it is unset.

    The initial environment of the torchrun process lacks torchrun's own 1. If that environment cannot be read, a 1 in
    a rank of torchrun counts as torchrun's.

    Args:
        parent: file with the launcher's initial environment; by default from /proc (Linux).
    """
    # torchrun's 1 would leave most cores idle; the engine then uses this process's share of them.
    value = os.environ.get("OMP_NUM_THREADS")
    if value is None:
        return False
    if value != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        variables = (parent or Path(f"/proc/{os.getppid()}/environ")).read_bytes().split(b"\0")
    except OSError:
        return False
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in variables)


def timeout_seconds(timeout: float | timedelta | None) -> float:
    """Returns the limit for a collective: `timeout`, else ZEROACCEL_COLLECTIVE_TIMEOUT, else 600. Infinite for 0.

    Raises:
        ConfigError: the value is not a number of seconds.
    """
    where = "timeout"
    value: float | str | None = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if value is None:
        where = "environment: ZEROACCEL_COLLECTIVE_TIMEOUT"
        value = os.environ.get("ZEROACCEL_COLLECTIVE_TIMEOUT") or _DEFAULT_LIMIT_SECONDS
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ConfigError(where, expected="a number of seconds, or 0 for no limit", got=value)
    return seconds or math.inf


def _integer(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment: {name}", expected="an integer", got=text, fix=_HOW_TO_START) from None


def core_set() -> frozenset[int]:
    """Returns the numbers of the cores that this process may use; all cores if the system does not report them."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of cores that this process may use, at least 1: its affinity, limited by a container quota."""
    # A container's CPU quota does not appear in the affinity; more threads than it allows throttle each other.
    cores = len(core_set())
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def fair_threads(usable: int, allowed: frozenset[int], local: Iterable[frozenset[int]]) -> int:
    """Returns the number of threads for one process; all processes of the job on a machine together use its cores.

    Only processes whose core sets overlap with this one's share its cores, so only these are counted.

    Args:
        usable: `usable_cores` of this process.
        allowed: `core_set` of this process.
        local: core sets of all processes of the job on this machine, including this one.
    """
    sharing = sum(bool(allowed & other) for other in local)
    return max(1, usable // max(1, sharing))
