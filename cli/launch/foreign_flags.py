"""Flags of other launchers that `zeroaccel launch` accepts: `deepspeed`'s, torchrun's and accelerate's.

Each flag becomes a setting of zeroaccel or has no effect, which a note says. `resolve_devices` resolves the flags that
depend on machines or devices, such as `--include` and `--num_gpus`, once the other settings are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from zeroaccel.comm.environment import usable_cores
from zeroaccel.config.launch.launch_foreign import FSDP_KEYS, MPI_LAUNCHERS, OTHER_AXES, fsdp_of_words, refused_axis
from zeroaccel.config.launch.launch_sources import ExplicitSettings, from_text
from zeroaccel.errors import ConfigError

from ..machine import devices, is_own_host
from .hostfile import Host, read_hostfile, select_hosts, slot_numbers

_Command = TypeVar("_Command", bound=Callable[..., Any])

# Flag -> zeroaccel's setting with the same meaning.
_SAME = {
    "num_nodes": "num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "master_port": "main_process_port",
}
_FSDP, _FSDP_WORDS = "use_fsdp", "fsdp"
_OF_TORCHRUN = ("nproc_per_node", "nnodes", "rdzv_endpoint")
# Flags of other launchers that have no effect here: name -> reason.
_IDLE_SWITCHES: Mapping[str, str] = {
    "quiet": "the launcher reports the failing process once, without a second traceback",
    "downcast_bf16": "it is a setting of TPUs",
    "ipex": "that library is not used",
    "use_xpu": "the accelerators of this machine are used",
    "force_multi": "the launcher uses ssh whenever a hostfile names other machines",
    "no_ssh_check": "the launcher reports an unreachable machine when the job starts",
    "save_pid": "the job ends with this process, so no file is needed",
    "detect_nvlink_pairs": "devices keep CUDA's order",
    "use_env": "LOCAL_RANK is always in the environment",
    "use_parallelism_config": "the sizes alone define the mesh",
    "use_tp": "--tp_size alone sets the ranks that share each layer",
    "no_tpu_cluster": "it is a setting of TPUs",
    "tpu_cluster": "it is a setting of TPUs",
    "tpu_use_sudo": "it is a setting of TPUs",
    "standalone": "one machine with a free port is the default",
    "run_path": "the launcher runs a script by its path",
}
_IDLE_VALUES: Mapping[str, str] = {
    "main_training_function": "it is a setting of TPUs; the launcher runs scripts unchanged",
    "bind_core_list": "--enable_cpu_affinity divides all cores",
    "log_level": "--debug shows everything",
    "rdzv_id": "the rendezvous endpoint is sufficient",
    "start_method": "every process is a separate program",
    "local_addr": "the launcher finds the address towards machine 0",
    "local_ranks_filter": "the terminal shows every rank; --redirects and --log_dir select",
}
# Sizes of accelerate's mesh that must be 1.
_AXES = {f"parallelism_config_{name}": name for name in OTHER_AXES}
_REFUSED_VALUES: Mapping[str, tuple[str, str]] = {
    "autotuning": (
        "zeroaccel has no autotuner",
        "`zeroaccel config --model NAME` shows what fits this machine",
    ),
    "ssh_port": ("a variable sets the port of ssh", 'ZEROACCEL_SSH="ssh -p PORT"'),
    "venv_script": ("every machine runs the same interpreter", "start zeroaccel from that environment"),
}

_MACHINES_COME_AND_GO = "use --num_machines MIN:MAX"
ELASTIC_HINTS: Mapping[str, str] = {
    "nproc": "use --nproc_per_node N",
    "n_procs": "use --nproc_per_node N",
    "enable_elastic_training": _MACHINES_COME_AND_GO,
    "elastic_training": _MACHINES_COME_AND_GO,
    "min_elastic_nodes": _MACHINES_COME_AND_GO,
    "max_elastic_nodes": _MACHINES_COME_AND_GO,
    "spares": f"{_MACHINES_COME_AND_GO}, and start the command on one more machine, which waits for a loss",
}
"""Flags of elastic DeepSpeed and of other launchers that do not exist here -> the flag to use instead."""

# Flags of the `deepspeed` command, as help shows them.
_SHOWN: Mapping[str, dict[str, Any]] = {
    "num_gpus": {"metavar": "N", "help": "Number of processes on each machine."},
    "num_nodes": {"metavar": "N", "help": "The same as --num_machines; with a hostfile, use its first N machines."},
    "node_rank": {"metavar": "N", "help": "The same as --machine_rank."},
    "master_addr": {"metavar": "HOST", "help": "The same as --main_process_ip."},
    "master_port": {"metavar": "PORT", "help": "The same as --main_process_port."},
    "no_ssh": {"is_flag": True, "help": "Use no ssh: you run the command on each machine of the hostfile."},
    "launcher": {"metavar": "pdsh|ssh", "help": "How the machines of a hostfile are reached; both values mean ssh."},
    "bind_cores_to_rank": {"is_flag": True, "help": "The same as --enable_cpu_affinity."},
    "enable_each_rank_log": {"metavar": "FOLDER", "help": "The same as --log_dir FOLDER --redirects 3."},
    "pass_local_rank": {
        "default": None,
        "help": "Pass --local_rank=N to the script. [default: if its argparse, click or fire declares it]",
    },
}
_HIDDEN = ("launcher_args", _FSDP_WORDS, *_OF_TORCHRUN, *FSDP_KEYS, *_IDLE_VALUES, *_REFUSED_VALUES, *_AXES)
_OPTIONS: Mapping[str, dict[str, Any]] = {
    **{name: {"is_flag": True, "hidden": True} for name in (_FSDP, *_IDLE_SWITCHES)},
    **{name: {"hidden": True} for name in _HIDDEN},
    **_SHOWN,
}
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_gpus": ("--num_gpus", "--num_accelerators"),
    "quiet": ("-q", "--quiet"),
    "pass_local_rank": ("--pass_local_rank/--no_local_rank",),
}


def foreign_flag_options(command: _Command) -> _Command:
    """Gives the launch these flags. All of them are optional; absent flags are None or false."""
    for name in reversed(tuple(_OPTIONS)):
        command = click.option(*_SPELLINGS.get(name, (f"--{name}",)), name, **_OPTIONS[name])(command)
    return command


@dataclass
class ForeignFlags:
    """The flags of other launchers that were typed.

    Attributes:
        values, sources: as in `ExplicitSettings`, for flags that are other names of settings.
        notes: one line for each flag without effect.
        fsdp: FSDP's settings.
        num_gpus: processes per machine.
        pass_local_rank: true to pass --local_rank to ranks; None passes it if the script declares it.
        is_fsdp: --use_fsdp was typed.
        no_ssh: --no_ssh was typed: the user runs the command on each machine.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fsdp: dict[str, str] = field(default_factory=dict)
    num_gpus: int | None = None
    pass_local_rank: bool | None = None
    is_fsdp: bool = False
    no_ssh: bool = False

    @classmethod
    def take_from(cls, typed: dict[str, Any]) -> ForeignFlags:
        """Removes these flags from click's parameters of a command line.

        Raises:
            ConfigError: a value does not have the form of its setting, or zeroaccel refuses a flag.
        """
        all_flags = {name: typed.pop(name, None) for name in _OPTIONS}
        typed_flags = {name: value for name, value in all_flags.items() if value not in (None, False)}
        flags = cls(pass_local_rank=all_flags["pass_local_rank"])
        for name, (reason, fix) in _REFUSED_VALUES.items():
            if name in typed_flags:
                raise ConfigError(f"--{name} {typed_flags[name]}: {reason}", fix=fix)
        for name, reason in {**_IDLE_SWITCHES, **_IDLE_VALUES}.items():
            if name in typed_flags:
                flags.notes.append(f"--{name}: does nothing, {reason}")
        for name, axis in _AXES.items():
            if name in typed_flags and (reason := refused_axis(axis, typed_flags[name])):
                raise ConfigError(f"--{name} {typed_flags[name]}: {reason}", fix="leave it out")
        flags.fsdp = {name: typed_flags[name] for name in FSDP_KEYS if name in typed_flags}
        if (words := all_flags[_FSDP_WORDS]) is not None:
            flags.fsdp = {**fsdp_of_words(words), **flags.fsdp}
            typed_flags[_FSDP] = True
        flags.is_fsdp, flags.no_ssh = _FSDP in typed_flags, "no_ssh" in typed_flags
        flags._take_settings(typed_flags)
        return flags

    def _take_settings(self, typed_flags: Mapping[str, Any]) -> None:
        for name, setting in _SAME.items():
            if name in typed_flags:
                self._read(setting, typed_flags[name], f"--{name}")
        if "num_gpus" in typed_flags:
            count = from_text("num_processes", typed_flags["num_gpus"], lambda _: "--num_gpus")
            if count == 0 or count < -1:
                raise ConfigError("--num_gpus", expected="a number above 0, or -1 for all", got=count)
            self.num_gpus = None if count == -1 else count
        self._take_torchrun(typed_flags)
        if "bind_cores_to_rank" in typed_flags:
            self._set("enable_cpu_affinity", True, "--bind_cores_to_rank")
        if "enable_each_rank_log" in typed_flags:
            self._set("log_dir", typed_flags["enable_each_rank_log"], "--enable_each_rank_log")
            self._set("redirects", 3, "--enable_each_rank_log")
        if "launcher" in typed_flags:
            self._take_launcher(typed_flags["launcher"].lower())
        if "launcher_args" in typed_flags:
            self.notes.append("--launcher_args: does nothing; set arguments for ssh in ZEROACCEL_SSH")
        if self.no_ssh:
            self._set("multinode_launcher", "standard", "--no_ssh")

    def _take_torchrun(self, typed_flags: Mapping[str, Any]) -> None:
        if "nproc_per_node" in typed_flags:
            self._take_local_processes(typed_flags["nproc_per_node"].lower())
        if "nnodes" in typed_flags:
            least, _, most = typed_flags["nnodes"].rpartition(":")
            for name, text in (("num_machines", most), ("min_machines", least)):
                if text and (name == "num_machines" or text != most):  # 2:2 is a fixed number of machines
                    self._read(name, text, "--nnodes")
        if "rdzv_endpoint" in typed_flags:
            endpoint = typed_flags["rdzv_endpoint"]
            host, _, port = endpoint.rpartition(":") if endpoint.rpartition(":")[2].isdigit() else (endpoint, "", "")
            for name, text in (("main_process_ip", host), ("main_process_port", port)):
                if text:
                    self._read(name, text, "--rdzv_endpoint")

    def _take_local_processes(self, text: str) -> None:
        """Reads torchrun's --nproc_per_node: a number, or "gpu", "cpu" or "auto" to count devices or cores."""
        flag = "--nproc_per_node"
        count: int | None = None
        if text == "cpu":
            count = usable_cores()
            self._set("use_cpu", True, flag)
        elif text not in ("gpu", "auto"):
            count = from_text("num_processes", text, lambda _: flag)
            if count < 1:
                raise ConfigError(flag, expected='a number above 0, "gpu", "cpu" or "auto"', got=count)
        if self.num_gpus is not None and count != self.num_gpus:
            raise ConfigError(f"{flag} {text}: conflicts with --num_gpus {self.num_gpus}", fix="keep one")
        self.num_gpus = count

    def _take_launcher(self, name: str) -> None:
        if name in MPI_LAUNCHERS:
            self.notes.append(
                f"--launcher {name}: ssh starts the machines of the hostfile instead, with the same results"
            )
            name = "ssh"
        self._set("multinode_launcher", name, "--launcher")

    def _read(self, name: str, text: str, flag: str) -> None:
        """Reads a value; refuses a second flag for the same setting with a different value."""
        value = from_text(name, text, lambda _: flag)
        if self.values.get(name, value) != value:
            here, there = f"{flag} {value}", f"{self.sources[name]} {self.values[name]}"
            raise ConfigError(f"{here}: conflicts with {there}", fix="keep one of the two")
        self._set(name, value, flag)

    def _set(self, name: str, value: Any, flag: str) -> None:
        self.values[name], self.sources[name] = value, flag

    def above(self, flags: ExplicitSettings) -> ExplicitSettings:
        """Merges these flags with those under zeroaccel's own names.

        Raises:
            ConfigError: two names of one setting have different values.
        """
        for name, value in self.values.items():
            if flags.values.get(name, value) != value:
                here, there = f"{self.sources[name]} {value}", f"{flags.sources[name]} {flags.values[name]}"
                fix = "keep one of the two, they are names of one setting"
                raise ConfigError(f"{here}: conflicts with {there}", fix=fix)
        return flags.under(ExplicitSettings(self.values, self.sources, tuple(self.notes)))


def resolve_devices(explicit: ExplicitSettings, flags: ForeignFlags) -> ExplicitSettings:
    """Converts processes per machine, filters without a hostfile and hostfiles without ssh into other settings.

    Raises:
        ConfigError: a filter names another machine or devices that this machine lacks, or counts contradict.
    """
    if explicit.values.get("hostfile") is not None:
        return _by_hostfile(explicit, flags)
    explicit = _without_hostfile(_by_filter(_on_one_machine(explicit)), flags)
    if flags.num_gpus is None:
        return explicit
    num_processes = flags.num_gpus * (explicit.values.get("num_machines") or 1)
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


def _without_hostfile(explicit: ExplicitSettings, flags: ForeignFlags) -> ExplicitSettings:
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


def _by_hostfile(explicit: ExplicitSettings, flags: ForeignFlags) -> ExplicitSettings:
    """Converts --num_nodes and --num_gpus into an inclusion filter of the hostfile, or with --no_ssh into counts."""
    path = explicit.values["hostfile"]
    num_nodes = explicit.values.get("num_machines") if explicit.sources.get("num_machines") == "--num_nodes" else None
    if num_nodes is not None or flags.num_gpus is not None:
        flag = "--num_nodes" if num_nodes is not None else "--num_gpus"
        for name in _FILTERS:
            if explicit.values.get(name) is not None:
                raise ConfigError(f"{flag}: set together with {explicit.where(name)}", fix="keep one of the two")
        hosts = read_hostfile(path)
        if num_nodes is not None and num_nodes > len(hosts):
            expected = f"at most the {len(hosts)} machines of {path}"
            raise ConfigError("--num_nodes", expected=expected, got=num_nodes)
        chosen = "@".join(_chosen(host, flags.num_gpus) for host in hosts[: num_nodes or len(hosts)])
        explicit = explicit.without([] if num_nodes is None else ["num_machines"])
        explicit = explicit.under(ExplicitSettings.of({"inclusion_filter": chosen}, flag))
    return _by_hand(explicit) if flags.no_ssh else explicit


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
