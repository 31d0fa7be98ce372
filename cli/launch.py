"""`zeroaccel launch`: the command line and the environment of a launch, read and handed on.

Flags become `LaunchSettings`, those a `LaunchPlan`; a dry run prints the plan, otherwise `agent` carries it out and
`failures` says what went wrong. The only file of the command line that reads the launcher's environment.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zeroaccel.config.launch import LaunchSettings, launch_settings

from .failures import exit_code, first_failure, tell
from .plan import LaunchPlan, Program, plan_launch

__all__ = ["launch"]

if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic only in newer releases

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FLAGS = {"use_cpu": "--cpu"}  # setting -> flag, where it is not just --setting


class StreamChoice(_Type):
    """What torchrun takes for --tee and --redirects: 3, or 0:3,1:2."""

    name = "streams"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            if ":" not in value:
                return int(value)
            return {int(rank): int(choice) for rank, choice in (part.split(":") for part in value.split(","))}
        except ValueError:
            self.fail(f"{value!r} is neither a number nor of the form 0:3,1:2", param, ctx)


class KeyValues(_Type):
    """KEY=NUMBER,KEY=NUMBER."""

    name = "key=value,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return {key.strip(): int(number) for key, number in (part.split("=") for part in value.split(","))}
        except ValueError:
            self.fail(f"{value!r} is not of the form KEY=NUMBER,KEY=NUMBER", param, ctx)


def _flag(setting: str) -> str:
    return _FLAGS.get(setting, f"--{setting}")


def _setting(name: str, kind: Any = None, metavar: str | None = None) -> Callable[[_Command], _Command]:
    """The option for one setting; without a kind it is a switch. Absent means: not given, whatever the default."""
    about = LaunchSettings.model_fields[name].description
    if kind is None:
        return click.option(_flag(name), name, is_flag=True, default=None, help=about)
    return click.option(_flag(name), name, type=kind, default=None, metavar=metavar, help=about)


@click.command(
    context_settings={
        "allow_interspersed_args": False,  # what follows the script is the script's
        "token_normalize_func": lambda name: name.replace("-", "_"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
    },
    short_help="Run a script as several processes.",
)
@_setting("num_processes", int, "N")
@_setting("num_machines", int, "N")
@_setting("machine_rank", int, "N")
@_setting("main_process_ip", str, "HOST")
@_setting("main_process_port", int, "PORT")
@_setting("use_cpu")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("--no_python", is_flag=True, help="SCRIPT is a program to run as it is.")
@_setting("max_restarts", int, "N")
@_setting("monitor_interval", float, "SECONDS")
@_setting("rdzv_backend", str, "static|c10d")
@_setting("rdzv_conf", KeyValues(), "KEY=VALUE,...")
@_setting("log_dir", click.Path(), "FOLDER")
@_setting("tee", StreamChoice(), "STREAMS")
@_setting("redirects", StreamChoice(), "STREAMS")
@_setting("timeout", float, "SECONDS")
@_setting("debug")
@click.option("--dry_run", is_flag=True, help="Print the environment and the command of each process; start nothing.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    script: str, script_args: tuple[str, ...], module: bool, no_python: bool, dry_run: bool, **given: Any
) -> int:
    """Run SCRIPT with its arguments as several processes that train together.

    Options may be spelled with - or _. Each process finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in
    its environment, and OMP_NUM_THREADS, the cores of the machine divided by its processes, unless you have set it.

    Exits with the code of the process that failed first, 128 + n for signal n, and 2 if nothing could be started.
    """
    if module and no_python:
        raise click.UsageError("--module and --no_python exclude each other.", click.get_current_context())
    if os.environ.get("ZEROACCEL_DEBUG", "0") not in ("", "0") and given["debug"] is None:
        given["debug"] = True
    settings = launch_settings({name: value for name, value in given.items() if value is not None}, _flag)
    program = Program(script, script_args, "module" if module else "executable" if no_python else "script")
    plan = plan_launch(settings, program, os.environ)
    for line in (*plan.warnings, *(() if dry_run else (plan.headline,))):
        _say(line)
    if dry_run:
        click.echo(plan.describe())
        return 0
    return _run(plan)


def _run(plan: LaunchPlan) -> int:
    from .agent import run_plan  # imports torch

    end = run_plan(plan, _say)
    if end.signal:
        _say(f"stopped by {signal.Signals(end.signal).name}; all processes of this machine have ended")
        return 128 + end.signal
    if not end.failures:
        return 0
    settings = plan.settings
    first_rank = min(failure.rank - failure.local_rank for failure in end.failures)
    _say(
        tell(
            end.failures,
            ranks=range(first_rank, first_rank + plan.num_local),
            host=socket.gethostname(),
            several_machines=settings.num_machines > 1,
            debug=settings.debug,
        )
    )
    if settings.log_dir is not None:
        _say(f"output and reports are in {settings.log_dir}")
    return exit_code(first_failure(end.failures))


def _say(message: str) -> None:
    """To the person, on stderr: stdout belongs to the script."""
    click.echo(f"zeroaccel: {message}", err=True)
