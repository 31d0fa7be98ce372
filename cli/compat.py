"""`zeroaccel compat`: commands and modules of DeepSpeed's names, written into a folder on request.

`import deepspeed` in processes of a launch needs none of this. What calls the `deepspeed` command by name, as scripts
and test-suites do, finds these where their folder is put on PATH and PYTHONPATH; no other folder is touched.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from zeroaccel.compat.finder import SHIM_MARK, real_location
from zeroaccel.errors import ConfigError

__all__ = ["compat"]

_COMMAND = """\
#!{python}
# Written by `zeroaccel compat install`.
from .deepspeed_command import {name}

{name}()
"""
_PACKAGE = '''\
"""Written by `zeroaccel compat install`: hands `import deepspeed` over to zeroaccel."""

import sys

if "deepspeed.launcher.runner" not in sys.orig_argv:  # then this package is run, and not imported
    from zeroaccel.compat import install

    del sys.modules["deepspeed"]
    install()
    import deepspeed
'''
_RUNNER = '''\
"""Written by `zeroaccel compat install`: the `deepspeed` command as a module."""

from .deepspeed_command import main

if __name__ == "__main__":
    main()
'''
_MARK = "This package is zeroaccel's.\n"


@click.group()
def compat() -> None:
    """What DeepSpeed's users call by name."""


@compat.command()
@click.argument("folder", type=click.Path(path_type=Path))
def install(folder: Path) -> None:
    """Write the commands `deepspeed`, `ds` and `ds_report` and a `deepspeed` package into FOLDER.

    FOLDER/bin goes on PATH, FOLDER/lib on PYTHONPATH; both lines are printed. `deepspeed ARGUMENTS` and `python -m
    deepspeed.launcher.runner ARGUMENTS` are then `zeroaccel launch ARGUMENTS`. Nothing else is changed; removing the
    folder takes all of it away.
    """
    commands, package = folder / "bin", folder / "lib" / "deepspeed"
    if sys.executable.find(" ") >= 0 or len(sys.executable) > 120:
        raise ConfigError(f"{sys.executable}: no command can name this interpreter in its first line")
    files = {
        commands / "deepspeed": _COMMAND.format(python=sys.executable, name="main"),
        commands / "ds": _COMMAND.format(python=sys.executable, name="main"),
        commands / "ds_report": _COMMAND.format(python=sys.executable, name="report"),
        package / "__init__.py": _PACKAGE,
        package / SHIM_MARK: _MARK,
        package / "launcher" / "__init__.py": "",
        package / "launcher" / "runner.py": _RUNNER,
    }
    theirs = [path for path in files if path.exists() and not _is_ours(path)]
    if theirs:
        raise ConfigError(f"{theirs[0]}: exists, and is not of `zeroaccel compat install`", fix="name another folder")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if path.parent == commands:
                path.chmod(0o755)
    except OSError as error:
        where = error.filename or folder
        raise ConfigError(f"{where}: {(error.strerror or 'cannot be written').lower()}", fix="name a folder") from None
    click.echo(f"export PATH={shlex.quote(str(commands.resolve()))}:$PATH")
    click.echo(f"export PYTHONPATH={shlex.quote(str(package.parent.resolve()))}:$PYTHONPATH")
    if (location := real_location()) is not None:
        click.echo(f"note: with these lines, the DeepSpeed in {location} is no longer found", err=True)


def _is_ours(path: Path) -> bool:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return text in ("", _MARK) or "zeroaccel compat install" in text
