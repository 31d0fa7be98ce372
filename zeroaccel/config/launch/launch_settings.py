"""The typed settings of a launch: how many processes, on which machines, how they meet, what they train with.

Command-line flags have the same names and pass the same checks. The settings are declared in `launch_schema`, and
gathered from flags, environment and file in `launch_sources`; read by `zeroaccel.cli`. Only what can be said without
looking at the machine is checked here: cores, ports, host names and the script are the business of `zeroaccel.cli`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from zeroaccel.config.launch.launch_schema import (
    DynamoSettings,
    HostSettings,
    ProcessSettings,
    Rendezvous,
    Streams,
    ZeroSettings,
)
from zeroaccel.config.problems import NOTHING, Problem, closest, from_pydantic
from zeroaccel.errors import ConfigError, compose

__all__ = [
    "LaunchSettings",
    "Rendezvous",
    "Streams",
    "idle_settings",
    "launch_settings",
    "typed_settings",
    "wrong_settings",
]

DEFAULT_STAGE = 2
"""The stage of a launch that asks for ZeRO without saying which, as in accelerate."""

_WAITS = ("join_timeout", "last_call_timeout", "close_timeout", "read_timeout", "heartbeat_timeout")
_RENDEZVOUS_KEYS: Mapping[Rendezvous, tuple[str, ...]] = {
    "static": ("timeout",),
    "c10d": (*_WAITS, "keep_alive_interval", "keep_alive_max_attempt"),
}


class LaunchSettings(ProcessSettings, ZeroSettings, HostSettings, DynamoSettings):
    """How a job is started. Made by `launch_settings`, which also checks the settings against each other."""

    @property
    def rendezvous(self) -> Rendezvous:
        """How the machines meet. A port that somebody chose becomes MASTER_PORT only by the static way."""
        if self.num_machines == 1 and not self.main_process_port:
            return "c10d"  # at a port that the agent finds; on one machine the ranks are fixed either way
        if self.rdzv_backend is None and (self.max_restarts or self.min_machines):
            return "c10d"  # the static way does not tell other machines of a restart
        return self.rdzv_backend or "static"

    @property
    def machine(self) -> int:
        """The number of this machine."""
        return self.machine_rank or 0

    @property
    def is_main_machine(self) -> bool:
        """Whether the meeting point is on this machine."""
        return self.machine == 0

    @property
    def starts_hosts(self) -> bool:
        """Whether this launcher starts the job on the machines of a hostfile, rather than its own part of it."""
        return self.hostfile is not None and self.multinode_launcher != "standard"

    @property
    def uses_zero(self) -> bool:
        """Whether the launch sets the ZeRO engine up, by name or by any of its settings."""
        if self.distributed_type is not None:
            return self.distributed_type == "DEEPSPEED"
        return bool(self.zero_settings)

    @property
    def zero_settings(self) -> dict[str, Any]:
        """The settings of ZeRO that were given."""
        return {name: value for name in ZeroSettings.model_fields if (value := getattr(self, name)) is not None}


def launch_settings(values: Mapping[str, Any], address: Callable[[str], str] = str) -> LaunchSettings:
    """Checks settings one by one and against each other.

    Args:
        values: setting -> value, of those that were given.
        address: setting -> what it is called where it was given, "--num_processes" for one.

    Raises:
        ConfigError: some are wrong; all of them are told, one line each.
    """
    settings = typed_settings(values, address)
    if problems := list(_contradictions(settings)):
        raise wrong_settings(problems, address)
    return settings


def typed_settings(values: Mapping[str, Any], address: Callable[[str], str] = str) -> LaunchSettings:
    """The same, each setting checked by itself only: for the part of a launch that a file shows.

    Raises:
        ConfigError: as for `launch_settings`.
    """
    if unknown := [name for name in values if name not in LaunchSettings.model_fields]:
        raise wrong_settings([_unknown(name) for name in unknown], address)
    try:
        return LaunchSettings(**values)
    except ValidationError as error:
        raise wrong_settings([from_pydantic(entry) for entry in error.errors(include_url=False)], address) from None


def idle_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings that do nothing beside the others -> why. What a JSON config says is not known here.

    Args:
        values: setting -> value, of those that were given; they need not be right.
    """
    if values.get("deepspeed_config_file") is not None:
        return {}
    stage = values.get("zero_stage", DEFAULT_STAGE)
    if not isinstance(stage, int) or isinstance(stage, bool):
        return {}
    said = f"the stage is {stage}" + ("" if "zero_stage" in values else ", as none is given")
    idle: dict[str, str] = {}
    for kind, least, what in (
        ("param", 3, f"parameters are sharded at stage 3 only, and {said}"),
        ("optimizer", 1, f"optimizer states are sharded from stage 1 on, and {said}"),
    ):
        names = [f"offload_{kind}_device", f"offload_{kind}_nvme_path"]
        if 0 <= stage < least and values.get(names[0]) in ("cpu", "nvme"):
            idle |= {name: what for name in names if name in values}
    return idle


def _unknown(name: str) -> Problem:
    meant = closest(name, LaunchSettings.model_fields)
    return Problem((name,), text="no such setting", fix=f"did you mean {meant}?" if meant else "remove it")


def wrong_settings(problems: list[Problem], address: Callable[[str], str]) -> ConfigError:
    """One error that tells all problems, each under the name and place its setting was given by."""
    lines = []
    for problem in problems:
        where = address(str(problem.path[0])) + (f": {problem.text}" if problem.text else "")
        got = {} if problem.got is NOTHING else {"got": problem.got}
        lines.append(compose(where, expected=problem.expected, fix=problem.fix, **got))
    return ConfigError(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} settings are wrong", *lines]))


def _contradictions(settings: LaunchSettings) -> Iterator[Problem]:
    yield from _problems_of_elasticity(settings)
    if settings.num_machines > 1:
        yield from _problems_between_machines(settings)
    elif settings.machine_rank and not settings.starts_hosts:
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
    yield from _problems_of_zero(settings)


def _problems_of_elasticity(settings: LaunchSettings) -> Iterator[Problem]:
    if settings.max_restarts and settings.num_machines > 1 and settings.rendezvous == "static":
        text = "the static rendezvous does not tell other machines of a restart"
        yield Problem(("rdzv_backend",), text=text, fix="set it to c10d, or max_restarts to 0")
    least = settings.min_machines
    if least is None:
        return
    if least > settings.num_machines:
        expected = f"at most num_machines ({settings.num_machines})"
        yield Problem(("min_machines",), expected=expected, got=least)
    elif settings.rendezvous != "c10d":
        text = "machines come and go with the c10d rendezvous only"
        yield Problem(("min_machines",), text=text, fix="set rdzv_backend to c10d, or leave it out")


def _problems_between_machines(settings: LaunchSettings) -> Iterator[Problem]:
    machines = settings.num_machines
    if settings.starts_hosts:
        yield from _problem_of_division(settings)
        return  # each machine is told its number and the meeting point by the one that starts the job
    arrives = settings.rendezvous == "c10d"  # then the numbers are given out in some order
    if (settings.machine_rank is None and not arrives) or (settings.machine_rank or 0) >= machines:
        got = NOTHING if settings.machine_rank is None else settings.machine_rank
        fix = "or give a hostfile, and the job is started on all machines from here" if got is NOTHING else ""
        yield Problem(("machine_rank",), expected=f"the number of this machine, 0 to {machines - 1}", got=got, fix=fix)
    if settings.main_process_ip is None:
        yield Problem(("main_process_ip",), expected="the address of machine 0", fix="give it on every machine")
    if settings.main_process_port == 0:
        fix = "choose one that is free on machine 0, and give it on every machine"
        yield Problem(("main_process_port",), expected="a port that all machines know", got=0, fix=fix)
    yield from _problem_of_division(settings)


def _problem_of_division(settings: LaunchSettings) -> Iterator[Problem]:
    machines = settings.num_machines
    if settings.num_processes and settings.num_processes % machines:
        per_machine = settings.num_processes // machines
        counts = " or ".join(str(count * machines) for count in (per_machine, per_machine + 1) if count)
        yield Problem(
            ("num_processes",),
            expected=f"a multiple of num_machines ({machines})",
            got=settings.num_processes,
            fix=f"it counts the processes of all machines together: {counts}",
        )


def _problems_of_zero(settings: LaunchSettings) -> Iterator[Problem]:
    given = settings.zero_settings
    if given and not settings.uses_zero:
        names = ", ".join(given)
        fix = f"set distributed_type to DEEPSPEED, or leave out {names}"
        yield Problem(("distributed_type",), text=f"{settings.distributed_type} does without ZeRO", fix=fix)
    if settings.inclusion_filter is not None and settings.exclusion_filter is not None:
        yield Problem(("exclusion_filter",), text="given beside an inclusion filter", fix="keep one of the two")
    for name in ("inclusion_filter", "exclusion_filter"):
        if getattr(settings, name) is not None and settings.hostfile is None:
            yield Problem((name,), text="a filter of the hostfile, and there is none", fix="set hostfile too")
    if settings.deepspeed_config_file is not None:
        return  # the stage may be said there; the whole is checked once the file has been read
    stage = DEFAULT_STAGE if settings.zero_stage is None else settings.zero_stage
    said = f"the stage is {stage}" + ("" if settings.zero_stage is not None else ", as none is given")
    if settings.offload_param_device not in (None, "none") and stage < 3:
        text = f"parameters are sharded at stage 3 only, and {said}"
        yield Problem(("offload_param_device",), text=text, fix='set zero_stage to 3, or this to "none"')
    if settings.offload_optimizer_device not in (None, "none") and stage < 1:
        text = f"optimizer states are sharded from stage 1 on, and {said}"
        yield Problem(("offload_optimizer_device",), text=text, fix='set zero_stage to 1, 2 or 3, or this to "none"')
    for kind in ("optimizer", "param"):
        path = f"offload_{kind}_nvme_path"
        if getattr(settings, f"offload_{kind}_device") == "nvme" and getattr(settings, path) is None:
            yield Problem(
                (path,), text=f'missing, and offload_{kind}_device is "nvme"', fix="give a folder on a local disk"
            )
