"""A launch against the JSON config it names: who decides what, found out before any process starts.

A setting of a launch fills what the JSON leaves "auto" or does not mention. What the JSON decides, the launch file may
not repeat, as one of the two would be changed and the other forgotten; a flag or a variable may repeat it, but not say
something else. Stands above `load` and `launch`; the same question inside a script is that of its plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zeroaccel.config.launch.launch_sources import Given
from zeroaccel.config.load_config_file import load_config
from zeroaccel.config.schema import Config
from zeroaccel.errors import ConfigError, compose

__all__ = ["JSON_PATHS", "check_json"]

_ZERO = "zero_optimization"
JSON_PATHS: Mapping[str, str] = {
    "zero_stage": f"{_ZERO}.stage",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero3_save_16bit_model": f"{_ZERO}.gather_16bit_weights_on_model_save",
    "deepspeed_moe_layer_cls_names": f"{_ZERO}.leaf_module.classes",
}
"""Setting of a launch -> dotted path of the same thing in the JSON, in the schema's names."""


def check_json(given: Given) -> Config | None:
    """Reads the JSON config that a launch names and compares the two; None where it names none.

    Raises:
        ConfigError: the JSON cannot be read or is wrong, or the launch says again what it decides; only the keys that
            are said twice are named, with both places.
    """
    path = given.values.get("deepspeed_config_file")
    if path is None:
        return None
    config = load_config(_existing(Path(path), given))
    lines = [*_twice(given, config), *_precision_twice(given, config)]
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError("\n  ".join([f"{len(lines)} settings are said twice, here and in {path}", *lines]))
    return config


def _existing(path: Path, given: Given) -> Path:
    if path.exists() or path.is_absolute():
        return path
    # As in accelerate, the path counts from the working directory; people often think of the launch file's folder.
    file = given.sources["deepspeed_config_file"].rpartition(":")[0].rpartition(":")[0]
    beside = Path(file).parent / path
    if file and beside.is_file():
        where = given.where("deepspeed_config_file")
        raise ConfigError(f"{where}: {path} does not exist in {Path.cwd()}", fix=f"write {beside}")
    return path


def _twice(given: Given, config: Config) -> Iterator[str]:
    for name, key in JSON_PATHS.items():
        if name in given.values and _decides(config, key):
            yield from _line(given, name, config, key, _value(config, key))


def _precision_twice(given: Given, config: Config) -> Iterator[str]:
    wanted = given.values.get("mixed_precision")
    if wanted is None:
        return
    for name in ("fp16", "bf16"):
        key = f"{name}.enabled"
        if not _decides(config, key):
            continue
        enabled = _value(config, key)
        if name == wanted or enabled:  # and not: this one is off, and another is wanted
            yield from _line(given, "mixed_precision", config, key, enabled, same=enabled == (name == wanted))


def _line(given: Given, name: str, config: Config, key: str, decided: Any, same: bool | None = None) -> Iterator[str]:
    value = given.values[name]
    same = value == decided if same is None else same
    in_file = _is_file(given.sources[name])
    if same and not in_file:
        return
    here, there = f"{given.where(name)} {_shown(value)}", f"{config.where(key)} {_shown(decided)}"
    fix = 'remove it here, or write "auto" there to let this one decide'
    yield compose(f"{here}: {'the same is' if same else 'something else is'} said by {there}", fix=fix)


def _is_file(source: str) -> bool:
    return not source.startswith(("--", "environment ", "default"))


def _decides(config: Config, key: str) -> bool:
    return key in config.sources and key not in config.unresolved


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)
