"""`zeroaccel zero-to-fp32`: whole weights of a sharded checkpoint.

The options are those of the standalone program and are declared there alone; here its errors become the command line's.
It also reads DeepSpeed's checkpoints, which the standalone program does not. No torch is imported but for .bin files.
"""

from __future__ import annotations

import click

from zeroaccel.checkpoint import zero_to_fp32 as program
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import open_source
from zeroaccel.errors import CheckpointError

__all__ = ["zero_to_fp32"]


@click.command(
    "zero-to-fp32", context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def zero_to_fp32(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Make whole weights of a sharded checkpoint, on one machine without a GPU."""
    try:
        program.run(arguments, ctx.command_path, open_source)
    except program.ArgumentsError as error:
        raise click.UsageError(str(error), ctx) from error
    except program.ConversionError as error:
        raise CheckpointError(str(error)) from error
