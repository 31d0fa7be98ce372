"""`zeroaccel report`: a page of every metric that the trackers of a run wrote, or of two runs beside each other.

Reads the files of `JsonlTracker` and `CsvTracker`, which `jsonl_monitor` and `csv_monitor` also write: a file of JSON
lines, or one file per metric with the columns step and value. The page shows only metrics that a run wrote.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import click

from zeroaccel.errors import UsageError

from .pages.frame import (
    COLOURS,
    MOST_NBYTES,
    Table,
    bar,
    check_page_path,
    escaped,
    figure,
    legend,
    line_chart,
    page,
    write_page,
)

_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("run", type=_FOLDER)
@click.argument("other", type=_FOLDER, required=False)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", help="The page. [default: report.html in RUN]"
)
def report(run: Path, other: Path | None, out: str | None) -> None:
    """Draw the metrics of RUN, or of two runs beside each other, as one HTML page.

    RUN is the folder with the files of a jsonl_monitor, a csv_monitor or a tracker, or a folder above it.

    \b
    Examples:
      zeroaccel report runs/first
      zeroaccel report runs/first runs/second -o compared.html
    """
    if not run.is_dir():
        raise UsageError(str(run), expected="the folder of a run", got="nothing there")
    path = Path(out) if out is not None else run / "report.html"
    check_page_path(str(path), "--out")
    folders = [run] if other is None else [run, other]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise UsageError("report", expected="two different runs", got=f"{run} twice")
    named = dict(zip(names, folders, strict=True))
    runs = {name: read_run(folder) for name, folder in named.items()}
    write_page(path, report_page(runs, {name: read_facts(folder) for name, folder in named.items()}), "--out")
    click.echo(f"{path}: page written")


Line = list[tuple[float, float]]
Run = Mapping[str, Sequence[tuple[float, float]]]

# Ending of a metric's name -> unit on the page, and its size in the metric's own unit.
_UNITS = {"_bytes_per_second": ("GB/s", 1e9), "_bytes": ("MB", 1e6), "_seconds": ("ms", 1e-3)}
_PARTS = ("forward", "backward", "update")
"""Phases of a step, side by side; the reductions at the end of backward are a part of backward."""
_STEP = "Time_step_seconds"
_MEASURED = ("Time_", "Memory_", "Sent_", "Offload_")
_MOST_BODY = MOST_NBYTES * 9 // 10
_MOST_METRICS = 500
_FACTS = "run.json"  # the same as in `zeroaccel.telemetry.trackers`, which imports torch


def read_run(folder: Path) -> dict[str, Line]:
    """Returns metric -> (step, value) in the order of steps, of every tracker's file in the folder or below it.

    Raises:
        UsageError: there is no such file, or a line is damaged.
    """
    if not folder.is_dir():
        raise UsageError(str(folder), expected="the folder of a run", got="nothing there")
    metrics: dict[Path, Line] = {}
    for file in sorted(folder.rglob("*.csv")):
        metrics |= _read_csv(file)
    for file in sorted(folder.rglob("*.jsonl")):
        metrics |= _read_jsonl(file)
    if not metrics:
        raise UsageError(
            str(folder),
            expected="CSV or JSONL files of a tracker",
            got="none with numbers in it",
            fix='train with "jsonl_monitor": {"enabled": true, "output_path": ...}, or log_with="jsonl"',
        )
    # Names are relative to the files' common folder, so that runs with different names have the same metrics.
    shared = os.path.commonpath([file.parent for file in metrics])
    return {str(file.relative_to(shared)): sorted(line, key=lambda item: item[0]) for file, line in metrics.items()}


def read_facts(folder: Path) -> dict[str, str]:
    """Returns what the engine noted about a run: its model, stage, ranks, config and beginning; {} without a note."""
    found = sorted(folder.rglob(_FACTS), key=lambda file: file.stat().st_mtime)
    try:
        content = json.loads(found[-1].read_text(encoding="utf-8")) if found else {}
    except ValueError:
        content = {}
    return {str(key): str(value) for key, value in content.items()} if isinstance(content, dict) else {}


def _read_csv(file: Path) -> dict[Path, Line]:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines))
    if len(rows) < 2 or len(rows[0]) != 2 or rows[0][0] != "step":
        return {}
    try:
        return {file.with_suffix(""): [(float(step), float(value)) for step, value in rows[1:]]}
    except ValueError:
        raise UsageError(
            str(file), expected="a step and a number in each line", fix="remove the damaged line"
        ) from None


def _read_jsonl(file: Path) -> dict[Path, Line]:
    """Reads JSON lines, with metrics named like the CSV tracker's files. Skips lines without a step, and values that
    are not numbers."""
    metrics: dict[Path, Line] = defaultdict(list)
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            fix = "remove the damaged line; killing a run may cut off the last line"
            raise UsageError(f"{file}:{number}", expected="a JSON object", got=text, fix=fix)
        step = content.get("step")
        if not _is_number(step):
            continue
        for name, value in content.items():
            if _is_number(value) and name not in ("step", "time"):
                metrics[file.parent / name.replace("/", "_").replace(" ", "_")].append((float(step), float(value)))
    return metrics


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def report_page(runs: Mapping[str, Run], facts: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Returns the page of the runs as HTML: their settings, the losses, the time of a step, every metric.

    Args:
        runs: name -> result of `read_run`.
        facts: name -> result of `read_facts`.

    Example:
        >>> text = report_page({"first": {"Train_loss": [(1.0, 2.0), (2.0, 1.5)]}})
        >>> "Train_loss" in text and "polyline" in text
        True
    """
    facts = facts or {}
    unit = "sample" if any(about.get("numbered_by") == "samples" for about in facts.values()) else "step"
    scaled = {name: _in_units(run) for name, run in runs.items()}
    names = sorted({metric for run in scaled.values() for metric in run}, key=_place)
    losses = [metric for metric in names if _place(metric)[0] < 0]
    body = [_head(scaled, facts), legend(dict(zip(runs, COLOURS, strict=False))) if len(runs) > 1 else ""]
    body += [_metric(metric, scaled, unit) for metric in losses]
    body += [*_time_split(runs), *_summary(names, scaled, unit)]
    others = names[len(losses) :]
    for number, metric in enumerate(others):
        drawn = _metric(metric, scaled, unit)
        if sum(map(len, (*body, drawn))) > _MOST_BODY:
            body.append(f"<p>{len(others) - number} more metrics are in the summary only.</p>")
            break
        body.append(drawn)
    return page(f"Run {' and '.join(runs)}", body)


def _head(scaled: Mapping[str, Run], facts: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a table with a column for each run: its model and settings, its last loss and its rate."""
    rows: dict[str, list[str]] = {key: [] for key in ("model", "stage", "ranks", "config", "begun", *_LAST)}
    for name, run in scaled.items():
        ends = {
            said: f"{finite[-1]:.4g}"
            for metric, line in run.items()
            for said, ending in _LAST.items()
            if metric.endswith(ending) and (finite := [value for _, value in line if math.isfinite(value)])
        }
        for key, cells in rows.items():
            cells.append({**facts.get(name, {}), **ends}.get(key, "-"))
    shown = [[key, *cells] for key, cells in rows.items() if set(cells) != {"-"}]
    return Table("The run" if len(scaled) == 1 else "The runs", ["", *scaled], shown).html() if shown else ""


_LAST = {"last loss": "loss", "last samples per second": "Time_samples_per_second"}


def _summary(names: Sequence[str], scaled: Mapping[str, Run], unit: str) -> list[str]:
    """Returns a table with a row for each metric of each run."""
    summary = []
    for metric in names:
        for name, run in scaled.items():
            if metric not in run:
                continue
            line = run[metric]
            finite = [value for _, value in line if math.isfinite(value)]
            label = metric if len(scaled) == 1 else f"{metric}, {name}"
            mean = sum(finite) / len(finite) if finite else math.nan
            numbers = [finite[-1], mean, min(finite), max(finite)] if finite else [math.nan] * 4
            summary.append([label, *(f"{x:.6g}" for x in numbers), f"{line[0][0]:g}", f"{line[-1][0]:g}", len(line)])
    headings = ["metric", "last", "mean", "lowest", "highest", f"first {unit}", f"last {unit}", "points"]
    body = [
        "<h2>Summary</h2>",
        Table("Every metric of the run", headings, summary[:_MOST_METRICS], identity="summary").html(),
    ]
    if len(summary) > _MOST_METRICS:
        body.append(f"<p>{len(summary) - _MOST_METRICS} more rows are left out; the files have them.</p>")
    return body


def _metric(metric: str, scaled: Mapping[str, Run], unit: str) -> str:
    """Returns the heading, the chart and the table of one metric."""
    lines = {name: run.get(metric, ()) for name, run in scaled.items()}
    finite_lines = {name: [point for point in line if math.isfinite(point[1])] for name, line in lines.items()}
    drawn = f"<h2>{escaped(metric)}</h2>"
    found = {value for line in finite_lines.values() for _, value in line}
    if len(found) == 1:  # a constant needs no chart
        drawn += f"<p>{found.pop():.6g} at every step.</p>"
    elif found:
        drawn += line_chart(finite_lines, f"{metric} over {unit}s; the table below has values", unit)
    return drawn + _values(metric, lines, unit)


def _place(metric: str) -> tuple[int, str]:
    """Sorts losses first, then other metrics of the training, then measurements of its cost."""
    name = metric.partition(" (")[0].rpartition("/")[2]
    if name.lower().endswith("loss"):
        return -1, metric
    found = next((number for number, start in enumerate(_MEASURED, start=1) if name.startswith(start)), 0)
    return found, metric


def _in_units(run: Run) -> dict[str, Sequence[tuple[float, float]]]:
    """Converts times to ms, bytes to MB and rates to GB/s, with the unit in the name."""
    scaled: dict[str, Sequence[tuple[float, float]]] = {}
    for name, line in run.items():
        ending = next((ending for ending in _UNITS if name.endswith(ending)), "")
        unit, size = _UNITS.get(ending, ("", 1.0))
        shown = f"{name.removesuffix(ending)} ({unit})" if ending else name
        scaled[shown] = [(step, value / size) for step, value in line] if ending else line
    return scaled


# -- the time of a step by part


def _time_split(runs: Mapping[str, Run]) -> list[str]:
    """Returns a bar and a row of means for each run that has timed its steps."""
    means = {name: split for name, run in runs.items() if (split := _mean_split(run)) is not None}
    if not means:
        return []
    rows: list[list[object]] = []
    timed = [*_PARTS, "other", "step", "reductions, a part of backward"]
    for kind in [kind for kind in timed if any(kind in split for split in means.values())]:
        row: list[object] = [kind]
        for split in means.values():
            row += [f"{split[kind]:.3f}", f"{100 * split[kind] / split['step']:.1f} %"] if kind in split else ["-", "-"]
        if len(means) == 2:
            first, two = means.values()
            row.append(f"{two[kind] / first[kind]:.3f}" if kind in two and first.get(kind) else "-")
        rows.append(row)
    headings = ["part", *(text for name in means for text in (f"{name}, ms", "of the step"))]
    headings += ["second / first"] if len(means) == 2 else []
    caption = "Means over the steps, all but the first"
    colours = dict(zip((*_PARTS, "other"), COLOURS, strict=False))
    return [
        "<h2>Where a step's time goes</h2>",
        legend(colours),
        _bars(means, colours),
        Table(caption, headings, rows).html(),
    ]


def _mean_split(run: Run) -> dict[str, float] | None:
    """Returns the mean milliseconds of timed steps by part, without parts that were not timed; None without times."""
    lines = {name.rpartition("/")[2]: line for name, line in run.items()}
    steps = dict(lines.get(_STEP, ()))
    if not steps:
        return None
    split: dict[str, float] = {}
    for kind in (*_PARTS, "reduce"):
        values = [value for step, value in lines.get(f"Time_{kind}_seconds", ()) if step in steps]
        if values:
            split[kind] = 1e3 * sum(values) / len(steps)
    split["step"] = 1e3 * sum(steps.values()) / len(steps)
    split["other"] = split["step"] - sum(split.get(kind, 0.0) for kind in _PARTS)
    if "reduce" in split:
        split["reductions, a part of backward"] = split.pop("reduce")
    return split


def _bars(means: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> str:
    left, width, tall = 160, 640, 26
    longest = max(split["step"] for split in means.values()) or 1.0
    parts = []
    for number, (name, split) in enumerate(means.items()):
        y, at = 6 + number * (tall + 10), float(left)
        shown = name if len(name) <= 22 else f"...{name[-19:]}"
        parts.append(f'<text class="end" x="{left - 8}" y="{y + 18}">{escaped(shown)}</text>')
        for kind, colour in colours.items():
            length = max(0.0, split.get(kind, 0.0)) / longest * width
            said = f"{kind}: {split.get(kind, 0.0):.3f} ms"
            parts.append(bar(at, y, length, tall, colour, said))
            at += length
        parts.append(f'<text x="{at + 6:.1f}" y="{y + 18}">{split["step"]:.2f} ms</text>')
    height = 12 + len(means) * (tall + 10)
    return figure("".join(parts), left + width + 100, height, "Mean time of a step by part; the table has the numbers")


_MOST_ROWS = 40


def _values(metric: str, lines: Mapping[str, Sequence[tuple[float, float]]], unit: str) -> str:
    """Returns a table of at most `_MOST_ROWS` steps, evenly spread, including the first and the last."""
    by_step: dict[float, dict[str, float]] = {}
    for name, line in lines.items():
        for step, value in line:
            by_step.setdefault(step, {})[name] = value
    steps = sorted(by_step)
    if len(steps) > _MOST_ROWS:
        steps = [steps[round(index * (len(steps) - 1) / (_MOST_ROWS - 1))] for index in range(_MOST_ROWS)]
    rows = [[f"{step:g}", *(f"{by_step[step][n]:.6g}" if n in by_step[step] else "-" for n in lines)] for step in steps]
    caption = f"{metric}: {len(steps)} of {len(by_step)} steps"
    table = Table(caption, [unit, *lines], rows).html()
    return f"<details><summary>Values</summary>{table}</details>"
