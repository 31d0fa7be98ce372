"""What a launcher tells the processes it starts: one set of environment variables, written and read here.

The names are those of accelerate's launcher, so that a script finds the same settings whichever of the two launchers
started it and whichever `Accelerator` it imports; ZEROACCEL_LAUNCH_SOURCES adds who said each of them. Both directions
are pure functions of mappings: nothing here reads or changes the environment, and nothing is judged beyond its form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from zeroaccel.config.bounds import parse_plain_json
from zeroaccel.errors import ConfigError

__all__ = ["SOURCES_VARIABLE", "LaunchedSettings", "from_environment", "to_environment", "variable_of"]

SOURCES_VARIABLE = "ZEROACCEL_LAUNCH_SOURCES"
_FILE_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
_NOT_IN_FILE = ("--", "environment ", "default")
_PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class LaunchedSettings:
    """What a launch says about training; None where it says nothing.

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
        deepspeed_moe_layer_cls_names: classes of modules that travel whole, separated by commas.
        use_cpu: compute on the CPU although there are accelerators.
        dynamo_backend, dynamo_mode, dynamo_use_fullgraph, dynamo_use_dynamic, dynamo_use_regional_compilation:
            arguments of torch.compile; a backend of "no" compiles nothing.
        debug: check the arguments of the collectives that scripts call.
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
    use_cpu: bool | None = None
    dynamo_backend: str | None = None
    dynamo_mode: str | None = None
    dynamo_use_fullgraph: bool | None = None
    dynamo_use_dynamic: bool | None = None
    dynamo_use_regional_compilation: bool | None = None
    debug: bool | None = None


def _whole(text: str) -> int:
    value = float(text)
    if value != int(value):
        raise ValueError
    return int(value)


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on", "y", "t"):
        return True
    if lowered in ("0", "false", "no", "off", "n", "f"):
        return False
    raise ValueError


def _precision(text: str) -> str:
    if text.lower() not in _PRECISIONS:
        raise ValueError
    return text.lower()


@dataclass(frozen=True)
class _Form:
    parse: Callable[[str], Any]
    expected: str


_COUNT = _Form(_whole, "a whole number")
_NUMBER = _Form(float, "a number")
_SWITCH = _Form(_flag, "true or false")
_TEXT = _Form(str, "text")
_LOWER = _Form(str.lower, "text")

# field -> (variable, form). A field that is missing here fails the test of both directions.
_VARIABLES: Mapping[str, tuple[str, _Form]] = {
    "use_zero": ("ACCELERATE_USE_DEEPSPEED", _SWITCH),
    "mixed_precision": ("ACCELERATE_MIXED_PRECISION", _Form(_precision, "one of " + ", ".join(_PRECISIONS))),
    "zero_stage": ("ACCELERATE_DEEPSPEED_ZERO_STAGE", _COUNT),
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", _COUNT),
    "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", _NUMBER),
    "offload_optimizer_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", _LOWER),
    "offload_param_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", _LOWER),
    "offload_optimizer_nvme_path": ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", _TEXT),
    "offload_param_nvme_path": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", _TEXT),
    "zero3_init_flag": ("ACCELERATE_DEEPSPEED_ZERO3_INIT", _SWITCH),
    "zero3_save_16bit_model": ("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", _SWITCH),
    "deepspeed_config_file": ("ACCELERATE_DEEPSPEED_CONFIG_FILE", _TEXT),
    "deepspeed_moe_layer_cls_names": ("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", _TEXT),
    "use_cpu": ("ACCELERATE_USE_CPU", _SWITCH),
    "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND", _LOWER),
    "dynamo_mode": ("ACCELERATE_DYNAMO_MODE", _TEXT),
    "dynamo_use_fullgraph": ("ACCELERATE_DYNAMO_USE_FULLGRAPH", _SWITCH),
    "dynamo_use_dynamic": ("ACCELERATE_DYNAMO_USE_DYNAMIC", _SWITCH),
    "dynamo_use_regional_compilation": ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", _SWITCH),
    "debug": ("ACCELERATE_DEBUG_MODE", _SWITCH),
}
_UNSAID = {
    # What other launchers write where nobody said anything. A path of "none" is no path.
    "gradient_accumulation_steps": ("auto",),
    "gradient_clipping": ("auto", "none"),
    "offload_optimizer_nvme_path": ("none",),
    "offload_param_nvme_path": ("none",),
    "deepspeed_config_file": ("none",),
}


def variable_of(name: str) -> str:
    """The variable that carries a field of `LaunchedSettings`."""
    return _VARIABLES[name][0]


def to_environment(settings: LaunchedSettings, sources: Mapping[str, str]) -> dict[str, str]:
    """The variables a process is started with.

    Args:
        sources: field -> who said it: "--zero_stage", "environment ZEROACCEL_ZERO_STAGE", "zeroaccel.yaml:12:3",
            "default". Whatever is neither a flag, nor a variable, nor "default" counts as the launch config file.
    """
    given = {field.name: value for field in fields(settings) if (value := getattr(settings, field.name)) is not None}
    environment = {variable_of(name): _text(value) for name, value in given.items()}
    said = {name: sources[name] for name in given if name in sources}
    in_file = [name for name, source in said.items() if not source.startswith(_NOT_IN_FILE)]
    if in_file:
        environment[_FILE_FIELDS] = ",".join(in_file)
    if said:
        environment[SOURCES_VARIABLE] = json.dumps({variable_of(name): source for name, source in said.items()})
    return environment


def from_environment(environ: Mapping[str, str]) -> tuple[LaunchedSettings, dict[str, str]]:
    """What the launcher said, and who said it to the launcher.

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
    for name, (variable, form) in _VARIABLES.items():
        text = environ.get(variable, "")
        if not text or text.lower() in _UNSAID.get(name, ()):
            continue
        unnamed = f"the launch config ({variable})" if name in in_file else f"environment {variable}"
        sources[name] = named.get(variable, unnamed)
        try:
            values[name] = form.parse(text)
        except (ValueError, OverflowError):
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


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
