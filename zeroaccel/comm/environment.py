"""What the launcher and the user say through environment variables, and limits of this process. No torch.

The only module of `comm` that reads the environment. The names are those of torchrun, which every launcher of PyTorch
jobs sets, and ZEROACCEL_COLLECTIVE_TIMEOUT.
"""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from zeroaccel.config.launch.launch_sources import check_variables
from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger

_Order = TypeVar("_Order")
_DEFAULT_LIMIT_SECONDS = 600.0
_FILES_PER_RANK, _OTHER_FILES = 5, 512  # of programs and their libraries
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # what mpirun sets, of Open MPI and of MPICH
_HOW_TO_START = "start the script with `zeroaccel launch --num_processes N script.py`, or set them on every rank"


def allow_connections(world_size: int) -> None:
    """Raises the limit of open files to what connections to all other ranks need, or warns that it cannot.

    gloo connects the ranks of a group all to all when it is made. Measured: 5 sockets per other rank, and a few more.
    """
    needed = _OTHER_FILES + _FILES_PER_RANK * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        text = "%d ranks need about %d open files per process, and the hard limit is %d: raise it with `ulimit -Hn %d`"
        logger.warning(text, world_size, needed, hard, needed)


def check_own_variables() -> None:
    """Looks for variables whose names begin as this package's do and that no code reads.

    Raises:
        ConfigError: there are some; each is named with the closest one that exists.
    """
    check_variables(os.environ)


def command_order(variable: str, command: str, read: Callable[[Any], _Order]) -> _Order | None:
    """What a command of zeroaccel orders the script it runs to do, or None.

    Args:
        variable: of the environment, in which the command writes JSON.
        command: its name, for messages.
        read: makes the order of what was parsed, or raises ValueError, KeyError or TypeError.

    Raises:
        ConfigError: the command did not write this.

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
        raise ConfigError(f"environment: {variable}", expected=f"an order of `{command}`", got=text, fix=fix) from None


def rank_and_world_size() -> tuple[int, int]:
    """(rank, world size) by RANK and WORLD_SIZE; (0, 1) where neither is set.

    Raises:
        ConfigError: some variables are set, but not all that are needed to find the other ranks.
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
    """Raises under mpirun without torchrun's variables, where each rank would take itself for the only one."""
    for name in _MPI_SIZES:
        if os.environ.get(name, "1") != "1":
            raise ConfigError(
                f"environment: {name}={os.environ[name]} set, as by mpirun, but not {', '.join(_NEEDED)}",
                fix=f"{_HOW_TO_START}; to run as one process, set WORLD_SIZE=1",
            )


def rendezvous_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def local_rank_and_size() -> tuple[int, int] | None:
    """(local rank, local world size), or None where the launcher has not set both."""
    if os.environ.get("LOCAL_RANK") and os.environ.get("LOCAL_WORLD_SIZE"):
        return _integer("LOCAL_RANK"), _integer("LOCAL_WORLD_SIZE")
    return None


def local_size() -> int | None:
    """Ranks on this machine, by LOCAL_WORLD_SIZE or DeepSpeed's LOCAL_SIZE; None where the launcher set neither."""
    return next((_integer(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if os.environ.get(name)), None)


def ranks_may_share_devices() -> bool:
    """Whether NCCL was asked for several ranks on one GPU, or to take the ranks for ones on different machines."""
    return bool(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") or os.environ.get("NCCL_HOSTID"))


def avoid_record_streams(torch_version: tuple[int, int]) -> None:
    """Before NCCL groups are made: has torch below 2.8 free the tensors of a collective in the order of the stream.

    Otherwise it asks the host whether the collective is over, and a host that runs ahead finds no free memory. Later
    versions do so anyway. What the environment says already stays.
    """
    if torch_version < (2, 8):
        os.environ.setdefault("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")


def launcher_owns_store() -> bool:
    """Whether the launcher hosts the rendezvous store, rather than rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launcher_memory() -> Path | None:
    """The folder in memory that the launcher keeps until the job ends; None where it keeps none."""
    folder = os.environ.get("ZEROACCEL_MEMORY_FOLDER")
    return Path(folder) if folder and os.path.isdir(folder) else None


def rack() -> str:
    """The name of the rack, or switch, of this machine: ZEROACCEL_RACK, or SLURM's path of switches; "" without."""
    return os.environ.get("ZEROACCEL_RACK") or os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


def is_in_launcher_memory(folder: str | os.PathLike[str]) -> bool:
    """Whether each machine has a folder of its own there."""
    memory = launcher_memory()
    return memory is not None and memory in Path(folder).parents


def launcher_wakes_stopped_ranks() -> bool:
    """Whether the launcher is `zeroaccel launch`, which ends its ranks even where they are stopped (SIGSTOP)."""
    return "ZEROACCEL_LAUNCH_ID" in os.environ


def omp_threads_chosen(parent: Path | None = None) -> bool:
    """Whether OMP_NUM_THREADS is the user's choice, rather than torchrun's, which sets it to 1 where it is unset.

    Torchrun's 1 is not in the environment that torchrun itself was started with; where that cannot be read, a 1 in a
    rank of torchrun is taken for its own.

    Args:
        parent: the launcher's initial environment, as Linux shows it.
    """
    # torchrun's 1 would leave most of the cores idle: the engine then takes this process's part of them.
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
    """How long a collective may wait: `timeout`, else ZEROACCEL_COLLECTIVE_TIMEOUT, else 600. Infinite for 0.

    Raises:
        ConfigError: not a number of seconds.
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
    """The numbers of the cores this process may run on; all of them where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many cores this process may use, at least 1: its affinity, and below that the quota of its container."""
    # A container's CPU quota does not show in the affinity; more threads than it allows only throttle each other.
    cores = len(core_set())
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def fair_threads(usable: int, own: frozenset[int], local: Iterable[frozenset[int]]) -> int:
    """Threads for one process, so that those of all processes of the job on a machine are as many as its cores.

    Processes that are bound to cores of their own do not share them, and so are not divided by again.

    Args:
        usable: `usable_cores` of this process.
        own: its `core_set`.
        local: those of all processes of the job on this machine, itself included.
    """
    sharing = sum(bool(own & other) for other in local)
    return max(1, usable // max(1, sharing))
