"""The machines of a job, read from the variables that a cluster's scheduler sets. Pure.

Supported are SLURM (inside a step of srun), OpenMPI's mpirun and the operators of Kubernetes that set torchrun's PET_
variables, or MASTER_ADDR with RANK and WORLD_SIZE per pod. Each starts the same command on every machine; this module
finds the settings that differ between machines. They override the launch file, and flags override them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.errors import ConfigError

_Settings = dict[str, int | str]
_Found = tuple[_Settings, str] | None  # settings, and their source


def cluster_environment(environ: Mapping[str, str]) -> ExplicitSettings:
    """Returns num_machines, machine_rank, main_process_ip and _port from the scheduler; nothing without a scheduler.

    Raises:
        ConfigError: the scheduler has started several launchers on one machine.
    """
    if "TORCHELASTIC_RUN_ID" in environ or "LOCAL_RANK" in environ:
        return ExplicitSettings()  # inside a rank of a running job
    for read in (_slurm, _open_mpi, _torchrun_variables, _pods):
        settings, source = read(environ) or ({}, "")
        if settings.get("num_machines", 1) != 1:
            return ExplicitSettings.of(settings, source)
    return ExplicitSettings()


def _slurm(environ: Mapping[str, str]) -> _Found:
    # SLURM_STEP_ variables exist only inside srun; a batch script runs on the first machine alone.
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    if not nodes.isdigit():
        return None
    tasks = environ.get("SLURM_STEP_NUM_TASKS", nodes)
    if int(nodes) > 1 and tasks != nodes:
        raise ConfigError(
            f"SLURM: srun has started {tasks} launchers on {nodes} machines",
            fix="start one per machine, as in: srun --ntasks-per-node=1 zeroaccel launch ...",
        )
    settings: _Settings = {"num_machines": int(nodes), "machine_rank": int(environ.get("SLURM_NODEID", "0"))}
    names = expand_nodelist(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    if names:
        settings["main_process_ip"] = names[0]
    if environ.get("SLURM_JOB_ID", "").isdigit():
        # Jobs that share a machine need different ports.
        settings["main_process_port"] = 20000 + int(environ["SLURM_JOB_ID"]) % 10000
    return settings, f"SLURM job {environ.get('SLURM_JOB_ID', '')}".rstrip()


def _open_mpi(environ: Mapping[str, str]) -> _Found:
    size, rank = environ.get("OMPI_COMM_WORLD_SIZE", ""), environ.get("OMPI_COMM_WORLD_RANK", "")
    if not (size.isdigit() and rank.isdigit()):
        return None
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1":
        raise ConfigError(
            f"OpenMPI: mpirun has started {environ['OMPI_COMM_WORLD_LOCAL_SIZE']} launchers on this machine",
            fix="start one per machine, as in: mpirun --map-by ppr:1:node zeroaccel launch ...",
        )
    settings: _Settings = {"num_machines": int(size), "machine_rank": int(rank)}
    return _with_address(settings, environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")), "OpenMPI"


def _torchrun_variables(environ: Mapping[str, str]) -> _Found:
    nodes, rank = environ.get("PET_NNODES", ""), environ.get("PET_NODE_RANK", "")
    if not (nodes.isdigit() and rank.isdigit()):
        return None
    settings: _Settings = {"num_machines": int(nodes), "machine_rank": int(rank)}
    local = environ.get("PET_NPROC_PER_NODE", "")
    if local.isdigit():
        settings["num_processes"] = int(local) * int(nodes)
    host = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR")
    return _with_address(settings, host, environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT")), "PET_ variables"


def _pods(environ: Mapping[str, str]) -> _Found:
    size, rank = environ.get("WORLD_SIZE", ""), environ.get("RANK", "")
    if "KUBERNETES_SERVICE_HOST" not in environ or not (size.isdigit() and rank.isdigit()):
        return None
    settings: _Settings = {"num_machines": int(size), "machine_rank": int(rank)}
    return _with_address(settings, environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")), "the pods of Kubernetes"


def _with_address(settings: _Settings, host: str | None, port: str | None) -> _Settings:
    if host:
        settings["main_process_ip"] = host
    if port and port.isdigit():
        settings["main_process_port"] = int(port)
    return settings


def expand_nodelist(text: str) -> list[str]:
    """Returns the names of a list in SLURM's short form.

    Example:
        >>> expand_nodelist("gpu[01-03,7],login")
        ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    return [name for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for name in _expand(word.strip())]


def _expand(word: str) -> Iterator[str]:
    match = re.search(r"\[([^\]]*)\]", word)
    if match is None:
        yield word
        return
    before, after = word[: match.start()], word[match.end() :]
    for item in match[1].split(","):
        low, _, high = item.partition("-")
        for number in range(int(low), int(high or low) + 1):
            yield from _expand(f"{before}{number:0{len(low)}d}{after}")
