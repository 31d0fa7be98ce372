"""The `zeroaccel` command: its sub-commands by name, and how errors end it.

A sub-command is imported when it is used, so that help and mistakes are answered at once; nothing here, and nothing
imported here, may import torch. Every mistake is one message on stderr and the exit code of its class in
`zeroaccel.errors`; 2 for a command line that cannot be read, 130 for Ctrl-C.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import click

import zeroaccel
from zeroaccel.errors import ZeroAccelError
from zeroaccel.logs import without_notes

from .lazy import LazyCommand, LazyCommands

__all__ = ["CommandLine", "main"]

SUB_COMMANDS: Mapping[str, LazyCommand] = {
    name: LazyCommand(f"{__package__}.{name.replace('-', '_')}", about)
    for name, about in {
        "checkpoint": "Look into checkpoints, check them, write them for other numbers of ranks or other programs.",
        "compat": "Commands and modules of DeepSpeed's names, for scripts that call them.",
        "config": "Make, check and explain launch files, by questions or by flags.",
        "doctor": "What works on this machine, what does not, and how to mend it.",
        "env": "Versions, machine and settings, for reports of problems.",
        "estimate": "How much memory training a model takes, for every stage and offload.",
        "launch": "Run a script as several processes, on this machine or on several.",
        "test": "Train a small model at every stage on this machine.",
        "verify": "Compare a script's first steps at stage 0 and as configured.",
        "zero-to-fp32": "Make whole weights of a sharded checkpoint.",
    }.items()
}


class CommandLine(LazyCommands):
    """The whole command line: what is raised below ends it with one message and the right exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command line. Does not return unless `standalone_mode` is off; then errors are raised."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, **extra)
        except click.Abort:
            code = 130
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "zeroaccel"
            code = _fail(f"{error.format_message()} ({command} --help shows what there is)", error.exit_code)
        except click.ClickException as error:
            code = _fail(error.format_message(), error.exit_code)
        except ZeroAccelError as error:
            code = _fail(str(error), error.exit_code)
        sys.exit(code)


def _fail(message: str, code: int) -> int:
    click.echo(f"zeroaccel: {message}", err=True)
    return code


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        torch = metadata.version("torch")  # the package's metadata, not the package
        click.echo(f"zeroaccel {zeroaccel.__version__} (torch {torch}, Python {platform.python_version()})")
        ctx.exit()


@click.group(
    cls=CommandLine,
    table=SUB_COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the versions."
)
@click.pass_context
def main(ctx: click.Context) -> None:
    """ZeRO training for PyTorch: start jobs, and see what will happen before it does."""
    ctx.with_resource(without_notes())
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
