"""One machine's part of a job that another machine started over ssh (`python -m zeroaccel.cli.launch.node`).

Protocol, in lines on stdin: an order, as JSON; "go" when all machines are ready; "stop N" to end by signal N. The end
of stdin means that the launching machine is gone, and stops the job too. Records for `ssh` go to stderr among the
output of the ranks, behind the order's token.

Nothing secret is on a command line or in a file: variables come with the order.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

import click

from zeroaccel.config.launch.launch_settings import launch_settings
from zeroaccel.errors import ConfigError, ZeroAccelError

from .launch_plan import LaunchPlan, Program, plan_launch

__all__ = [
    "MODULE",
    "Order",
    "main",
]


MODULE = "zeroaccel.cli.launch.node"
ARRIVAL_SECONDS = 20.0  # all machines are known to be ready when one is told to go
_PATIENCE_SECONDS = 15.0  # for an orderly end, once nobody listens any more

Order = Mapping[str, Any]
"""token; folder: working directory; environment: variables to set; settings: as for `launch_settings`; program: as
`Program`; told: variables for the ranks alone; bf16_by: as for `plan_launch`."""


def main() -> int:
    """Carries out one order. Returns the exit code."""
    control = _take_stdin()
    order: Order = json.loads(control.readline())
    tell = _Teller(order["token"])
    try:
        plan = _prepare(order)
        from .agent import run_plan

        tell({"ready": plan.headline, "warnings": plan.warnings})
        if control.readline().strip() != "go":
            return 1  # another machine was not ready
        threading.Thread(target=_obey, args=(control, tell), daemon=True).start()
        end = run_plan(plan, _say, arrival_seconds=ARRIVAL_SECONDS)
    except ZeroAccelError as error:
        tell({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    tell({"ends": [asdict(one) for one in end.failures], "signal": end.signal})
    return 128 + end.signal if end.signal else int(bool(end.failures))


def _take_stdin() -> IO[str]:
    """Stdin for ourselves: the ranks must not read from it."""
    control = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


def _prepare(order: Order) -> LaunchPlan:
    try:
        os.chdir(order["folder"])
    except OSError as error:
        reason = f"{order['folder']}: {(error.strerror or 'not there').lower()}"
        raise ConfigError(f"{reason} on this machine", fix="the job runs in the same folder everywhere") from None
    os.environ.update(order["environment"])
    program = Program(**{**order["program"], "arguments": tuple(order["program"]["arguments"])})
    settings = launch_settings(order["settings"])
    return plan_launch(settings, program, os.environ, order["told"], bf16_by=order["bf16_by"])


def _obey(control: IO[str], tell: _Teller) -> None:
    """Stops as told, and says that it was heard; or stops when nobody is left to tell."""
    for line in control:
        word, _, number = line.partition(" ")
        if word == "stop":
            tell({"stopping": number.strip()})
            os.kill(os.getpid(), int(number))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class _Teller:
    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, record: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            # In one write, so that no rank's words come between.
            os.write(2, f"{self._token}{json.dumps(record)}\n".encode())


def _say(message: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"zeroaccel: {message}", err=True)


if __name__ == "__main__":
    sys.exit(main())
