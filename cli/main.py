"""The `zeroaccel` command: its sub-commands by name, and how errors end it.

A sub-command is imported when it is used, so that help and mistakes are answered at once; nothing here, and nothing
imported here, may import torch. Every mistake is one message on stderr and the exit code of its class in
`zeroaccel.errors`; 2 for a command line that cannot be read, 130 for Ctrl-C.
"""

from __future__ import annotations

import difflib
import importlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

import zeroaccel
from zeroaccel.errors import ZeroAccelError
from zeroaccel.logs import without_notes

from .grouped_help import CONTEXT, GroupedOptions


class StoredHelp(GroupedOptions):
    """The help of a command from a file, in a tenth of the time that its flags take to be made from their settings.

    Args:
        path: of what `LaunchCommand.stored_help` wrote; a test compares the two.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._parts = json.loads(path.read_text(encoding="utf-8"))
        super().__init__(name, help=self._parts["help"], context_settings=CONTEXT)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return list(self._parts["usage"])

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        return {heading: [(flag, about) for flag, about in rows] for heading, rows in self._parts["sections"].items()}


class LazyCommands(GroupedOptions, click.Group):
    """The group. A name that it does not have is answered with the one that was probably meant.

    Args:
        table: name -> (module, what the command is for). The module has the command under its name, with _ for -.
        other_names: name of another program's command -> what there is instead.
    """

    def __init__(
        self,
        *args: Any,
        table: Mapping[str, tuple[str, str]],
        other_names: Mapping[str, str] = MappingProxyType({}),
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self._table = table
        self._other_names = other_names

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module = importlib.import_module(self._table[cmd_name][0])
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._table and not name.startswith("-"):
            if name in self._other_names:
                ctx.fail(f"No such command '{name}'; {self._other_names[name]}.")
            meant = difflib.get_close_matches(name, self._table, n=1)
            ctx.fail(f"No such command '{name}'." + (f" Did you mean {meant[0]}?" if meant else ""))
        if name == "launch" and args[1:] in (["--help"], ["-h"]):
            return name, StoredHelp("launch", Path(__file__).parent / "launch" / "launch_help.json"), args[1:]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._table[name][1]) for name in self.list_commands(ctx)])


SUB_COMMANDS: Mapping[str, tuple[str, str]] = {
    "checkpoint": ("zeroaccel.cli.checkpoint", "Inspect, verify, reshard and convert checkpoints."),
    "compat": ("zeroaccel.cli.compat", "Install commands named `deepspeed`, for scripts that call them."),
    "config": ("zeroaccel.cli.config.config_command", "Create, validate and explain launch files."),
    "doctor": ("zeroaccel.cli.doctor", "Check this machine: features, speed, remedies."),
    "env": ("zeroaccel.cli.doctor", "Print versions, machine and settings for a bug report."),
    "estimate": ("zeroaccel.cli.estimate", "Estimate training memory for every stage and offload."),
    "launch": ("zeroaccel.cli.launch.launch_command", "Run a script in several processes, on one or several machines."),
    "report": ("zeroaccel.cli.report", "Draw the metrics of one or two runs as an HTML page."),
    "test": ("zeroaccel.cli.verify", "Train a small model at every stage on this machine."),
    "trace": ("zeroaccel.cli.trace", "Record a script's steps and show their time and waits."),
    "verify": ("zeroaccel.cli.verify", "Compare a script's first steps at stage 0 and as configured."),
    "zero-to-fp32": ("zeroaccel.cli.checkpoint", "Convert a sharded checkpoint to full weights."),
}
"""Name -> the module that has the command, and what it is for."""


_OTHER_NAMES: Mapping[str, str] = {
    "merge-weights": "zeroaccel zero-to-fp32 CHECKPOINT OUT makes full weights of a sharded checkpoint",
    "estimate-memory": "zeroaccel estimate MODEL estimates training memory",
    "tpu-config": "zeroaccel does not support TPUs",
    "to-fsdp2": "FSDP's settings are read as they are: zeroaccel config convert FILE",
    "default-config": "zeroaccel config asks, and zeroaccel launch needs no file",
    "ds-report": "zeroaccel doctor checks this machine",
    "ds_report": "zeroaccel doctor checks this machine",
    "report-env": "zeroaccel env",
    "migrate": "zeroaccel config convert FILE",
}
"""Commands that accelerate and DeepSpeed have -> what there is here."""


class CommandLine(LazyCommands):
    """The command line: what is raised below ends it with one message and the right exit code."""

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


def _show_version(ctx: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested:
        torch = metadata.version("torch")  # the package's metadata, not the package
        click.echo(f"zeroaccel {zeroaccel.__version__} (torch {torch}, Python {platform.python_version()})")
        ctx.exit()


@click.group(
    cls=CommandLine,
    table=SUB_COMMANDS,
    other_names=_OTHER_NAMES,
    invoke_without_command=True,
    context_settings=CONTEXT,
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the versions."
)
@click.pass_context
def main(ctx: click.Context) -> None:
    """ZeRO training for PyTorch: start jobs, and see what will happen before it does.

    \b
    Examples:
      zeroaccel config
      zeroaccel launch --num_processes 2 train.py
      zeroaccel estimate 7b --ranks 8 --device_memory 80GB
      zeroaccel doctor
    """
    ctx.with_resource(without_notes())
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
