"""`zeroaccel config template`: the files of the package to start from, listed, printed or written.

The files themselves are in `templates/`, with a table that says what each is for.
"""

from __future__ import annotations

from importlib import import_module, resources
from pathlib import Path

import click

from zeroaccel.config.problems import closest
from zeroaccel.errors import ConfigError

from .command import CONTEXT
from .making import say
from .write import write_file

__all__ = ["template", "template_names"]

_PACKAGE = "zeroaccel.templates"


@click.command(context_settings=CONTEXT)
@click.argument("name", required=False)
@click.option("-o", "--output", metavar="PATH", help="Write it there, rather than to stdout.")
@click.option("-y", "--yes", is_flag=True, help="Replace a file that is there; a copy of it is kept.")
def template(name: str | None, output: str | None, yes: bool) -> None:
    """Print a template; without NAME, list them."""
    names = template_names()
    if name is None:
        for known, words in _about().items():
            click.echo(f"{known}\t{words}")
        return
    chosen = next((known for known in names if name in (known, Path(known).stem)), None)
    if chosen is None:
        meant = closest(name, names)
        raise ConfigError(
            f"{name}: no such template", fix=f"did you mean {meant}?" if meant else "leave NAME out for a list"
        )
    text = _text(chosen)
    if output is None:
        click.echo(text, nl=False)
        return
    path = Path(output) / chosen if Path(output).is_dir() else Path(output)
    if path.exists() and not yes:
        raise ConfigError(f"{path} exists", fix="--yes replaces it and keeps a copy")
    kept = write_file(path, text)
    say(f"written: {path}" + (f" (what was there is in {kept})" if kept else ""))


def template_names() -> list[str]:
    """The names of the templates."""
    return list(_about())


def _about() -> dict[str, str]:
    """File -> what it is for."""
    about: dict[str, str] = import_module(_PACKAGE).ABOUT
    return dict(sorted(about.items()))


def _text(name: str) -> str:
    return (resources.files(_PACKAGE) / name).read_text()
