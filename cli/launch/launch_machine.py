"""Settings that depend on this machine: devices and processes for filters and counts, and folders for offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.config.schema import Config
from zeroaccel.errors import ConfigError
from zeroaccel.offload.offload_folder import examine_folder

from ..machine import devices, gib, is_own_host, local_disks
from .hostfile import Host, read_hostfile, select_hosts, slot_numbers
from .typed_settings import TypedSettings

_FILTERS = ("inclusion_filter", "exclusion_filter")
_OF_OTHER_MACHINES = ("main_process_ip", "machine_rank", "min_machines", "rdzv_backend")


@dataclass
class _Draft:
    """Settings while this module changes them; fields as in `ExplicitSettings`."""

    values: dict[str, Any]
    sources: dict[str, str]
    notes: list[str]
    where: Callable[[str], str]

    def put(self, values: Mapping[str, Any], source: str) -> None:
        self.values |= values
        self.sources |= dict.fromkeys(values, source)

    def drop(self, *names: str, note: str = "") -> None:
        for name in names:
            self.values.pop(name, None)
        self.notes += [note] if note else []

    def put_processes(self, count: int, flag: str) -> None:
        before, source = self.values.get("num_processes", count), self.sources.get("num_processes", "")
        if before != count and source.startswith("--"):
            text = f"{flag}: {count} processes in all, but {source} is {before}"
            raise ConfigError(text, fix="keep one of the two")
        self.put({"num_processes": count}, flag)


def settings_here(
    explicit: ExplicitSettings, typed: TypedSettings, config: Config | None, log: Callable[[str], None]
) -> ExplicitSettings:
    """Converts processes per machine, filters without a hostfile and hostfiles without ssh into other settings.

    For each "nvme" without a folder, it chooses the local disk with the most room, and logs it. With a hostfile it
    chooses nothing: the launcher does not know the disks of the other machines.

    Raises:
        ConfigError: a filter names another machine or devices that this machine lacks, or counts contradict.
    """
    draft = _Draft(dict(explicit.values), dict(explicit.sources), [*explicit.notes], explicit.where)
    if draft.values.get("hostfile") is not None:
        _by_hostfile(draft, typed)
    else:
        _drop_other_machines(draft)
        _by_filter(draft)
        if typed.num_gpus is not None:
            draft.put_processes(typed.num_gpus * (draft.values.get("num_machines") or 1), "--num_gpus")
        lacking = [f"{what}_nvme_path" for what, path, _ in _on_nvme(explicit, config) if path is None]
        disk = max(local_disks(), key=lambda mount: mount.free_nbytes, default=None) if lacking else None
        if disk is not None:
            draft.put(dict.fromkeys(lacking, disk.folder), "the local disk with the most room")
            room = f"{disk.folder} ({disk.file_system}, {gib(disk.free_nbytes)} free)"
            log(f"no --{' and no --'.join(lacking)}: files go to {room}, the local disk with the most room")
    return ExplicitSettings(draft.values, draft.sources, tuple(draft.notes))


def _drop_other_machines(draft: _Draft) -> None:
    """Drops --num_nodes and the multi-node launcher, with notes, if no hostfile or address names other machines."""
    count = draft.values.get("num_machines", 1)
    is_bare = not any(draft.values.get(name) is not None for name in _OF_OTHER_MACHINES)
    if draft.sources.get("num_machines") == "--num_nodes" and count not in (0, 1) and is_bare:
        note = f"--num_nodes {count}: does nothing, as no hostfile and no --master_addr names another machine"
        draft.drop("num_machines", note=note)
    launcher = draft.values.get("multinode_launcher")
    if launcher not in (None, "ssh", "standard") or draft.sources.get("multinode_launcher") == "--launcher":
        note = f"{draft.where('multinode_launcher')} {launcher}: does nothing, as there is no hostfile"
        draft.drop("multinode_launcher", note=note)


def _by_filter(draft: _Draft) -> None:
    """Converts a filter that names this machine into devices, with one process for each."""
    name = next((filter_name for filter_name in _FILTERS if draft.values.get(filter_name) is not None), None)
    if name is None:
        return
    text, where = str(draft.values[name]), draft.where(name)
    host, _, slots = text.partition(":")
    if "@" in text or not (host == "localhost" or is_own_host(host)):
        fix = "set hostfile too, or name this machine, as in localhost:0,1"
        raise ConfigError(f"{where} {text}: it filters a hostfile, and none is set", fix=fix)

    # Like the `deepspeed` command: without a hostfile, --include localhost:0,2 chooses devices of this machine.
    numbers: Sequence[int] = slot_numbers(slots, where, "localhost:0,1", text)
    num_devices = 0 if draft.values.get("use_cpu") else len(devices())
    if name == "exclusion_filter":
        numbers = [number for number in range(num_devices) if number not in (numbers or range(num_devices))]
        if not numbers:
            some = f"to leave one of the {num_devices} devices of this machine"
            raise ConfigError(where, expected=some if num_devices else "devices to leave out", got=text)
    draft.drop(*_FILTERS)
    if not numbers:
        return
    if num_devices:
        draft.put({"gpu_ids": ",".join(map(str, numbers))}, draft.sources[name])
    else:
        draft.notes.append(f"{where} {text}: {len(numbers)} on the CPU, as no accelerator is used here")
    draft.put_processes(len(numbers), draft.sources[name])


def _by_hostfile(draft: _Draft, typed: TypedSettings) -> None:
    """Converts --num_nodes and --num_gpus into an inclusion filter of the hostfile, or with --no_ssh into counts."""
    path = draft.values["hostfile"]
    num_nodes = draft.values.get("num_machines") if draft.sources.get("num_machines") == "--num_nodes" else None
    is_counted = num_nodes is not None or typed.num_gpus is not None
    hosts = read_hostfile(path, draft.where("hostfile")) if is_counted or typed.no_ssh else []
    if is_counted:
        flag = "--num_nodes" if num_nodes is not None else "--num_gpus"
        for name in _FILTERS:
            if draft.values.get(name) is not None:
                raise ConfigError(f"{flag}: set together with {draft.where(name)}", fix="keep one of the two")
        if num_nodes is not None and num_nodes > len(hosts):
            raise ConfigError("--num_nodes", expected=f"at most the {len(hosts)} machines of {path}", got=num_nodes)
        chosen = "@".join(_chosen(host, typed.num_gpus) for host in hosts[: num_nodes or len(hosts)])
        draft.drop(*([] if num_nodes is None else ["num_machines"]))
        draft.put({"inclusion_filter": chosen}, flag)
    if typed.no_ssh:  # the hostfile only gives the numbers of machines and processes, and the first machine
        include, exclude = map(draft.values.get, _FILTERS)
        hosts = select_hosts(hosts, include, exclude, draft.where)
        processes = sum(len(host.slots) for host in hosts)
        first = {"num_machines": len(hosts), "num_processes": processes, "main_process_ip": hosts[0].address}
        draft.put({name: value for name, value in first.items() if name not in draft.values}, f"hostfile {path}")
        draft.drop(*_FILTERS)


def _chosen(host: Host, num_gpus: int | None) -> str:
    if num_gpus is None:
        return host.name
    if num_gpus > len(host.slots):
        raise ConfigError("--num_gpus", expected=f"at most {len(host.slots)}, the slots of {host.name}", got=num_gpus)
    return f"{host.name}:{','.join(map(str, host.slots[:num_gpus]))}"


def check_folders(explicit: ExplicitSettings, config: Config | None) -> None:
    """Checks the folders for "nvme" before the start; otherwise every process would fail once it has its model."""
    for what, path, where in _on_nvme(explicit, config):
        if path is None:
            raise ConfigError(f'{where}: missing, and {what}_device is "nvme"', fix="give a folder on a local disk")
        examine_folder(path, where)


def _on_nvme(explicit: ExplicitSettings, config: Config | None) -> Iterator[tuple[str, str | None, str]]:
    """Yields each offload to files with its explicit folder, or None, and the address of that setting."""
    for what in ("offload_optimizer", "offload_param"):
        name = f"{what}_nvme_path"
        in_json = getattr(config.zero_optimization, what) if config is not None else None
        device = explicit.values.get(f"{what}_device") or (in_json.device if in_json is not None else "none")
        if str(device).lower() != "nvme":
            continue
        if name not in explicit.values and config is not None and in_json is not None and in_json.nvme_path is not None:
            yield what, in_json.nvme_path, config.where(f"zero_optimization.{what}.nvme_path")
        else:
            yield what, explicit.values.get(name), explicit.where(name)
