"""One machine's part of a job that another machine started over ssh (`python -m zeroaccel.cli.launch.node`).

Protocol, in lines on stdin: an order, as JSON; "go" when all machines are ready; "stop N" to end by signal N. The end
of stdin means that the launching machine is gone, and also stops the job. Records for `ssh` go to stderr among the
output of the ranks, after the order's token.

No command line and no file has secrets: variables come with the order.
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

MODULE = "zeroaccel.cli.launch.node"
ARRIVAL_SECONDS = 20.0  # short, since "go" comes only when all machines are ready
_ORPHANED_SECONDS = 5.0  # beyond --shutdown_timeout, for an orderly end once the connection is gone

Order = Mapping[str, Any]
"""token; folder: working directory; environment: variables to set; settings: for `launch_settings`; program:
fields of `Program`."""


def main() -> int:
    """Runs one order. Returns the exit code."""
    control = _take_stdin()
    order: Order = json.loads(control.readline())
    send = _RecordWriter(order["token"])
    try:
        plan = _prepare(order)
        # Importing torch takes seconds: do it before "ready", since after "go" the other machines wait for this one.
        from .agent import run_plan

        send({"ready": plan.headline, "warnings": plan.warnings})
        if control.readline().strip() != "go":
            return 1  # another machine was not ready
        threading.Thread(
            target=_follow_commands, args=(control, send, plan.settings.shutdown_timeout), daemon=True
        ).start()
        end = run_plan(plan, _log, arrival_seconds=ARRIVAL_SECONDS)
    except ZeroAccelError as error:
        send({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    send({"ends": [asdict(failure) for failure in end.failures], "signal": end.signal})
    return 128 + end.signal if end.signal else int(bool(end.failures))


def _take_stdin() -> IO[str]:
    """Moves stdin to a file of this process alone: ranks inherit /dev/null instead and cannot read commands."""
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
        raise ConfigError(f"{reason} on this machine", fix="the job needs the same folder on all machines") from None
    os.environ.update(order["environment"])
    return plan_launch(launch_settings(order["settings"]), Program.from_json(order["program"]), os.environ)


def _follow_commands(control: IO[str], send: _RecordWriter, shutdown_timeout: float) -> None:
    """Acknowledges and follows "stop"; ends the job at the end of stdin, when the launching machine is gone."""
    for line in control:
        word, _, number = line.partition(" ")
        if word == "stop":
            send({"stopping": number.strip()})
            os.kill(os.getpid(), int(number))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(shutdown_timeout + _ORPHANED_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class _RecordWriter:
    """Writes records for `ssh` to stderr, among the output of the ranks."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, record: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            # A pipe keeps one write of up to PIPE_BUF bytes together, so no output of a rank comes between.
            os.write(2, f"{self._token}{json.dumps(record)}\n".encode())


def _log(message: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"zeroaccel: {message}", err=True)


if __name__ == "__main__":
    sys.exit(main())
