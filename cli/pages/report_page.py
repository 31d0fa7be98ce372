"""The page of `zeroaccel report`: every metric that the trackers of a run wrote, or of two runs beside each other.

Reads what `CsvTracker`, and so `csv_monitor`, writes: one file per metric with the columns step and value. What a run
did not write is not shown.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroaccel.errors import UsageError

from .frame import COLOURS, Table, escaped, legend, line_chart, page

Line = list[tuple[float, float]]
_MOST_ROWS = 40


def read_run(folder: Path) -> dict[str, Line]:
    """Metric -> (step, value) in the order of the steps, of every CSV file of a tracker in the folder or below it.

    Raises:
        UsageError: there is none, or a line of one is damaged.
    """
    if not folder.is_dir():
        raise UsageError(str(folder), expected="the folder of a run", got="nothing there")
    metrics: dict[Path, Line] = {}
    for file in sorted(folder.rglob("*.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines))
        if len(rows) < 2 or len(rows[0]) != 2 or rows[0][0] != "step":
            continue
        try:
            values = [(float(step), float(value)) for step, value in rows[1:]]
        except ValueError:
            raise UsageError(
                str(file), expected="a step and a number in each line", fix="remove the damaged line"
            ) from None
        metrics[file.with_suffix("")] = sorted(values, key=lambda one: one[0])
    if not metrics:
        raise UsageError(
            str(folder),
            expected="CSV files of a tracker",
            got="none with numbers in it",
            fix='train with "csv_monitor": {"enabled": true, "output_path": ...}, or log_with=CsvTracker(...)',
        )
    # Named from the folder that all of them are in, so that two runs of other names have the same metrics.
    shared = os.path.commonpath([file.parent for file in metrics])
    return {str(file.relative_to(shared)): line for file, line in metrics.items()}


def report_page(runs: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> str:
    """The whole page.

    Args:
        runs: name -> what `read_run` found.

    Example:
        >>> text = report_page({"first": {"Train_loss": [(1.0, 2.0), (2.0, 1.5)]}})
        >>> "Train_loss" in text and "polyline" in text
        True
    """
    names = sorted({metric for run in runs.values() for metric in run})
    summary = []
    body = [legend(dict(zip(runs, COLOURS, strict=False))) if len(runs) > 1 else ""]
    for metric in names:
        lines = {name: run[metric] for name, run in runs.items() if metric in run}
        for name, line in lines.items():
            finite = [value for _, value in line if math.isfinite(value)]
            label = metric if len(runs) == 1 else f"{metric}, {name}"
            numbers = [min(finite), max(finite), finite[-1]] if finite else [math.nan] * 3
            summary.append([label, len(line), f"{line[0][0]:g}", f"{line[-1][0]:g}", *(f"{x:.6g}" for x in numbers)])
    headings = ["metric", "points", "first step", "last step", "lowest", "highest", "last"]
    body += ["<h2>Summary</h2>", Table("Every metric of the run", headings, summary).html()]
    for metric in names:
        lines = {name: run.get(metric, ()) for name, run in runs.items()}
        finite_lines = {name: [one for one in line if math.isfinite(one[1])] for name, line in lines.items()}
        body.append(f"<h2>{escaped(metric)}</h2>")
        if any(finite_lines.values()):
            body.append(line_chart(finite_lines, f"{metric} over steps; the table below has values"))
        body.append(_values(metric, lines))
    return page(f"Run {' and '.join(runs)}", body)


def _values(metric: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """At most `_MOST_ROWS` steps, evenly spread, the first and the last among them."""
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
