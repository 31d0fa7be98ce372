"""`zeroaccel config default`, `update` and `template`: launch files without questions.

`default` calls `make_config_file` with the defaults for this machine, `update` with the answers of the existing file.
The package `zeroaccel.templates` has the templates and a table of their purposes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module, resources
from pathlib import Path

import click

from zeroaccel.config.diagnostics import hint
from zeroaccel.config.launch.launch_file import find_launch_file, read_launch_file
from zeroaccel.errors import ConfigError

from ..machine import look
from ..main import GroupedOptions
from .config_command import HEADINGS, TypedFlags, question_flags
from .config_file import answers_of, make_config_file, why_not_ask, write_file


@click.command(cls=GroupedOptions, headings=HEADINGS)
@question_flags
@click.pass_obj
def default(environ: Mapping[str, str], /, typed: TypedFlags) -> None:
    """Write a launch file with the defaults for this machine, without asking questions.

    Flags override the defaults. An existing file is replaced only with --yes.

    \b
    Examples:
      zeroaccel config default
      zeroaccel config default --zero_stage 3 --dry_run
    """
    path = Path(typed.config_file or "zeroaccel.yaml")
    if path.exists() and not typed.yes and not typed.dry_run:
        raise ConfigError(
            f"{path} exists", fix="--yes replaces it and keeps a copy; `zeroaccel config update` changes it"
        )
    make_config_file(typed.request(path, no_asking="this command asks no questions", yes=True), look(environ))


@click.command(cls=GroupedOptions, headings=HEADINGS)
@question_flags
@click.pass_obj
def update(environ: Mapping[str, str], /, typed: TypedFlags) -> None:
    """Change answers in a launch file, by flags or, without flags, by asking the questions again.

    Answers that no longer apply are removed; keys without a question are kept. The old file is kept as a copy.

    \b
    Examples:
      zeroaccel config update --zero_stage 2
      zeroaccel config update
    """
    source = find_launch_file(typed.config_file, environ, Path.cwd())
    if source is None:
        raise ConfigError("there is no launch file", fix="name one by --config_file, or run `zeroaccel config`")
    former, extras = answers_of(read_launch_file(*source))
    no_asking = why_not_ask(environ, yes=typed.yes, no_input=typed.no_input)
    request = typed.request(source[0], no_asking=no_asking, former=former)
    if request.answers or request.extras:
        request = replace(request, no_asking="flags give the answers")
    make_config_file(replace(request, extras={**extras, **request.extras}), look(environ))


_PACKAGE = "zeroaccel.templates"


@click.command()
@click.argument("name", required=False)
@click.option("-o", "--output", metavar="PATH", help="Write the template to PATH instead of stdout.")
@click.option("-y", "--yes", is_flag=True, help="Replace an existing file; a copy of it is kept.")
def template(name: str | None, output: str | None, yes: bool) -> None:
    """Print or write the template NAME; without NAME, list the templates.

    \b
    Examples:
      zeroaccel config template
      zeroaccel config template zero3_config -o zeroaccel.yaml
    """
    about: dict[str, str] = import_module(_PACKAGE).ABOUT
    if name is None:
        for each, words in sorted(about.items()):
            click.echo(f"{each}\t{words}")
        return
    chosen = next((each for each in sorted(about) if name in (each, Path(each).stem)), None)
    if chosen is None:
        raise ConfigError(f"{name}: no such template", fix=hint(name, sorted(about), "omit NAME to list the templates"))
    text = (resources.files(_PACKAGE) / chosen).read_text()
    if output is None:
        click.echo(text, nl=False)
        return
    path = Path(output) / chosen if Path(output).is_dir() else Path(output)
    if path.exists() and not yes:
        raise ConfigError(f"{path} exists", fix="--yes replaces it and keeps a copy")
    write_file(path, text)
