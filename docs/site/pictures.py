"""The pictures of recorded runs, and the example pages of the commands: `python docs/site/pictures.py`.

`record.py` made the recordings. A test compares the files in docs/diagrams and docs/shown with the output of this
program.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from drawing import FOLDER, ROOT, about, box, figures_of, key, line, moved, recorded, svg, text, write
from measured import RESULTS, rows_of

from zeroaccel.cli.pages.frame import COLOURS, line_chart
from zeroaccel.cli.report import read_run, report_page
from zeroaccel.cli.trace import _KINDS, trace_page
from zeroaccel.telemetry.trace_file import StepTraceFile, read_trace

SHOWN = ROOT / "docs" / "shown"
_RECORDED = Path(__file__).resolve().parent / "recorded"


def demo() -> str:
    """Draws loss and speed of the demo over its steps."""
    recording = recorded("demo")
    parts, y = [text(8, 22, about(recording), "small")], 30.0
    for title, place in (("loss, bits per byte", _bits), ("bytes per second, both ranks", _speed)):
        points = [(one["step"] / 16, value) for one in recording["lines"] if (value := place(one)) is not None]
        drawing, width, height = figures_of(line_chart({title: points}, title))[0]
        parts += [text(8, y + 20, title, "title"), moved(drawing, 0, y + 26)]
        y += height + 40
    return svg(parts, width, y, "Loss and speed of the demo over its 500 steps")


def _bits(one: Mapping[str, float]) -> float:
    return one["Train/loss"] / math.log(2)


def _speed(one: Mapping[str, float]) -> float | None:
    rate = one.get("Time/samples_per_second")
    return None if rate is None else 128 * rate


def memory() -> str:
    """Draws the memory of a rank over a simulated step: states, gradients, activations, and each unsharded unit."""
    recording = recorded("memory")
    moments: Sequence[tuple[int, int, int, int, Sequence[int]]] = recording["moments"]
    left, width, tall, top = 70.0, 760.0, 320.0, 60.0
    most = max(total for _, total, *_ in moments)
    step = width / len(moments)
    units, found = recording["units"], []
    # From the bottom: states, gradients, then units in their order, then activations.
    below = [0.0] * len(moments)
    layers: list[tuple[str, str, list[float]]] = [
        ("masters, states, shards", COLOURS[2], [float(one[2]) for one in moments]),
        ("gradients", COLOURS[3], [float(one[3]) for one in moments]),
    ]
    for number, unit in enumerate(units):
        layers.append((f"unit {unit}", COLOURS[(0, 5)[number % 2]], [float(one[4][number]) for one in moments]))
    rest = [max(0.0, one[1] - one[2] - one[3] - sum(one[4])) for one in moments]
    layers.append(("activations, buffers of collectives", COLOURS[1], rest))
    for name, colour, values in layers:
        above = [low + value for low, value in zip(below, values, strict=True)]
        for start, end in _runs(values):
            upper = _outline(range(start, end), above, left, step, top + tall, tall / most)
            lower = _outline(range(start, end), below, left, step, top + tall, tall / most)
            place = f"M{' '.join(upper)} L{' '.join(reversed(lower))}Z"
            found.append(f'<path d="{place}" fill="{colour}"><title>{name}</title></path>')
        below = above
    names = ["masters, states, shards", "gradients", "unsharded units", "activations, buffers"]
    colours = [COLOURS[index] for index in (2, 3, 0, 1)]
    parts = [key(left, 28, names, colours), *found, line(left, top + tall, left + width, top + tall)]
    for part in range(5):
        nbytes = most * part / 4
        parts.append(text(left - 8, top + tall * (1 - part / 4) + 5, f"{nbytes / 1e9:.1f} GB", "end small"))
    for phase, name in enumerate(("forward", "backward", "step")):
        at = [index for index, one in enumerate(moments) if one[0] == phase]
        if at:
            begin = left + at[0] * step
            parts += [line(begin, top - 14, begin, top + tall), text(begin + 4, top - 4, name, "small")]
    parts.append(text(left, top + tall + 22, f"estimated: {recording['about']}", "small"))
    return svg(parts, 860, top + tall + 36, "Memory of a rank over a step at stage 3, by unit")


def _runs(values: Sequence[float]) -> Iterable[tuple[int, int]]:
    """Yields the ranges of moments with values above zero."""
    start = None
    for index, value in enumerate([*values, 0.0]):
        if value and start is None:
            start = index
        elif not value and start is not None:
            yield start, index
            start = None


def _outline(
    indices: Iterable[int], values: Sequence[float], left: float, step: float, bottom: float, scale: float
) -> list[str]:
    """Returns the corners of a line of steps, without those in the middle of a level part."""
    corners: list[tuple[float, float]] = []
    for index in indices:
        y = bottom - values[index] * scale
        if len(corners) >= 2 and corners[-1][1] == y:
            corners[-1] = (left + (index + 1) * step, y)
        else:
            corners += [(left + index * step, y), (left + (index + 1) * step, y)]
    return [f"{x:.1f},{y:.1f}" for x, y in corners]


def timeline() -> str:
    """Draws a step of rank 0 of the demo."""
    recording = recorded("trace")
    drawing, width, height = figures_of(trace_page(_trace()))[0]
    names = list(_KINDS)[:4] + list(_KINDS)[5:7]
    parts = [text(8, 22, about(recording), "small")]
    parts += [key(8, 46, names, [_KINDS[name] for name in names]), moved(drawing, 0, 56)]
    return svg(parts, width, height + 60, "A step of rank 0 of the demo at stage 3, by unit over time")


def _trace() -> StepTraceFile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        path.write_text(json.dumps(recorded("trace")["trace"]))
        return read_trace(path)


def estimate() -> str:
    """Draws the plans of the recorded page of an estimate."""
    drawing, width, height = figures_of((SHOWN / "estimate.html").read_text(encoding="utf-8"))[0]
    names = ["weights", "masters and states", "gradients", "activations"]
    parts = [key(330, 22, names), moved(drawing, 10, 36)]
    return svg(parts, width + 10, height + 44, "Memory of a rank for each plan of Llama 3.1 8B on 8 GPUs of 80 GB")


def wizard() -> str:
    """Draws the terminal that the test of the questionnaire recorded."""
    lines = (_RECORDED / "wizard.txt").read_text(encoding="utf-8").splitlines()
    parts = []
    for number, words in enumerate(lines):
        chosen = words.lstrip().startswith(("»", "?"))
        parts.append(text(16, 30 + 18 * number, words, "code bold" if chosen else "code"))
    width = 32 + 7.9 * max(map(len, lines))
    return svg(parts, width, 46 + 18 * len(lines), "A terminal with the questionnaire of zeroaccel config")


def report() -> str:
    """Draws the loss and the time of a step from the page of `zeroaccel report`."""
    (loss, width, height), (split, _, below), *_ = figures_of(report_of_demo())
    parts = [text(8, 22, "loss over samples", "title"), moved(loss, 0, 30)]
    parts += [text(8, height + 60, "mean time of a step", "title"), key(220, height + 60, PARTS)]
    parts.append(moved(split, 0, height + 72))
    return svg(parts, width, height + below + 80, "From the report of a run: its loss, and the mean time of a step")


PARTS = ("forward", "backward", "update", "other")


def report_of_demo() -> str:
    """Returns the page of `zeroaccel report` for the recorded demo."""
    recording = recorded("demo")
    with tempfile.TemporaryDirectory() as folder:
        lines = "\n".join(map(json.dumps, recording["lines"]))
        Path(folder, "metrics.jsonl").write_text(f"{lines}\n")
        facts: dict[str, Any] = {key: str(value) for key, value in recording["facts"].items()}
        return report_page({"demo": read_run(Path(folder))}, {"demo": facts})


def host_updates() -> str:
    """Draws the modelled time of a step for each place and time of the optimizer's update."""
    section = "Host updates and a share on the device"
    rows = rows_of(RESULTS / "stream_model.md", section)
    left, width = 440.0, 300.0
    longest = max(float(row["ms"]) for row in rows.values())
    parts, y = [text(8, 22, "one step, from one forward to the next: ms of the stream model", "title")], 36.0
    for name, row in rows.items():
        share = COLOURS[1] if "half" in name else COLOURS[0]
        length = float(row["ms"]) / longest * width
        parts += [text(left - 8, y + 13, name, "end"), box(left, y, length, 17, share)]
        parts.append(text(left + length + 6, y + 13, f"{row['ms']} ms, {row['device memory, GiB']} GiB", "small"))
        y += 24
    parts.append(key(left, y + 20, ["all on the host", "half on the device"], COLOURS[:2]))
    return svg(parts, left + width + 130, y + 36, "Modelled time of a step with the optimizer on the host")


PICTURES: Mapping[str, Callable[[], str]] = {
    "host_updates": host_updates,
    "demo": demo,
    "memory": memory,
    "timeline": timeline,
    "estimate": estimate,
    "report": report,
    "wizard": wizard,
}
PAGES: Mapping[str, Callable[[], str]] = {"report": report_of_demo, "trace": lambda: trace_page(_trace())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    SHOWN.mkdir(exist_ok=True)
    write(FOLDER, {name: draw() for name, draw in PICTURES.items()})
    for name, make in PAGES.items():
        (SHOWN / f"{name}.html").write_text(make(), encoding="utf-8")
