"""The typed settings of a launch: how many processes, on which machines, how they meet, where their output goes.

Command-line flags have the same names and pass the same checks. Beside `schema`, which holds what the processes train;
read by `zeroaccel.cli`. Only what can be said without looking at the machine is checked here: cores, ports, host names
and the script are the business of `zeroaccel.cli`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from zeroaccel.config.problems import NOTHING, Problem, closest, from_pydantic
from zeroaccel.config.section import (
    Count,
    Flag,
    Name,
    NonNegativeNumber,
    PathText,
    PositiveCount,
    PositiveNumber,
    wrong,
)
from zeroaccel.errors import ConfigError, compose

__all__ = ["LaunchSettings", "Rendezvous", "Streams", "launch_settings"]

Rendezvous = Literal["static", "c10d"]

_WAITS = ("join_timeout", "last_call_timeout", "close_timeout", "read_timeout", "heartbeat_timeout")
_RENDEZVOUS_KEYS: Mapping[Rendezvous, tuple[str, ...]] = {
    "static": ("timeout",),
    "c10d": (*_WAITS, "keep_alive_interval", "keep_alive_max_attempt"),
}


def _port(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 65535:
        return value
    raise wrong("a port, 0 to 65535")


def _streams(value: object) -> object:
    choices = value.values() if isinstance(value, Mapping) else (value,)
    if all(type(choice) is int and 0 <= choice <= 3 for choice in choices) and (
        not isinstance(value, Mapping) or all(type(rank) is int and rank >= 0 for rank in value)
    ):
        return value
    raise wrong("0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of them per local rank as in 0:3,1:2")


def _rendezvous_conf(value: object) -> object:
    if isinstance(value, Mapping) and all(type(number) is int and number > 0 for number in value.values()):
        return value
    raise wrong("settings with whole numbers above 0, as in join_timeout=60,read_timeout=30")


Port = Annotated[int, BeforeValidator(_port)]
Streams = Annotated[int | dict[int, int], BeforeValidator(_streams)]
RendezvousConf = Annotated[dict[str, int], BeforeValidator(_rendezvous_conf)]


class LaunchSettings(BaseModel):
    """How a job is started. Made by `launch_settings`, which also checks the settings against each other."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    num_processes: PositiveCount | None = None
    """Processes of the whole job, over all machines. [default: one per accelerator; without any, 1 per machine]"""
    num_machines: PositiveCount = 1
    """Machines that take part; run the same command on each, with its --machine_rank. [default: 1]"""
    machine_rank: Count | None = None
    """The number of this machine, from 0. Machine 0 hosts the meeting point."""
    main_process_ip: Name | None = None
    """Address of machine 0, as the other machines reach it."""
    main_process_port: Port | None = None
    """Port on machine 0 for the meeting point. [default: a free one on one machine, 29500 on several]"""
    use_cpu: Flag = False
    """Hide the accelerators: the processes compute on the CPU and talk through gloo."""
    max_restarts: Count = 0
    """How often all processes are started again after a failure. [default: 0]"""
    monitor_interval: PositiveNumber = 0.1
    """Seconds between two looks at the processes. [default: 0.1]"""
    rdzv_backend: Rendezvous | None = None
    """How machines meet: static (fixed ranks) or c10d. [default: c10d on one machine, static on several]"""
    rdzv_conf: RendezvousConf = {}
    """Settings of the meeting, as KEY=VALUE,...: timeout (static), join_timeout, ... (c10d), in seconds."""
    log_dir: PathText | None = None
    """Folder that keeps the output and the error reports of every process."""
    tee: Streams = 0
    """Also write output to files: 1 stdout, 2 stderr, 3 both, or per local rank as in 0:3,1:2. Prefixes each line."""
    redirects: Streams = 0
    """Write output to files in --log_dir instead of the terminal; as for --tee."""
    timeout: NonNegativeNumber | None = None
    """Seconds a collective may wait for the other processes, 0 for no limit. [default: 600]"""
    debug: Flag = False
    """Show every traceback in full, and the messages of torch's elastic agent."""

    @property
    def rendezvous(self) -> Rendezvous:
        """How the machines meet. A port that somebody chose becomes MASTER_PORT only by the static way."""
        if self.rdzv_backend is not None:
            return self.rdzv_backend
        return "static" if self.num_machines > 1 or self.main_process_port else "c10d"

    @property
    def machine(self) -> int:
        """The number of this machine."""
        return self.machine_rank or 0

    @property
    def is_main_machine(self) -> bool:
        """Whether the meeting point is on this machine."""
        return self.machine == 0


def launch_settings(values: Mapping[str, Any], address: Callable[[str], str] = str) -> LaunchSettings:
    """Checks settings one by one and against each other.

    Args:
        values: setting -> value, of those that were given.
        address: setting -> what it is called where it was given, "--num_processes" for one.

    Raises:
        ConfigError: some are wrong; all of them are told, one line each.
    """
    if unknown := [name for name in values if name not in LaunchSettings.model_fields]:
        raise _error([_unknown(name) for name in unknown], address)
    try:
        settings = LaunchSettings(**values)
    except ValidationError as error:
        raise _error([from_pydantic(entry) for entry in error.errors(include_url=False)], address) from None
    if problems := list(_contradictions(settings)):
        raise _error(problems, address)
    return settings


def _unknown(name: str) -> Problem:
    meant = closest(name, LaunchSettings.model_fields)
    return Problem((name,), text="no such setting", fix=f"did you mean {meant}?" if meant else "remove it")


def _error(problems: list[Problem], address: Callable[[str], str]) -> ConfigError:
    lines = []
    for problem in problems:
        where = address(str(problem.path[0])) + (f": {problem.text}" if problem.text else "")
        got = {} if problem.got is NOTHING else {"got": problem.got}
        lines.append(compose(where, expected=problem.expected, fix=problem.fix, **got))
    return ConfigError(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} settings are wrong", *lines]))


def _contradictions(settings: LaunchSettings) -> Iterator[Problem]:
    if settings.num_machines > 1:
        yield from _problems_between_machines(settings)
    elif settings.machine_rank:
        yield Problem(
            ("machine_rank",), expected="0 on one machine", got=settings.machine_rank, fix="set num_machines too"
        )
    if settings.redirects and settings.log_dir is None:
        yield Problem(("redirects",), text="the output would be lost", fix="set log_dir to the folder that keeps it")
    known = _RENDEZVOUS_KEYS[settings.rendezvous]
    for name in settings.rdzv_conf:
        if name not in known:
            expected = f"settings of the {settings.rendezvous} rendezvous ({', '.join(known)})"
            yield Problem(("rdzv_conf",), expected=expected, got=name)


def _problems_between_machines(settings: LaunchSettings) -> Iterator[Problem]:
    machines = settings.num_machines
    if settings.machine_rank is None or settings.machine_rank >= machines:
        got = NOTHING if settings.machine_rank is None else settings.machine_rank
        yield Problem(("machine_rank",), expected=f"the number of this machine, 0 to {machines - 1}", got=got)
    if settings.main_process_ip is None:
        yield Problem(("main_process_ip",), expected="the address of machine 0", fix="give it on every machine")
    if settings.main_process_port == 0:
        fix = "choose one that is free on machine 0, and give it on every machine"
        yield Problem(("main_process_port",), expected="a port that all machines know", got=0, fix=fix)
    if settings.num_processes and settings.num_processes % machines:
        per_machine = settings.num_processes // machines
        counts = " or ".join(str(count * machines) for count in (per_machine, per_machine + 1) if count)
        yield Problem(
            ("num_processes",),
            expected=f"a multiple of num_machines ({machines})",
            got=settings.num_processes,
            fix=f"it counts the processes of all machines together: {counts}",
        )
