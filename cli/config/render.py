"""From answers to the text of a launch file, and from such a file back to answers; the same answers, the same bytes.

Knows the table's paths and YAML; what is written is checked by reading it as a launch does. Touches no file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zeroaccel.config.launch_file import LaunchConfig, parse_launch_file
from zeroaccel.config.launch_json import check_json

from .answers import as_text
from .questions import AUTO, QUESTIONS

__all__ = ["answers_of", "checked", "command_line", "launch_line", "render"]


def render(answers: Mapping[str, Any], extras: Mapping[tuple[str, ...], Any] | None = None) -> str:
    """The launch file.

    Args:
        answers: setting -> answer, of the questions that apply.
        extras: path of a key in the file -> value, for keys that no question is about.
    """
    tree: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": _type(answers)}
    for question in QUESTIONS:
        if question.path and answers.get(question.key, AUTO) != AUTO:
            _put(tree, question.path, answers[question.key])
    for path, value in (extras or {}).items():
        _put(tree, path, value)
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    return text


def checked(text: str, name: str) -> LaunchConfig:
    """The launch file behind a text, with its settings checked against each other and against its JSON config.

    Raises:
        ConfigError: something in it is wrong; all of it is told.
    """
    given = parse_launch_file(text, name)
    given.settings()
    check_json(given)
    return given


def answers_of(file: LaunchConfig) -> tuple[dict[str, Any], dict[tuple[str, ...], Any]]:
    """The answers that would make a file, and the keys of it that no question is about."""
    values = dict(file.values)
    answers: dict[str, Any] = {}
    if (kind := values.pop("distributed_type", None)) is not None:
        answers["use_deepspeed"] = kind == "DEEPSPEED"
    if values.get("dynamo_backend") == "no":
        del values["dynamo_backend"]
    for question in QUESTIONS:
        if question.path and question.key in values:
            value = values.pop(question.key)
            answers[question.key] = ",".join(value) if isinstance(value, tuple) else value
    sections = {"dynamo_": "dynamo_config", "offload_": "deepspeed_config", "zero": "deepspeed_config"}
    extras: dict[tuple[str, ...], Any] = {}
    for key, value in values.items():
        section = next((section for start, section in sections.items() if key.startswith(start)), None)
        extras[(section, key) if section else (key,)] = value
    return answers, extras


def command_line(answers: Mapping[str, Any], extras: Mapping[tuple[str, ...], Any], path: Path) -> str:
    """The command that makes the same file without asking."""
    words = ["zeroaccel", "config", "--yes", "--config_file", str(path)]
    for question in QUESTIONS:
        if question.key in answers:
            words += [question.flag, as_text(answers[question.key])]
    for key, value in extras.items():
        words += ["--set", f"{'.'.join(key)}={yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}"]
    return shlex.join(words)


def launch_line(path: Path, folder: Path) -> str:
    """The command that starts a script with this file."""
    words = ["zeroaccel", "launch"]
    if path.resolve() != (folder / "zeroaccel.yaml").resolve():
        words += ["--config_file", str(path)]
    return f"{shlex.join(words)} train.py"


def _type(answers: Mapping[str, Any]) -> str:
    if answers.get("use_deepspeed"):
        return "DEEPSPEED"
    if answers.get("num_processes", 1) == 1:
        return "NO"
    return "MULTI_CPU" if answers.get("use_cpu") else "MULTI_GPU"


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
