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
    write_page(
        path, report_page({name: read_run(folder) for name, folder in zip(names, folders, strict=True)}), "--out"
    )
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
    return {str(file.relative_to(shared)): sorted(line, key=lambda one: one[0]) for file, line in metrics.items()}


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


def report_page(runs: Mapping[str, Run]) -> str:
    """Returns the page of the runs as HTML.

    Args:
        runs: name -> result of `read_run`.

    Example:
        >>> text = report_page({"first": {"Train_loss": [(1.0, 2.0), (2.0, 1.5)]}})
        >>> "Train_loss" in text and "polyline" in text
        True
    """
    scaled = {name: _in_units(run) for name, run in runs.items()}
    names = sorted({metric for run in scaled.values() for metric in run}, key=_place)
    summary = []
    body = [legend(dict(zip(runs, COLOURS, strict=False))) if len(runs) > 1 else ""]
    for metric in names:
        lines = {name: run[metric] for name, run in scaled.items() if metric in run}
        for name, line in lines.items():
            finite = [value for _, value in line if math.isfinite(value)]
            label = metric if len(runs) == 1 else f"{metric}, {name}"
            mean = sum(finite) / len(finite) if finite else math.nan
            numbers = [min(finite), mean, max(finite), finite[-1]] if finite else [math.nan] * 4
            summary.append([label, len(line), f"{line[0][0]:g}", f"{line[-1][0]:g}", *(f"{x:.6g}" for x in numbers)])
    headings = ["metric", "points", "first step", "last step", "lowest", "mean", "highest", "last"]
    body += _time_split(runs)
    body += ["<h2>Summary</h2>", Table("Every metric of the run", headings, summary[:_MOST_METRICS]).html()]
    if len(summary) > _MOST_METRICS:
        body.append(f"<p>{len(summary) - _MOST_METRICS} more rows are left out; the files have them.</p>")
    for number, metric in enumerate(names):
        lines = {name: run.get(metric, ()) for name, run in scaled.items()}
        finite_lines = {name: [one for one in line if math.isfinite(one[1])] for name, line in lines.items()}
        drawn = [f"<h2>{escaped(metric)}</h2>"]
        found = {value for line in finite_lines.values() for _, value in line}
        if len(found) == 1:  # a constant needs no chart
            drawn.append(f"<p>{found.pop():.6g} at every step.</p>")
        elif found:
            drawn.append(line_chart(finite_lines, f"{metric} over steps; the table below has values"))
        drawn.append(_values(metric, lines))
        if sum(map(len, (*body, *drawn))) > _MOST_BODY:
            body.append(f"<p>{len(names) - number} more metrics are in the summary only.</p>")
            break
        body += drawn
    return page(f"Run {' and '.join(runs)}", body)


def _place(metric: str) -> tuple[int, str]:
    """Sorts metrics of the training before measurements of its cost."""
    name = metric.partition(" (")[0].rpartition("/")[2]
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
    for part in [part for part in timed if any(part in split for split in means.values())]:
        row: list[object] = [part]
        for split in means.values():
            row += [f"{split[part]:.3f}", f"{100 * split[part] / split['step']:.1f} %"] if part in split else ["-", "-"]
        if len(means) == 2:
            one, two = means.values()
            row.append(f"{two[part] / one[part]:.3f}" if part in two and one.get(part) else "-")
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
    for part in (*_PARTS, "reduce"):
        values = [value for step, value in lines.get(f"Time_{part}_seconds", ()) if step in steps]
        if values:
            split[part] = 1e3 * sum(values) / len(steps)
    split["step"] = 1e3 * sum(steps.values()) / len(steps)
    split["other"] = split["step"] - sum(split.get(part, 0.0) for part in _PARTS)
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
        for part, colour in colours.items():
            length = max(0.0, split.get(part, 0.0)) / longest * width
            said = f"{part}: {split.get(part, 0.0):.3f} ms"
            parts.append(bar(at, y, length, tall, colour, said))
            at += length
        parts.append(f'<text x="{at + 6:.1f}" y="{y + 18}">{split["step"]:.2f} ms</text>')
    height = 12 + len(means) * (tall + 10)
    return figure("".join(parts), left + width + 100, height, "Mean time of a step by part; the table has the numbers")


_MOST_ROWS = 40


def _values(metric: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
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
    table = Table(caption, ["step", *lines], rows).html()
    return f"<details><summary>Values</summary>{table}</details>"
