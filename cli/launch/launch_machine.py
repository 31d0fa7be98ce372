"""Settings that depend on this machine: devices and processes for filters and counts, and folders for offload."""

from __future__ import annotations

from collections.abc import Callable

from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.config.schema import Config
from zeroaccel.errors import ConfigError
from zeroaccel.offload.offload_folder import examine_folder

from ..machine import devices, gib, is_own_host, local_disks
from .hostfile import Host, read_hostfile, select_hosts, slot_numbers
from .typed_settings import TypedSettings


def resolve_devices(explicit: ExplicitSettings, typed: TypedSettings) -> ExplicitSettings:
    """Converts processes per machine, filters without a hostfile and hostfiles without ssh into other settings.

    Raises:
        ConfigError: a filter names another machine or devices that this machine lacks, or counts contradict.
    """
    if explicit.values.get("hostfile") is not None:
        return _by_hostfile(explicit, typed)
    explicit = _without_hostfile(_by_filter(_on_one_machine(explicit)), typed)
    if typed.num_gpus is None:
        return explicit
    num_processes = typed.num_gpus * (explicit.values.get("num_machines") or 1)
    return _with_processes(explicit, num_processes, "--num_gpus")


_FILTERS = ("inclusion_filter", "exclusion_filter")
_OF_OTHER_MACHINES = ("main_process_ip", "machine_rank", "min_machines", "rdzv_backend")


def _on_one_machine(explicit: ExplicitSettings) -> ExplicitSettings:
    """Drops --num_nodes, which selects machines of a hostfile, if neither hostfile nor rendezvous address exists."""
    count = explicit.values.get("num_machines", 1)
    is_bare = not any(explicit.values.get(name) is not None for name in _OF_OTHER_MACHINES)
    if explicit.sources.get("num_machines") != "--num_nodes" or count in (0, 1) or not is_bare:
        return explicit
    note = f"--num_nodes {count}: does nothing, as no hostfile and no --master_addr names another machine"
    return explicit.without(["num_machines"], note)


def _without_hostfile(explicit: ExplicitSettings, typed: TypedSettings) -> ExplicitSettings:
    """Drops the multi-node launcher, with a note, if no hostfile names other machines."""
    launcher = explicit.values.get("multinode_launcher")
    if launcher in (None, "ssh", "standard") and explicit.sources.get("multinode_launcher") != "--launcher":
        return explicit
    note = f"{explicit.where('multinode_launcher')} {launcher}: does nothing, as there is no hostfile"
    return explicit.without(["multinode_launcher"], note)


def _with_processes(explicit: ExplicitSettings, num_processes: int, flag: str) -> ExplicitSettings:
    count = explicit.values.get("num_processes", num_processes)
    if count != num_processes and explicit.sources["num_processes"].startswith("--"):
        raise ConfigError(
            f"{flag}: {num_processes} processes in all, but {explicit.sources['num_processes']} is {count}",
            fix="keep one of the two",
        )
    return explicit.under(ExplicitSettings.of({"num_processes": num_processes}, flag))


def _by_filter(explicit: ExplicitSettings) -> ExplicitSettings:
    """Converts a filter that names this machine into devices, with one process for each."""
    name = next((one for one in _FILTERS if explicit.values.get(one) is not None), None)
    if name is None:
        return explicit
    text, where = str(explicit.values[name]), explicit.where(name)
    host, _, slots = text.partition(":")
    if "@" in text or not (host == "localhost" or is_own_host(host)):
        raise ConfigError(
            f"{where} {text}: it filters a hostfile, and none is set",
            fix="set hostfile too, or name this machine, as in localhost:0,1",
        )

    # Like the `deepspeed` command: without a hostfile, --include localhost:0,2 chooses devices of this machine.
    numbers = slot_numbers(slots, where, "localhost:0,1", text)
    num_devices = 0 if explicit.values.get("use_cpu") else len(devices())
    if name == "exclusion_filter":
        numbers_left = [number for number in range(num_devices) if number not in (numbers or range(num_devices))]
        if not numbers_left:
            expected = (
                f"to leave one of the {num_devices} devices of this machine" if num_devices else "devices to leave out"
            )
            raise ConfigError(where, expected=expected, got=text)
        numbers = numbers_left
    source, explicit = explicit.sources[name], explicit.without(_FILTERS)
    if not numbers:
        return explicit
    if num_devices:
        explicit = explicit.under(ExplicitSettings.of({"gpu_ids": ",".join(map(str, numbers))}, source))
    else:
        explicit = explicit.without([], f"{where} {text}: {len(numbers)} on the CPU, as no accelerator is used here")
    return _with_processes(explicit, len(numbers), source)


def _by_hostfile(explicit: ExplicitSettings, typed: TypedSettings) -> ExplicitSettings:
    """Converts --num_nodes and --num_gpus into an inclusion filter of the hostfile, or with --no_ssh into counts."""
    path = explicit.values["hostfile"]
    num_nodes = explicit.values.get("num_machines") if explicit.sources.get("num_machines") == "--num_nodes" else None
    if num_nodes is not None or typed.num_gpus is not None:
        flag = "--num_nodes" if num_nodes is not None else "--num_gpus"
        for name in _FILTERS:
            if explicit.values.get(name) is not None:
                raise ConfigError(f"{flag}: set together with {explicit.where(name)}", fix="keep one of the two")
        hosts = read_hostfile(path)
        if num_nodes is not None and num_nodes > len(hosts):
            expected = f"at most the {len(hosts)} machines of {path}"
            raise ConfigError("--num_nodes", expected=expected, got=num_nodes)
        chosen = "@".join(_chosen(host, typed.num_gpus) for host in hosts[: num_nodes or len(hosts)])
        explicit = explicit.without([] if num_nodes is None else ["num_machines"])
        explicit = explicit.under(ExplicitSettings.of({"inclusion_filter": chosen}, flag))
    return _by_hand(explicit) if typed.no_ssh else explicit


def _chosen(host: Host, num_gpus: int | None) -> str:
    if num_gpus is None:
        return host.name
    if num_gpus > len(host.slots):
        raise ConfigError("--num_gpus", expected=f"at most {len(host.slots)}, the slots of {host.name}", got=num_gpus)
    return f"{host.name}:{','.join(map(str, host.slots[:num_gpus]))}"


def _by_hand(explicit: ExplicitSettings) -> ExplicitSettings:
    """Applies --no_ssh: the hostfile only gives the numbers of machines and processes, and the first machine."""
    path = explicit.values["hostfile"]
    hosts = select_hosts(read_hostfile(path), *map(explicit.values.get, _FILTERS))
    by_hostfile = {
        "num_machines": len(hosts),
        "num_processes": sum(len(host.slots) for host in hosts),
        "main_process_ip": hosts[0].address,
    }
    return ExplicitSettings.of(by_hostfile, f"hostfile {path}").under(explicit.without(_FILTERS))


# -- folders for offload


def with_folders(explicit: ExplicitSettings, config: Config | None, log: Callable[[str], None]) -> ExplicitSettings:
    """Chooses the local disk with the most room for each "nvme" without a folder, and logs it.

    With a hostfile it chooses nothing: the launcher does not know the disks of the other machines.
    """
    lacking = [f"{what}_nvme_path" for what, (path, _) in _on_nvme(explicit, config).items() if path is None]
    disks = () if "hostfile" in explicit.values or not lacking else local_disks()
    disk = max(disks, key=lambda one: one.free_nbytes, default=None)
    if disk is None:
        return explicit
    room = f"{disk.folder} ({disk.file_system}, {gib(disk.free_nbytes)} free)"
    log(f"no --{' and no --'.join(lacking)}: files go to {room}, the local disk with the most room")
    return ExplicitSettings.of(dict.fromkeys(lacking, disk.folder), "the local disk with the most room").under(explicit)


def check_folders(explicit: ExplicitSettings, config: Config | None) -> None:
    """Checks the folders for "nvme" before the start; otherwise every process would fail once it has its model."""
    for what, (path, where) in _on_nvme(explicit, config).items():
        if path is None:
            raise ConfigError(f'{where}: missing, and {what}_device is "nvme"', fix="give a folder on a local disk")
        examine_folder(path, where)


def _on_nvme(explicit: ExplicitSettings, config: Config | None) -> dict[str, tuple[str | None, str]]:
    """Returns each offload to files -> its explicit folder, or None, and the address of that setting."""
    folders: dict[str, tuple[str | None, str]] = {}
    for what in ("offload_optimizer", "offload_param"):
        name = f"{what}_nvme_path"
        in_json = getattr(config.zero_optimization, what) if config is not None else None
        device = explicit.values.get(f"{what}_device") or (in_json.device if in_json is not None else "none")
        if str(device).lower() != "nvme":
            continue
        if name not in explicit.values and config is not None and in_json is not None and in_json.nvme_path is not None:
            folders[what] = in_json.nvme_path, config.where(f"zero_optimization.{what}.nvme_path")
        else:
            folders[what] = explicit.values.get(name), explicit.where(name)
    return folders
