"""Merges flags, environment and launch file into one set of settings with sources; builds the environment of ranks.

The precedence is the same for every setting: flag, environment, file, default. The variable of a setting is ZEROACCEL_
and its name; settings for ranks also have the variable by which ranks receive them. Those names are accelerate's, so
that a script reads the same settings with either launcher; ZEROACCEL_LAUNCH_SOURCES adds the source of each. An unknown
ZEROACCEL_ variable is nearly always misspelt, and is an error. These functions take and return mappings: they neither
read nor change the environment of the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from zeroaccel.config.bounds import parse_plain_json
from zeroaccel.config.diagnostics import Problem, closest
from zeroaccel.config.launch.launch_settings import LaunchSettings, idle_settings, launch_settings, wrong_settings
from zeroaccel.config.launch.setting_table import SETTINGS
from zeroaccel.config.parallel import AXES, ParallelConfig
from zeroaccel.config.section import FLAG_WORDS, as_integer, as_text, spellings, types_of
from zeroaccel.errors import ConfigError, compose

SOURCES_VARIABLE = "ZEROACCEL_LAUNCH_SOURCES"
_FILE_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
_USE_ZERO = "ACCELERATE_USE_DEEPSPEED"
_USE_MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"
NOT_IN_FILE = ("--", "environment ", "default")
"""Prefixes of sources other than the launch file."""

_PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class LaunchedSettings:
    """Training settings that a launch passes to its ranks; None for settings that it does not set.

    Attributes:
        use_zero: train with ZeRO rather than plain data parallelism.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        zero_stage: 0 to 3.
        gradient_accumulation_steps: micro-batches per optimizer step.
        gradient_clipping: maximum global L2 norm of the gradients; 0 disables clipping.
        offload_optimizer_device, offload_param_device: "none", "cpu" or "nvme".
        offload_optimizer_nvme_path, offload_param_nvme_path: folder for "nvme".
        zero3_init_flag: shard parameters while the model is being built.
        zero3_save_16bit_model: gather the weights when a model is saved.
        deepspeed_config_file: path of the JSON config.
        deepspeed_moe_layer_cls_names: classes of leaf modules (gathered as a whole), separated by commas.
        zero_hpz_partition_size, zero_quantized_weights, zero_quantized_gradients: ZeRO++ settings, as in the JSON.
        frozen_weights: "int8", "nf4" or "mxfp4".
        use_cpu: compute on the CPU even if there are accelerators.
        dynamo_backend, dynamo_mode, dynamo_use_fullgraph, dynamo_use_dynamic, dynamo_use_regional_compilation:
            arguments of torch.compile; the backend "no" disables compilation.
        debug: check the arguments of collectives that scripts call.
        use_parallelism_config: apply the sizes below.
        dp_replicate_size, dp_shard_size, pp_size, sp_size, tp_size, ep_size: sizes of the mesh, see `ParallelConfig`.
        sp_seq_length, sp_seq_length_is_variable, sp_attn_implementation: settings for accelerate.
    """

    use_zero: bool | None = None
    mixed_precision: str | None = None
    zero_stage: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    deepspeed_config_file: str | None = None
    deepspeed_moe_layer_cls_names: str | None = None
    zero_hpz_partition_size: int | None = None
    zero_quantized_weights: bool | None = None
    zero_quantized_gradients: bool | None = None
    frozen_weights: str | None = None
    use_cpu: bool | None = None
    dynamo_backend: str | None = None
    dynamo_mode: str | None = None
    dynamo_use_fullgraph: bool | None = None
    dynamo_use_dynamic: bool | None = None
    dynamo_use_regional_compilation: bool | None = None
    debug: bool | None = None
    use_parallelism_config: bool | None = None
    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    pp_size: int | None = None
    sp_size: int | None = None
    tp_size: int | None = None
    ep_size: int | None = None
    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    @property
    def parallel(self) -> ParallelConfig | None:
        """Mesh that the launch requests."""
        if not self.use_parallelism_config:
            return None
        return ParallelConfig.from_sizes({axis: getattr(self, f"{axis}_size") for axis in (*AXES, "ep")})


SettingKind = Literal["switch", "count", "number", "streams", "pairs", "text"]


def kind_of(name: str) -> SettingKind:
    """Returns the kind of a setting's value on a command line."""
    kinds = types_of(LaunchSettings.model_fields[name].annotation)
    if bool in kinds:
        return "switch"
    if dict in kinds:
        return "streams" if int in kinds else "pairs"
    return "number" if float in kinds else "count" if int in kinds else "text"


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
    return {int(rank): int(choice) for rank, choice in (part.split(":") for part in text.split(","))}


def _pairs(text: str) -> dict[str, int | str]:
    pairs = (part.split("=") for part in text.split(","))
    named = {key.strip(): value.strip() for key, value in pairs}
    return {key: value if key in _RDZV_SETTINGS else int(value) for key, value in named.items()}


def _precision(text: str) -> str:
    if text.lower() not in _PRECISIONS:
        raise ValueError
    return text.lower()


@dataclass(frozen=True)
class _Form:
    """Parser of a value (ValueError or LookupError for invalid text), and the expected form for messages."""

    parse: Callable[[str], Any]
    expected: str


FORMS: Mapping[SettingKind, _Form] = {
    "switch": _Form(lambda text: FLAG_WORDS[text.strip().lower()], "true or false"),
    "count": _Form(_count, "a whole number"),
    "number": _Form(float, "a number"),
    "streams": _Form(_streams, "a number, or one per local rank such as 0:3,1:2"),
    "pairs": _Form(_pairs, "the form KEY=NUMBER,KEY=NUMBER"),
    "text": _Form(str, "text"),
}
_LOWER = _Form(str.lower, "text")
_RANK_FORMS = {
    "mixed_precision": _Form(_precision, "one of " + ", ".join(_PRECISIONS)),
    "offload_optimizer_device": _LOWER,
    "offload_param_device": _LOWER,
    "dynamo_backend": _LOWER,
}
_SWITCHES = {"use_zero": _USE_ZERO, "use_parallelism_config": _USE_MESH}
# Field of `LaunchedSettings` -> (variable, form).
_RANK_VARIABLES: Mapping[str, tuple[str, _Form]] = {
    **{name: (variable, FORMS["switch"]) for name, variable in _SWITCHES.items()},
    **{
        name: (setting.rank_variable, _RANK_FORMS.get(name, FORMS[kind_of(name)]))
        for name, setting in SETTINGS.items()
        if setting.rank_variable
    },
}


def variable_of(name: str) -> str:
    """Returns the variable for a field of `LaunchedSettings`."""
    return _RANK_VARIABLES[name][0]


def to_environment(settings: LaunchedSettings, sources: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables for a process.

    Args:
        sources: field -> its source: "--zero_stage", "environment ZEROACCEL_ZERO_STAGE", "zeroaccel.yaml:12:3",
            "default". A source other than a flag, a variable or "default" counts as the launch config file.
    """
    values = {field.name: value for field in fields(settings) if (value := getattr(settings, field.name)) is not None}
    environment = {variable_of(name): as_text(value) for name, value in values.items()}
    named = {name: sources[name] for name in values if name in sources}
    in_file = [name for name, source in named.items() if not source.startswith(NOT_IN_FILE)]
    if in_file:
        environment[_FILE_FIELDS] = ",".join(in_file)
    if named:
        environment[SOURCES_VARIABLE] = json.dumps({variable_of(name): source for name, source in named.items()})
    return environment


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
    for name, (variable, form) in _RANK_VARIABLES.items():
        text = environ.get(variable, "")
        if not text or text.lower() in _unset_words(name):
            continue
        unnamed = f"the launch config ({variable})" if name in in_file else f"environment {variable}"
        sources[name] = named.get(variable, unnamed)
        try:
            values[name] = form.parse(text)
        except (ValueError, LookupError, OverflowError):
            raise ConfigError(f"{sources[name]}: {name}", expected=form.expected, got=text) from None
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


PREFIX = "ZEROACCEL_"
"""Prefix of zeroaccel's variables."""

# Variables that processes read directly, in another form: if one is set, the launcher leaves it unchanged.
_STAYS: Mapping[str, tuple[str, object]] = {
    "num_cpu_threads_per_process": ("OMP_NUM_THREADS", None),
    "gpu_ids": ("CUDA_VISIBLE_DEVICES", "all"),
}
_RANK_SETTINGS = tuple(name for name, setting in SETTINGS.items() if setting.rank_variable)
# Keys of torchrun's --rdzv_conf that are separate settings here, or have no effect -> the reason, or "".
_RDZV_SETTINGS: Mapping[str, str] = {
    "rdzv_backend": "",
    "rdzv_endpoint": "",
    "rdzv_id": "the rendezvous needs only an address",
    "is_host": "machine 0 hosts the rendezvous",
    "store_type": "the rendezvous always uses torch's TCP store",
    "use_libuv": "torch chooses",
}


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

    def without(self, names: Collection[str], *notes: str) -> ExplicitSettings:
        """Returns these settings without the named ones, and with further notes."""
        return ExplicitSettings(
            {name: value for name, value in self.values.items() if name not in names},
            {name: source for name, source in self.sources.items() if name not in names},
            (*self.notes, *notes),
        )

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
        notes = (f"{self.where(name)} {self.values[name]}: does nothing: {reason}" for name, reason in idle.items())
        return self.without(idle, *notes)

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


def gather(flags: ExplicitSettings, environ: Mapping[str, str], file: ExplicitSettings) -> ExplicitSettings:
    """Merges all given settings: each from the first of flags, environment and file that has it.

    Raises:
        ConfigError: an environment variable has an invalid value.
    """
    return _with_rendezvous(file.under(settings_from_environment(environ)).under(flags))


def settings_from_environment(environ: Mapping[str, str]) -> ExplicitSettings:
    """Reads settings from environment variables; an empty variable sets nothing."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in LaunchSettings.model_fields:
        for variable in variables_of(name):
            text = environ.get(variable, "").strip()
            if text and text.lower() not in _unset_words(name):
                sources[name] = f"environment {variable}"
                values[name] = from_text(name, text, lambda name: f"{sources[name]}: {name}")
                break
    for name, (variable, value) in _STAYS.items():
        if variable in environ and name not in values:
            values[name], sources[name] = value, f"environment {variable}"
    if "distributed_type" not in values and FLAG_WORDS.get(switch := environ.get(_USE_ZERO, "").lower()):
        values["distributed_type"] = "DEEPSPEED"
        sources["distributed_type"] = f"environment {_USE_ZERO}={switch}"
    return ExplicitSettings(values, sources)


def launched_environment(settings: LaunchSettings, sources: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that pass these settings to ranks."""
    values: dict[str, Any] = {}
    value_sources: dict[str, str] = {}
    for name in _RANK_SETTINGS:
        value = getattr(settings, name)
        if name in sources and value is not None:
            values[name] = ",".join(value) if isinstance(value, tuple) else value
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


def other_names(name: str) -> tuple[str, ...]:
    """Returns the other names of a setting."""
    return tuple(mark.name for mark in spellings(LaunchSettings.model_fields[name]))


def from_text(name: str, text: str, address: Callable[[str], str]) -> Any:
    """Parses the value of a setting from the text of a flag or variable.

    Raises:
        ConfigError: the text does not have the form of such a value. The value itself is not checked.
    """
    form = FORMS[kind_of(name)]
    try:
        return form.parse(text)
    except (ValueError, LookupError, OverflowError):
        raise wrong_settings([Problem((name,), expected=form.expected, got=text)], address) from None


def _with_rendezvous(explicit: ExplicitSettings) -> ExplicitSettings:
    """Moves the rendezvous keys of torchrun's --rdzv_conf to the corresponding settings."""
    pairs = explicit.values.get("rdzv_conf")
    if not isinstance(pairs, Mapping) or not set(pairs) & set(_RDZV_SETTINGS):
        return explicit
    source = explicit.sources.get("rdzv_conf", "--rdzv_conf")
    moved: dict[str, Any] = {}
    if "rdzv_backend" in pairs:
        moved["rdzv_backend"] = pairs["rdzv_backend"]
    host, _, port = str(pairs.get("rdzv_endpoint", "")).rpartition(":")
    host, port = (host, port) if port.isdigit() else (str(pairs.get("rdzv_endpoint", "")), "")
    if host:
        moved["main_process_ip"] = host
    if port:
        moved["main_process_port"] = int(port)

    # A separate setting takes precedence over a key inside rdzv_conf, with a note.
    notes = []
    for name, value in moved.items():
        before = explicit.values.get(name, value)
        is_other = before != value
        notes.append(
            f"{source}: {name} {value}: does nothing, because {explicit.where(name)} is {before}"
            if is_other
            else f"{source} -> {name} {value}"
        )
    notes += [f"{source}: {key}: does nothing: {why}" for key, why in _RDZV_SETTINGS.items() if key in pairs and why]
    rest = {key: value for key, value in pairs.items() if key not in _RDZV_SETTINGS}
    rdzv_conf = ExplicitSettings({"rdzv_conf": rest}, {"rdzv_conf": source}, tuple(notes))
    return ExplicitSettings.of(moved, source).under(explicit).under(rdzv_conf)


def variables_of(name: str) -> tuple[str, ...]:
    """Returns the environment variables of a setting, in order of precedence."""
    setting = SETTINGS[name]
    # Not the variable of `debug`: in accelerate it enables checks of collectives, here full tracebacks.
    received = (setting.rank_variable,) if setting.rank_variable and name != "debug" else ()
    return (f"{PREFIX}{name.upper()}", *setting.variables, *received)


def _unset_words(name: str) -> tuple[str, ...]:
    """Returns the words that launchers write for an unset value. A path of "none" means no path."""
    endings = ("_path", "_file", "_clipping", "_steps", "_length", "_implementation")
    return ("auto", "none") if name.endswith(endings) else ()


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
    settings = (variable for name in LaunchSettings.model_fields for variable in variables_of(name))
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
