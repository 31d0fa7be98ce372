"""`zeroaccel estimate`: the memory for training a model, per plan, as a table, JSON or a chart.

`zeroaccel.estimate` computes the numbers; `--meshes` compares meshes. Data goes to stdout, remarks to stderr. An .html
chart is a page (`pages/`); matplotlib, an optional dependency, draws a .png.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeroaccel.config.parallel import AXES
from zeroaccel.errors import ConfigError

from .main import GroupedOptions
from .pages.estimate_page import KINDS, chart_page, command, config_of, estimate_page, gb, positions, verdict
from .pages.frame import COLOURS, check_page_path, write_page
from .progress import ProgressLine, estimating

if TYPE_CHECKING:
    from zeroaccel.estimate import Capacity, MeshRow, PlanRow, Subject, Workload

    _Rows = Sequence[tuple[PlanRow, bool, Sequence[str]]]
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic only in newer releases

COMMUNICATOR_NBYTES = 688_000_000
"""Device memory of one of NCCL's communicators, which `topology.subgroup` makes in pairs; figures of users differ."""

_UNITS = {"": 10**9, "gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20, "tb": 10**12, "tib": 2**40}
_CHARTS = (".html", ".png")
CODES = ("int8", "nf4", "mxfp4", "bnb_nf4", "bnb_nf4_double")
OPTIMIZERS = ("adam", "lion", "adagrad", "momentum", "sgd")
COUNT = click.IntRange(1)
_option = click.option


class Size(_Type):
    """A size such as 80GB, 141GiB or 512MB; the unit of a bare number is GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
        if match is None or match[2] not in _UNITS or not float(match[1]):
            self.fail(f"{value!r} is not a size such as 80GB or 512MiB", param, ctx)
        return round(float(match[1]) * _UNITS[match[2]])


@click.command(
    cls=GroupedOptions,
    headings={
        "The work": "precision",
        "Adapters": "lora_rank",
        "Ranks and meshes": "ranks",
        "Capacity of each machine": "device_memory",
        "Output": "as_json",
    },
)
@click.argument("model")
@_option("--precision", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True)
@_option("--config", type=click.Path(dir_okay=False), metavar="FILE", help="JSON config; flags override it.")
@_option("--batch", type=COUNT, default=1, show_default=True, help="Samples per rank and micro-step.")
@_option("--sequence", "--seq", type=COUNT, default=2048, show_default=True, help="Tokens per sample.")
@_option("--accumulation", type=COUNT, default=1, show_default=True, help="Micro-steps per step.")
@_option("--checkpointing", is_flag=True, help="Recompute each block's activations in backward.")
@_option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    default="adam",
    show_default=True,
    help="Optimizer, which determines the states.",
)
@_option("--residual_masters", is_flag=True, help='With data_types.master_weights "residual": 2 bytes instead of 4.')
@_option("--early_updates", is_flag=True, help='With offload_optimizer.update_during "backward": spare memory.')
@_option("--ratio", type=click.FloatRange(0, 1), default=1.0, help="The host's share (offload_optimizer.ratio).")
@_option("--device_budget", type=Size(), help="Masters and states that stay on the device with offload_optimizer.")
@_option(
    "--moments_dtype",
    type=click.Choice(("fp32", "bf16", "int8")),
    default="fp32",
    show_default=True,
    help="Format of the states (optimizer.params.moments_dtype).",
)
@_option("--peer_checkpoints", is_flag=True, help="Keep copies of states in memory for lost ranks (checkpoint.peer).")
@_option("--lora_rank", type=click.IntRange(0), default=0, metavar="N", help="Train LoRA of rank N; freeze the model.")
@_option(
    "--frozen_weights",
    type=click.Choice(CODES),
    help="Format of quantized frozen weights: by zeroaccel (the JSON key of this name), or by bitsandbytes (bnb), "
    "with or without double quantization.",
)
@_option("--ranks", "--num_processes", type=COUNT, metavar="N", help="Processes. [default: one per accelerator, or 1]")
@_option("--ranks_per_machine", type=COUNT, metavar="N", help="Ranks on one machine. [default: all]")
@_option("--pp_size", "pp", type=COUNT, default=1, metavar="N", help="Stages of the pipeline. [default: 1]")
@_option("--sp_size", "sp", type=COUNT, default=1, metavar="N", help="Ranks that share each sequence. [default: 1]")
@_option("--tp_size", "tp", type=COUNT, default=1, metavar="N", help="Ranks that share each layer. [default: 1]")
@_option("--ep_size", "ep", type=COUNT, default=1, metavar="N", help="Ranks that share the experts. [default: 1]")
@_option("--meshes", is_flag=True, help="Compare all meshes of the ranks, with the same samples per step.")
@_option(
    "--device_memory",
    type=Size(),
    metavar="SIZE",
    help="Memory of one accelerator, such as 80GB. [default: this machine's, if any]",
)
@_option(
    "--host_memory",
    type=Size(),
    metavar="SIZE",
    help="Memory of one machine. [default: this machine's, with accelerators or --cpu]",
)
@_option("--disk", type=Size(), metavar="SIZE", help="Free disk space for offload on one machine.")
@_option("--cpu", is_flag=True, help="Train on the CPU, by default with this machine's memory.")
@_option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes.")
@_option("--html", "html_path", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page with sliders.")
@_option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Write a chart; FILE ends in .html or .png.")
def estimate(
    model: str,
    config: str | None,
    ranks: int | None,
    device_memory: int | None,
    host_memory: int | None,
    disk: int | None,
    meshes: bool,
    cpu: bool,
    as_json: bool,
    html_path: str | None,
    plot: str | None,
    **workload: Any,
) -> None:
    """Estimate the memory for training MODEL on device, host and disk, for every stage and offload.

    MODEL is a number of parameters (7b), the name of a common model (llama-3.1-8b), the folder or config.json of a
    Hugging Face model, or module:function. The function returns a model, or a model and a function (model, batch,
    sequence) -> loss.

    The engine simulates a step on tensors without data; the command reads no weights and starts no process.

    \b
    Examples:
      zeroaccel estimate 7b --ranks 8 --device_memory 80GB
      zeroaccel estimate llama-3.1-8b --ranks 8 --checkpointing --html memory.html
      zeroaccel estimate 70b --ranks 16 --ranks_per_machine 8 --device_memory 80GB --meshes
      zeroaccel estimate 7b --ranks 8 --tp_size 2
      zeroaccel estimate my_models:build --cpu --ranks 2 --json
    """
    workload |= _of_config(config) if config is not None else {}
    check_page_path(plot, "--plot", _CHARTS)
    check_page_path(html_path)
    if meshes and (html_path or plot or max(workload[axis] for axis in ("pp", "sp", "tp", "ep")) > 1):
        raise click.UsageError("--meshes compares all meshes, in a table or as --json: omit sizes, --html and --plot")
    with estimating(model) as line:
        what, requested, capacity = _question(model, ranks, device_memory, host_memory, disk, cpu, workload)
        if meshes:
            mesh_rows = _mesh_rows(what, requested, capacity, line)
        else:
            rows = _plans(what, requested, capacity)
            smaller = _smaller(model, what, requested, capacity, rows, line)
    if what.note:
        click.echo(f"zeroaccel: {what.note}", err=True)
    if meshes:
        show_meshes(model, requested, capacity, mesh_rows, as_json=as_json)
        return
    if as_json:
        click.echo(json.dumps(_report(model, requested, capacity, rows) | smaller, indent=2))
    else:
        _show(model, requested, capacity, rows, smaller)
        for words in (*mesh_remarks(what, requested, capacity, rows[0]), *communicator_remarks(requested)):
            click.echo(words, err=not words.startswith("GB "))
    if html_path is not None:
        page = _html(f"Memory of {_title(model, requested, rows)}", model, what, requested, capacity)
        write_page(Path(html_path), page)
        click.echo(f"zeroaccel: page written to {html_path}", err=True)
    if plot is not None:
        draw(Path(plot), _title(model, requested, rows), rows, requested, capacity)
        click.echo(f"zeroaccel: chart written to {plot}", err=True)


def _of_config(path: str) -> dict[str, Any]:
    """Returns batch, precision, recomputation, optimizer and frozen weights of a JSON config that no flag sets.

    Raises:
        ConfigError: the config is invalid, or has an optimizer that estimates do not know.
    """
    from zeroaccel.config.load_config_file import load_config

    config = load_config(path)
    section = config.optimizer
    name = ((section.type if section is not None else None) or "AdamW").lower().removeprefix("cpu")
    arguments = section.params if section is not None else {}
    known = "momentum" if name == "sgd" and arguments.get("momentum") else name.replace("adamw", "adam")
    small = config.bf16.bf16_optimizer_states or arguments.get("fp32_optimizer_states") is False
    if known not in OPTIMIZERS:
        raise ConfigError(
            f"--config {path}: optimizer.type",
            expected=f"one of {', '.join(OPTIMIZERS)}",
            got=name,
            fix="add --optimizer",
        )
    offload = config.zero_optimization.offload_optimizer
    found: dict[str, Any] = {
        "precision": config.precision,
        "batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps,
        "checkpointing": config.activation_checkpointing.wrap_blocks,
        "optimizer": known,
        "moments_dtype": arguments.get("moments_dtype", "bf16" if small else None),
        "residual_masters": config.data_types.master_weights == "residual",
        "frozen_weights": config.zero_optimization.frozen_weights,
        "early_updates": offload is not None and offload.update_during == "backward",
        "ratio": None if offload is None else offload.ratio,
        "device_budget": None if offload is None else offload.device_budget,
    }
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    return {
        key: value for key, value in found.items() if value is not None and context.get_parameter_source(key) is default
    }


def _html(title: str, model: str, what: Subject, requested: Workload, capacity: Capacity) -> str:
    with estimating(model) as line:
        from zeroaccel.estimate import ClosedForms, plan_table

        at = positions(requested)
        forms, tables = ClosedForms(at), []
        if not sys.stderr.isatty():
            click.echo(f"zeroaccel: estimating {len(at)} positions of the page's sliders", err=True)
        for number, position in enumerate(at, 1):
            line.doing = f"estimating the sliders' positions: {number} of {len(at)}"
            tables.append(plan_table(what, position, capacity, simulate=forms))
    return estimate_page(title, model, requested, capacity, tables, len(forms.simulated))


def _question(
    model: str,
    ranks: int | None,
    device_memory: int | None,
    host_memory: int | None,
    disk: int | None,
    cpu: bool,
    workload: dict[str, Any],
) -> tuple[Subject, Workload, Capacity]:
    from zeroaccel.errors import UsageError
    from zeroaccel.estimate import Capacity, Workload, subject

    from .machine import devices, memory_nbytes

    # Defaults are this machine's if the ranks would run here; otherwise nothing is known, and "fits" stays open.
    accelerators = () if cpu else devices()
    if accelerators and device_memory is None:
        device_memory = min(device.memory_nbytes for device in accelerators)
    if (accelerators or cpu) and host_memory is None:
        host_memory = memory_nbytes()
    workload["frozen_weights"] = workload["frozen_weights"] or ""
    workload["device_budget"] = workload["device_budget"] or 0
    try:
        requested = Workload(ranks=ranks or max(1, len(accelerators)), **workload)
    except UsageError as error:
        raise ConfigError(_in_flags(str(error))) from None
    return subject(model), requested, Capacity(device=device_memory, host=host_memory, disk=disk, on_cpu=cpu)


def _in_flags(message: str) -> str:
    message = re.sub(r"ParallelConfig\((\w+)=(\d+)[^)]*\)", r"--\1_size \2", message.replace("Workload.", "--"))
    return message.replace("ParallelConfig", "--pp_size, --sp_size, --tp_size").replace(
        "start a multiple", "take a multiple"
    )


def _plans(what: Subject, requested: Workload, capacity: Capacity) -> list[PlanRow]:
    from zeroaccel.errors import UsageError
    from zeroaccel.estimate import plan_table

    try:
        return plan_table(what, requested, capacity)
    except UsageError as error:
        fix = "" if requested.is_plain else "--meshes lists the possible meshes"
        raise ConfigError(_in_flags(str(error)), fix=fix) from None


def _mesh_rows(what: Subject, requested: Workload, capacity: Capacity, line: ProgressLine) -> list[MeshRow]:
    from zeroaccel.estimate import mesh_table

    def show(candidate: Workload) -> None:
        line.doing = f"estimating {what.name} on {candidate.mesh_name}"

    return mesh_table(what, requested, capacity, on_row=show)


def _report(model: str, workload: Workload, capacity: Capacity, rows: list[PlanRow]) -> dict[str, Any]:
    from zeroaccel.estimate import traffic_table

    plans = []
    for row in rows:
        plan = asdict(row.estimate)
        for place in ("device", "host", "disk"):
            plan[place]["total"] = getattr(row.estimate, place).total
        plans.append({**plan, "fits": row.fits, "short_of": row.short_of, "recommended": row.recommended})
    is_plain = workload.is_plain and not workload.lora_rank  # the formulas are for a fully trained model
    traffic = [asdict(sent) for sent in traffic_table(rows[0].estimate.numel, workload)] if is_plain else []
    report = {"model": model, "workload": asdict(workload), "capacity": asdict(capacity), "plans": plans}
    return report | ({"traffic": traffic} if traffic else {})


def _smaller(
    model: str, what: Subject, requested: Workload, capacity: Capacity, rows: list[PlanRow], line: ProgressLine
) -> dict[str, Any]:
    """Returns {"smaller": a workload that fits, with its command and the keys of its config} if no plan fits, or {}."""
    from zeroaccel.estimate import smaller_that_fits

    if any(row.fits is not False for row in rows):
        return {}
    line.doing = f"estimating {model} with less memory"
    found = smaller_that_fits(what, requested, capacity)
    if found is None:
        return {}
    workload, estimate = found[0], found[1].estimate
    facts = {"plan": estimate.name, "total": estimate.device.total, "checkpointing": workload.checkpointing}
    config = config_of(workload, estimate)
    return {"smaller": {**facts, "command": command(model, workload, capacity), "config": config}}


def _show_smaller(smaller: dict[str, Any]) -> None:
    click.echo(
        f"zeroaccel: no plan fits as requested; with activation checkpointing and batch "
        f"{smaller['config']['train_micro_batch_size_per_gpu']}, {smaller['plan']} does, with "
        f"{gb(smaller['total'])} GB per rank:\n  {smaller['command']}\n  {json.dumps(smaller['config'])}",
        err=True,
    )


def _title(model: str, workload: Workload, rows: list[PlanRow]) -> str:
    ranks = f"{workload.ranks} rank{'s' if workload.ranks > 1 else ''}"
    words = [
        f"{model}: {rows[0].estimate.numel / 1e9:.3g} B parameters",
        f"{ranks} as {workload.mesh_name}" if not workload.is_plain else ranks,
        workload.precision,
        f"batch {workload.batch} x {workload.sequence}",
    ]
    words += [f"{workload.accumulation} micro-steps"] if workload.accumulation > 1 else []
    words += ["recomputation"] if workload.checkpointing else []
    words += ["residual masters"] if workload.residual_masters else []
    words += ["updates in the backward"] if workload.early_updates else []
    words += [f"{workload.ratio:.0%} of offloaded states on the host"] if workload.ratio < 1.0 else []
    words += [f"{workload.device_budget / 1e9:.3g} GB of states on the device"] if workload.device_budget else []
    words += [f"{workload.moments_dtype} moments"] if workload.moments_dtype != "fp32" else []
    words += [f"LoRA of rank {workload.lora_rank}"] if workload.lora_rank else []
    words += [f"frozen weights in {workload.frozen_weights}"] if workload.frozen_weights else []
    return ", ".join([*words, workload.optimizer])


def _show(model: str, workload: Workload, capacity: Capacity, rows: list[PlanRow], smaller: dict[str, Any]) -> None:
    from rich import box

    device = "in memory, per rank" if capacity.on_cpu else "on the device, per rank"
    caption = f"{device}, at the peak of a step; host and disk are per machine"
    cells = [(row, row.recommended, _plan_cells(row, workload.local_ranks)) for row in rows]
    headings = ("plan", "params", "optimizer", "gradients", "activations", "total", "host", "disk", "fits")
    title = f"{_title(model, workload, rows)}; GB"
    _print_table(headings, cells, 100, title=title, caption=caption, box=box.ROUNDED)
    if workload.is_plain and not workload.lora_rank:
        _show_traffic(rows[0].estimate.numel, workload)
    if words := _parameters_in_host_memory(rows, workload):
        click.echo(words, err=True)
    if all(row.fits is None for row in rows):
        click.echo("zeroaccel: add --device_memory 80GB (or --cpu) to see which plans fit", err=True)
    elif smaller:
        _show_smaller(smaller["smaller"])
    elif not any(row.fits for row in rows):
        remedy = "use more ranks, a shorter sequence, or --lora_rank 16"
        click.echo(f"zeroaccel: no plan fits, not even with --checkpointing and --batch 1; {remedy}", err=True)


def _plan_cells(row: PlanRow, local: int) -> list[str]:
    estimate = row.estimate
    parts = (estimate.device.params, estimate.device.optimizer, estimate.device.gradients, estimate.device.activations)
    sizes = (*parts, estimate.device.total, estimate.host.total * local, estimate.disk.total * local)
    return [estimate.name, *map(gb, sizes), verdict(row, row.recommended)]


def _print_table(headings: Sequence[str], rows: _Rows, width: int, *, title: str = "", **look: Any) -> None:
    """Prints (plan, true if recommended, cells) per row; on a terminal in colour, in a table styled by `look`."""
    from rich.console import Console
    from rich.table import Table

    terminal = Console()
    is_plain = not terminal.is_terminal
    plain_look = {"box": None, "pad_edge": look.get("pad_edge", True)}
    table = Table(**plain_look) if is_plain else Table(title=title or None, **look)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("mesh", "plan", "fits") else "right", no_wrap=True)
    for plan, recommended, cells in rows:
        style = "bold green" if recommended else "dim" if plan.fits is False else ""
        table.add_row(*cells, style=None if is_plain else style)
    if is_plain and title:
        click.echo(title)
    Console(width=160 if is_plain else max(terminal.width, width), soft_wrap=is_plain).print(table)


def _parameters_in_host_memory(rows: list[PlanRow], workload: Workload) -> str:
    """Returns a remark on the host memory of parameters on NVMe; "" without such a plan."""
    from zeroaccel.config.schema_zero import OffloadParam

    estimate = next((row.estimate for row in rows if row.estimate.offload_param == "nvme"), None)
    if estimate is None:
        return ""
    settings, nbytes = OffloadParam(), estimate.host.params * workload.local_ranks
    return (
        f"zeroaccel: parameters on nvme take {gb(nbytes)} GB of host memory: the first {settings.max_in_cpu:,}"
        " elements of each rank's shards stay there (offload_param.max_in_cpu), and "
        f"{settings.buffer_count} buffers of {settings.buffer_size:,} elements read the rest"
    )


def _show_traffic(numel: int, workload: Workload) -> None:
    from zeroaccel.estimate import traffic_table

    rows = traffic_table(numel, workload)
    if rows:
        sent = ", ".join(f"{row.name} {gb(row.across)}" for row in rows)
        click.echo(f"GB that a rank sends to other machines per step: {sent}")


def draw(path: Path, title: str, rows: Sequence[PlanRow], workload: Workload, capacity: Capacity) -> None:
    """Writes the chart in the format of the file's ending.

    Raises:
        ConfigError: the file cannot be written, or matplotlib is not installed.
    """
    if path.suffix != ".png":
        write_page(path, chart_page(title, workload, capacity, rows), "--plot")
        return
    try:
        _draw_png(path, title, rows, capacity.device)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}", fix="name another file") from None


def _draw_png(path: Path, title: str, rows: Sequence[PlanRow], limit: int | None) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        fix = "pip install 'zeroaccel[plot]', or name an .html file"
        raise ConfigError(f"--plot {path}: a .png needs matplotlib, which is not installed", fix=fix) from None
    figure = Figure(figsize=(10, 1.5 + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel="GB per rank on the device, at the peak of a step")
    names = [row.estimate.name + (" (recommended)" if row.recommended else "") for row in rows]
    offsets = [0.0] * len(rows)
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        widths = [getattr(row.estimate.device, kind) / 1e9 for row in rows]
        axes.barh(names, widths, left=offsets, color=colour, label=kind)
        offsets = [x + width for x, width in zip(offsets, widths, strict=True)]
    if limit:
        axes.axvline(limit / 1e9, color="black", linestyle="--", label="on the device")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=120)


def show_meshes(model: str, workload: Workload, capacity: Capacity, rows: Sequence[MeshRow], *, as_json: bool) -> None:
    """Prints the table, data to stdout and remarks to stderr.

    Args:
        workload: the requested workload, without a mesh.
    """
    if as_json:
        report = {"model": model, "workload": asdict(workload), "capacity": asdict(capacity)}
        click.echo(json.dumps({**report, "meshes": [_as_json(row) for row in rows]}, indent=2))
        return
    from rich import box

    samples = workload.ranks * workload.batch * workload.accumulation
    title = f"{model}: {workload.ranks} ranks, {samples} samples of {workload.sequence} tokens per step; GB per rank"
    shown = [(row.plan, row.recommended, _cells(row, row.plan)) for row in rows if row.plan is not None]
    headings = ("mesh", "micro-steps", "plan", "memory", "inside", "across", "idle", "fits")
    click.echo(title)
    _print_table(headings, shown, 80, box=box.SIMPLE, pad_edge=False)
    remarks = ["memory: at the peak; inside, across: sent per step to ranks of the same machine, and of others"]
    if any(row.idle for row in rows):
        remarks.append("idle: share of a step in which pipeline stages wait for the first and the last micro-batches")
    remarks += dict.fromkeys(f"not possible: {_in_flags(row.refused)}" for row in rows if row.refused)
    if all(row.plan is None or row.plan.fits is None for row in rows):
        remarks.append("add --device_memory 80GB (or --cpu) to see which meshes fit")
    elif not any(row.recommended for row in rows):
        remarks.append("no mesh fits; use more ranks, a smaller batch, or --checkpointing")
    remarks += [words.removeprefix("zeroaccel: ") for words in communicator_remarks(workload)]
    for words in remarks:
        click.echo(f"zeroaccel: {words}", err=True)


def mesh_remarks(what: Subject, workload: Workload, capacity: Capacity, plan: PlanRow) -> Iterator[str]:
    """Yields lines about the traffic of one mesh under a plan, and about traffic between machines that is avoidable."""
    from zeroaccel.estimate import MeshRow, link_bytes, needless_crossing

    if workload.is_plain:
        return
    links = link_bytes(plan, workload)
    across = {link.axis: f" + {_gb_in_short(link.across)}" if link.across else "" for link in links}
    parts = [f"{link.axis} {_gb_in_short(link.inside)}{across[link.axis]}" for link in links]
    more = " (+ to other machines)" if any(link.across for link in links) else ""
    yield f"GB that a rank sends per step, {plan.estimate.name}: {', '.join(parts)}{more}"
    if workload.pp > 1:
        yield f"zeroaccel: memory is for pipeline stage {plan.estimate.pipeline_stage}, which needs the most"
    if words := needless_crossing(what, MeshRow(workload, plan, links), capacity):
        yield f"zeroaccel: {words}"


def communicator_remarks(workload: Workload) -> Iterator[str]:
    """Yields a line about the memory of NCCL's communicators: a gatherer's and a reducer's for each group of a rank."""
    if workload.ranks == 1:
        return
    apart = workload.pp * workload.sp * workload.tp
    sizes = (workload.pp, workload.sp, workload.tp, workload.ep, workload.ranks // apart)
    count = 2 * (1 + sum(1 < size < workload.ranks for size in sizes))  # a group of all ranks is made once
    yield (
        f"zeroaccel: on GPUs {count} communicators take about {count * COMMUNICATOR_NBYTES / 1e9:.1f} GB of each device"
        " besides, as reported for 4 A100 with NVLink (NVIDIA/nccl#964); with NCCL_MAX_NCHANNELS=8, less"
    )


def _cells(row: MeshRow, plan: PlanRow) -> tuple[str, ...]:
    sizes = map(_gb_in_short, (plan.estimate.device.total, row.inside, row.across))
    idle, fits = f"{row.idle:.0%}" if row.idle else "-", verdict(plan, row.recommended)
    return row.workload.mesh_name, str(row.workload.accumulation), plan.estimate.name, *sizes, idle, fits


def _as_json(row: MeshRow) -> dict[str, Any]:
    mesh = {axis: getattr(row.workload.mesh, axis) for axis in AXES if not axis.startswith("dp")}
    mesh |= {"ep": row.workload.ep, "dp": row.workload.mesh.dp_shard, "accumulation": row.workload.accumulation}
    if row.plan is None:
        return {"mesh": mesh, "refused": row.refused}
    estimate = row.plan.estimate
    return {
        "mesh": mesh,
        "plan": {**asdict(estimate), "total": estimate.device.total},
        "links": [asdict(link) for link in row.links],
        "idle": row.idle,
        "fits": row.plan.fits,
        "short_of": row.plan.short_of,
        "recommended": row.recommended,
    }


def _gb_in_short(nbytes: int) -> str:
    return "-" if not nbytes else f"{nbytes / 1e9:.2f}" if nbytes < 1e10 else f"{nbytes / 1e9:.1f}"
