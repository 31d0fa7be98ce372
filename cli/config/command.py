"""`zeroaccel config` itself: the questionnaire, and its sub-commands by name, imported when used.

Reads the environment for all of them: whether there is somebody to ask, and where files of the user lie. Imports
neither torch nor pydantic before a command runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click
from click.core import ParameterSource

from ..lazy import LazyCommand, LazyCommands
from .flags import Typed, question_flags

__all__ = ["config"]

SUB_COMMANDS: Mapping[str, LazyCommand] = {
    "convert": LazyCommand(f"{__package__}.converting", "Make our files of accelerate's YAML or DeepSpeed's JSON."),
    "default": LazyCommand(f"{__package__}.defaults", "Write a launch file for this machine, without a question."),
    "explain": LazyCommand(
        f"{__package__}.reading", "Say what a key means, what it may be, and where it can be given."
    ),
    "schema": LazyCommand(f"{__package__}.reading", "Print the JSON Schema of a file, for editors."),
    "show": LazyCommand(f"{__package__}.reading", "Print the launch file, or every setting with who said it."),
    "template": LazyCommand(f"{__package__}.templates", "Print or write a file to start from."),
    "update": LazyCommand(f"{__package__}.defaults", "Change answers of a launch file."),
    "validate": LazyCommand(
        f"{__package__}.validating", "Check launch files, JSON configs, hostfiles and job scripts."
    ),
}
CONTEXT = {
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
}


@click.group(
    cls=LazyCommands,
    table=SUB_COMMANDS,
    invoke_without_command=True,
    context_settings=CONTEXT,
    short_help="Make a launch file.",
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
    typed: Typed,
) -> None:
    """Make a launch file by answering questions, or without a question by flags.

    What a flag answers is not asked. Every step can be left backwards; nothing is written before the end.
    """
    ctx.obj = os.environ
    if ctx.invoked_subcommand is not None:
        for param in ctx.command.params:
            if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{param.opts[-1]} goes behind {ctx.invoked_subcommand}.", ctx)
        return
    from ..machine import look, measure_disk
    from .making import ConfigRequest, make, why_not_ask
    from .plan import Model

    said = typed.said()
    no_asking = why_not_ask(os.environ, yes=typed.yes, no_input=typed.no_input)
    machine = look(os.environ)
    if not no_asking:
        machine = machine.with_disks(tuple(measure_disk(disk) for disk in machine.disks))
    make(
        ConfigRequest(
            path=Path(typed.config_file or "zeroaccel.yaml"),
            given=said.answers,
            sources=said.sources,
            extras=said.extras,
            model=None if model is None else Model(model, sequence, batch, checkpointing),
            yes=typed.yes,
            dry_run=typed.dry_run,
            no_asking=no_asking,
        ),
        machine,
    )
