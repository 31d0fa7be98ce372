"""`zeroaccel config show`, `explain` and `schema`: the settings of a launch, and the meaning of keys.

The commands print to stdout, as data, and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo

from zeroaccel.config.diagnostics import at, hint
from zeroaccel.config.launch import resolution
from zeroaccel.config.launch.launch_file import find_launch_file, read_launch_file
from zeroaccel.config.launch.launch_settings import LaunchFile
from zeroaccel.config.launch.launch_sources import ExplicitSettings, check_variables, form_of
from zeroaccel.config.launch.setting import Setting
from zeroaccel.config.launch.setting_table import GROUP_ORDER, SETTINGS
from zeroaccel.config.schema import Config
from zeroaccel.config.section import ConfigSection, as_text, keys_of, nested_section, spellings
from zeroaccel.config.support import KEYS, Kind
from zeroaccel.errors import ConfigError

from .answers import either


@click.command()
@click.option("--config_file", metavar="PATH", help="The launch file. [default: the file that a launch would use]")
@click.option("--resolve", is_flag=True, help="Print every setting, also from the environment, with its source.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def show(environ: Mapping[str, str], config_file: str | None, resolve: bool, as_json: bool) -> None:
    """Print the launch file, or with --resolve all settings that a launch would use.

    \b
    Examples:
      zeroaccel config show
      zeroaccel config show --resolve
    """
    source = find_launch_file(config_file, environ, Path.cwd())
    if source is None and not resolve:
        raise ConfigError("there is no launch file", fix="create one with `zeroaccel config`")
    file = ExplicitSettings() if source is None else read_launch_file(*source)
    if source is not None:
        click.echo(f"{source[0]} ({source[1]})", err=True)
    if source is not None and not resolve:
        click.echo(json.dumps(dict(file.values), indent=2) if as_json else source[0].read_text().rstrip("\n"))
        return
    check_variables(environ)
    explicit, config = resolution.resolve(environ=environ, file=lambda _: file)
    settings = explicit.settings()
    rows = [(name, getattr(settings, name), explicit.sources.get(name, "default")) for name in SETTINGS]
    if config is not None:
        path = explicit.values["deepspeed_config_file"]
        rows += [(f"{path}: {key}", _value(config, key), source) for key, source in config.sources.items()]
    if as_json:
        click.echo(json.dumps({name: {"value": value, "source": source} for name, value, source in rows}, indent=2))
    else:
        shown = [(name, _shown(value), source) for name, value, source in rows]
        _table(_by_group(shown))


@click.command()
@click.argument("key")
def explain(key: str) -> None:
    """Explain KEY: a setting of a launch, or a key of the JSON config such as zero_optimization.stage.

    \b
    Examples:
      zeroaccel config explain zero_stage
      zeroaccel config explain zero_optimization.stage
    """
    texts = [*_about_settings(key), *_about_json(key)]
    if not texts:
        in_json = (".".join(names) for path, field in keys_of(Config) for names in (path, _usual(path, field)))
        names = [*SETTINGS, *in_json]
        names += [name.rpartition(".")[2] for name in names]
        raise ConfigError(f"{key}: no such key", fix=hint(key, names))
    click.echo("\n\n".join("\n".join(lines) for lines in texts))


@click.command()
@click.argument("kind", type=click.Choice(["launch", "json"]), default="launch")
def schema(kind: str) -> None:
    """Print the JSON Schema of a launch file, or of a JSON config, for editors.

    \b
    Examples:
      zeroaccel config schema > launch.schema.json
      zeroaccel config schema json > config.schema.json
    """
    model: type[ConfigSection] = LaunchFile if kind == "launch" else Config
    click.echo(json.dumps(model.model_json_schema(), indent=2))


def _about_settings(key: str) -> Iterator[list[str]]:
    name = key.lstrip("-").replace("-", "_").rpartition(".")[2]
    for row in SETTINGS.values():
        if name not in (row.name, row.flag_name.lstrip("-"), *row.spelled, *row.same, *row.means):
            continue
        yield [
            f"{row.name}: {row.about.partition(' [default: ')[0]}",
            f"  flag         {', '.join((row.flag_name, *(f'--{other}' for other in (*row.spelled, *row.same))))}",
            f"  environment  {', '.join(row.read_variables)}",
            f"  launch file  {'.'.join(row.key)}",
            *([f"  JSON config  {row.json_path}"] if row.json_path else []),
            f"  form         {_form(row)}",
            f"  default      {_default(row)}",
            f"  read by      {row.read_by}",
        ]


def _default(row: Setting) -> str:
    """Returns the default of a setting; words in the help override the value."""
    return row.default_words or ("none" if row.default is None else _shown(row.default))


def _form(row: Setting) -> str:
    return either(list(map(str, row.choices))) if row.choices else form_of(row).expected


def _about_json(key: str) -> Iterator[list[str]]:
    for path, field in keys_of(Config):
        names = _usual(path, field)
        if key not in {".".join(path), ".".join(names), path[-1], names[-1]}:
            continue
        lines = [f"{'.'.join(path)}: {field.description if field else 'its value is not read here.'}"]
        lines.append("  in the JSON config")
        default = field.get_default(call_default_factory=True) if field else None
        keys = nested_section(field) if field else None
        if keys is not None:
            lines.append(f"  keys         {', '.join(keys.model_fields)}")
        elif field:
            lines.append(f"  default      {_shown(default)}")
        if field and (others := [mark.name for mark in spellings(field)]):
            lines.append(f"  also         {', '.join(others)}")
        # The status of the key, or that of the innermost section around it.
        above = (".".join(path[:end]) for end in range(len(path), 0, -1))
        status = next((KEYS[name] for name in above if name in KEYS), None)
        if status is not None and status.kind is not Kind.WORKS:
            verb = "refused" if status.kind is Kind.REFUSED else "accepted without effect"
            lines.append(f"  {verb}: {status.reason}" + (f"; {status.fix}" if status.fix else ""))
        yield lines


def _usual(path: tuple[str, ...], field: FieldInfo | None) -> tuple[str, ...]:
    """Returns the path of a key with the most usual of its other names, if it has one."""
    return (*path[:-1], next((mark.name for mark in spellings(field)), path[-1]) if field else path[-1])


def _value(config: Config, key: str) -> Any:
    value = at(config, key)
    return "auto" if key in config.unresolved else value.model_dump() if isinstance(value, ConfigSection) else value


def _shown(value: Any) -> str:
    if value is None or value == {} or value == ():
        return "-"
    if isinstance(value, Mapping) and not any(isinstance(item, (Mapping, list)) for item in value.values()):
        return ",".join(f"{key}={_shown(item)}" for key, item in value.items())
    return json.dumps(value) if isinstance(value, (Mapping, list)) else as_text(value)


def _by_group(rows: Sequence[tuple[str, str, str]]) -> dict[str, list[tuple[str, str, str]]]:
    """Groups the rows under the headings of `zeroaccel launch --help`; those of the JSON config come last."""
    by_name = {row[0]: row for row in rows}
    groups = {
        title: [by_name.pop(name) for name, row in SETTINGS.items() if row.group == title] for title in GROUP_ORDER
    }
    return {**groups, "JSON config": list(by_name.values())}


def _table(groups: Mapping[str, Sequence[tuple[str, str, str]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        for rows in groups.values():
            for row in rows:
                click.echo("\t".join(row))
        return
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for title, rows in groups.items():
        if rows:
            table.add_row(f"\n{title}", style="bold")
        for name, value, source in rows:
            if source == "default" and name in SETTINGS:
                value = _default(SETTINGS[name])  # in words, if it is no fixed value
            table.add_row(f"  {name}", value, source, style="dim" if source == "default" else "")
    console.print(table)
