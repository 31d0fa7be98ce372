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
from zeroaccel.config.launch.launch_file import text_of_file
from zeroaccel.config.launch.launch_schema import LaunchFile
from zeroaccel.config.launch.launch_settings import LaunchSettings, launch_settings, typed_settings
from zeroaccel.config.load_config_file import load_config
from zeroaccel.config.normalize import UnknownKeys
from zeroaccel.config.variables import known_variables, unknown_variable
from zeroaccel.config.yaml_text import parse_yaml
from zeroaccel.errors import ConfigError, ZeroAccelError

from ..hostfile import read_hostfile
from ..launch import launch
from ..launch_flags import flag, given_by_flags
from ..launch_others import OtherFlags
from .command import CONTEXT
from .making import say
from .render import checked

__all__ = ["validate", "validate_file"]

_LAUNCH = re.compile(r"\bzeroaccel\s+launch\s+(.*)")
_VARIABLE = re.compile(r"\b(ZEROACCEL_[A-Z0-9_]+)=")


@click.command(context_settings=CONTEXT)
@click.argument("files", nargs=-1, required=True)
@click.option("--strict", "unknown_keys", flag_value="strict", help="Any unknown key of a JSON config is an error.")
@click.option("--lenient", "unknown_keys", flag_value="lenient", help="None is, where DeepSpeed ignores it.")
@click.pass_context
def validate(ctx: click.Context, files: tuple[str, ...], unknown_keys: UnknownKeys | None) -> None:
    """Check FILES: launch files, JSON configs, hostfiles, job scripts and Kubernetes objects.

    Tells everything that is wrong, with file, line and column, as a run would before it starts. Unknown keys of a JSON
    config that look like known ones are errors, others notes. Exits with 0 if all are right, and 2 otherwise.
    """
    wrong = 0
    for name in files:
        try:
            kind, notes = validate_file(name, unknown_keys or "standard")
        except ZeroAccelError as error:
            wrong += 1
            say(f"zeroaccel: {error}")
        else:
            click.echo(f"{name}: {kind}, right")
            for note in notes:
                click.echo(f"note: {note}")
    if wrong:
        ctx.exit(2)


def validate_file(name: str, unknown_keys: UnknownKeys = "standard") -> tuple[str, tuple[str, ...]]:
    """Checks one file.

    Args:
        unknown_keys: what unknown keys of a JSON config are, see `load_config`.

    Returns:
        What kind of file it is, and notes, with their places, on what is accepted without effect.

    Raises:
        ConfigError: it is wrong.
    """
    path, text = Path(name), text_of_file(name)
    if path.suffix in (".json", ".yaml", ".yml"):
        return _structured(path, text, unknown_keys)
    if text.startswith("#!") or path.suffix in (".sh", ".sbatch", ".slurm"):
        _check_script(name, text)
        return "job script", ()
    read_hostfile(name)
    return "hostfile", ()


def _structured(path: Path, text: str, unknown_keys: UnknownKeys) -> tuple[str, tuple[str, ...]]:
    if path.suffix == ".json" and not _is_launch_json(text):
        return "JSON config", _json(path, unknown_keys)
    parsed = parse_yaml(text, str(path))
    tree = parsed.value
    if isinstance(tree, dict) and {"apiVersion", "kind"} <= set(tree):
        commands = list(_container_commands(tree))
        if not commands:
            raise ConfigError(f"{path}: no container of it runs `zeroaccel launch`")
        for words in commands:
            _check_words(str(path), words)
        return f"Kubernetes {tree['kind']}", ()
    found = checked(text, str(path))
    named = found.values.get("deepspeed_config_file")
    return "launch file", (*found.notes, *(() if named is None else _json(Path(named), unknown_keys)))


def _json(path: Path, unknown_keys: UnknownKeys) -> tuple[str, ...]:
    """The notes of a JSON config, of which all is checked that a run would."""
    from zeroaccel.zero.from_config import check_training  # imports torch, which other files do not need

    config = load_config(path, unknown_keys=unknown_keys)
    check_training(config)
    return config.notes


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
    names = (*LaunchSettings.model_fields, "use_deepspeed", "multi_gpu")
    is_whole = not any("$" in str(value) for name, value in typed.items() if not name.startswith("script"))
    typed = {name: None if "$" in str(value) else value for name, value in typed.items()}
    try:
        others = OtherFlags.take_from(typed)
        written = {name: typed[name] for name in names}
        check = launch_settings if is_whole else typed_settings
        check(others.above(given_by_flags(written)).effective().values, flag)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
