"""What a JSON config decides, and what it leaves to the launch: read once, and again when the file changes.

Tells `questions` which of them are left to ask; the file is checked on the way, as a launch would.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from zeroaccel.config.launch.launch_json import JSON_PATHS
from zeroaccel.config.load_config_file import load_config

__all__ = ["JsonFacts", "json_facts"]


@dataclass(frozen=True)
class JsonFacts:
    """What a JSON config leaves to the launch.

    Attributes:
        open_keys: settings that it leaves "auto".
        stage: the stage it decides, or None.
    """

    open_keys: frozenset[str] = frozenset()
    stage: int | None = None


def json_facts(path: str) -> JsonFacts:
    """What a JSON config leaves to the launch.

    Raises:
        ConfigError: it cannot be read, or is wrong.
    """
    return _json_facts(path, Path(path).stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _json_facts(path: str, _: int) -> JsonFacts:
    config = load_config(path)
    open_keys = {name for name, key in JSON_PATHS.items() if key in config.unresolved}
    if {"fp16.enabled", "bf16.enabled"} & set(config.unresolved) or not {"fp16", "bf16"} & set(config.sources):
        open_keys.add("mixed_precision")
    stage = None if "zero_stage" in open_keys else config.zero_optimization.stage
    return JsonFacts(frozenset(open_keys), stage)
