"""`zeroaccel trace`: run a script for a few steps, and show where their time went.

The ranks record, as `zeroaccel.zero.step_trace` is asked to by the environment; here the job is started, the page made
of what they have written, and said what went wrong where there is nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from zeroaccel.errors import UsageError
from zeroaccel.telemetry.trace_file import StepTraceFile, read_trace

from .pages.frame import write_page
from .pages.trace_page import trace_page
from .verify import launch_command

_VARIABLE = "ZEROACCEL_TRACE"  # as `zeroaccel.zero.step_trace` has it, which imports torch
_FILE, _PAGE = "trace.json", "trace.html"


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    short_help="Record a script's steps: where their time goes, and what waits for what.",
)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Optimizer steps to record.")
@click.option(
    "--warmup", type=click.IntRange(0), default=3, show_default=True, help="Steps before them, which are not typical."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("zeroaccel-trace"),
    show_default=True,
    metavar="FOLDER",
    help="Where trace.json and trace.html go.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, required=True)
def trace(steps: int, warmup: int, out: Path, arguments: tuple[str, ...]) -> int:
    """Run a script for a few steps, record them, and draw each rank's time.

    ARGUMENTS are those of `zeroaccel launch`: its flags, the script, and the script's arguments. The first engine that
    the script makes to train is recorded. After the steps the script is ended, at the end of engine.step(), with
    success. Nothing that it computes is changed.

    FOLDER gets trace.html, a page, and trace.json, which Perfetto and Chrome open. With a trace.json in place of a
    script, as engine.record_trace() writes it, only the page is made, beside it.

    \b
    Examples:
      zeroaccel trace --num_processes 2 train.py
      zeroaccel trace --steps 5 -o before --num_processes 8 --zero_stage 3 train.py --lr 1e-4
      zeroaccel trace runs/trace.json
    """
    if len(arguments) == 1 and arguments[0].endswith(".json"):
        path = Path(arguments[0])
        _show(read_trace(path), path.with_suffix(".html"))
        return 0
    with _folder_for_results(out), tempfile.TemporaryDirectory(prefix="zeroaccel-trace-") as folder:
        progress, written = Path(folder, "steps"), out / _FILE
        order = {"path": str(written.resolve()), "warmup": warmup, "steps": steps, "progress": str(progress)}
        code = _run(arguments, json.dumps(order))
        if code:
            return code
        done = int(progress.read_text()) if progress.exists() else None
    if done is None:
        raise UsageError(
            "trace: the script made no engine that trains",
            fix="it must call zeroaccel.initialize or Accelerator.prepare with an optimizer",
        )
    if done < warmup + steps:
        before = done - steps if done > steps else min(warmup, done - 1)
        raise UsageError(
            f"trace: the script ended after {done} optimizer steps",
            expected=f"{warmup} to warm up and {steps} to record",
            fix=f"pass --warmup {before} --steps {done - before}" if done else "train for longer",
        )
    recorded = read_trace(written)
    _show(recorded, out / _PAGE)
    click.echo(f"{written}: the same for Perfetto and Chrome")
    return 0


@contextmanager
def _folder_for_results(folder: Path) -> Iterator[None]:
    """Before a job is started: the folder is made, and a file in it. It goes again where the job leaves it empty."""
    probe, is_new = folder / f".{os.getpid()}.partial", not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}", fix="name a folder that can be written") from None
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _run(arguments: tuple[str, ...], order: str) -> int:
    process = subprocess.Popen(launch_command(arguments), env={**os.environ, _VARIABLE: order})
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal sends it to the job as well
        process.wait()
        return 128 + signal.SIGINT


def _show(recorded: StepTraceFile, page: Path) -> None:
    """Writes the page, and says what matters most of it."""
    write_page(page, trace_page(recorded), "--out")
    ranks, steps = len(recorded.ranks), recorded.num_steps
    begin, end = recorded.ranks[0].steps[0][0], recorded.ranks[0].steps[-1][1]
    mean = (end - begin) / 1e6 / steps
    click.echo(f"{steps} step{'s' if steps > 1 else ''} of {ranks} rank{'s' if ranks > 1 else ''}, {mean:.2f} ms each")
    for rank in range(min(ranks, 8)):
        split = recorded.mean_split(rank)
        shares = ", ".join(f"{share} {seconds * 1e3:.2f}" for share, seconds in split.items() if seconds >= 5e-6)
        click.echo(f"  rank {rank}, ms: {shares}")
    waits = recorded.largest_waits()
    click.echo("largest waits:" if waits else "no rank waited for another")
    for number, wait in enumerate(waits, start=1):
        click.echo(f"  {number}. {wait}")
    click.echo(f"{page}: page written")
