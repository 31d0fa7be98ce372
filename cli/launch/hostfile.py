"""The machines of a job: from a hostfile, with filters that select some, or from the variables of a scheduler.

The hostfile has DeepSpeed's format: a line per machine, `node1 slots=8`, with # for comments. Filters name machines,
joined by @, with some of their slots, or all by default: `node1@node2:0,2`. `ssh` connects to the machines.

`cluster_environment` supports SLURM (inside a step of srun), OpenMPI's mpirun and the operators of Kubernetes that set
torchrun's PET_ variables, or MASTER_ADDR with RANK and WORLD_SIZE per pod. Each starts the same command on every
machine. The settings that differ between machines override the launch file, and flags override them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroaccel.config.bounds import read_at_most
from zeroaccel.config.diagnostics import closest
from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.errors import ConfigError

_LINE = re.compile(r"(?P<name>[^\s=@]([^\s=]*[^\s=@])?)(\s+slots=(?P<slots>\d+))?")
_MOST_NBYTES = 4 << 20
_FORM = "a machine and its number of processes, as in: node1 slots=8"


@dataclass(frozen=True)
class Host:
    """A machine of the hostfile.

    Attributes:
        name: its name for ssh; may be user@name.
        slots: numbers of the devices to use, with one process each.
        all_slots: true if these are all its slots in the file.
    """

    name: str
    slots: tuple[int, ...]
    all_slots: bool = True

    @property
    def address(self) -> str:
        """The name without a user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: str, where: str = "--hostfile") -> list[Host]:
    """Returns the machines in the order of the file.

    Args:
        where: address of the setting with the path, for messages.

    Raises:
        ConfigError: the file cannot be read, a line does not have the right form, or a machine appears twice.
    """
    where = f"{where} {path}"
    try:
        lines = read_at_most(Path(path).expanduser(), _MOST_NBYTES).decode("utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{where}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{where}: expected a file, got a folder", fix="name a file in it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not a text file") from None
    except (OSError, ValueError, RuntimeError) as error:  # the last one for an unknown home
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{where}: {reason}") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None or int((match["slots"] or "1")[:5]) == 0 or match["name"].startswith("-"):
            raise ConfigError(f"{path}:{number}", expected=_FORM, got=text)
        if len(match["slots"] or "") > 4:
            raise ConfigError(f"{path}:{number}", expected="at most 9999 slots", got=text)
        if match["name"] in hosts:
            raise ConfigError(f"{path}:{number}: {match['name']} appears twice", fix="give each machine one line")
        hosts[match["name"]] = Host(match["name"], tuple(range(int(match["slots"] or 1))))
    if not hosts:
        raise ConfigError(f"{where}: names no machine", expected=f"a line per machine, {_FORM}")
    return list(hosts.values())


def select_hosts(
    hosts: Iterable[Host],
    include: str | None,
    exclude: str | None,
    where: Callable[[str], str] = "--{}".format,
) -> list[Host]:
    """Returns the machines that a filter selects, in the order of the hostfile; at most one of the two is given.

    Args:
        where: setting -> its address, for messages.

    Raises:
        ConfigError: a filter names a machine or a slot that does not exist, or selects nothing, or the selected
            machines have different numbers of processes.
    """
    by_name = {host.name: host for host in hosts}
    name, text = ("inclusion_filter", include) if exclude is None else ("exclusion_filter", exclude)
    named = {} if text is None else _parse(text, by_name, where(name))
    selected = []
    for host in by_name.values():
        slots = named.get(host.name, ()) or host.slots
        if exclude is not None:
            slots = tuple(slot for slot in host.slots if host.name not in named or slot not in slots)
        if slots and (include is None or host.name in named):
            selected.append(Host(host.name, slots, all_slots=slots == host.slots))
    if not selected:
        raise ConfigError(f"{where('exclusion_filter')}: leaves no machine", fix="exclude fewer")

    # A rank is machine * ranks per machine + local rank, and torch's agent starts equally many on each machine.
    counts = {len(host.slots): host.name for host in selected}
    if len(counts) > 1:
        (most, first), (least, other) = max(counts.items()), min(counts.items())
        raise ConfigError(
            f"{where('hostfile')}: {first} has {most} processes and {other} {least}, but all machines must have "
            "the same number",
            fix="change slots=, or choose some of them with --inclusion_filter, as in node1:0,1@node2:0,1",
        )
    return selected


def slot_numbers(text: str, where: str, form: str, got: str) -> list[int]:
    """Returns the numbers of a filter such as 0,2 in order; none for an empty text.

    Raises:
        ConfigError: the text does not have this form.
    """
    try:
        return sorted({int(number) for number in text.split(",")}) if text else []
    except ValueError:
        raise ConfigError(where, expected=f"the form {form}", got=got) from None


def _parse(text: str, by_name: Mapping[str, Host], where: str) -> dict[str, tuple[int, ...]]:
    """Returns machine -> its slots, empty for all. The @ of user@name belongs to the name."""
    named: dict[str, tuple[int, ...]] = {}
    words = text.split("@")
    while words:
        word = words.pop(0).strip()
        if words and word not in by_name and f"{word}@{words[0].partition(':')[0]}" in by_name:
            word = f"{word}@{words.pop(0)}"
        name, _, numbers = word.partition(":")
        if name not in by_name:
            near = closest(name, by_name, cutoff=0.6)
            fix = f"did you mean {near}?" if near else f"it has {', '.join(by_name)}"
            raise ConfigError(where, expected="machines of the hostfile", got=name, fix=fix)
        slots = tuple(slot_numbers(numbers, where, "node1@node2:0,2", word))
        if beyond := [slot for slot in slots if slot not in by_name[name].slots]:
            raise ConfigError(where, expected=f"slots 0 to {len(by_name[name].slots) - 1} of {name}", got=beyond[0])
        named[name] = slots
    return named


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
