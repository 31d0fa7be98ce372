"""`zeroaccel config convert`: files of others, in the form that is read here.

An accelerate YAML with a DeepSpeed section comes out with the keys a launch takes; FSDP's settings are translated to
the stage and offload that shard the same way; a JSON config of DeepSpeed loses what is refused or has no effect here.
What is left out is told, each with its reason; the file that was read is not changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import ValidationError

from zeroaccel.config.document import read_document
from zeroaccel.config.launch.launch_file import MOVED, text_of_file
from zeroaccel.config.launch.launch_foreign import settle_foreign_keys
from zeroaccel.config.launch.launch_schema import LaunchFile
from zeroaccel.config.load_config_file import load_config
from zeroaccel.config.normalize import NormalizedConfig
from zeroaccel.config.problems import NOTHING, closest, report
from zeroaccel.config.provenance import Path as KeyPath
from zeroaccel.config.provenance import Provenance, dotted
from zeroaccel.config.schema import Config
from zeroaccel.config.support import KEYS, Kind, refusals
from zeroaccel.config.yaml_text import parse_yaml
from zeroaccel.errors import ConfigError

from .command import CONTEXT
from .making import say
from .render import checked
from .write import write_file

__all__ = ["convert", "convert_json", "convert_launch"]

_NO_COUNTERPART = ("megatron_lm_config", "parallelism_config", "fp8_config", "mpirun_config")


@click.command(context_settings=CONTEXT)
@click.argument("file")
@click.option("-o", "--output", metavar="PATH", help="Write it there, rather than to stdout.")
@click.option("--drop_unknown", is_flag=True, help="Leave unknown keys of a JSON config out, each with a line.")
def convert(file: str, output: str | None, drop_unknown: bool) -> None:
    """Make a file for zeroaccel of FILE: an accelerate YAML with DeepSpeed or FSDP settings, or a DeepSpeed JSON."""
    text = text_of_file(file)
    if Path(file).suffix == ".json" and "distributed_type" not in text:
        tree, notes = convert_json(file, drop_unknown=drop_unknown)
        result = json.dumps(tree, indent=2) + "\n"
        load_config(result)
    else:
        tree, notes = convert_launch(text, file)
        result = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
        checked(result, f"the result of {file}")
    for note in notes:
        say(note)
    if output is None:
        click.echo(result, nl=False)
        return
    kept = write_file(Path(output), result)
    say(f"written: {output}" + (f" (what was there is in {kept})" if kept else ""))


def convert_json(file: str, *, drop_unknown: bool = False) -> tuple[dict[str, Any], list[str]]:
    """A JSON config without what is refused or has no effect, and a line, with its place, for each key left out.

    Args:
        drop_unknown: leave unknown keys out too, rather than refuse them.

    Raises:
        ConfigError: the file cannot be read, or has a key that does not exist.
    """
    document = read_document(Path(file))
    canonical = NormalizedConfig(Config, document.tree, "strict")
    origin = Provenance(name=document.name, places=document.places, written=canonical.written)
    tree = _copy(document.tree)
    notes = []
    if canonical.unknown and not drop_unknown:
        problems = [problem for problem in canonical.problems if problem.text == "unknown key"]
        lines = [str(report([problem], origin, [])) for problem in problems]
        heading = [f"{file}: {len(lines)} unknown keys"] if len(lines) > 1 else []
        raise ConfigError("\n  ".join([*heading, *lines]), fix="correct them, or leave them out by --drop_unknown")
    for path in canonical.unknown:
        _remove(tree, path)
        notes.append(f"left out {origin.where_written(path)}: unknown key")
    for note in canonical.notes:
        if note.path[-1:] and str(note.path[-1]).startswith("_") and _remove(tree, note.path):
            notes.append(f"left out {note.line(origin)}")
    try:
        refused = {_key_of(problem.path) for problem in refusals(Config(**canonical.tree), set(canonical.unresolved))}
    except ValidationError:
        load_config(file, unknown_keys="lenient")  # tells every wrong value
        raise
    for key, standing in KEYS.items():
        written = canonical.written.get(tuple(key.split(".")))
        if written is None or not (key in refused or standing.kind is Kind.MOOT):
            continue
        if _remove(tree, written):
            fix = f"; {standing.fix}" if key in refused and standing.fix else ""
            notes.append(f"left out {origin.where_written(written)}: {standing.reason}{fix}")
    return tree, notes


def _key_of(path: KeyPath) -> str:
    """The key of the table that a refusal is about: the path itself, or the section whose switch it names."""
    key = dotted(path)
    return key if key in KEYS else key.rpartition(".")[0]


def convert_launch(text: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """A launch file with the keys that are read here, and a line for each that was left out or stands for another.

    Raises:
        ConfigError: it is no YAML, or has a key that neither accelerate nor we have.
    """
    tree = parse_yaml(text, name).value
    if not isinstance(tree, dict):
        raise ConfigError(name, expected="settings as in `num_processes: 2`", got=tree)
    foreign = settle_foreign_keys(tree)
    if foreign.problems:
        problem = foreign.problems[0]
        where = f"{name}: {dotted(problem.path)}" + (f": {problem.text}" if problem.text else "")
        got = {} if problem.got is NOTHING else {"got": problem.got}
        raise ConfigError(where, expected=problem.expected, fix=problem.fix, **got)
    tree = {key: value for key, value in foreign.tree.items() if value not in ({}, [])}
    notes = [f"{dotted(path)}: {text}" for path, text in foreign.notes]
    for key in (*(key for key in LaunchFile.model_fields if key.startswith("tpu_")), "downcast_bf16"):
        tree.pop(key, None)  # what is left of them says nothing
    tree.pop("main_training_function", None)
    for key in _NO_COUNTERPART:
        if tree.pop(key, None):
            notes.append(f"left out {key}: it has no counterpart")
    for old, new in MOVED.items():
        if old in tree:
            section, _, below = new.partition(".")
            tree.setdefault(section, {})[below] = tree.pop(old)
    if tree.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError(f"{name}: compute_environment", expected="LOCAL_MACHINE", got=tree["compute_environment"])
    if tree.get("rdzv_backend") == "static" and tree.get("num_machines", 1) == 1:
        del tree["rdzv_backend"]  # what accelerate writes where nobody has chosen
    for key in [key for key in tree if key not in LaunchFile.model_fields]:
        meant = closest(str(key), LaunchFile.model_fields)
        raise ConfigError(f"{name}: {key}: unknown key", fix=f"did you mean {meant}?" if meant else "remove it")
    return tree, notes


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _remove(tree: dict[str, Any], path: KeyPath) -> bool:
    """Removes a key, and what holds nothing else; false if it is gone already."""
    *above, last = map(str, path)
    for part in above:
        tree = tree.get(part, {})
    return tree.pop(last, path) is not path  # which is no value of a file
