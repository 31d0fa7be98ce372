"""`zeroaccel config convert` and `validate`: convert other launchers' files, and check every file that a launch reads.

`convert` turns an accelerate YAML (DeepSpeed or FSDP settings) into a launch file, and removes from a JSON config the
keys that zeroaccel refuses or ignores; it lists each removed key with its reason. `validate` checks launch files and
JSON configs as a launch does, the flags and variables in job scripts and Kubernetes objects, and hostfiles by line.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import ValidationError

from zeroaccel.config.bounds import parse_plain_json
from zeroaccel.config.diagnostics import (
    KeyPath,
    Problem,
    Provenance,
    dotted,
    duplicate_key_problems,
    hint,
    report,
)
from zeroaccel.config.document import read_document
from zeroaccel.config.launch.launch_file import text_of_file
from zeroaccel.config.launch.launch_foreign import settle_foreign_keys
from zeroaccel.config.launch.launch_settings import LaunchFile, launch_settings, typed_settings
from zeroaccel.config.launch.launch_sources import known_variables, unknown_variable
from zeroaccel.config.load_config_file import load_config
from zeroaccel.config.normalize import NormalizedConfig, UnknownKeys
from zeroaccel.config.schema import Config
from zeroaccel.config.section import keys_of
from zeroaccel.config.support import KEYS, Kind, refusals
from zeroaccel.config.yaml_text import parse_yaml
from zeroaccel.errors import ConfigError, ZeroAccelError

from ..launch.hostfile import read_hostfile
from ..launch.launch_command import launch
from ..launch.typed_settings import TypedSettings
from .config_file import checked, log, write_file

_NO_COUNTERPART = ("megatron_lm_config", "fp8_config", "mpirun_config")


@click.command()
@click.argument("file")
@click.option("-o", "--output", metavar="PATH", help="Write the result to PATH instead of stdout.")
@click.option("--drop_unknown", is_flag=True, help="Leave out unknown keys of a JSON config, and list them.")
def convert(file: str, output: str | None, drop_unknown: bool) -> None:
    """Convert FILE, an accelerate YAML with DeepSpeed or FSDP settings or a DeepSpeed JSON, for zeroaccel.

    \b
    Examples:
      zeroaccel config convert fsdp.yaml -o zeroaccel.yaml
      zeroaccel config convert ds_config.json -o ours.json
    """
    text = text_of_file(file)
    if _looks_like_json(Path(file), text) and "distributed_type" not in text:
        tree, notes = convert_json(file, drop_unknown=drop_unknown)
        result = json.dumps(tree, indent=2) + "\n"
        load_config(result)
    else:
        tree, notes = convert_launch(text, file)
        result = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
        checked(result, f"the result of {file}")
    for note in notes:
        log(note)
    if output is None:
        click.echo(result, nl=False)
        return
    write_file(Path(output), result)


def convert_json(file: str, *, drop_unknown: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Returns a JSON config without refused keys and keys without effect, and a line with the place of each of them.

    Args:
        drop_unknown: leave out unknown keys too, rather than refuse them.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key.
    """
    document = read_document(Path(file))
    normalized = NormalizedConfig(Config, document.tree, "strict")
    origin = Provenance(name=document.name, places=document.places, written=normalized.written)
    tree = copy.deepcopy(document.tree)
    notes = []
    if document.problems:
        raise report(document.problems, origin, document.places)
    if normalized.unknown and not drop_unknown:
        problems = [problem for problem in normalized.problems if problem.text == "unknown key"]
        lines = [problem.line(origin) for problem in problems]
        heading = [f"{file}: {len(lines)} unknown keys"] if len(lines) > 1 else []
        raise ConfigError("\n  ".join([*heading, *lines]), fix="correct them, or leave them out with --drop_unknown")
    for path in normalized.unknown:
        _remove(tree, path)
        notes.append(f"left out {origin.where_written(path)}: unknown key")
    for note in normalized.notes:
        if note.path[-1:] and str(note.path[-1]).startswith("_") and _remove(tree, note.path):
            notes.append(f"left out {note.line(origin)}")
    try:
        refused = {_key_of(problem.path) for problem in refusals(Config(**normalized.tree), set(normalized.unresolved))}
    except ValidationError:
        load_config(file, unknown_keys="lenient")  # raises with every wrong value
        raise
    for key, status in KEYS.items():
        written = normalized.written.get(tuple(key.split(".")))
        if written is None or not (key in refused or status.kind is Kind.IGNORED):
            continue
        if _remove(tree, written):
            fix = f"; {status.fix}" if key in refused and status.fix else ""
            notes.append(f"left out {origin.where_written(written)}: {status.reason}{fix}")
    for path, field in keys_of(Config):
        section = normalized.written.get(path[:-1])
        if field is None and section is not None and _remove(tree, (*section, path[-1])):
            notes.append(f"left out {origin.where_written((*section, path[-1]))}: zeroaccel does not read it")
    return tree, notes


def _key_of(path: KeyPath) -> str:
    """Returns the key in KEYS that a refusal is about: the path itself, or the section whose switch it names."""
    key = dotted(path)
    return key if key in KEYS else key.rpartition(".")[0]


def convert_launch(text: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """Returns a launch file with the keys that zeroaccel reads, and a line for each key left out or replaced.

    Raises:
        ConfigError: the text is not YAML, or has a key that neither accelerate nor zeroaccel knows.
    """
    parsed = parse_yaml(text, name)
    if not isinstance(parsed.value, dict):
        raise ConfigError(name, expected="settings as in `num_processes: 2`", got=parsed.value)
    foreign, origin = settle_foreign_keys(parsed.value), Provenance(name=name, places=parsed.places)
    if wrong := [*duplicate_key_problems(parsed.duplicates), *foreign.problems]:
        raise report(wrong, origin, parsed.places)
    tree = {key: value for key, value in foreign.tree.items() if value not in ({}, [])}
    notes = [f"{dotted(path)}: {text}" for path, text in foreign.notes]
    for key in (*(key for key in LaunchFile.model_fields if key.startswith("tpu_")), "downcast_bf16"):
        tree.pop(key, None)  # the values that passed have no effect
    tree.pop("main_training_function", None)
    for key in _NO_COUNTERPART:
        if tree.pop(key, None):
            notes.append(f"left out {key}: it has no counterpart")
    if tree.get("rdzv_backend") == "static" and tree.get("num_machines", 1) == 1:
        del tree["rdzv_backend"]  # accelerate's default, which it writes into every file
    names = LaunchFile.model_fields
    problems = [
        Problem((key,), text="unknown key", fix=hint(str(key), names, "remove it")) for key in tree if key not in names
    ]
    if tree.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        problems.append(Problem(("compute_environment",), expected="LOCAL_MACHINE", got=tree["compute_environment"]))
    if problems:
        raise report(problems, origin, parsed.places)
    return tree, notes


def _remove(tree: dict[str, Any], path: KeyPath) -> bool:
    """Removes a key. Returns False if the tree does not have it."""
    *above, last = map(str, path)
    for key in above:
        tree = tree.get(key, {})
    return tree.pop(last, path) is not path  # a path is never a value of a file


_LAUNCH = re.compile(r"\bzeroaccel\s+launch\s+(.*)")
_YAML_KEY = re.compile(r"^\w+:(\s|$)", re.MULTILINE)
_VARIABLE = re.compile(r"\b(ZEROACCEL_[A-Z0-9_]+)=")


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--strict", "unknown_keys", flag_value="strict", help="Treat every unknown key of a JSON config as an error."
)
@click.option("--lenient", "unknown_keys", flag_value="lenient", help="Accept unknown keys that DeepSpeed ignores.")
@click.pass_context
def validate(ctx: click.Context, files: tuple[str, ...], unknown_keys: UnknownKeys | None) -> None:
    """Check FILES: launch files, JSON configs, hostfiles, job scripts and Kubernetes objects.

    Reports every mistake with file, line and column, as a run would before it starts. Unknown keys of a JSON config are
    errors if they resemble known keys, and notes otherwise. Exits with 0 if all files are valid, and with 2 otherwise.

    \b
    Examples:
      zeroaccel config validate zeroaccel.yaml ds_config.json job.sbatch hostfile
    """
    wrong = 0
    for name in files:
        try:
            kind, notes = validate_file(name, unknown_keys or "standard")
        except ZeroAccelError as error:
            wrong += 1
            log(f"zeroaccel: {error}")
        else:
            click.echo(f"{name}: {kind}, valid")
            for note in notes:
                click.echo(f"note: {note}")
    if wrong:
        ctx.exit(2)


def validate_file(name: str, unknown_keys: UnknownKeys = "standard") -> tuple[str, tuple[str, ...]]:
    """Checks one file.

    Args:
        unknown_keys: treatment of unknown keys of a JSON config, see `load_config`.

    Returns:
        The kind of the file, and notes, with their places, on keys that are accepted without effect.

    Raises:
        ConfigError: the file is not valid.
    """
    path, text = Path(name), text_of_file(name)
    if text.startswith("#!") or path.suffix in (".sh", ".sbatch", ".slurm"):
        _check_script(name, text)
        return "job script", ()
    # accelerate reads any ending as YAML; a hostfile has no line "key: value".
    if path.suffix in (".json", ".yaml", ".yml") or _looks_like_json(path, text) or _YAML_KEY.search(text):
        return _structured(path, text, unknown_keys)
    read_hostfile(name)
    return "hostfile", ()


def _structured(path: Path, text: str, unknown_keys: UnknownKeys) -> tuple[str, tuple[str, ...]]:
    if _looks_like_json(path, text) and not _is_launch_json(text):
        return "JSON config", _json(path, unknown_keys)
    parsed = parse_yaml(text, str(path))
    tree = parsed.value
    if isinstance(tree, dict) and {"apiVersion", "kind"} <= set(tree):
        commands = list(_container_commands(tree))
        if not commands:
            raise ConfigError(f"{path}: no container in it runs `zeroaccel launch`")
        for words in commands:
            _check_words(str(path), words)
        return f"Kubernetes {tree['kind']}", ()
    settings = checked(text, str(path))
    named = settings.values.get("deepspeed_config_file")
    return "launch file", (*settings.notes, *(() if named is None else _json(Path(named), unknown_keys)))


def _json(path: Path, unknown_keys: UnknownKeys) -> tuple[str, ...]:
    """Checks a JSON config as a run does, and returns its notes."""
    # Both modules import torch, which the checks of other files do not need.
    from zeroaccel.setup.job import compilation_of
    from zeroaccel.zero.from_config import check_training

    config = load_config(path, unknown_keys=unknown_keys)
    check_training(config)
    compilation_of(config)
    return config.notes


def _looks_like_json(path: Path, text: str) -> bool:
    return path.suffix == ".json" or text.lstrip().startswith("{")


def _is_launch_json(text: str) -> bool:
    """Returns True if JSON is a launch file, as accelerate may write it, and not a config in DeepSpeed's format."""
    try:
        tree = parse_plain_json(text)
    except ValueError:
        return False
    return isinstance(tree, dict) and bool(set(tree) & (set(LaunchFile.model_fields) - {"fp16", "bf16"}))


def _container_commands(tree: Any) -> Iterator[list[str]]:
    if isinstance(tree, dict):
        words = [str(word) for key in ("command", "args") for word in tree.get(key) or []]
        if words[:2] == ["zeroaccel", "launch"]:
            yield words[2:]
        for below in tree.values():
            yield from _container_commands(below)
    elif isinstance(tree, list):
        for below in tree:
            yield from _container_commands(below)


def _check_script(name: str, text: str) -> None:
    known_names = known_variables()
    has_launch = False
    for number, line in _whole_lines(text):
        where = f"{name}:{number}"
        for variable in _VARIABLE.findall(line):
            if variable not in known_names:
                raise ConfigError(f"{where}: {unknown_variable(variable)}")
        if (command := _LAUNCH.search(line)) is not None:
            has_launch = True
            _check_words(where, shlex.split(command.group(1)))
    if not has_launch:
        raise ConfigError(f"{name}: no line runs `zeroaccel launch`")


def _whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a script with their numbers, without comments; joins lines that end with a backslash."""
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
    """Checks the words after `zeroaccel launch`; accepts values that a shell or a cluster fills in."""
    try:
        with launch.make_context("zeroaccel launch", list(words)) as context:
            typed = dict(context.params)
    except click.UsageError as error:
        raise ConfigError(f"{where}: {error.format_message()}") from None
    is_whole = not any("$" in str(value) for name, value in typed.items() if not name.startswith("script"))
    try:
        settings = TypedSettings.of(
            {name: None if "$" in str(value) else value for name, value in typed.items()}
        ).settings
        (launch_settings if is_whole else typed_settings)(settings.effective().values, settings.where)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
