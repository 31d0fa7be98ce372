"""The command `zeroaccel launch`: its flags, one for each row of `setting_table`, and its help.

Help appears at once, because this module imports no schema: `launch_job` runs a launch, and `typed_settings` reads the
flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import click
from click.shell_completion import CompletionItem

from zeroaccel.config.launch.setting import Setting
from zeroaccel.config.launch.setting_table import SETTINGS

from ..main import CONTEXT, GroupedOptions
from .foreign_flags import ELASTIC_HINTS, foreign_flag_options

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FP8 = "8-bit training is not available; use --mixed_precision bf16"
_REFUSED_BEGINNINGS: Mapping[str, str] = {
    "fp8_": _FP8,
    "megatron_lm_": "this is a setting of Megatron-LM, which is another engine",
    "use_megatron_lm": "Megatron-LM is another engine",
    "tpu": "there is no support for TPUs",
    "no_tpu": "there is no support for TPUs",
    "mpirun_": "the launcher does not call mpirun; run `mpirun -n N zeroaccel launch ...` instead",
    "aws_": "there is no support for SageMaker",
    "zero_nvme_path": "use --offload_optimizer_nvme_path or --offload_param_nvme_path",
}

HEADINGS: Mapping[str, str] = {
    **{row.group: row.name for row in reversed([*SETTINGS.values()])},
    "Flags of the deepspeed command": "num_gpus",
    "This command": "config_file",
}
"""Heading in help -> its first flag."""


class LaunchCommand(GroupedOptions):
    """The launch command; for options of other launchers that do not exist, it explains why."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            for beginning, reason in _REFUSED_BEGINNINGS.items():
                if name.startswith(beginning):
                    raise click.UsageError(f"{error.option_name}: {reason}", ctx) from None
            if hint := ELASTIC_HINTS.get(name):
                raise click.UsageError(f"No such option {error.option_name}; {hint}", ctx) from None
            from zeroaccel.config.diagnostics import closest

            meant = closest(name, [option.lstrip("-") for param in self.params for option in param.opts])
            fix = f"; did you mean --{meant}?" if meant else ""
            raise click.UsageError(f"No such option {error.option_name}{fix}", ctx) from None


def setting_flags(command: _Command) -> _Command:
    """Gives a command the flag of every setting. A flag that is absent is None, whatever the setting's default."""
    for row in reversed([*SETTINGS.values()]):
        command = _option(row)(command)
    return command


def _option(row: Setting) -> Callable[[_Command], _Command]:
    if row.kind == "switch" and not row.takes_value:
        bare = row.flag_name.lstrip("-")
        return click.option(f"--{bare}/--no_{bare}", row.name, is_flag=True, default=None, help=row.about)
    spelled = [row.flag_name, *(f"--{other}" for other in row.spelled), *filter(None, [row.short])]
    kind = _Value(row)
    return click.option(*spelled, row.name, default=None, type=kind, metavar=row.placeholder, help=row.about)


class _Value(click.types.StringParamType):
    """The value of a setting as text, which `typed_settings` reads; shells complete choices and paths."""

    def __init__(self, row: Setting) -> None:
        self._row = row

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self._row.kind in ("file", "folder"):
            return [CompletionItem(incomplete, type="dir" if self._row.kind == "folder" else "file")]
        return [CompletionItem(value) for value in map(str, self._row.choices) if value.startswith(incomplete)]


@click.command(
    cls=LaunchCommand,
    headings=HEADINGS,
    context_settings={**CONTEXT, "allow_interspersed_args": False},  # words after SCRIPT belong to it
)
@setting_flags
@foreign_flag_options
@click.option("--config_file", metavar="PATH", help="The launch file. [default: see above]")
@click.option("-m", "--module", is_flag=True, help="Run SCRIPT as a module, like python -m.")
@click.option("--no_python", is_flag=True, help="Run SCRIPT as a program, without Python.")
@click.option("--dry_run", is_flag=True, help="Print each process's environment and command, and start nothing.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    script: str,
    script_args: tuple[str, ...],
    config_file: str | None,
    module: bool,
    no_python: bool,
    dry_run: bool,
    **typed: Any,
) -> int:
    """Run SCRIPT with its arguments in several processes that train together.

    Options may be spelled with - or _. Each can also be set in the environment, as ZEROACCEL_ and its name in capitals,
    and in a launch file, which `zeroaccel config` creates. Flags override the environment, and the environment
    overrides the file. The file is the one of --config_file, else of ZEROACCEL_CONFIG, else zeroaccel.yaml in the
    project, else in ~/.config/zeroaccel.

    The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process. Unless you set it,
    OMP_NUM_THREADS is the number of the machine's cores divided by its processes.

    Exits with the code of the process that failed first, with 128 + n after signal n, and with 2 if nothing started.

    \b
    Examples:
      zeroaccel launch --num_processes 2 train.py
      zeroaccel launch --num_processes 8 --zero_stage 3 --mixed_precision bf16 train.py --lr 1e-4
      zeroaccel launch --hostfile hosts train.py
      zeroaccel launch --dry_run train.py
    """
    if module and no_python:
        raise click.UsageError("--module and --no_python exclude each other.", click.get_current_context())
    from .launch_job import run_launch

    kind: Literal["module", "executable", "script"] = "module" if module else "executable" if no_python else "script"
    return run_launch(script, script_args, kind, config_file, typed, dry_run=dry_run)
