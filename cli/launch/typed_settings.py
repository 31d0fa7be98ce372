"""The settings that were typed for a launch, under zeroaccel's own names and under those of other launchers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroaccel.comm.environment import usable_cores
from zeroaccel.config.launch.foreign_names import CONTEXT, CONTEXT_IS_SP, FSDP_KEYS, MPI_LAUNCHERS
from zeroaccel.config.launch.launch_foreign import fsdp_of_words, refused_axis
from zeroaccel.config.launch.launch_sources import ExplicitSettings, from_text
from zeroaccel.config.launch.setting_table import SETTINGS
from zeroaccel.errors import ConfigError

from .foreign_flags import AXES, IDLE_SWITCHES, IDLE_VALUES, REFUSED_VALUES, SAME, SWITCHES

_Typed = Iterator[tuple[str, Any, str]]  # setting, value, flag


@dataclass(frozen=True)
class TypedSettings:
    """The settings of a command line.

    Attributes:
        settings: the settings, each with its flag, and a note for each flag without effect.
        fsdp: FSDP's settings.
        num_gpus: processes per machine.
        pass_local_rank: true to pass --local_rank to ranks; None passes it if the script declares it.
        is_fsdp: --use_fsdp was typed.
        no_ssh: --no_ssh was typed: the user runs the command on each machine.
    """

    settings: ExplicitSettings
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    num_gpus: int | None = None
    pass_local_rank: bool | None = None
    is_fsdp: bool = False
    no_ssh: bool = False

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> TypedSettings:
        """Reads click's parameters of a command line; None or false for flags that were not typed.

        Raises:
            ConfigError: a value does not have the form of its setting, zeroaccel refuses a flag, or two names of one
                setting have different values.
        """
        typed = {name: value for name, value in params.items() if value is not None}
        switched = {name: value for name, value in typed.items() if value is not False}
        _check_refused(switched)
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name, value, flag in (*_own(typed), *_foreign(switched)):
            if str(values.get(name, value)).lower() != str(value).lower():
                here, there = _said(flag, value), _said(sources[name], values[name])
                fix = "keep one of the two, they are names of one setting"
                raise ConfigError(f"{here}: conflicts with {there}", fix=fix)
            values[name], sources[name] = value, flag
        words = typed.get("fsdp")
        fsdp = {} if words is None else fsdp_of_words(words)
        return cls(
            ExplicitSettings(values, sources, tuple(_notes(switched))),
            fsdp | {name: switched[name] for name in FSDP_KEYS if name in switched},
            _processes_per_machine(switched),
            typed.get("pass_local_rank"),
            "use_fsdp" in switched or words is not None,
            "no_ssh" in switched,
        )


def _said(flag: str, value: Any) -> str:
    """Returns the words of a flag: a switch has no value."""
    return flag if value is True or flag.lstrip("-") in SWITCHES else f"{flag} {value}"


def _check_refused(typed: Mapping[str, Any]) -> None:
    for name, (reason, fix) in REFUSED_VALUES.items():
        if name in typed:
            raise ConfigError(f"--{name} {typed[name]}: {reason}", fix=fix)
    for name, axis in AXES.items():
        if name in typed and (reason := refused_axis(axis, typed[name])):
            raise ConfigError(f"--{name} {typed[name]}: {reason}", fix="leave it out")


def _notes(typed: Mapping[str, Any]) -> Iterator[str]:
    for name, reason in {**IDLE_SWITCHES, **IDLE_VALUES}.items():
        if name in typed:
            yield f"--{name}: does nothing, {reason}"
    if str(typed.get("launcher", "")).lower() in MPI_LAUNCHERS:
        name = typed["launcher"].lower()
        yield f"--launcher {name}: ssh starts the machines of the hostfile instead, with the same results"
    if typed.get(_CONTEXT) not in (None, "0", "1"):
        yield f"--{_CONTEXT}: {CONTEXT_IS_SP}"
    if "launcher_args" in typed:
        yield "--launcher_args: does nothing; set arguments for ssh in ZEROACCEL_SSH"


def _own(typed: Mapping[str, Any]) -> _Typed:
    """Yields the settings under zeroaccel's names. Like torchrun's --nnodes, two of them take MIN:MAX."""
    for name, row in SETTINGS.items():
        value = typed.get(name)
        if isinstance(value, bool):
            yield name, value, row.flag_name
        elif value is not None:
            least, _, most = value.rpartition(":") if name in _RANGES else ("", "", value)
            yield name, from_text(name, most, lambda name: SETTINGS[name].flag_name), row.flag_name
            if least:
                fewest = _RANGES[name]
                yield fewest, from_text(fewest, least, lambda name: SETTINGS[name].flag_name), f"--{fewest}"


_CONTEXT = f"parallelism_config_{CONTEXT}"
_RANGES = {"num_machines": "min_machines", "num_processes": "min_processes"}


def _foreign(typed: Mapping[str, Any]) -> _Typed:
    """Yields the settings that flags of other launchers set."""
    for flag, name in SAME.items():
        if flag in typed:
            yield name, _read(name, typed[flag], flag), f"--{flag}"
    for flag, (name, value) in SWITCHES.items():
        if flag in typed:
            yield name, value, f"--{flag}"
    context = typed.get(_CONTEXT)
    if context not in (None, "0", "1"):
        yield "sp_size", _read("sp_size", context, _CONTEXT), f"--{_CONTEXT}"
    yield from _of_torchrun(typed)
    if "enable_each_rank_log" in typed:
        yield "log_dir", typed["enable_each_rank_log"], "--enable_each_rank_log"
        yield "redirects", 3, "--enable_each_rank_log"
    if "launcher" in typed and "no_ssh" not in typed:
        word = typed["launcher"].lower()
        yield "multinode_launcher", "ssh" if word in MPI_LAUNCHERS else word, "--launcher"


def _of_torchrun(typed: Mapping[str, Any]) -> _Typed:
    if str(typed.get("nproc_per_node", "")).lower() == "cpu":
        yield "use_cpu", True, "--nproc_per_node"
    if "nnodes" in typed:
        least, _, most = typed["nnodes"].rpartition(":")
        yield "num_machines", _read("num_machines", most, "nnodes"), "--nnodes"
        if least not in ("", most):  # 2:2 is a fixed number of machines
            yield "min_machines", _read("min_machines", least, "nnodes"), "--nnodes"
    if "rdzv_endpoint" in typed:
        endpoint = typed["rdzv_endpoint"]
        host, _, port = endpoint.rpartition(":") if endpoint.rpartition(":")[2].isdigit() else (endpoint, "", "")
        for name, text in (("main_process_ip", host), ("main_process_port", port)):
            if text:
                yield name, _read(name, text, "rdzv_endpoint"), "--rdzv_endpoint"


def _read(name: str, text: str, flag: str) -> Any:
    return from_text(name, text, lambda _: f"--{flag}")


def _processes_per_machine(typed: Mapping[str, Any]) -> int | None:
    """Reads --num_gpus, and torchrun's --nproc_per_node: a number, or "gpu", "cpu" or "auto"; None for all devices."""
    count: int | None = None
    if "num_gpus" in typed:
        count = _read("num_processes", typed["num_gpus"], "num_gpus")
        if count == 0 or count < -1:
            raise ConfigError("--num_gpus", expected="a number above 0, or -1 for all", got=count)
        count = None if count == -1 else count
    if "nproc_per_node" not in typed:
        return count
    before, word = count, typed["nproc_per_node"].lower()
    if word == "cpu":
        count = usable_cores()
    elif word in ("gpu", "auto"):
        count = None
    else:
        count = _read("num_processes", word, "nproc_per_node")
        if count < 1:
            raise ConfigError("--nproc_per_node", expected='a number above 0, "gpu", "cpu" or "auto"', got=count)
    if before is not None and count != before:
        raise ConfigError(f"--nproc_per_node {word}: conflicts with --num_gpus {before}", fix="keep one")
    return count
