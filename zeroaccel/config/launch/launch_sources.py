"""Flags, environment and launch file merged into one set of settings, each with its source; the environment of ranks.

The order is the same for every setting: flag, environment, file, default. Every setting can be given as ZEROACCEL_ and
its name, and those that ranks receive also under the name they are received by. Those names are accelerate's, so that a
script reads the same settings whichever launcher started it; ZEROACCEL_LAUNCH_SOURCES adds the source of each. A
ZEROACCEL_ variable that nothing reads is nearly always a misspelt one, and is an error. Functions of mappings: the
environment itself is neither read nor changed here.
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
    """The settings of training that a launch passes to its ranks; None where it sets nothing.

    Attributes:
        use_zero: train with ZeRO rather than plain data parallelism.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        zero_stage: 0 to 3.
        gradient_accumulation_steps: micro-steps per optimizer step.
        gradient_clipping: largest global L2 norm of the gradients; 0 is off.
        offload_optimizer_device, offload_param_device: "none", "cpu" or "nvme".
        offload_optimizer_nvme_path, offload_param_nvme_path: folder for "nvme".
        zero3_init_flag: shard parameters while the model is built.
        zero3_save_16bit_model: gather the weights when a model is saved.
        deepspeed_config_file: the JSON file.
        deepspeed_moe_layer_cls_names: classes of leaf modules (gathered at once), separated by commas.
        zero_hpz_partition_size, zero_quantized_weights, zero_quantized_gradients: ZeRO++, as the keys of the JSON.
        frozen_weights: "int8", "nf4" or "mxfp4".
        use_cpu: compute on the CPU although there are accelerators.
        dynamo_backend, dynamo_mode, dynamo_use_fullgraph, dynamo_use_dynamic, dynamo_use_regional_compilation:
            arguments of torch.compile; a backend of "no" compiles nothing.
        debug: check the arguments of the collectives that scripts call.
        use_parallelism_config: the sizes that follow count.
        dp_replicate_size, dp_shard_size, pp_size, sp_size, tp_size, ep_size: of the mesh, see `ParallelConfig`.
        sp_seq_length, sp_seq_length_is_variable, sp_attn_implementation: for accelerate.
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
        """The mesh that the launch asks for."""
        if not self.use_parallelism_config:
            return None
        return ParallelConfig.from_sizes({axis: getattr(self, f"{axis}_size") for axis in (*AXES, "ep")})


SettingKind = Literal["switch", "count", "number", "streams", "pairs", "text"]


def kind_of(name: str) -> SettingKind:
    """How a setting is written on a command line."""
    kinds = types_of(LaunchSettings.model_fields[name].annotation)
    if bool in kinds:
        return "switch"
    if dict in kinds:
        return "streams" if int in kinds else "pairs"
    return "number" if float in kinds else "count" if int in kinds else "text"


def _count(text: str) -> int:
    text = text.replace("_", "x")  # 1_000 is a number to Python only
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
    """How a value is read from a text (ValueError or LookupError where it is none), and what is expected."""

    parse: Callable[[str], Any]
    expected: str


FORMS: Mapping[SettingKind, _Form] = {
    "switch": _Form(lambda text: FLAG_WORDS[text.strip().lower()], "true or false"),
    "count": _Form(_count, "a whole number"),
    "number": _Form(float, "a number"),
    "streams": _Form(_streams, "a number, or one per local rank as 0:3,1:2"),
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
    """The variable that carries a field of `LaunchedSettings`."""
    return _RANK_VARIABLES[name][0]


def to_environment(settings: LaunchedSettings, sources: Mapping[str, str]) -> dict[str, str]:
    """The variables a process is started with.

    Args:
        sources: field -> its source: "--zero_stage", "environment ZEROACCEL_ZERO_STAGE", "zeroaccel.yaml:12:3",
            "default". Whatever is neither a flag, nor a variable, nor "default" counts as the launch config file.
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
    """The settings that the launcher passed, and the source of each.

    Returns:
        The settings, and field -> source of every field that is not None. Where the launcher does not name its
        sources, that is the variable, marked as the launch config's if the launcher lists it as such.

    Raises:
        ConfigError: a variable has a value that means nothing.
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
            expected="a JSON object from variable to source",
            got=text,
            fix="unset it; launchers set it",
        )
    return named


PREFIX = "ZEROACCEL_"
"""Of the variables that are ours."""

# Variables that the processes read themselves, in a form of their own: where one is set, it stays as it is.
_STAYS: Mapping[str, tuple[str, object]] = {
    "num_cpu_threads_per_process": ("OMP_NUM_THREADS", None),
    "gpu_ids": ("CUDA_VISIBLE_DEVICES", "all"),
}
_RANK_SETTINGS = tuple(name for name, setting in SETTINGS.items() if setting.rank_variable)
# Keys of torchrun's --rdzv_conf that are settings of their own here -> why they have no effect, where they have none.
_RDZV_SETTINGS: Mapping[str, str] = {
    "rdzv_backend": "",
    "rdzv_endpoint": "",
    "rdzv_id": "the meeting point is enough",
    "is_host": "machine 0 hosts the meeting point",
    "store_type": "machines meet through torch's TCP store",
    "use_libuv": "torch chooses",
}


@dataclass(frozen=True)
class ExplicitSettings:
    """Settings that a flag, a variable or a file sets, each with its source.

    Attributes:
        values: setting -> value; those left to their defaults are absent.
        sources: setting -> its source: "--zero_stage", "environment ZEROACCEL_ZERO_STAGE", "zeroaccel.yaml:12:3".
        notes: one line for each setting that has no effect, or stands for another one here.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(values: Mapping[str, Any], source: str) -> ExplicitSettings:
        """Settings of one source."""
        return ExplicitSettings(values, dict.fromkeys(values, source))

    def without(self, names: Collection[str], *notes: str) -> ExplicitSettings:
        """These settings without some, and with further notes."""
        return ExplicitSettings(
            {name: value for name, value in self.values.items() if name not in names},
            {name: source for name, source in self.sources.items() if name not in names},
            (*self.notes, *notes),
        )

    def under(self, other: ExplicitSettings) -> ExplicitSettings:
        """These settings where the other has none."""
        return ExplicitSettings(
            {**self.values, **other.values}, {**self.sources, **other.sources}, (*self.notes, *other.notes)
        )

    def effective(self) -> ExplicitSettings:
        """These settings without those that have no effect, given the others; each leaves a note.

        They are settings that accelerate and DeepSpeed take and do nothing with, as offload of parameters at stage 2.
        """
        idle = idle_settings(self.values)
        notes = (f"{self.where(name)} {self.values[name]}: does nothing, {reason}" for name, reason in idle.items())
        return self.without(idle, *notes)

    def where(self, name: str) -> str:
        """The address of a setting for a message: its source, or the flag that would set it."""
        source = self.sources.get(name, f"--{name}")
        return source if source.startswith("--") else f"{source}: {name}"

    def settings(self) -> LaunchSettings:
        """The settings, checked.

        Raises:
            ConfigError: some are wrong; all of them are listed, each with its source.
        """
        return launch_settings(self.values, self.where)


def gather(flags: ExplicitSettings, environ: Mapping[str, str], file: ExplicitSettings) -> ExplicitSettings:
    """All settings that were given, each from the first of flags, environment and file that has it.

    Raises:
        ConfigError: a variable of the environment cannot be read.
    """
    return _with_rendezvous(file.under(settings_from_environment(environ)).under(flags))


def settings_from_environment(environ: Mapping[str, str]) -> ExplicitSettings:
    """The settings that variables of the environment give; an empty variable gives nothing."""
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
    """The variables by which ranks receive these settings."""
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
    if settings.uses_zero and values.get("use_cpu"):
        # accelerate reads the variable as "DDP, whatever else is asked for". Devices are hidden from ranks anyway; said
        # as false, as ranks inherit the variable where the launcher has it from its own environment.
        values["use_cpu"] = False
    return to_environment(LaunchedSettings(**values), value_sources)


def other_names(name: str) -> tuple[str, ...]:
    """The other names of a setting."""
    return tuple(mark.name for mark in spellings(LaunchSettings.model_fields[name]))


def from_text(name: str, text: str, address: Callable[[str], str]) -> Any:
    """The value of a setting that was written as text, as a flag or in the environment.

    Raises:
        ConfigError: the text has not the form of such a value; whether the value is right is not looked at.
    """
    form = FORMS[kind_of(name)]
    try:
        return form.parse(text)
    except (ValueError, LookupError, OverflowError):
        raise wrong_settings([Problem((name,), expected=form.expected, got=text)], address) from None


def _with_rendezvous(explicit: ExplicitSettings) -> ExplicitSettings:
    """With the rendezvous keys of torchrun's --rdzv_conf moved to the settings that they are here."""
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

    # A setting of its own counts more than a key inside rdzv_conf, and a note says so.
    notes = []
    for name, value in moved.items():
        before = explicit.values.get(name, value)
        is_other = before != value
        notes.append(
            f"{source}: {name} {value}: does nothing, as {explicit.where(name)} says {before}"
            if is_other
            else f"{source} -> {name} {value}"
        )
    notes += [f"{source}: {key}: does nothing, {why}" for key, why in _RDZV_SETTINGS.items() if key in pairs and why]
    rest = {key: value for key, value in pairs.items() if key not in _RDZV_SETTINGS}
    rdzv_conf = ExplicitSettings({"rdzv_conf": rest}, {"rdzv_conf": source}, tuple(notes))
    return ExplicitSettings.of(moved, source).under(explicit).under(rdzv_conf)


def variables_of(name: str) -> tuple[str, ...]:
    """The variables of the environment that give a setting, the first that is there first."""
    setting = SETTINGS[name]
    # Not that of `debug`: in accelerate it asks for checks of collectives, and here for full tracebacks.
    received = (setting.rank_variable,) if setting.rank_variable and name != "debug" else ()
    return (f"{PREFIX}{name.upper()}", *setting.variables, *received)


def _unset_words(name: str) -> tuple[str, ...]:
    """What launchers write into the environment where nothing was set. A path of "none" is no path."""
    endings = ("_path", "_file", "_clipping", "_steps", "_length", "_implementation")
    return ("auto", "none") if name.endswith(endings) else ()


OTHER_VARIABLES: Mapping[str, str] = {
    "ZEROACCEL_COMPAT": "hands the facade for `import deepspeed` on to children",
    "ZEROACCEL_CONFIG": "the launch file",
    "ZEROACCEL_CPU_CORES": "the cores of a rank, from its launcher",
    "ZEROACCEL_MEMORY_FOLDER": "where ranks find states in memory after a restart; the launcher's own",
    "ZEROACCEL_LAUNCH_ID": "by which a launcher knows what its ranks have started",
    "ZEROACCEL_LAUNCH_SOURCES": "who said what a launcher tells its ranks",
    "ZEROACCEL_LOG_LEVEL": "how much a rank says",
    "ZEROACCEL_RACK": "the rack of this machine; copies of states in memory go to another one",
    "ZEROACCEL_SSH": "the program that reaches other machines",
    "ZEROACCEL_TRACE": "the order of `zeroaccel trace`",
    "ZEROACCEL_VERIFY": "the order of `zeroaccel verify`",
}
"""Variables that are no settings of a launch -> what they are for."""


def known_variables() -> frozenset[str]:
    """Every name that means something."""
    settings = (variable for name in LaunchSettings.model_fields for variable in variables_of(name))
    return frozenset(OTHER_VARIABLES) | {variable for variable in settings if variable.startswith(PREFIX)}


def unknown_variable(name: str) -> str:
    """What is wrong with a name that begins so and means nothing, with the one that was probably meant."""
    meant = closest(name.removeprefix(PREFIX), (name_known.removeprefix(PREFIX) for name_known in known_variables()))
    fix = f"did you mean {PREFIX}{meant}?" if meant else f"names that begin with {PREFIX} are settings; unset it"
    return compose(f"{name}: no such setting", fix=fix)


def check_variables(names: Iterable[str]) -> None:
    """Looks for names that begin with ZEROACCEL_ and mean nothing.

    Args:
        names: of the variables that are set.

    Raises:
        ConfigError: there are some; all are named, each with the one that was probably meant.
    """
    names_known = known_variables()
    lines = [unknown_variable(name) for name in sorted(names) if name.startswith(PREFIX) and name not in names_known]
    if len(lines) == 1:
        raise ConfigError(f"environment {lines[0]}")
    if lines:
        raise ConfigError("\n  ".join([f"environment: {len(lines)} variables are wrong", *lines]))
