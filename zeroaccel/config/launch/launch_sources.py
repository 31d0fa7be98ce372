"""Settings with their sources: reads them from the environment, and passes them to ranks as variables.

The variable of a setting is ZEROACCEL_ and its name; settings for ranks also have the variable by which ranks receive
them. Those names are accelerate's, so that a script reads the same settings with either launcher;
ZEROACCEL_LAUNCH_SOURCES adds the source of each. An unknown ZEROACCEL_ variable is nearly always misspelt, and is an
error. These functions take and return mappings: they neither read nor change the environment of the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from zeroaccel.config.bounds import parse_plain_json
from zeroaccel.config.diagnostics import Problem, closest
from zeroaccel.config.launch.launch_settings import LaunchSettings, idle_settings, launch_settings, wrong_settings
from zeroaccel.config.launch.setting import Setting
from zeroaccel.config.launch.setting_table import ROWS, SETTINGS
from zeroaccel.config.parallel import AXES, ParallelConfig
from zeroaccel.config.section import FLAG_WORDS, as_integer, as_text
from zeroaccel.errors import ConfigError, compose

SOURCES_VARIABLE = "ZEROACCEL_LAUNCH_SOURCES"
_FILE_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
NOT_IN_FILE = ("--", "environment ", "default")
"""Prefixes of sources other than the launch file."""


# -- values as text


def _count(text: str) -> int:
    text = text.replace("_", "x")  # int() would accept 1_000, which is not valid here
    if re.fullmatch(r"\s*[+-]?\d+\s*", text):
        return int(text)
    value = as_integer(float(text))  # other launchers write 1.0 and 1e3
    if value is None:
        raise ValueError
    return value


def _streams(text: str) -> int | dict[int, int]:
    if ":" not in text:
        return int(text)
    return {int(rank): int(choice) for rank, choice in (pair.split(":") for pair in text.split(","))}


def _pairs(text: str) -> dict[str, int | str]:
    pairs = (pair.split("=") for pair in text.split(","))
    named = {key.strip(): value.strip() for key, value in pairs}
    return {key: value if key in RDZV_SETTINGS else int(value) for key, value in named.items()}


@dataclass(frozen=True)
class _Form:
    """Parser of a value (ValueError or LookupError for invalid text), and the expected form for messages."""

    parse: Callable[[str], Any]
    expected: str


_TEXT, _COUNT = _Form(str, "text"), _Form(_count, "a whole number")
_FORMS: Mapping[str, _Form] = {
    "switch": _Form(lambda text: FLAG_WORDS[text.strip().lower()], "true or false"),
    "count": _COUNT,
    "port": _COUNT,
    "number": _Form(float, "a number"),
    "streams": _Form(_streams, "a number, or one per local rank such as 0:3,1:2"),
    "pairs": _Form(_pairs, "the form KEY=NUMBER,KEY=NUMBER"),
}


def form_of(row: Setting) -> _Form:
    """Returns the form of a setting's value as text."""
    return _FORMS.get("count" if row.choices and isinstance(row.choices[0], int) else row.kind, _TEXT)


def from_text(name: str, text: str, address: Callable[[str], str]) -> Any:
    """Parses the value of a setting from the text of a flag or variable.

    Raises:
        ConfigError: the text does not have the form of such a value. The value itself is not checked.
    """
    form = form_of(SETTINGS[name])
    try:
        return form.parse(text)
    except (ValueError, LookupError, OverflowError):
        raise wrong_settings([Problem((name,), expected=form.expected, got=text)], address) from None


def _is_unset(row: Setting, text: str) -> bool:
    """Returns True for text that launchers write for an unset value. A path of "none" means no path."""
    may_be_unset = row.rank_variable and row.kind in ("count", "number", "text", "file", "folder")
    return not text or (bool(may_be_unset) and text.lower() in ("auto", "none"))


# -- settings with sources


@dataclass(frozen=True)
class ExplicitSettings:
    """Settings from flags, variables or a file, each with its source.

    Attributes:
        values: setting -> value, without settings that have their defaults.
        sources: setting -> its source: "--zero_stage", "environment ZEROACCEL_ZERO_STAGE", "zeroaccel.yaml:12:3".
        notes: one line for each setting that has no effect or is translated to another one.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(values: Mapping[str, Any], source: str) -> ExplicitSettings:
        """Creates settings that all have the same source."""
        return ExplicitSettings(values, dict.fromkeys(values, source))

    def under(self, other: ExplicitSettings) -> ExplicitSettings:
        """Merges both; the other's settings take precedence."""
        return ExplicitSettings(
            {**self.values, **other.values}, {**self.sources, **other.sources}, (*self.notes, *other.notes)
        )

    def effective(self) -> ExplicitSettings:
        """Returns these settings without those that have no effect together with the others; adds a note for each.

        accelerate and DeepSpeed accept and ignore such settings, for example offload of parameters at stage 2.
        """
        idle = idle_settings(self.values)
        notes = [f"{self.where(name)} {self.values[name]}: does nothing: {reason}" for name, reason in idle.items()]
        values = {name: value for name, value in self.values.items() if name not in idle}
        return ExplicitSettings(values, self.sources, (*self.notes, *notes))

    def where(self, name: str) -> str:
        """Returns the address of a setting for a message: its source, or else its flag."""
        source = self.sources.get(name, f"--{name}")
        return source if source.startswith("--") else f"{source}: {name}"

    def settings(self) -> LaunchSettings:
        """Returns the checked settings.

        Raises:
            ConfigError: settings are wrong; the message lists all of them, each with its source.
        """
        return launch_settings(self.values, self.where)


RDZV_SETTINGS: Mapping[str, str] = {
    "rdzv_backend": "",
    "rdzv_endpoint": "",
    "rdzv_id": "the rendezvous needs only an address",
    "is_host": "machine 0 hosts the rendezvous",
    "store_type": "the rendezvous always uses torch's TCP store",
    "use_libuv": "torch chooses",
}
"""Keys of torchrun's --rdzv_conf that are separate settings here, or have no effect -> the reason, or ""."""

# Variables that processes read directly, in another form: if one is set, the launcher leaves it unchanged.
_STAYS: Mapping[str, tuple[str, object]] = {
    "num_cpu_threads_per_process": ("OMP_NUM_THREADS", None),
    "gpu_ids": ("CUDA_VISIBLE_DEVICES", "all"),
}


def settings_from_environment(environ: Mapping[str, str]) -> ExplicitSettings:
    """Reads settings from environment variables; an empty variable sets nothing.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, row in SETTINGS.items():
        texts = ((variable, environ.get(variable, "").strip()) for variable in row.read_variables)
        variable, text = next(((variable, text) for variable, text in texts if not _is_unset(row, text)), ("", ""))
        if text:
            sources[name] = f"environment {variable}"
            values[name] = from_text(name, text, lambda name: f"{sources[name]}: {name}")
    for name, (variable, value) in _STAYS.items():
        if variable in environ and name not in values:
            values[name], sources[name] = value, f"environment {variable}"
    variable = ROWS["use_zero"].rank_variable
    if "distributed_type" not in values and FLAG_WORDS.get(switch := environ.get(variable, "").lower()):
        values["distributed_type"] = "DEEPSPEED"
        sources["distributed_type"] = f"environment {variable}={switch}"
    return ExplicitSettings(values, sources)


# -- the environment of ranks

_RANK_ROWS: Mapping[str, Setting] = {name: row for name, row in ROWS.items() if row.rank_variable}
# Launchers pass on fp8, too, which scripts refuse.
_RANK_PRECISIONS = ("no", "fp16", "bf16", "fp8")


class LaunchedSettings(SimpleNamespace):
    """Settings that a launch passes to its ranks: one attribute for each row of `setting_table` with a variable.

    An attribute is None if the launch does not set it. `use_zero` trains with ZeRO rather than plain data parallelism;
    `use_parallelism_config` applies the sizes of the mesh.

    Example:
        >>> LaunchedSettings(zero_stage=3).gradient_clipping is None
        True
    """

    def __init__(self, **values: Any) -> None:
        if unknown := set(values) - set(_RANK_ROWS):
            raise TypeError(f"no settings of ranks: {', '.join(sorted(unknown))}")
        super().__init__(**{**dict.fromkeys(_RANK_ROWS), **values})

    @property
    def parallel(self) -> ParallelConfig | None:
        """Mesh that the launch requests."""
        if not self.use_parallelism_config:
            return None
        return ParallelConfig.from_sizes({axis: getattr(self, f"{axis}_size") for axis in (*AXES, "ep")})


def to_environment(settings: LaunchedSettings, sources: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables for a process.

    Args:
        sources: field -> its source: "--zero_stage", "environment ZEROACCEL_ZERO_STAGE", "zeroaccel.yaml:12:3",
            "default". A source other than a flag, a variable or "default" counts as the launch config file.
    """
    values = {name: value for name, value in vars(settings).items() if value is not None}
    environment = {_RANK_ROWS[name].rank_variable: as_text(value) for name, value in values.items()}
    named = {name: sources[name] for name in values if name in sources}
    in_file = [name for name, source in named.items() if not source.startswith(NOT_IN_FILE)]
    if in_file:
        environment[_FILE_FIELDS] = ",".join(in_file)
    if named:
        by_variable = {_RANK_ROWS[name].rank_variable: source for name, source in named.items()}
        environment[SOURCES_VARIABLE] = json.dumps(by_variable)
    return environment


def launched_environment(settings: LaunchSettings, sources: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that pass these settings to ranks."""
    values: dict[str, Any] = {}
    value_sources: dict[str, str] = {}
    for name in _RANK_ROWS:
        if name in sources and (value := getattr(settings, name)) is not None:
            values[name] = as_text(value) if isinstance(value, tuple) else value
            value_sources[name] = sources[name]
    if settings.uses_zero or settings.distributed_type is not None:
        values["use_zero"] = settings.uses_zero
        value_sources["use_zero"] = sources.get("distributed_type", "default")
    if settings.parallel != ParallelConfig(dp_shard=settings.parallel.dp_shard):
        values["use_parallelism_config"] = True
        value_sources["use_parallelism_config"] = "default"
    if values.get("use_cpu") and (settings.uses_zero or settings.distributed_type is None):
        # accelerate reads the variable as "use DDP, regardless of other settings", such as those of the script's own
        # config for Trainer. Devices are hidden anyway; the launcher sets the variable to false, because ranks may
        # inherit it from the launcher's own environment.
        values["use_cpu"] = False
    return to_environment(LaunchedSettings(**values), value_sources)


def from_environment(environ: Mapping[str, str]) -> tuple[LaunchedSettings, dict[str, str]]:
    """Reads the settings that the launcher passed, and the source of each.

    Returns:
        The settings, and field -> source for every field that is not None. If the launcher names no sources, the
        source is the variable, marked as the launch config's if the launcher lists it as such.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    named = _named_sources(environ)
    in_file = {name.strip() for name in environ.get(_FILE_FIELDS, "").split(",")}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, row in _RANK_ROWS.items():
        variable = row.rank_variable
        text = environ.get(variable, "")
        if _is_unset(row, text):
            continue
        unnamed = f"the launch config ({variable})" if name in in_file else f"environment {variable}"
        sources[name] = named.get(variable, unnamed)
        form = form_of(row)
        try:
            values[name] = form.parse(text.lower() if row.kind in ("choice", "word") else text)
        except (ValueError, LookupError, OverflowError):
            raise ConfigError(f"{sources[name]}: {name}", expected=form.expected, got=text) from None
        if name == "mixed_precision" and values[name] not in _RANK_PRECISIONS:
            raise ConfigError(f"{sources[name]}: {name}", expected=f"one of {', '.join(_RANK_PRECISIONS)}", got=text)
    return LaunchedSettings(**values), sources


def _named_sources(environ: Mapping[str, str]) -> dict[str, str]:
    text = environ.get(SOURCES_VARIABLE)
    if not text:
        return {}
    try:
        named = parse_plain_json(text)
    except ValueError:
        named = None
    if not isinstance(named, dict) or not all(isinstance(source, str) for source in named.values()):
        raise ConfigError(
            f"environment {SOURCES_VARIABLE}",
            expected="a JSON object that maps variables to sources",
            got=text,
            fix="unset it; launchers set it",
        )
    return named


# -- variables

PREFIX = "ZEROACCEL_"
"""Prefix of zeroaccel's variables."""

OTHER_VARIABLES: Mapping[str, str] = {
    "ZEROACCEL_COMPAT": "enables the facade for `import deepspeed` in child processes",
    "ZEROACCEL_CONFIG": "path of the launch file",
    "ZEROACCEL_CPU_CORES": "cores of a rank; set by the launcher",
    "ZEROACCEL_MEMORY_FOLDER": "folder where ranks find states in memory after a restart; set by the launcher",
    "ZEROACCEL_LAUNCH_ID": "identifies the processes that the ranks of a launcher have started",
    "ZEROACCEL_LAUNCH_SOURCES": "sources of the settings that a launcher passes to its ranks",
    "ZEROACCEL_LOG_LEVEL": "log level of a rank",
    "ZEROACCEL_RACK": "rack of this machine; copies of states in memory go to machines in other racks",
    "ZEROACCEL_SSH": "program that runs commands on other machines",
    "ZEROACCEL_TRACE": "options of `zeroaccel trace` for the ranks",
    "ZEROACCEL_VERIFY": "options of `zeroaccel verify` for the ranks",
}
"""Variables other than launch settings -> their purpose."""


def known_variables() -> frozenset[str]:
    """Returns the names of all known ZEROACCEL_ variables."""
    settings = (variable for row in SETTINGS.values() for variable in row.read_variables)
    return frozenset(OTHER_VARIABLES) | {variable for variable in settings if variable.startswith(PREFIX)}


def unknown_variable(name: str) -> str:
    """Returns the message for an unknown ZEROACCEL_ variable, with the closest known name."""
    meant = closest(name.removeprefix(PREFIX), (name_known.removeprefix(PREFIX) for name_known in known_variables()))
    fix = f"did you mean {PREFIX}{meant}?" if meant else f"zeroaccel reserves names with {PREFIX}; unset it"
    return compose(f"{name}: no such setting", fix=fix)


def check_variables(names: Iterable[str]) -> None:
    """Checks for unknown variables that begin with ZEROACCEL_.

    Args:
        names: names of all variables in the environment.

    Raises:
        ConfigError: variables are unknown; the message lists all of them, each with the closest known name.
    """
    names_known = known_variables()
    lines = [unknown_variable(name) for name in sorted(names) if name.startswith(PREFIX) and name not in names_known]
    if len(lines) == 1:
        raise ConfigError(f"environment {lines[0]}")
    if lines:
        raise ConfigError("\n  ".join([f"environment: {len(lines)} variables are wrong", *lines]))
