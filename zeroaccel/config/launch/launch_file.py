"""Finds and reads the launch file, with the line and column of each setting.

Reads accelerate's YAML unchanged. Keys for other engines are errors if they are switched on, and unknown keys are
errors that suggest the closest name. Returns a flat set of settings to `launch_sources`. Reads only the given or found
file; the caller passes the environment and the folder to search.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zeroaccel.config.bounds import read_at_most
from zeroaccel.config.diagnostics import (
    KeyPath,
    Problem,
    Provenance,
    duplicate_key_problems,
    from_pydantic,
    hint,
    report,
)
from zeroaccel.config.document import key_paths
from zeroaccel.config.launch.launch_foreign import settle_foreign_keys
from zeroaccel.config.launch.launch_settings import SECTIONS, LaunchFile, LaunchSettings
from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.config.normalize import NormalizedConfig
from zeroaccel.config.yaml_text import parse_yaml
from zeroaccel.errors import ConfigError

__all__ = [
    "CONFIG_VARIABLE",
    "FILE_NAME",
    "LaunchConfig",
    "blanks",
    "find_launch_file",
    "parse_launch_file",
    "read_launch_file",
    "text_of_file",
    "user_config_folder",
]

CONFIG_VARIABLE = "ZEROACCEL_CONFIG"
FILE_NAME = "zeroaccel.yaml"
_MOST_NBYTES = 4 << 20

_PROJECT_MARKS = (".git", "pyproject.toml", "setup.cfg", "setup.py")
_FILLED_IN = ("machine_rank", "num_machines", "num_processes", "main_process_ip", "main_process_port")
_REFUSED: Mapping[str, tuple[str, str]] = {
    "megatron_lm_config": ("settings of Megatron-LM, which is another engine", "remove it"),
    "fp8_config": ("8-bit training is not available", "remove it, and set mixed_precision to bf16"),
    "ipex_config": ("that library is not used", "remove it"),
    "mpirun_config": ("zeroaccel does not call mpirun", "remove it, and run `mpirun ... zeroaccel launch ...`"),
}


@dataclass(frozen=True)
class LaunchConfig(ExplicitSettings):
    """Settings of a launch file, with their places.

    Attributes:
        path: path of the file, as given.
        model: the checked content of the file.
    """

    path: str = ""
    model: LaunchFile = field(default_factory=LaunchFile)


def find_launch_file(path_flag: str | None, environ: Mapping[str, str], folder: Path) -> tuple[Path, str] | None:
    """Returns the launch file to read and the reason for the choice, or None if there is no file.

    Args:
        path_flag: value of --config_file.
        environ: environment with ZEROACCEL_CONFIG, XDG_CONFIG_HOME and HOME.
        folder: working directory; the file may also be in a parent folder, up to the root of the project.
    """
    if path_flag is not None:
        return Path(path_flag), "--config_file"
    if path_variable := environ.get(CONFIG_VARIABLE):
        return Path(path_variable), f"environment {CONFIG_VARIABLE}"
    for place in _project_folders(folder.resolve()):
        if (place / FILE_NAME).is_file():
            path = place / FILE_NAME
            return (Path(FILE_NAME) if place == folder.resolve() else path), "found in the project"
    user_file = user_config_folder(environ) / FILE_NAME
    return (user_file, "of the user") if user_file.is_file() else None


def user_config_folder(environ: Mapping[str, str]) -> Path:
    """Returns the folder for this user's files (XDG Base Directory Specification)."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(home, "zeroaccel")


def read_launch_file(
    path: Path, why: str = "", *, over: ExplicitSettings | None = None, fsdp_flags: Mapping[str, Any] | None = None
) -> LaunchConfig:
    """Reads and checks a launch file.

    Args:
        why: source of the path, for the message that the file does not exist.
        over: settings that take precedence; the file's values for them are not checked.
        fsdp_flags: as for `parse_launch_file`.

    Raises:
        ConfigError: the file is unreadable, not YAML, or has mistakes; the message lists all, with line and column.
    """
    return parse_launch_file(text_of_file(path, why), str(path), over=over, fsdp_flags=fsdp_flags)


def parse_launch_file(
    text: str, name: str, *, over: ExplicitSettings | None = None, fsdp_flags: Mapping[str, Any] | None = None
) -> LaunchConfig:
    """Checks the text of a launch file, like `read_launch_file` for text without a file.

    Args:
        name: name of the text in messages.
        fsdp_flags: FSDP settings from the command line, which take precedence over those of the file.
    """
    parsed = parse_yaml(text, name)
    if not isinstance(parsed.value, dict):
        raise ConfigError(name, expected="settings such as `num_processes: 2`", got=parsed.value)

    # Machines may share a file with blanks that flags fill, so values of settings in `over` are not checked.
    decided = {} if over is None else over.values
    tree_given = _without(decided, _without_nothing(parsed.value))
    foreign = settle_foreign_keys(tree_given, decided.get("distributed_type"), fsdp_flags)
    # A moved or translated key keeps the place of the original key.
    moved = {new: parsed.places[old] for new, old in foreign.moved.items() if old in parsed.places}
    normalized = NormalizedConfig(LaunchFile, foreign.tree)
    origin = Provenance(name=name, raw=foreign.tree, places=parsed.places | moved, written=normalized.written)
    model, problems = _validated(normalized.tree)
    problems = [
        *duplicate_key_problems(parsed.duplicates),
        *foreign.problems,
        *normalized.problems,
        *map(_as_blank, problems),
        *_refusals(normalized.tree),
    ]
    if problems:
        raise report(problems, origin, key_paths(parsed.value))
    values, paths = _flat(normalized.tree, model)
    sources = {name: origin.where(path).partition(": ")[0] for name, path in paths.items()}
    notes = [f"{origin.where_written(path) or name}: {text}" for path, text in foreign.notes]
    return LaunchConfig(values, sources, tuple(notes), name, model)


def _project_folders(folder: Path) -> Iterator[Path]:
    """Yields the folder and its parents up to the root of its project; only the folder if it is in no project."""
    above = [folder, *folder.parents]
    roots = [index for index, place in enumerate(above) if any((place / mark).exists() for mark in _PROJECT_MARKS)]
    yield from above[: roots[0] + 1 if roots else 1]


def text_of_file(path: Path | str, why: str = "") -> str:
    """Returns the text of a file that users write.

    Raises:
        ConfigError: the file does not exist or is unreadable.
    """
    path = Path(path)
    shown = f"{path} ({why})" if why else str(path)
    try:
        return read_at_most(path, _MOST_NBYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"file {shown} does not exist", fix=_near(path)) from None
    except IsADirectoryError:
        files = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".yaml", ".yml"))[:3]
        fix = f"YAML files in it: {', '.join(files)}" if files else "name a file"
        raise ConfigError(f"file {shown} is a folder", fix=fix) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"file {shown}: byte {error.start} is not UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"file {shown} cannot be read: {reason}") from None


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    names = sorted(os.listdir(path.parent))
    return hint(path.name, names, "`zeroaccel config` makes one", 0.6, lambda near: str(path.parent / near))


def _without_nothing(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Removes keys without a value, such as `fsdp_config: {}` and `main_process_ip:`, which set nothing."""
    return {
        key: _without_nothing(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None and not (key in _REFUSED and value in ({}, [], "", False))
    }


def _without(values: Mapping[str, Any], tree: dict[Any, Any]) -> dict[Any, Any]:
    """Removes the keys of settings that a flag or a variable sets; the file may have blanks for them."""
    rest = {key: value for key, value in tree.items() if key not in values or key == "distributed_type"}
    for section in SECTIONS:
        if isinstance(rest.get(section), dict):
            rest[section] = {key: value for key, value in rest[section].items() if key not in values}
    return rest


def _validated(tree: dict[str, Any]) -> tuple[LaunchFile, list[Problem]]:
    """Returns the validated file; or an empty one with its problems, if any value is invalid."""
    try:
        return LaunchFile(**tree), []
    except ValidationError as error:
        problems = [from_pydantic(entry) for entry in error.errors(include_url=False)]
        return LaunchFile(), problems


def blanks(tree: Mapping[Any, Any]) -> tuple[str, ...]:
    """Returns machine settings whose value is a placeholder, such as `machine_rank: 'MACHINE_RANK'`."""
    return tuple(name for name in _FILLED_IN if _is_blank(tree.get(name)))


def _is_blank(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[<{$\[].*|[A-Z][A-Z_]{3,}", value.strip()) is not None


def _as_blank(problem: Problem) -> Problem:
    if len(problem.path) == 1 and problem.path[0] in _FILLED_IN and _is_blank(problem.got):
        return replace(problem, fix=f"write it there, or pass --{problem.path[0]}, which takes precedence")
    return problem


def _refusals(tree: Mapping[str, Any]) -> Iterator[Problem]:
    for name, (reason, fix) in _REFUSED.items():
        if tree.get(name):
            yield Problem((name,), text=reason, fix=fix)


def _flat(tree: Mapping[str, Any], model: LaunchFile) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Returns setting -> value and setting -> path of its key, for the settings in the file."""
    values: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for section in ((), *((name,) for name in SECTIONS)):
        keys = tree.get(section[0], {}) if section else tree
        owner = getattr(model, section[0]) if section else model
        for name in keys:
            if name in LaunchSettings.model_fields:
                values[name], paths[name] = getattr(owner, name), (*section, name)
    if values.get("distributed_type") == "NO" and "num_processes" not in values:
        values["num_processes"], paths["num_processes"] = 1, ("distributed_type",)
    return values, paths
