"""From answers to the text of a launch file, and from such a file back to answers; the same answers, the same bytes.

Knows the table's paths and YAML; what is written is checked by reading it as a launch does. Touches no file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zeroaccel.config.launch.launch_file import LaunchConfig, blanks, parse_launch_file
from zeroaccel.config.launch.launch_json import check_json
from zeroaccel.config.launch.launch_sources import Given
from zeroaccel.config.yaml_text import parse_yaml

from .answers import as_text
from .questions import AUTO, QUESTIONS

__all__ = ["answers_of", "checked", "command_line", "launch_line", "render"]


_OF_A_MACHINE: Mapping[str, Any] = {"machine_rank": 0, "main_process_ip": "localhost"}
"""What a machine of several has to know, and what stands for it while a file is checked."""


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


def checked(text: str, name: str) -> Given:
    """The settings behind a text, checked against each other and against their JSON config, and notes on them.

    What each machine of several has to be told for itself, a flag of the launch may say: it is a note here.

    Raises:
        ConfigError: something in it is wrong; all of it is told.
    """
    tree = parse_yaml(text, name).value
    empty = blanks(tree) if isinstance(tree, dict) else ()
    machines = {"num_machines": 2} if "num_machines" in empty else {}
    over = Given({**dict.fromkeys(empty), **machines}, dict.fromkeys(empty, "to be filled in"))
    given = parse_launch_file(text, name, over=over).under(Given(machines)).effective()
    lacking = list(empty)
    if given.values.get("num_machines", 1) != 1 and not _starts_hosts(given):
        needed = [key for key in _OF_A_MACHINE if key != "machine_rank" or given.values.get("rdzv_backend") != "c10d"]
        lacking += [key for key in needed if key not in given.values and key not in lacking]
    filled = {key: value for key, value in _OF_A_MACHINE.items() if key in lacking}
    given.under(Given(filled)).settings()
    check_json(given)
    if not lacking:
        return given
    note = f"{name}: to be completed by {' and '.join(f'--{key}' for key in lacking)} of `zeroaccel launch`"
    return Given(given.values, given.sources, (*given.notes, note))


def _starts_hosts(given: Given) -> bool:
    return given.values.get("hostfile") is not None and given.values.get("multinode_launcher") != "standard"


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
