"""`zeroaccel config default` and `zeroaccel config update`: a launch file without questions, and changes to one.

Both are the questionnaire of `making` with something given: nothing but this machine, or the file as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from zeroaccel.config.launch.launch_file import find_launch_file, read_launch_file
from zeroaccel.errors import ConfigError

from ..machine import look
from .command import CONTEXT
from .flags import Typed, question_flags
from .making import ConfigRequest, make, why_not_ask
from .render import answers_of

__all__ = ["default", "update"]


@click.command(context_settings=CONTEXT)
@question_flags
@click.pass_obj
def default(
    environ: Mapping[str, str],
    /,
    typed: Typed,
) -> None:
    """Write a launch file with the defaults for this machine, without a question.

    What a flag says counts more than the default. A file that is there is only replaced with --yes.
    """
    path = Path(typed.config_file or "zeroaccel.yaml")
    if path.exists() and not typed.yes and not typed.dry_run:
        raise ConfigError(
            f"{path} exists", fix="--yes replaces it and keeps a copy; `zeroaccel config update` changes it"
        )
    said = typed.said()
    request = ConfigRequest(
        path, said.answers, said.sources, said.extras, yes=True, dry_run=typed.dry_run, no_asking="nobody is asked"
    )
    make(request, look(environ))


@click.command(context_settings=CONTEXT)
@question_flags
@click.pass_obj
def update(
    environ: Mapping[str, str],
    /,
    typed: Typed,
) -> None:
    """Change answers of a launch file: those of the flags, or, with none, by going through the questions again.

    Answers that no longer apply are left out; keys that no question is about stay. A copy of the file is kept.
    """
    found = find_launch_file(typed.config_file, environ, Path.cwd())
    if found is None:
        raise ConfigError("there is no launch file", fix="name one by --config_file, or make one: `zeroaccel config`")
    former, extras = answers_of(read_launch_file(*found))
    said = typed.said()
    by_flags = "the answers are given" if said.answers or said.extras else ""
    request = ConfigRequest(
        found[0],
        said.answers,
        said.sources,
        {**extras, **said.extras},
        former=former,
        yes=typed.yes,
        dry_run=typed.dry_run,
        no_asking=by_flags or why_not_ask(environ, yes=typed.yes, no_input=typed.no_input),
    )
    make(request, look(environ))
