"""`zeroaccel verify`: a script's own first steps at stage 0 and as configured, and by how much they differ.

Runs the script by `launch`, twice, with an order in its environment that `zeroaccel.telemetry.verification` carries out
inside; a third time where the two differ, to tell a sharding that changes numbers from a script that does so by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from zeroaccel.errors import UsageError

from .jobs import launch_command

__all__ = ["verify"]

_VARIABLE = "ZEROACCEL_VERIFY"  # as `zeroaccel.telemetry.verification` has it, which imports torch


@dataclass(frozen=True)
class Record:
    """One step of one engine on one rank."""

    stage: int
    losses: tuple[float, ...]
    norm: float | None


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Compare a script's first steps at stage 0 and as configured.",
)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Optimizer steps to compare.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, required=True)
def verify(steps: int, arguments: tuple[str, ...]) -> int:
    """Run a script for a few steps as ARGUMENTS say, and once more at stage 0 without offload; report the difference.

    ARGUMENTS are those of `zeroaccel launch`: its flags, the script, and the script's arguments. The difference should
    be 0: where tensors live does not change what is computed. The script must set its seeds. After the steps it is
    ended, at the end of engine.step(), with success.

    Exits with 0 if all losses and gradient norms are the same to the last bit, and with 1 if they are not.
    """
    with tempfile.TemporaryDirectory(prefix="zeroaccel-verify-") as folder:
        plain, code = _run(Path(folder, "plain"), steps, arguments, baseline=True)
        if code:
            return code
        chosen, code = _run(Path(folder, "chosen"), steps, arguments, baseline=False)
        if code:
            return code
        if not plain or not chosen:
            raise UsageError(
                f"verify: the script took no step of a zeroaccel engine in {steps} steps",
                fix="it must call engine.step(), or Accelerator's, before it ends",
            )
        _show(plain, chosen)
        if plain == chosen or _values(plain) == _values(chosen):
            click.echo("the same to the last bit")
            return 0
        again, code = _run(Path(folder, "again"), steps, arguments, baseline=True)
        if code:
            return code
        if _values(again) != _values(plain):
            click.echo("DIFFERENT, but so are two runs at one stage: the script does not set all its seeds")
        else:
            click.echo("DIFFERENT")
    return 1


def _run(
    folder: Path, steps: int, arguments: tuple[str, ...], *, baseline: bool
) -> tuple[dict[str, list[Record]], int]:
    """(file -> records, exit code)."""
    order = json.dumps({"folder": str(folder), "steps": steps, "baseline": baseline})
    click.echo(f"zeroaccel: {'at stage 0' if baseline else 'as configured'}:", err=True)
    process = subprocess.Popen(
        launch_command(arguments), env={**os.environ, _VARIABLE: order}, stdout=subprocess.DEVNULL
    )
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has told the job too
        process.wait()
        return {}, 128 + signal.SIGINT
    found = {path.stem: _read(path) for path in sorted(folder.glob("*.jsonl"))} if folder.is_dir() else {}
    return {name: records for name, records in found.items() if records}, code


def _read(path: Path) -> list[Record]:
    records = []
    for line in path.read_text().splitlines():
        data = json.loads(line)
        losses = tuple(float.fromhex(loss) for loss in data["losses"])
        records.append(Record(data["stage"], losses, None if data["norm"] is None else float.fromhex(data["norm"])))
    return records


def _values(records: dict[str, list[Record]]) -> str:
    """All numbers, as text, so that NaN is like NaN."""
    return repr({name: [(one.losses, one.norm) for one in steps] for name, steps in records.items()})


def _show(plain: dict[str, list[Record]], chosen: dict[str, list[Record]]) -> None:
    name = next(iter(plain))
    ours = chosen.get(name, [])
    click.echo(f"{len(plain)} record{'s' if len(plain) > 1 else ''}, one per engine and rank; of {name}:")
    stage = f"stage {plain[name][0].stage}"
    other = f"stage {ours[0].stage}" if ours else "nothing"
    click.echo(f"{'step':>4}  {'loss, ' + stage:>22}  {'loss, ' + other + ' as configured':>28}  {'difference':>10}")
    for number, (one, two) in enumerate(zip(plain[name], ours, strict=False), start=1):
        first, second = _mean(one.losses), _mean(two.losses)
        click.echo(f"{number:>4}  {first:>22.15g}  {second:>28.15g}  {abs(first - second):>10.3g}")
    largest = max(
        (
            abs(a - b)
            for file, steps in plain.items()
            for one, two in zip(steps, chosen.get(file, []), strict=False)
            for a, b in zip((*one.losses, one.norm or 0.0), (*two.losses, two.norm or 0.0), strict=False)
        ),
        default=0.0,
    )
    click.echo(f"largest difference of a loss or a gradient norm on any rank: {largest:.3g}")


def _mean(losses: tuple[float, ...]) -> float:
    return sum(losses) / len(losses) if losses else float("nan")
