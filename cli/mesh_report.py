"""Meshes as `zeroaccel estimate` prints them: a table, JSON, and remarks on one mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from zeroaccel.config.parallel import AXES

if TYPE_CHECKING:
    from zeroaccel.estimate import Capacity, MeshRow, PlanRow, Subject, Workload

_HEADINGS = ("mesh", "micro-steps", "plan", "memory", "inside", "across", "idle", "fits")


def show_meshes(model: str, workload: Workload, capacity: Capacity, rows: Sequence[MeshRow], *, as_json: bool) -> None:
    """Prints the table, data to stdout and remarks to stderr.

    Args:
        workload: as it was asked for, without a mesh.
    """
    if as_json:
        report = {"model": model, "workload": asdict(workload), "capacity": asdict(capacity)}
        click.echo(json.dumps({**report, "meshes": [_as_json(row) for row in rows]}, indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    is_plain = not console.is_terminal
    samples = workload.ranks * workload.batch * workload.accumulation
    title = f"{model}: {workload.ranks} ranks, {samples} samples of {workload.sequence} tokens per step; GB per rank"
    click.echo(title)
    table = Table(box=None if is_plain else box.SIMPLE, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("mesh", "plan", "fits") else "right", no_wrap=True)
    for row in rows:
        if row.plan is None:
            continue
        style = "bold green" if row.recommended else "dim" if row.plan.fits is False else ""
        table.add_row(*_cells(row), style=None if is_plain else style)
    Console(width=160 if is_plain else max(console.width, 80), soft_wrap=is_plain).print(table)
    remarks = ["memory: at the peak; inside, across: sent per step to ranks of the same machine, and of others"]
    if any(row.idle for row in rows):
        remarks.append("idle: of a step, while stages of a pipeline wait for the first and the last micro-batches")
    remarks += dict.fromkeys(f"not possible: {row.refused}" for row in rows if row.refused)
    if all(row.plan is None or row.plan.fits is None for row in rows):
        remarks.append("--device_memory 80GB (or --cpu) says what fits")
    elif not any(row.recommended for row in rows):
        remarks.append("no mesh fits; use more ranks, a smaller batch, or --checkpointing")
    for words in remarks:
        click.echo(f"zeroaccel: {words}", err=True)


def mesh_remarks(what: Subject, workload: Workload, capacity: Capacity, plan: PlanRow) -> Iterator[str]:
    """What ranks of one mesh send under a plan, and whether more of it crosses machines than has to."""
    from zeroaccel.estimate import MeshRow, link_bytes, needless_crossing

    if workload.is_plain:
        return
    links = link_bytes(plan, workload)
    parts = [f"{link.axis} {_gb(link.inside)}" + (f" + {_gb(link.across)}" if link.across else "") for link in links]
    more = " (+ to other machines)" if any(link.across for link in links) else ""
    yield f"GB that a rank sends per step, {plan.estimate.name}: {', '.join(parts)}{more}"
    if workload.pp > 1:
        yield f"zeroaccel: memory is that of stage {plan.estimate.pipeline_stage} of the pipeline, which takes the most"
    if words := needless_crossing(what, MeshRow(workload, plan, links), capacity):
        yield f"zeroaccel: {words}"


def _cells(row: MeshRow) -> tuple[str, ...]:
    assert row.plan is not None, "a mesh that is shown has a plan"
    one, fits = row.plan.estimate, row.plan.fits
    words = "?" if fits is None else f"no: {row.plan.short_of}" if not fits else "yes"
    idle = f"{row.idle:.0%}" if row.idle else "-"
    return (
        row.workload.mesh_name,
        str(row.workload.accumulation),
        one.name,
        _gb(one.device.total),
        _gb(row.inside),
        _gb(row.across),
        idle,
        "recommended" if row.recommended else words,
    )


def _as_json(row: MeshRow) -> dict[str, Any]:
    mesh = {axis: getattr(row.workload.mesh, axis) for axis in AXES if not axis.startswith("dp")}
    mesh |= {"ep": row.workload.ep, "dp": row.workload.mesh.dp_shard, "accumulation": row.workload.accumulation}
    if row.plan is None:
        return {"mesh": mesh, "refused": row.refused}
    one = row.plan.estimate
    return {
        "mesh": mesh,
        "plan": {**asdict(one), "total": one.device.total},
        "links": [asdict(link) for link in row.links],
        "idle": row.idle,
        "fits": row.plan.fits,
        "short_of": row.plan.short_of,
        "recommended": row.recommended,
    }


def _gb(nbytes: int) -> str:
    return "-" if not nbytes else f"{nbytes / 1e9:.2f}" if nbytes < 1e10 else f"{nbytes / 1e9:.1f}"
