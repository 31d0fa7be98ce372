"""From flags, environment and launch file to one set of settings, each knowing who said it.

The order is the same for every setting: flag, environment, file, default. Every setting may be given in the environment
as ZEROACCEL_ and its name, and those that launchers hand on also under the name they are handed on by. Reads mappings,
never the environment itself; files are read by `launch_file`, and settings are judged in `launch`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from zeroaccel.config.launch.launch_env import LaunchedSettings, to_environment, variable_of
from zeroaccel.config.launch.launch_settings import (
    LaunchSettings,
    idle_settings,
    launch_settings,
    wrong_settings,
)
from zeroaccel.config.problems import Problem
from zeroaccel.config.section import spellings

__all__ = [
    "PREFIX",
    "Given",
    "from_text",
    "gather",
    "given_in_environment",
    "kind_of",
    "launched_environment",
    "other_names",
    "variables_of",
]

SettingKind = Literal["switch", "count", "number", "streams", "pairs", "text"]

PREFIX = "ZEROACCEL_"
"""Of the variables that are ours."""

# Names of long standing for the same thing; what launchers hand on is added below.
_OTHER_VARIABLES: Mapping[str, tuple[str, ...]] = {"timeout": ("ZEROACCEL_COLLECTIVE_TIMEOUT",)}
# Variables that the processes read themselves, in a form of their own: where one is set, it stays as it is.
_STAYS: Mapping[str, tuple[str, object]] = {
    "num_cpu_threads_per_process": ("OMP_NUM_THREADS", None),
    "gpu_ids": ("CUDA_VISIBLE_DEVICES", "all"),
}
_HANDED_ON = {one.name for one in fields(LaunchedSettings)} & set(LaunchSettings.model_fields)
# What people write into --rdzv_conf beside its own settings -> why it does nothing, where it does nothing.
_MEETING: Mapping[str, str] = {
    "rdzv_backend": "",
    "rdzv_endpoint": "",
    "rdzv_id": "the meeting point is enough",
    "is_host": "machine 0 hosts the meeting point",
    "store_type": "machines meet through torch's TCP store",
    "use_libuv": "torch chooses",
}
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Given:
    """Settings that somebody gave.

    Attributes:
        values: setting -> value; those that nobody gave are absent.
        sources: setting -> who said it: "--zero_stage", "environment ZEROACCEL_ZERO_STAGE", "zeroaccel.yaml:12:3".
        notes: one line for each thing that was said and has no effect, or stands for something else here.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def under(self, other: Given) -> Given:
        """These settings where the other has none."""
        return Given({**self.values, **other.values}, {**self.sources, **other.sources}, (*self.notes, *other.notes))

    def effective(self) -> Given:
        """These settings without those that have no effect beside the others, each of which leaves a note.

        They are settings that accelerate and DeepSpeed take and do nothing with, as offload of parameters at stage 2.
        """
        idle = idle_settings(self.values)
        notes = [f"{self.where(name)} {self.values[name]}: does nothing, {reason}" for name, reason in idle.items()]
        return Given(
            {name: value for name, value in self.values.items() if name not in idle},
            {name: source for name, source in self.sources.items() if name not in idle},
            (*self.notes, *notes),
        )

    def where(self, name: str) -> str:
        """The address of a setting for a message; one that nobody gave is called by the flag that would give it."""
        source = self.sources.get(name, f"--{name}")
        return source if source.startswith("--") else f"{source}: {name}"

    def settings(self) -> LaunchSettings:
        """The settings, checked.

        Raises:
            ConfigError: some are wrong; all of them are told, each with who said it.
        """
        return launch_settings(self.values, self.where)


def gather(flags: Given, environ: Mapping[str, str], file: Given) -> Given:
    """All settings that were given, each from the first of flags, environment and file that has it.

    Raises:
        ConfigError: a variable of the environment cannot be read.
    """
    return _meeting(file.under(given_in_environment(environ)).under(flags))


def given_in_environment(environ: Mapping[str, str]) -> Given:
    """The settings that variables of the environment give; an empty variable gives nothing."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in LaunchSettings.model_fields:
        for variable in variables_of(name):
            text = environ.get(variable, "").strip()
            if text and text.lower() not in _unsaid(name):
                sources[name] = f"environment {variable}"
                values[name] = from_text(name, text, lambda name: f"{sources[name]}: {name}")
                break
    for name, (variable, value) in _STAYS.items():
        if variable in environ and name not in values:
            values[name], sources[name] = value, f"environment {variable}"
    if "distributed_type" not in values and (said := environ.get("ACCELERATE_USE_DEEPSPEED", "").lower()) in _YES:
        values["distributed_type"] = "DEEPSPEED"
        sources["distributed_type"] = f"environment ACCELERATE_USE_DEEPSPEED={said}"
    return Given(values, sources)


def launched_environment(settings: LaunchSettings, sources: Mapping[str, str]) -> dict[str, str]:
    """What the processes are told of these settings, as variables of their environment."""
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name in _HANDED_ON:
        value = getattr(settings, name)
        if name in sources and value is not None:
            values[name] = ",".join(value) if isinstance(value, tuple) else value
            said[name] = sources[name]
    if settings.uses_zero or settings.distributed_type is not None:
        values["use_zero"] = settings.uses_zero
        said["use_zero"] = sources.get("distributed_type", "default")
    return to_environment(LaunchedSettings(**values), said)


def kind_of(name: str) -> SettingKind:
    """How a setting is written on a command line."""
    kinds = set(_plain_types(LaunchSettings.model_fields[name].annotation))
    if bool in kinds:
        return "switch"
    if dict in kinds:
        return "streams" if int in kinds else "pairs"
    return "number" if float in kinds else "count" if int in kinds else "text"


def other_names(name: str) -> tuple[str, ...]:
    """The other names of a setting."""
    return tuple(mark.name for mark in spellings(LaunchSettings.model_fields[name]))


def from_text(name: str, text: str, address: Callable[[str], str]) -> Any:
    """The value of a setting that was written as text, as a flag or in the environment.

    Raises:
        ConfigError: the text has not the form of such a value; whether the value is right is not looked at.
    """
    parse, expected = _FORMS[kind_of(name)]
    try:
        return parse(text)
    except (ValueError, OverflowError):
        raise wrong_settings([Problem((name,), expected=expected, got=text)], address) from None


def _switch(text: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise ValueError
    return text.lower() in _YES


def _count(text: str) -> int:
    return int(text.replace("_", "x"))  # 1_000 is a number to Python only


def _streams(text: str) -> int | dict[int, int]:
    if ":" not in text:
        return int(text)
    return {int(rank): int(choice) for rank, choice in (part.split(":") for part in text.split(","))}


def _pairs(text: str) -> dict[str, int | str]:
    pairs = (part.split("=") for part in text.split(","))
    named = {key.strip(): value.strip() for key, value in pairs}
    return {key: value if key in _MEETING else int(value) for key, value in named.items()}


def _meeting(given: Given) -> Given:
    """With what torchrun's --rdzv_conf says of the meeting itself as the settings that say it here."""
    pairs = given.values.get("rdzv_conf")
    if not isinstance(pairs, Mapping) or not set(pairs) & set(_MEETING):
        return given
    source = given.sources.get("rdzv_conf", "--rdzv_conf")
    said: dict[str, Any] = {}
    if "rdzv_backend" in pairs:
        said["rdzv_backend"] = pairs["rdzv_backend"]
    host, _, port = str(pairs.get("rdzv_endpoint", "")).rpartition(":")
    host, port = (host, port) if port.isdigit() else (str(pairs.get("rdzv_endpoint", "")), "")
    if host:
        said["main_process_ip"] = host
    if port:
        said["main_process_port"] = int(port)
    notes = []
    for name, value in said.items():
        before = given.values.get(name, value)
        is_other = before != value
        notes.append(
            f"{source}: {name} {value}: does nothing, as {given.where(name)} says {before}"
            if is_other
            else f"{source} -> {name} {value}"
        )
    notes += [f"{source}: {key}: does nothing, {why}" for key, why in _MEETING.items() if key in pairs and why]
    kept = {key: value for key, value in pairs.items() if key not in _MEETING}
    values = {**given.values, "rdzv_conf": kept}
    return Given(said, dict.fromkeys(said, source)).under(Given(values, given.sources, (*given.notes, *notes)))


_FORMS: Mapping[SettingKind, tuple[Callable[[str], Any], str]] = {
    "switch": (_switch, "true or false"),
    "count": (_count, "a whole number"),
    "number": (float, "a number"),
    "streams": (_streams, "a number, or the form 0:3,1:2"),
    "pairs": (_pairs, "the form KEY=NUMBER,KEY=NUMBER"),
    "text": (str, "text"),
}


def _plain_types(annotation: Any) -> list[type]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [plain for part in get_args(annotation) for plain in _plain_types(part)]
    if get_origin(annotation) is Annotated:
        return _plain_types(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return [str]
    return [get_origin(annotation) or annotation]


def variables_of(name: str) -> tuple[str, ...]:
    """The variables of the environment that give a setting, the first that is there first."""
    handed_on = (variable_of(name),) if name in _HANDED_ON and name != "debug" else ()
    return (f"{PREFIX}{name.upper()}", *_OTHER_VARIABLES.get(name, ()), *handed_on)


def _unsaid(name: str) -> tuple[str, ...]:
    """What stands for nothing in the environment."""
    return ("auto", "none") if name.endswith(("_path", "_file", "_clipping", "_steps")) else ()
