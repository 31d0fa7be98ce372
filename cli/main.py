"""The `zeroaccel` command: its sub-commands by name, and how errors end it.

A sub-command is imported when it is used, so that help and mistakes are answered at once; nothing here, and nothing
imported here, may import torch. Every mistake is one message on stderr and the exit code of its class in
`zeroaccel.errors`; 2 for a command line that cannot be read, 130 for Ctrl-C.
"""

from __future__ import annotations

import difflib
import importlib
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import click

import zeroaccel
from zeroaccel.errors import ZeroAccelError

__all__ = ["CommandLine", "main"]

# name -> what it is for; the module and the command in it have the same name
SUB_COMMANDS: Mapping[str, str] = {
    "checkpoint": "Look into checkpoints, check them, write them for other numbers of ranks or other programs.",
    "config": "Make, check and explain launch files, by questions or by flags.",
    "doctor": "What works on this machine, what does not, and how to mend it.",
    "env": "Versions, machine and settings, for reports of problems.",
    "estimate": "How much memory training a model takes, for every stage and offload.",
    "launch": "Run a script as several processes, on this machine or on several.",
    "test": "Train a small model at every stage on this machine.",
    "verify": "Compare a script's first steps at stage 0 and as configured.",
    "zero-to-fp32": "Make whole weights of a sharded checkpoint.",
}


class CommandLine(click.Group):
    """A group of commands that are imported one at a time, when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUB_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUB_COMMANDS:
            return None
        module = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f".{module}", __package__), module)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in SUB_COMMANDS and not name.startswith("-"):
            meant = difflib.get_close_matches(name, SUB_COMMANDS, n=1)
            ctx.fail(f"No such command '{name}'." + (f" Did you mean {meant[0]}?" if meant else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUB_COMMANDS[name]) for name in self.list_commands(ctx)])

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


@click.group(cls=CommandLine, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the versions."
)
@click.pass_context
def main(ctx: click.Context) -> None:
    """ZeRO training for PyTorch: start jobs, and see what will happen before it does."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
