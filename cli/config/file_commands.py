"""`zeroaccel config default`, `update` and `template`: launch files without questions.

`default` and `update` call `make_config_file` with every answer given: by this machine, or by the file as it is. The
templates are in `templates/`, with a table of what each is for.
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

from ..grouped_help import GroupedOptions
from ..machine import look
from .config_command import HEADINGS, TypedFlags, question_flags
from .config_file import answers_of, make_config_file, why_not_ask, write_file


@click.command(cls=GroupedOptions, headings=HEADINGS)
@question_flags
@click.pass_obj
def default(environ: Mapping[str, str], /, typed: TypedFlags) -> None:
    """Write a launch file with the defaults for this machine, without a question.

    What a flag says counts more than the default. A file that is there is only replaced with --yes.

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
    make_config_file(typed.request(path, no_asking="nobody is asked", yes=True), look(environ))


@click.command(cls=GroupedOptions, headings=HEADINGS)
@question_flags
@click.pass_obj
def update(environ: Mapping[str, str], /, typed: TypedFlags) -> None:
    """Change answers of a launch file: those of the flags, or, with none, by going through the questions again.

    Answers that no longer apply are left out; keys that no question is about stay. A copy of the file is kept.

    \b
    Examples:
      zeroaccel config update --zero_stage 2
      zeroaccel config update
    """
    source = find_launch_file(typed.config_file, environ, Path.cwd())
    if source is None:
        raise ConfigError("there is no launch file", fix="name one by --config_file, or make one: `zeroaccel config`")
    former, extras = answers_of(read_launch_file(*source))
    no_asking = why_not_ask(environ, yes=typed.yes, no_input=typed.no_input)
    request = typed.request(source[0], no_asking=no_asking, former=former)
    if request.answers or request.extras:
        request = replace(request, no_asking="the answers are given")
    make_config_file(replace(request, extras={**extras, **request.extras}), look(environ))


_PACKAGE = "zeroaccel.templates"


@click.command()
@click.argument("name", required=False)
@click.option("-o", "--output", metavar="PATH", help="Write it there, rather than to stdout.")
@click.option("-y", "--yes", is_flag=True, help="Replace a file that is there; a copy of it is kept.")
def template(name: str | None, output: str | None, yes: bool) -> None:
    """Print a template; without NAME, list them.

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
        raise ConfigError(f"{name}: no such template", fix=hint(name, sorted(about), "leave NAME out for a list"))
    text = (resources.files(_PACKAGE) / chosen).read_text()
    if output is None:
        click.echo(text, nl=False)
        return
    path = Path(output) / chosen if Path(output).is_dir() else Path(output)
    if path.exists() and not yes:
        raise ConfigError(f"{path} exists", fix="--yes replaces it and keeps a copy")
    write_file(path, text)
