"""`zeroaccel config validate`: checks every kind of file a launch reads or is read from.

Launch files and JSON configs by what a launch itself checks them with; job scripts and Kubernetes objects by the flags
and variables they start it with; hostfiles line by line. Looks at no machine but for the JSON a launch file names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from zeroaccel.config.bounds import parse_plain_json
from zeroaccel.config.launch import LaunchSettings, launch_settings, typed_settings
from zeroaccel.config.launch_file import text_of_file
from zeroaccel.config.launch_schema import LaunchFile
from zeroaccel.config.load import load_config
from zeroaccel.config.variables import known_variables, unknown_variable
from zeroaccel.config.yaml_text import parse_yaml
from zeroaccel.errors import ConfigError, ZeroAccelError

from ..hostfile import read_hostfile
from ..launch import launch
from ..launch_flags import flag, given_by_flags
from .command import CONTEXT
from .making import say
from .render import checked

__all__ = ["validate", "validate_file"]

_LAUNCH = re.compile(r"\bzeroaccel\s+launch\s+(.*)")
_VARIABLE = re.compile(r"\b(ZEROACCEL_[A-Z0-9_]+)=")


@click.command(context_settings=CONTEXT)
@click.argument("files", nargs=-1, required=True)
@click.pass_context
def validate(ctx: click.Context, files: tuple[str, ...]) -> None:
    """Check FILES: launch files, JSON configs, hostfiles, job scripts and Kubernetes objects.

    Tells everything that is wrong, with file, line and column. Exits with 0 if all are right, and 2 otherwise.
    """
    wrong = 0
    for name in files:
        try:
            kind, notes = validate_file(name)
        except ZeroAccelError as error:
            wrong += 1
            say(f"zeroaccel: {error}")
        else:
            click.echo(f"{name}: {kind}, right")
            for note in notes:
                click.echo(f"{name}: note: {note}")
    if wrong:
        ctx.exit(2)


def validate_file(name: str) -> tuple[str, tuple[str, ...]]:
    """Checks one file.

    Returns:
        What kind of file it is, and notes on what is accepted without effect.

    Raises:
        ConfigError: it is wrong.
    """
    path, text = Path(name), text_of_file(name)
    if path.suffix in (".json", ".yaml", ".yml"):
        return _structured(path, text)
    if text.startswith("#!") or path.suffix in (".sh", ".sbatch", ".slurm"):
        _check_script(name, text)
        return "job script", ()
    read_hostfile(name)
    return "hostfile", ()


def _structured(path: Path, text: str) -> tuple[str, tuple[str, ...]]:
    if path.suffix == ".json" and not _is_launch_json(text):
        return "JSON config", load_config(path).notes
    tree = parse_yaml(text, str(path)).value
    if isinstance(tree, dict) and {"apiVersion", "kind"} <= set(tree):
        commands = list(_container_commands(tree))
        if not commands:
            raise ConfigError(f"{path}: no container of it runs `zeroaccel launch`")
        for words in commands:
            _check_words(str(path), words)
        return f"Kubernetes {tree['kind']}", ()
    checked(text, str(path))
    return "launch file", ()


def _is_launch_json(text: str) -> bool:
    """Whether JSON is a launch file, which accelerate writes so too, and not a config in DeepSpeed's format."""
    try:
        tree = parse_plain_json(text)
    except ValueError:
        return False
    return isinstance(tree, dict) and bool(set(tree) & (set(LaunchFile.model_fields) - {"fp16", "bf16"}))


def _container_commands(tree: Any) -> Iterator[list[str]]:
    if isinstance(tree, dict):
        words = [str(word) for part in ("command", "args") for word in tree.get(part) or []]
        if words[:2] == ["zeroaccel", "launch"]:
            yield words[2:]
        for below in tree.values():
            yield from _container_commands(below)
    elif isinstance(tree, list):
        for below in tree:
            yield from _container_commands(below)


def _check_script(name: str, text: str) -> None:
    known = known_variables()
    found = False
    for number, line in _whole_lines(text):
        where = f"{name}:{number}"
        for variable in _VARIABLE.findall(line):
            if variable not in known:
                raise ConfigError(f"{where}: {unknown_variable(variable)}")
        if (command := _LAUNCH.search(line)) is not None:
            found = True
            _check_words(where, shlex.split(command.group(1)))
    if not found:
        raise ConfigError(f"{name}: no line of it runs `zeroaccel launch`")


def _whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a script with their numbers; those that go on in the next are joined, comments left out."""
    start, joined = 1, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not joined:
            start = number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        if not (joined + line).lstrip().startswith("#"):
            yield start, joined + line
        joined = ""


def _check_words(where: str, words: list[str]) -> None:
    """Checks the words behind `zeroaccel launch`; values that a shell or a cluster fills in are taken for right."""
    try:
        with launch.make_context("zeroaccel launch", list(words)) as context:
            typed = dict(context.params)
    except click.UsageError as error:
        raise ConfigError(f"{where}: {error.format_message()}") from None
    settings = {name: typed[name] for name in (*LaunchSettings.model_fields, "use_deepspeed", "multi_gpu")}
    written = {name: value for name, value in settings.items() if "$" not in str(value)}
    try:
        check = launch_settings if len(written) == len(settings) else typed_settings
        check(given_by_flags(written).values, flag)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
