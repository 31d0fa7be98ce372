"""`zeroaccel config` itself: the questionnaire, and its sub-commands by name, imported when used.

Reads the environment for all of them: whether there is somebody to ask, and where files of the user lie. Imports
neither torch nor pydantic before a command runs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from .flags import gather_answers, question_flags

__all__ = ["config"]

# name -> the module it is in, and what it is for
SUB_COMMANDS: Mapping[str, tuple[str, str]] = {
    "convert": ("converting", "Make our files of accelerate's YAML or DeepSpeed's JSON."),
    "default": ("defaults", "Write a launch file for this machine, without a question."),
    "explain": ("reading", "Say what a key means, what it may be, and where it can be given."),
    "schema": ("reading", "Print the JSON Schema of a file, for editors."),
    "show": ("reading", "Print the launch file, or every setting with who said it."),
    "template": ("templates", "Print or write a file to start from."),
    "update": ("defaults", "Change answers of a launch file."),
    "validate": ("validating", "Check launch files, JSON configs, hostfiles and job scripts."),
}
CONTEXT = {
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
}


class ConfigCommands(click.Group):
    """Sub-commands that are imported one at a time, when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUB_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUB_COMMANDS:
            return None
        module = importlib.import_module(f".{SUB_COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in sorted(SUB_COMMANDS.items())])


@click.group(
    cls=ConfigCommands, invoke_without_command=True, context_settings=CONTEXT, short_help="Make a launch file."
)
@question_flags
@click.option("--model", metavar="MODEL", help="What will be trained, as for `zeroaccel estimate`: plans what fits.")
@click.option(
    "--sequence", type=click.IntRange(1), default=2048, metavar="N", help="Its tokens per sample. [default: 2048]"
)
@click.option(
    "--batch", type=click.IntRange(1), default=1, metavar="N", help="Its samples per micro-step. [default: 1]"
)
@click.option("--checkpointing", is_flag=True, help="It recomputes activations.")
@click.pass_context
def config(
    ctx: click.Context,
    /,
    model: str | None,
    sequence: int,
    batch: int,
    checkpointing: bool,
    answers: str | None,
    sets: tuple[str, ...],
    config_file: str | None,
    yes: bool,
    no_input: bool,
    dry_run: bool,
    **typed: Any,
) -> None:
    """Make a launch file by answering questions, or without a question by flags.

    What a flag answers is not asked. Every step can be left backwards; nothing is written before the end.
    """
    ctx.obj = os.environ
    if ctx.invoked_subcommand is not None:
        if given := [
            name for name, value in {**typed, "answers": answers, "config_file": config_file}.items() if value
        ]:
            raise click.UsageError(f"--{given[0]} goes behind {ctx.invoked_subcommand}.", ctx)
        return
    from ..facts import look, measure_disk
    from .making import Request, make, why_not_ask
    from .plan import Model

    said = gather_answers(typed, answers, sets)
    no_asking = why_not_ask(os.environ, yes=yes, no_input=no_input)
    machine = look(os.environ)
    if not no_asking:
        machine = machine.with_disks(tuple(measure_disk(disk) for disk in machine.disks))
    make(
        Request(
            path=Path(config_file or "zeroaccel.yaml"),
            given=said.answers,
            sources=said.sources,
            extras=said.extras,
            model=None if model is None else Model(model, sequence, batch, checkpointing),
            yes=yes,
            dry_run=dry_run,
            no_asking=no_asking,
        ),
        machine,
    )
