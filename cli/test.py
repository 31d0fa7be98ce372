"""`zeroaccel test`: trains a small model at every stage on this machine, in processes, and says whether all is well."""

from __future__ import annotations

import os

import click

from .jobs import run_job
from .machine import devices as look_for_devices

__all__ = ["test"]

_SECONDS = 300.0


@click.command(
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
    short_help="Train a small model at every stage on this machine.",
)
@click.option("--num_processes", type=click.IntRange(1), metavar="N", help="[default: one per accelerator, or 2]")
@click.option("--cpu", is_flag=True, help="On the CPU, although there are accelerators.")
def test(num_processes: int | None, cpu: bool) -> int:
    """Train a small model for three steps at every stage and offload, in two processes or more.

    The losses of every stage must be those of stage 0 to the last bit; on accelerators those of the CPU's optimizer may
    differ in rounding, which is said and is no failure. Exits with 1 if anything failed.
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
        name, told, is_wrong = _told(result, on_cpu=on_cpu or not devices)
        failed = failed or is_wrong
        click.echo(f"{name:<40} {told}")
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
        return name, f"works, the same losses as stage 0 ({seconds})", False
    rounded = not on_cpu and result["optimizer"] != "none"
    if rounded:
        return name, f"works, rounded differently by the CPU's optimizer ({seconds})", False
    return name, f"FAILED: other losses than stage 0 ({seconds})", True
