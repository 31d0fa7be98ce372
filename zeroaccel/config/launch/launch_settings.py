"""The models of a launch, made from the rows of `setting_table`: types, the launch file, checks for contradictions.

`LaunchFile` has accelerate's keys and sections; `launch_settings` combines all settings into one flat `LaunchSettings`
and checks them against each other. This module does not inspect the machine: `zeroaccel.cli` checks cores, ports, host
names and the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, create_model

from zeroaccel.config.diagnostics import NOTHING, Problem, from_pydantic, hint
from zeroaccel.config.launch.setting import Setting
from zeroaccel.config.launch.setting_table import DYNAMO_SECTION, MESH_SECTION, SETTINGS, TRAINING, ZERO_SECTION
from zeroaccel.config.parallel import AXES, ParallelConfig
from zeroaccel.config.section import (
    AlsoSpelled,
    ConfigSection,
    Count,
    Flag,
    FreeSection,
    Name,
    NonNegativeNumber,
    PathText,
    PositiveCount,
    PositiveNumber,
    Text,
    as_integer,
    checked,
    lowered,
    wrong,
)
from zeroaccel.errors import ConfigError, UsageError, compose

Rendezvous = Literal["static", "c10d"]
Streams = int | dict[int, int]
_Section = TypeVar("_Section", bound=ConfigSection)


# -- types of values


def _streams(value: object) -> object:
    choices = value.values() if isinstance(value, Mapping) else (value,)
    if all(type(choice) is int and 0 <= choice <= 3 for choice in choices) and (
        not isinstance(value, Mapping) or all(type(rank) is int and rank >= 0 for rank in value)
    ):
        return value
    raise wrong("0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of them per local rank such as 0:3,1:2")


def _rendezvous_conf(value: object) -> object:
    if value in (None, ""):
        return {}
    if isinstance(value, Mapping) and all(type(number) is int and number > 0 for number in value.values()):
        return value
    raise wrong("settings with whole numbers above 0, such as join_timeout=60,read_timeout=30")


def _no(value: object) -> object:
    return "no" if value is False else value  # YAML reads a bare `no` as false


def _devices(value: object) -> object:
    text = str(value).replace(" ", "") if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    text = text.removesuffix(",")  # accelerate's files write a list of one device as "0,"
    names = text.split(",")
    if text == "all" or (text and all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name) for name in names)):
        if len(set(names)) == len(names):
            return text
        raise wrong("each device once")
    raise wrong('"all", or device numbers such as 0,2')


def _class_names(value: object) -> object:
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) and name.strip() for name in names):
        return tuple(name.strip() for name in names)
    raise wrong("class names separated by commas")


def _word(value: object) -> object:
    return value.lower() if isinstance(value, str) else as_integer(value)


def _choice(row: Setting) -> BeforeValidator:
    """Returns the validator that reads a choice in any case, its synonyms, and the words that are refused."""
    words: dict[Any, Any] = {_word(choice): choice for choice in row.choices} | dict(row.synonyms)
    expected = row.expected or " or ".join(f'"{choice}"' for choice in row.choices)

    def read(value: object) -> object:
        word = "no" if value is False else _word(value)  # YAML reads a bare `no` as false
        if word in words:
            return words[word]
        if row.expected or word in row.refused:
            raise wrong(expected, row.refused.get(str(word), ""))
        return value

    return BeforeValidator(read)


_TYPES: Mapping[str, Any] = {
    "switch": Flag,
    "port": Annotated[int, checked(lambda value: type(value) is int and 0 <= value <= 65535, "a port, 0 to 65535")],
    "text": Name,
    "word": Annotated[Name, BeforeValidator(lowered), BeforeValidator(_no)],
    "file": PathText,
    "folder": PathText,
    "names": Annotated[tuple[str, ...], BeforeValidator(_class_names)],
    "devices": Annotated[str, BeforeValidator(_devices)],
    "streams": Annotated[Streams, BeforeValidator(_streams)],
    "pairs": Annotated[dict[str, int], BeforeValidator(_rendezvous_conf)],
}


def type_of(row: Setting) -> Any:
    """Returns the type of a setting's value for pydantic."""
    if row.kind == "choice":
        return Annotated[Literal[row.choices], _choice(row)]
    if row.kind in ("count", "number"):
        counts, numbers = (Count, PositiveCount), (NonNegativeNumber, PositiveNumber)
        return (counts if row.kind == "count" else numbers)[not row.from_zero]
    return _TYPES[row.kind]


def with_settings(rows: Iterable[Setting]) -> Callable[[type[_Section]], type[_Section]]:
    """Returns a decorator that adds a field for each row to a section; the row's help describes it."""

    def add(section: type[_Section]) -> type[_Section]:
        fields: dict[str, Any] = {}
        for row in rows:
            kind = type_of(row)
            optional = kind if row.default is not None or row.kind == "pairs" else kind | None
            marks = tuple(map(AlsoSpelled, row.spelled))
            default = {"default_factory": dict} if row.kind == "pairs" else {"default": row.default}
            fields[row.name] = (
                Annotated[(optional, *marks)] if marks else optional,
                Field(description=row.about, **default),
            )
        fields |= {"__base__": section, "__doc__": section.__doc__, "__module__": section.__module__}
        return cast(type[_Section], create_model(section.__name__, **fields))

    return add


def _of(section: str) -> list[Setting]:
    return [row for row in SETTINGS.values() if row.section == section]


# -- the launch file


class SettingsSection(ConfigSection):
    """A section with fields from `setting_table`."""

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


@with_settings(_of(ZERO_SECTION))
class DeepSpeedSection(SettingsSection):
    """Settings of ZeRO and of the hostfile; `deepspeed_config` in the launch file."""


@with_settings(_of(DYNAMO_SECTION))
class DynamoSection(SettingsSection):
    """Settings of torch.compile; `dynamo_config` in the launch file."""


@with_settings(_of(MESH_SECTION))
class ParallelSection(SettingsSection):
    """Sizes of the mesh axes; `parallelism_config` in the launch file."""


@with_settings(_of(""))
class LaunchFile(SettingsSection):
    """The launch file: accelerate's keys and zeroaccel's additional settings."""

    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    """Environment of the processes: LOCAL_MACHINE."""
    main_training_function: Text = "main"
    """Accepted without effect: the launcher runs scripts as they are."""
    downcast_bf16: Annotated[Literal["no"], BeforeValidator(_no)] = "no"
    """A setting of TPUs: no."""
    tpu_env: Any = None
    """A setting of TPUs: empty."""
    tpu_use_cluster: Literal[False] = False
    """A setting of TPUs: false."""
    tpu_use_sudo: Literal[False] = False
    """A setting of TPUs: false."""
    deepspeed_config: DeepSpeedSection = DeepSpeedSection()
    """Settings of ZeRO and of the hostfile."""
    dynamo_config: DynamoSection = DynamoSection()
    """Settings of torch.compile."""
    fsdp_config: FreeSection = None
    """Settings of FSDP: if distributed_type is FSDP, translated to the equivalent ZeRO stage and offload."""
    megatron_lm_config: FreeSection = None
    """Settings of Megatron-LM, which is another engine."""
    parallelism_config: ParallelSection = ParallelSection()
    """Sizes of the mesh axes."""
    fp8_config: FreeSection = None
    """Settings of 8-bit training."""
    ipex_config: FreeSection = None
    """Settings of Intel Extension for PyTorch."""
    mpirun_config: FreeSection = None
    """Settings of mpirun."""


SECTIONS = (ZERO_SECTION, DYNAMO_SECTION, MESH_SECTION)
"""Keys of the launch file that hold sections of settings."""

DEFAULT_STAGE: int = SETTINGS["zero_stage"].unresolved
"""ZeRO stage of a launch that requests ZeRO without a stage, as in accelerate."""

ZERO_SETTINGS = tuple(row.name for row in SETTINGS.values() if row.section == ZERO_SECTION and row.group == TRAINING)
"""Settings of ZeRO, any of which requests the engine."""

_WAITS = ("join_timeout", "last_call_timeout", "close_timeout", "read_timeout", "heartbeat_timeout")
_RENDEZVOUS_KEYS: Mapping[Rendezvous, tuple[str, ...]] = {
    "static": ("timeout",),
    "c10d": (*_WAITS, "keep_alive_interval", "keep_alive_max_attempt"),
}


# -- the settings of a launch


@with_settings(SETTINGS.values())
class LaunchSettings(SettingsSection):
    """All settings of a launch. `launch_settings` creates it and checks the settings against each other."""

    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    def where(self, name: str) -> str:
        """Returns the address of a setting for a message: its flag, variable or place in a file, else its flag."""
        return self._places.get(name, SETTINGS[name].flag_name)

    @property
    def rendezvous(self) -> Rendezvous:
        """Rendezvous backend. An explicit port becomes MASTER_PORT with static rendezvous only."""
        if self.num_machines == 1 and not self.main_process_port:
            return "c10d"  # at a port that the agent chooses; on one machine the ranks are fixed with either backend
        if self.rdzv_backend is None and (self.max_restarts or self.min_machines):
            return "c10d"  # static rendezvous does not restart the ranks of other machines
        return self.rdzv_backend or "static"

    @property
    def is_elastic(self) -> bool:
        """True if the job may continue with fewer processes."""
        return self.min_machines is not None or self.min_processes is not None

    @property
    def machine(self) -> int:
        """Rank of this machine."""
        return self.machine_rank or 0

    @property
    def is_main_machine(self) -> bool:
        """True if this machine hosts the rendezvous store."""
        return self.machine == 0

    @property
    def starts_hosts(self) -> bool:
        """True if this launcher starts the job on all machines of a hostfile, rather than only on this one."""
        return self.hostfile is not None and self.multinode_launcher != "standard"

    @property
    def uses_zero(self) -> bool:
        """True if the launch requests the ZeRO engine, by distributed_type or by any setting of ZeRO."""
        if self.distributed_type is not None:
            return bool(self.distributed_type == "DEEPSPEED")
        return bool(self.zero_settings)

    @property
    def parallel(self) -> ParallelConfig:
        """Mesh with the requested sizes."""
        return ParallelConfig.from_sizes({axis: getattr(self, f"{axis}_size") for axis in (*AXES, "ep")})

    @property
    def zero_settings(self) -> dict[str, Any]:
        """Settings of ZeRO that the launch sets."""
        return {name: value for name in ZERO_SETTINGS if (value := getattr(self, name)) is not None}


def launch_settings(values: Mapping[str, Any], address: Callable[[str], str] = str) -> LaunchSettings:
    """Checks settings one by one and against each other.

    Args:
        values: setting -> value, without settings that were not given.
        address: setting -> its name at the place where the user set it, such as "--num_processes".

    Raises:
        ConfigError: settings are wrong; the message lists all of them, one per line.

    Example:
        >>> settings = launch_settings({"num_processes": 8, "zero_stage": 3})
        >>> settings.uses_zero, settings.rendezvous
        (True, 'c10d')
    """
    settings = typed_settings(values, address)
    if problems := list(_contradictions(settings)):
        raise wrong_settings(problems, address)
    if address is not str:
        settings._places.update({name: address(name) for name in values})
    return settings


def typed_settings(values: Mapping[str, Any], address: Callable[[str], str] = str) -> LaunchSettings:
    """Checks each setting by itself, but not against the others, for example those of a launch file alone.

    Raises:
        ConfigError: as for `launch_settings`.
    """
    names = LaunchSettings.model_fields
    unknown = [
        Problem((name,), text="no such setting", fix=hint(name, names, "remove it"))
        for name in values
        if name not in names
    ]
    if unknown:
        raise wrong_settings(unknown, address)
    try:
        return LaunchSettings(**values)
    except ValidationError as error:
        raise wrong_settings([from_pydantic(entry) for entry in error.errors(include_url=False)], address) from None


def idle_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns settings that have no effect together with the others -> the reason. Does not read the JSON config.

    Args:
        values: setting -> value, without settings that were not given; the values may be invalid.
    """
    stage = values.get("zero_stage", DEFAULT_STAGE)
    if stage not in (0, 1, 2, 3) or values.get("deepspeed_config_file") is not None:
        return {}
    about_stage = f"the stage is {stage}" + ("" if "zero_stage" in values else ", the default")
    idle: dict[str, str] = {}
    if stage < 3:
        zeropp = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
        what = f"parameters are sharded at stage 3 only, and {about_stage}"
        idle = {name: what for name in zeropp if values.get(name) not in (None, False, 1)}
    for kind, least, what in (
        ("param", 3, f"parameters are sharded at stage 3 only, and {about_stage}"),
        ("optimizer", 1, f"optimizer states are sharded from stage 1 on, and {about_stage}"),
    ):
        names = [f"offload_{kind}_device", f"offload_{kind}_nvme_path"]
        if stage < least and str(values.get(names[0])).lower() in ("cpu", "nvme"):
            idle |= {name: what for name in names if name in values}
    return idle


def wrong_settings(problems: list[Problem], address: Callable[[str], str]) -> ConfigError:
    """Combines problems into one error that names each setting by the place where the user set it."""
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
    keys = _RENDEZVOUS_KEYS[settings.rendezvous]
    for name in settings.rdzv_conf:
        if name not in keys:
            expected = f"settings of the {settings.rendezvous} rendezvous ({', '.join(keys)})"
            yield Problem(("rdzv_conf",), expected=expected, got=name)
    yield from _problems_of_zero(settings)
    yield from _problems_of_axes(settings)


def _problems_of_axes(settings: LaunchSettings) -> Iterator[Problem]:
    if settings.num_processes is None:
        return  # one process per device: `plan_launch` knows their number, and every rank checks it
    mesh = settings.parallel
    try:
        mesh.resolve(settings.num_processes)
    except UsageError:
        names = [f"{axis}_size" for axis in (*AXES, "ep") if getattr(settings, f"{axis}_size") is not None]
        yield Problem((names[-1],), text=mesh.misfit(settings.num_processes), fix=_FITTING)


_FITTING = "change num_processes, or the sizes"


def _problems_of_elasticity(settings: LaunchSettings) -> Iterator[Problem]:
    if settings.max_restarts and settings.num_machines > 1 and settings.rendezvous == "static":
        text = "the static rendezvous does not inform other machines about a restart"
        yield Problem(("rdzv_backend",), text=text, fix="set it to c10d, or max_restarts to 0")
    if settings.min_processes is not None:
        yield from _problems_of_fewer_processes(settings, settings.min_processes)
    least = settings.min_machines
    if least is None:
        return
    if least > settings.num_machines:
        expected = f"at most num_machines ({settings.num_machines})"
        yield Problem(("min_machines",), expected=expected, got=least)
    elif settings.rendezvous != "c10d":
        text = "only the c10d rendezvous lets machines join and leave"
        yield Problem(("min_machines",), text=text, fix="set rdzv_backend to c10d, or leave it out")


def _problems_of_fewer_processes(settings: LaunchSettings, least: int) -> Iterator[Problem]:
    name = ("min_processes",)
    if settings.num_machines > 1:
        text = "the number of processes per machine is fixed on several machines"
        yield Problem(name, text=text, fix="pass --num_machines MIN:MAX instead")
    elif settings.num_processes is None or least > settings.num_processes:
        most = "num_processes" if settings.num_processes is None else f"num_processes ({settings.num_processes})"
        yield Problem(name, expected=f"at most {most}", got=least)
    elif settings.max_restarts < 2:
        text = "the launcher excludes a process only after two failed attempts"
        yield Problem(name, text=text, fix="set max_restarts to 2 or more")


def _problems_between_machines(settings: LaunchSettings) -> Iterator[Problem]:
    machines = settings.num_machines
    if settings.starts_hosts:
        yield from _problem_of_division(settings)
        return  # `ssh` passes each machine its rank and the address of machine 0
    arrives = settings.rendezvous == "c10d"  # c10d assigns the numbers in any order
    is_spare = settings.min_machines is not None and arrives  # a machine that waits may have a number above the others
    if (settings.machine_rank is None and not arrives) or ((settings.machine_rank or 0) >= machines and not is_spare):
        got = NOTHING if settings.machine_rank is None else settings.machine_rank
        fix = "or set hostfile, and this launcher starts the job on all machines" if got is NOTHING else ""
        yield Problem(("machine_rank",), expected=f"the number of this machine, 0 to {machines - 1}", got=got, fix=fix)
    if settings.main_process_ip is None:
        yield Problem(("main_process_ip",), expected="the address of machine 0", fix="set it on every machine")
    if settings.main_process_port == 0:
        fix = "choose a port that is free on machine 0, and set it on every machine"
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
            fix=f"it is the total number of processes on all machines: set {counts}",
        )


def _problems_of_zero(settings: LaunchSettings) -> Iterator[Problem]:
    explicit = settings.zero_settings
    if explicit and not settings.uses_zero:
        names = ", ".join(explicit)
        fix = f"set distributed_type to DEEPSPEED, or leave out {names}"
        yield Problem(("distributed_type",), text=f"{settings.distributed_type} does not use ZeRO", fix=fix)
    if settings.inclusion_filter is not None and settings.exclusion_filter is not None:
        yield Problem(("exclusion_filter",), text="given together with an inclusion filter", fix="keep one of the two")
    for name in ("inclusion_filter", "exclusion_filter"):
        if getattr(settings, name) is not None and settings.hostfile is None:
            yield Problem((name,), text="it filters a hostfile, and hostfile is not set", fix="set hostfile too")
    if settings.deepspeed_config_file is not None:
        return  # it may set the stage; `load_config` checks the merged settings
    idle = idle_settings(settings.model_dump(exclude_none=True))
    for kind in ("optimizer", "param"):
        device, path = f"offload_{kind}_device", f"offload_{kind}_nvme_path"
        if getattr(settings, device) == "nvme" and device not in idle and getattr(settings, path) is None:
            yield Problem(
                (path,), text=f'missing, and offload_{kind}_device is "nvme"', fix="set it to a folder on a local disk"
            )
