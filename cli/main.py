"""The `zeroaccel` command: the table of its sub-commands, and how errors end it.

A sub-command is imported when it is used, so that help and error messages appear at once; this module and its imports
must not import torch. Every error is one message on stderr and the exit code of its class in `zeroaccel.errors`; 2 for
a wrong command line, 130 for Ctrl-C.
"""

from __future__ import annotations

import difflib
import importlib
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Any

import click

import zeroaccel
from zeroaccel.errors import ZeroAccelError
from zeroaccel.logs import without_notes

CONTEXT = {
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
}
"""Click's settings for the spelling of options and for help. Commands inherit them from their group."""


class GroupedOptions(click.Command):
    """Lists its options under headings.

    Args:
        headings: heading -> its first option, in the order of the options' declarations.
    """

    def __init__(self, *args: Any, headings: Mapping[str, str] = MappingProxyType({}), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._begins = {name: heading for heading, name in headings.items()}

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Returns heading -> (flag, help) of each option, in order."""
        heading, sections = "Options", dict[str, list[tuple[str, str]]]()
        for param in self.get_params(ctx):
            heading = self._begins.get(str(param.name), heading)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(heading, []).append(record)
        return sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, rows in self.sections(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(rows)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


class LazyCommands(GroupedOptions, click.Group):
    """A group that imports its commands when they are used. For an unknown name, the error suggests a similar one.

    Args:
        table: name -> (module, purpose of the command). The module has the command under its name, with _ for -.
        other_names: name of another program's command -> the replacement.
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
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._table[name][1]) for name in self.list_commands(ctx)])


SUB_COMMANDS: Mapping[str, tuple[str, str]] = {
    "checkpoint": ("zeroaccel.cli.checkpoint", "Inspect, verify, reshard and convert checkpoints."),
    "compat": ("zeroaccel.cli.compat", "Install commands named `deepspeed`, for scripts that call them."),
    "config": ("zeroaccel.cli.config.config_command", "Create, validate and explain launch files."),
    "doctor": ("zeroaccel.cli.doctor", "Check the features and the speed of this machine, with remedies."),
    "env": ("zeroaccel.cli.doctor", "Print versions, machine and settings for a bug report."),
    "estimate": ("zeroaccel.cli.estimate", "Estimate training memory for each stage and offload."),
    "launch": ("zeroaccel.cli.launch.launch_command", "Run a script in several processes, on one or several machines."),
    "report": ("zeroaccel.cli.report", "Draw the metrics of one or two runs as an HTML page."),
    "test": ("zeroaccel.cli.verify", "Train a small model at every stage on this machine."),
    "trace": ("zeroaccel.cli.trace", "Record some steps of a script and show their times and waits."),
    "verify": ("zeroaccel.cli.verify", "Compare a script's first steps at stage 0 and as configured."),
    "zero-to-fp32": ("zeroaccel.cli.checkpoint", "Convert a sharded checkpoint to full weights."),
}
"""Name -> module of the command, and its purpose."""


_OTHER_NAMES: Mapping[str, str] = {
    "merge-weights": "zeroaccel zero-to-fp32 CHECKPOINT OUT converts a sharded checkpoint to full weights",
    "estimate-memory": "zeroaccel estimate MODEL estimates training memory",
    "tpu-config": "zeroaccel does not support TPUs",
    "to-fsdp2": "zeroaccel config convert FILE converts FSDP's settings",
    "default-config": "zeroaccel config default writes a file, but zeroaccel launch needs none",
    "ds-report": "zeroaccel doctor checks this machine",
    "ds_report": "zeroaccel doctor checks this machine",
    "report-env": "zeroaccel env",
    "migrate": "zeroaccel config convert FILE",
}
"""Commands of accelerate and DeepSpeed -> the replacement."""


class CommandLine(LazyCommands):
    """The command line: ends with one message and an exit code for each kind of error."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command line. Does not return unless `standalone_mode` is off; then it raises errors."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, **extra)
        except click.Abort:
            code = 130
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "zeroaccel"
            code = _fail(f"{error.format_message()} ({command} --help shows the options)", error.exit_code)
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
    """Start ZeRO training jobs for PyTorch, and plan, check and inspect them.

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
