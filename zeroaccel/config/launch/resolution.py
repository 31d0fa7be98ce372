"""Resolves the settings of a launch: from flags, environment, scheduler, launch file and JSON config to values.

The precedence is the same for every setting: a flag overrides the environment, the environment the scheduler, the
scheduler the launch file, and the file the default. A JSON config is not overridden: settings fill the keys that it
omits or sets to "auto". The launch file may not repeat a value of the JSON, because users would change one and forget
the other; a flag or a variable may repeat it, but not contradict it. `json_facts` lists the settings that a JSON leaves
open, for the questionnaire.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zeroaccel.config.diagnostics import at
from zeroaccel.config.launch.launch_sources import (
    NOT_IN_FILE,
    RDZV_SETTINGS,
    ExplicitSettings,
    settings_from_environment,
)
from zeroaccel.config.launch.setting_table import SETTINGS
from zeroaccel.config.load_config_file import load_config
from zeroaccel.config.parallel import with_config_axes
from zeroaccel.config.schema import Config
from zeroaccel.config.section import as_text
from zeroaccel.errors import ConfigError, compose

JSON_PATHS: Mapping[str, str] = {name: setting.json_path for name, setting in SETTINGS.items() if setting.json_path}
"""Launch setting -> dotted path of the same setting in the JSON, in the schema's names."""


def check_json(explicit: ExplicitSettings) -> Config | None:
    """Reads the JSON config that a launch names and compares the two; returns None if the launch names none.

    Raises:
        ConfigError: the JSON is unreadable or invalid, or the launch sets the same keys; the message names only these
            keys, each with both places.
    """
    path = explicit.values.get("deepspeed_config_file")
    if path is None:
        return None
    config = load_config(_existing(Path(path), explicit))
    lines = [*_twice(explicit, config), *_precision_twice(explicit, config)]
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError("\n  ".join([f"{len(lines)} settings are given twice, here and in {path}", *lines]))
    return config


def _existing(path: Path, explicit: ExplicitSettings) -> Path:
    if path.exists() or path.is_absolute():
        return path
    # As in accelerate, the path is relative to the working directory; users often mean the launch file's folder.
    file = explicit.sources["deepspeed_config_file"].rpartition(":")[0].rpartition(":")[0]
    next_to_file = Path(file).parent / path
    if file and next_to_file.is_file():
        where = explicit.where("deepspeed_config_file")
        raise ConfigError(f"{where}: {path} does not exist in {Path.cwd()}", fix=f"write {next_to_file}")
    return path


def _twice(explicit: ExplicitSettings, config: Config) -> Iterator[str]:
    for name, key in JSON_PATHS.items():
        if name in explicit.values and _decides(config, key):
            yield from _line(explicit, name, config, key, at(config, key))


def _precision_twice(explicit: ExplicitSettings, config: Config) -> Iterator[str]:
    precision = explicit.values.get("mixed_precision")
    if precision is None:
        return
    for name in ("fp16", "bf16"):
        key = f"{name}.enabled"
        if not _decides(config, key):
            continue
        enabled = at(config, key)
        if name == precision or enabled:  # no conflict if the JSON disables another precision
            yield from _line(explicit, "mixed_precision", config, key, enabled, same=enabled == (name == precision))


def _line(
    explicit: ExplicitSettings, name: str, config: Config, key: str, decided: Any, same: bool | None = None
) -> Iterator[str]:
    value = explicit.values[name]
    same = value == decided if same is None else same
    in_file = not explicit.sources[name].startswith(NOT_IN_FILE)
    if same and not in_file:
        return
    here, there = f"{explicit.where(name)} {as_text(value)}", f"{config.where(key)} {as_text(decided)}"
    fix = 'remove it here, or write "auto" there to use this one'
    yield compose(f"{here}: {'repeats' if same else 'conflicts with'} {there}", fix=fix)


def _decides(config: Config, key: str) -> bool:
    return key in config.sources and key not in config.unresolved


@dataclass(frozen=True)
class JsonFacts:
    """Settings that a JSON config decides, and settings that it leaves to the launch.

    Attributes:
        open_keys: settings with the value "auto".
        stage: stage in the JSON, or None if it is open.
        decided: setting -> value, for the settings in the JSON.
    """

    open_keys: frozenset[str] = frozenset()
    stage: int | None = None
    decided: Mapping[str, Any] = field(default_factory=dict, hash=False)


def json_facts(path: str) -> JsonFacts:
    """Reads which launch settings a JSON config decides and which it leaves open.

    Raises:
        ConfigError: the file is unreadable or invalid.
    """
    return _json_facts(path, Path(path).stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _json_facts(path: str, _: int) -> JsonFacts:
    config = load_config(path)
    open_keys = {name for name, key in JSON_PATHS.items() if key in config.unresolved}
    if {"fp16.enabled", "bf16.enabled"} & set(config.unresolved) or not {"fp16", "bf16"} & set(config.sources):
        open_keys.add("mixed_precision")
    stage = None if "zero_stage" in open_keys else config.zero_optimization.stage
    decided = {name: at(config, key) for name, key in JSON_PATHS.items() if _decides(config, key)}
    if stage is not None:
        decided["zero_stage"] = stage
    mesh = with_config_axes(config.raw, None)
    if mesh is not None:
        decided |= {f"{axis}_size": getattr(mesh, axis) for axis in ("sp", "tp", "ep") if getattr(mesh, axis) > 1}
    if "mixed_precision" not in open_keys:
        on = [name for name in ("fp16", "bf16") if getattr(config, name).enabled]
        decided["mixed_precision"] = on[0] if on else "no"
    return JsonFacts(frozenset(open_keys), stage, decided)


NONE = ExplicitSettings()
"""No settings."""


def resolve(
    flags: ExplicitSettings = NONE,
    environ: Mapping[str, str] = MappingProxyType({}),
    scheduler: ExplicitSettings = NONE,
    file: Callable[[ExplicitSettings], ExplicitSettings] = lambda decided: NONE,
    json: Callable[[ExplicitSettings], Config | None] = check_json,
) -> tuple[ExplicitSettings, Config | None]:
    """Returns each setting from the first of flags, environment, scheduler and file that has it, and the JSON config.

    Settings without effect are left out, with a note for each.

    Args:
        file: reads the launch file; the argument has the settings that override it.
        json: reads the JSON config that the settings name, and compares it with them.

    Raises:
        ConfigError: a variable, the file or the JSON config is invalid, or the JSON config decides a setting, too.
    """
    above = (_with_rendezvous(flags), _with_rendezvous(settings_from_environment(environ)), scheduler)
    decided = {name: value for source in reversed(above) for name, value in source.values.items()}
    by_precedence = (*above, _with_rendezvous(file(ExplicitSettings(decided))))

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in SETTINGS:
        first = next((source for source in by_precedence if name in source.values), NONE)
        if first is not NONE:
            values[name], sources[name] = first.values[name], first.sources.get(name, f"--{name}")
    notes = tuple(note for source in reversed(by_precedence) for note in source.notes)
    explicit = ExplicitSettings(values, sources, notes)
    return explicit.effective(), json(explicit)


def _with_rendezvous(explicit: ExplicitSettings) -> ExplicitSettings:
    """Moves the rendezvous keys of torchrun's --rdzv_conf to the corresponding settings."""
    pairs = explicit.values.get("rdzv_conf")
    if not isinstance(pairs, Mapping) or not set(pairs) & set(RDZV_SETTINGS):
        return explicit
    source = explicit.sources.get("rdzv_conf", "--rdzv_conf")
    endpoint = str(pairs.get("rdzv_endpoint", ""))
    host, _, port = endpoint.rpartition(":") if endpoint.rpartition(":")[2].isdigit() else (endpoint, "", "")
    moved = {"rdzv_backend": pairs.get("rdzv_backend"), "main_process_ip": host, "main_process_port": int(port or 0)}
    values = {**explicit.values, "rdzv_conf": {key: pairs[key] for key in pairs if key not in RDZV_SETTINGS}}
    notes = []
    for name, value in moved.items():
        before = values.setdefault(name, value) if value else value
        if before != value:  # a separate setting takes precedence over a key inside rdzv_conf
            where = f"{explicit.where(name)} is {before}"
            notes.append(f"{source}: {name} {value}: does nothing, because {where}")
        elif value:
            notes.append(f"{source} -> {name} {value}")
    notes += [f"{source}: {key}: does nothing: {why}" for key, why in RDZV_SETTINGS.items() if key in pairs and why]
    sources = {**dict.fromkeys(values, source), **explicit.sources}
    return ExplicitSettings(values, sources, (*explicit.notes, *notes))
