"""`zeroaccel test` and `zeroaccel verify`: train in a separate job and compare stages to the last bit.

`run_job` runs a `zeroaccel launch` as a child process and reads the JSON lines it prints; `doctor` uses it as well.
`test` trains the model of `smoke` at every stage; `verify` runs the user's script twice, at stage 0 and as configured,
with `zeroaccel.setup.orders` recording losses and norms inside the ranks. If ranks share sequences, it runs the script
a third time, on whole sequences; the launcher's `ordered_settings` changes the number of processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from zeroaccel.errors import UsageError

from .machine import devices as look_for_devices


def launch_command(arguments: Sequence[str]) -> list[str]:
    """Returns the words that run `zeroaccel launch` with this interpreter."""
    return [sys.executable, "-m", "zeroaccel.cli", "launch", *arguments]


def run_job(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Runs a job that prints JSON lines.

    Returns:
        (the lines, the reason of a failure): the second is empty after a success.
    """
    try:
        done = subprocess.run(
            launch_command(arguments),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"it did not end within {seconds:g} s"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines, "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def run_ordered(arguments: Sequence[str], order: Mapping[str, str], stdout: int | None = None) -> int:
    """Runs a job on this terminal, with an order for the engine in its environment. Returns its exit code."""
    process = subprocess.Popen(launch_command(arguments), env={**os.environ, **order}, stdout=stdout)
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal sends it to the job as well
        process.wait()
        return 128 + signal.SIGINT


_SECONDS = 300.0


@click.command()
@click.option("--num_processes", type=click.IntRange(1), metavar="N", help="[default: one per accelerator, or 2]")
@click.option("--cpu", is_flag=True, help="Train on the CPU even if there are accelerators.")
def test(num_processes: int | None, cpu: bool) -> int:
    """Train a small model for three steps at every stage and offload, in two processes or more.

    The losses of every stage must equal those of stage 0 to the last bit: this training has one micro-batch per step,
    and so all stages add gradients in one order. With accelerators, the rounding of the CPU's
    optimizer may differ; the command reports this, but it is no failure. Exits with 1 if a stage fails.

    \b
    Examples:
      zeroaccel test
      zeroaccel test --cpu --num_processes 4
    """
    devices = 0 if cpu else len(look_for_devices())
    on_cpu = devices < 2 and num_processes != 1
    count = num_processes or max(2, devices)
    where = f"{count} process{'es' if count > 1 else ''} on {'the CPU' if on_cpu or not devices else 'accelerators'}"
    click.echo(f"zeroaccel: {where}", err=True)
    flags = ["--num_processes", str(count), *(["--cpu"] if on_cpu or not devices else []), "--module"]
    results, trouble = run_job([*flags, "zeroaccel.cli.smoke"], os.environ, _SECONDS)
    failed = bool(trouble)
    for result in results:
        name, outcome, is_wrong = _told(result, on_cpu=on_cpu or not devices)
        failed = failed or is_wrong
        click.echo(f"{name:<46} {outcome}")
    if trouble:
        click.echo(f"zeroaccel: the job failed:\n{trouble}", err=True)
    return int(failed)


def _told(result: dict, *, on_cpu: bool) -> tuple[str, str, bool]:  # type: ignore[type-arg]
    name = f"stage {result['stage']}"
    name += f", optimizer on {result['optimizer']}" if result["optimizer"] != "none" else ""
    name += f", parameters on {result['param']}" if result["param"] != "none" else ""
    if "error" in result:
        return name, f"FAILED: {result['error']}", True
    seconds = f"{result['seconds']:.1f} s"
    if result["same"]:
        compared = ", the same losses as stage 0" if name != "stage 0" else "; the others must have its losses"
        return name, f"works{compared} ({seconds})", False
    rounded = not on_cpu and result["optimizer"] != "none"
    if rounded:
        return name, f"works, but the CPU's optimizer rounds differently ({seconds})", False
    return name, f"FAILED: other losses than stage 0 ({seconds})", True


VARIABLE = "ZEROACCEL_VERIFY"  # the same as in `zeroaccel.setup.orders`, which imports torch


# Keys that replace the config's in the simplest run with the same numbers; the stage is added.
_PLAIN: dict[str, Any] = {
    "offload_optimizer": None,
    "offload_param": None,
    "zero_hpz_partition_size": 1,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_weights": False,
}


@dataclass(frozen=True)
class Record:
    """One step of one engine on one rank."""

    stage: int
    accumulation: int
    losses: tuple[float, ...]
    norm: float | None
    half: bool = False

    @property
    def plain_stage(self) -> int:
        """The lowest stage that adds gradients in the same order.

        It is 0, except with several micro-steps per step: stages 2 and 3 sum over ranks first, then over micro-steps.
        """
        return 2 if self.accumulation > 1 and self.stage >= 2 else 0

    @property
    def why(self) -> str:
        """The reason for `plain_stage`, for the user."""
        if self.accumulation == 1:
            return "with one micro-batch per step, all stages add gradients in one order"
        order = "ranks before micro-batches" if self.plain_stage else "micro-batches before ranks"
        pair = "stages 2 and 3" if self.plain_stage else "stages 0 and 1"
        return f"with {self.accumulation} micro-batches per step, {pair} add {order}, the other stages in another order"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Optimizer steps to compare.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, required=True)
def verify(steps: int, arguments: tuple[str, ...]) -> int:
    """Run a script's first steps as configured and at a lower stage without offload, and report the difference.

    ARGUMENTS are those of `zeroaccel launch`: its flags, the script, and the script's arguments. The difference should
    be 0, since sharding and offload do not change the computation. The lower stage is 0, or 2 for stages 2 and 3 with
    gradient accumulation: stages 0 and 1 add gradients in another order there. The script must set its seeds.
    After the steps, it ends with success at the end of engine.step().

    With --sp_size N, a last run trains on whole sequences, with one process for each N. Its sums have another order, so
    losses and norms may differ by rounding; the report says where they differ by more, and what to change.

    Exits with 0 if all losses and gradient norms are the same to the last bit (of whole sequences: up to rounding), and
    with 1 if they are not.

    \b
    Examples:
      zeroaccel verify --steps 5 --num_processes 2 --zero_stage 3 train.py --lr 1e-4
    """
    with tempfile.TemporaryDirectory(prefix="zeroaccel-verify-") as folder:
        chosen, code = _run(Path(folder, "chosen"), steps, arguments, {})
        if code:
            return code
        if not chosen:
            raise UsageError(
                f"verify: the script took no step of a zeroaccel engine in {steps} steps",
                fix="it must call engine.step(), or step() of Accelerator's optimizer, before it ends",
            )
        first = next(iter(chosen.values()))[0]
        baseline = {**_PLAIN, "stage": first.plain_stage}
        click.echo(f"compared with stage {first.plain_stage} without offload: {first.why}")
        plain, code = _run(Path(folder, "plain"), steps, arguments, baseline)
        if code:
            return code
        _show(plain, chosen)
        if _values(plain) == _values(chosen):
            click.echo("the same to the last bit")
            return _compare_sequences(Path(folder), steps, arguments, chosen)

        # Repeats the run at the same stage: without seeds, no two of its runs are equal.
        again, code = _run(Path(folder, "again"), steps, arguments, baseline)
        if code:
            return code
        if _values(again) != _values(plain):
            click.echo("DIFFERENT, but two runs at the same stage differ, too: the script does not set all its seeds")
        else:
            click.echo("DIFFERENT")
    return 1


def _run(
    folder: Path,
    steps: int,
    arguments: tuple[str, ...],
    zero: Mapping[str, Any],
    launch: Mapping[str, int] | None = None,
) -> tuple[dict[str, list[Record]], int]:
    """Runs the script with these keys of `zero_optimization` and settings of the launch replaced.

    Returns:
        (file -> records, exit code)
    """
    order = json.dumps({"folder": str(folder), "steps": steps, "zero": dict(zero), "launch": launch or {}})
    how = f"at stage {zero['stage']}" if zero else "on whole sequences" if launch else "as configured"
    click.echo(f"zeroaccel: {how}:", err=True)
    code = run_ordered(arguments, {VARIABLE: order}, stdout=subprocess.DEVNULL)
    records = {path.stem: _read(path) for path in sorted(folder.glob("*.jsonl"))} if folder.is_dir() else {}
    return {name: steps for name, steps in records.items() if steps}, code


def _compare_sequences(folder: Path, steps: int, arguments: tuple[str, ...], chosen: dict[str, list[Record]]) -> int:
    """Compares the configured run with one on whole sequences, if ranks share sequences. Returns the exit code."""
    size = sequence_ranks(folder / "chosen")
    if size == 1:
        return 0
    ranks = 1 + max(int(name.rpartition("rank")[2]) for name in chosen)
    launch = {"sp_size": 1, "num_processes": ranks // size}
    whole, code = _run(folder / "whole", steps, arguments, {}, launch)
    if code or not whole:
        click.echo(f"zeroaccel: nothing to compare with: the script did not train with {launch}", err=True)
        return code or 1
    half = next(iter(chosen.values()))[0].half
    report, is_same = compare_runs(
        _means(whole), _means(chosen), size, _HALF if half else _ROUNDING, _apart(chosen, size)
    )
    click.echo(f"compared with whole sequences on {ranks // size} of {ranks} processes: sums differ by rounding")
    click.echo(report)
    return 0 if is_same else 1


def sequence_ranks(folder: Path) -> int:
    """Returns `sp_size` of the run that recorded into this folder."""
    path = folder.with_suffix(".sp")
    return int(path.read_text()) if path.is_file() else 1


_ROUNDING, _HALF = 1e-4, 3e-2  # relative differences of correct runs are below these, over a few steps
_ALIKE = 0.05  # a ratio this close to N is N

_Step = tuple[float, float | None]


def _means(records: Mapping[str, list[Record]]) -> list[_Step]:
    """Returns each step's loss, the mean over micro-batches and ranks, and its gradient norm."""
    return [
        (_mean(tuple(_mean(run.losses) for run in step)), step[0].norm) for step in zip(*records.values(), strict=False)
    ]


def _apart(records: Mapping[str, list[Record]], size: int) -> bool:
    """True if ranks that share a sequence report different losses in the first step."""
    of_ranks = {int(name.rpartition("rank")[2]): steps[0].losses for name, steps in records.items()}
    return any(losses != of_ranks.get(rank // size * size, losses) for rank, losses in of_ranks.items())


def compare_runs(
    whole: Sequence[_Step], cut: Sequence[_Step], size: int, tolerance: float, apart: bool
) -> tuple[str, bool]:
    """Returns (the table of losses and norms with what to change where they part, True if they agree).

    Args:
        apart: the ranks of a sequence report different losses.

    Example:
        >>> report, is_same = compare_runs([(4.0, 1.0)], [(8.0, 2.0)], 2, 1e-4, False)
        >>> print(report.splitlines()[-1][:53])
        PART at step 1: the loss is 2 times that of one rank,
    """
    lines = [
        f"{'step':>4}  {'loss, whole':>14}  {f'loss, sp {size}':>14}  {'norm, whole':>14}  {f'norm, sp {size}':>14}"
    ]
    cure = ""
    for number, ((loss, norm), (own_loss, own_norm)) in enumerate(zip(whole, cut, strict=False), start=1):
        norms = [f"{'none' if value is None else format(value, '.8g'):>14}" for value in (norm, own_norm)]
        lines.append(f"{number:>4}  {loss:>14.8g}  {own_loss:>14.8g}  {'  '.join(norms)}")
        ratios = _ratio(own_loss, loss), _ratio(own_norm, norm)
        if not cure and any(not abs(ratio - 1) <= tolerance for ratio in ratios):
            cure = f"PART at step {number}: {_cure(*ratios, size, number, apart=apart)}"
    return "\n".join([*lines, cure or "the same up to rounding"]), not cure


def _ratio(value: float | None, reference: float | None) -> float:
    if value is None or reference is None or value == reference:
        return 1.0
    return value / reference if reference else float("inf")


def _cure(loss: float, norm: float, size: int, step: int, *, apart: bool) -> str:
    def is_about(ratio: float, factor: float) -> bool:
        return abs(ratio / factor - 1) < _ALIKE

    mean = "loss = engine.sequence_group.mean_loss(loss, shift_labels)"
    if step > 1:
        return (
            "the first step agrees, so its loss and gradients are right; a later batch or the update differs, for "
            "example by a rank's own random numbers, or a schedule or loader that counts ranks"
        )
    if apart:
        return (
            "each rank's loss is the mean over its own tokens, whose numbers of labels differ; average over the ranks "
            f"of a sequence: {mean}"
        )
    if is_about(loss, size) or is_about(norm, size):
        what = "loss" if is_about(loss, size) else "gradient"
        return (
            f"the {what} is {size} times that of one rank, as if the losses of the {size} ranks of a sequence were "
            f"added, or divided by the labels of one of them; average them: {mean}, with num_items_in_batch=N if the "
            "model divides by N"
        )
    if is_about(loss, 1 / size) or is_about(norm, 1 / size):
        what = "loss" if is_about(loss, 1 / size) else "gradient"
        return (
            f"the {what} is 1/{size} of that of one rank: the engine averages gradients over all ranks, and each has "
            f"only its part of a sum; {mean[:-1]}, num_items_in_batch=N) multiplies it"
        )
    return (
        "the ranks train on other tokens or labels than one rank; cut whole batches with SequenceLoader or "
        "SequenceGroup.shard, which shift labels before the cut, and leave data to loaders that know the ranks of a "
        "sequence"
    )


def _read(path: Path) -> list[Record]:
    records = []
    for line in path.read_text().splitlines():
        data = json.loads(line)
        losses = tuple(float.fromhex(loss) for loss in data["losses"])
        norm = None if data["norm"] is None else float.fromhex(data["norm"])
        records.append(Record(data["stage"], data["accumulation"], losses, norm, bool(data.get("half"))))
    return records


def _values(records: dict[str, list[Record]]) -> str:
    """Returns all numbers as text, so that NaN equals NaN."""
    return repr({name: [(record.losses, record.norm) for record in steps] for name, steps in records.items()})


def _show(plain: dict[str, list[Record]], chosen: dict[str, list[Record]]) -> None:
    name = next(iter(chosen))
    ours, reference = chosen[name], plain.get(name, [])
    click.echo(f"{len(chosen)} record{'s' if len(chosen) > 1 else ''}, one per engine and rank; losses of {name}:")
    stage = f"stage {reference[0].stage}" if reference else "nothing"
    other = f"stage {ours[0].stage}"
    click.echo(f"{'step':>4}  {'loss, ' + stage:>22}  {'loss, ' + other + ' as configured':>28}  {'difference':>10}")
    for number, (before, after) in enumerate(zip(reference, ours, strict=False), start=1):
        first, second = _mean(before.losses), _mean(after.losses)
        click.echo(f"{number:>4}  {first:>22.15g}  {second:>28.15g}  {abs(first - second):>10.3g}")
    largest = max(
        (
            abs(a - b)
            for file, steps in plain.items()
            for x, y in zip(steps, chosen.get(file, []), strict=False)
            for a, b in zip((*x.losses, x.norm or 0.0), (*y.losses, y.norm or 0.0), strict=False)
        ),
        default=0.0,
    )
    click.echo(f"largest difference of a loss or a gradient norm on any rank: {largest:.3g}")


def _mean(losses: tuple[float, ...]) -> float:
    return sum(losses) / len(losses) if losses else float("nan")
