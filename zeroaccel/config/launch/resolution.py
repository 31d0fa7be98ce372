"""Resolves the settings of a launch: from flags, environment, scheduler, launch file and JSON config to values.

The precedence is the same for every setting: a flag overrides the environment, the environment the scheduler, the
scheduler the launch file, and the file the default. A JSON config is not overridden: settings fill the keys that it
omits or sets to "auto".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from zeroaccel.config.launch.launch_json import check_json
from zeroaccel.config.launch.launch_sources import RDZV_SETTINGS, ExplicitSettings, settings_from_environment
from zeroaccel.config.launch.setting_table import SETTINGS
from zeroaccel.config.schema import Config

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
