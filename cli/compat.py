"""`zeroaccel compat`: writes the commands `deepspeed`, `ds` and `ds_report` into a folder, and implements them.

`import deepspeed` in the ranks of a launch works without them. They are for scripts and test suites that call
`deepspeed` by name, with that folder on PATH and PYTHONPATH; no other folder is changed. `deepspeed` is `zeroaccel
launch` with zeroaccel as its engine, and with DeepSpeed's default hostfile.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from zeroaccel.compat.finder import SHIM_MARK, real_location
from zeroaccel.errors import ConfigError

from .main import main as run

_COMMAND = """\
#!{python}
# Written by `zeroaccel compat install`.
from zeroaccel.cli.compat import {name}

{name}()
"""
_PACKAGE = '''\
"""Written by `zeroaccel compat install`: makes `import deepspeed` import zeroaccel."""

import sys

if "deepspeed.launcher.runner" not in sys.orig_argv:  # otherwise the package is being run, not imported
    from zeroaccel.compat import install

    del sys.modules["deepspeed"]
    install()
    import deepspeed
'''
_RUNNER = '''\
"""Written by `zeroaccel compat install`: the `deepspeed` command as a module."""

from zeroaccel.cli.compat import main

if __name__ == "__main__":
    main()
'''
_MARK = "This package is zeroaccel's.\n"


@click.group()
def compat() -> None:
    """Install commands and modules with DeepSpeed's names.

    \b
    Examples:
      zeroaccel compat install ~/deepspeed_names
    """


@compat.command()
@click.argument("folder", type=click.Path(path_type=Path))
def install(folder: Path) -> None:
    """Write the commands `deepspeed`, `ds` and `ds_report` and a `deepspeed` package into FOLDER.

    Prints the lines that add FOLDER/bin to PATH and FOLDER/lib to PYTHONPATH. With these, `deepspeed ARGUMENTS` and
    `python -m deepspeed.launcher.runner ARGUMENTS` run `zeroaccel launch ARGUMENTS`. Nothing else is changed; to
    uninstall, remove the folder.

    \b
    Examples:
      zeroaccel compat install ~/deepspeed_names
    """
    commands, package = folder / "bin", folder / "lib" / "deepspeed"
    if sys.executable.find(" ") >= 0 or len(sys.executable) > 120:
        raise ConfigError(f"{sys.executable}: the path is too long, or has a space, for the first line of a command")
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
        raise ConfigError(f"{theirs[0]}: exists, but not from `zeroaccel compat install`", fix="name another folder")
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
        click.echo(f"note: with these lines, Python no longer finds the DeepSpeed in {location}", err=True)


def _is_ours(path: Path) -> bool:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return text in ("", _MARK) or "zeroaccel compat install" in text


DEFAULT_HOSTFILE = Path("/job/hostfile")
"""DeepSpeed's default hostfile."""


def main(args: Sequence[str] | None = None) -> None:
    """Runs `deepspeed ARGUMENTS`; does not return.

    Args:
        args: the words after the command's name; by default those of this process.
    """
    words = list(sys.argv[1:] if args is None else args)
    hosts = ["--hostfile", str(DEFAULT_HOSTFILE)] if DEFAULT_HOSTFILE.is_file() else []
    # In front: flags that the user typed come later and override these.
    run(["launch", "--engine", "zeroaccel", *hosts, *words], prog_name="zeroaccel")


def report() -> None:
    """Runs `ds_report`: versions, machine and settings. Does not return."""
    run(["env"], prog_name="zeroaccel")
