"""Figures of a run on a GPU: measured values beside predictions, in a file and as tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One reading.

    Attributes:
        name: name of the measured quantity.
        value: measured value, or None if it could not be read.
        unit: unit of the value and of the prediction.
        predicted: prediction of the stream model, or None if it predicts nothing.
        note: reason for a missing value, or a figure to compare with.
    """

    name: str
    value: float | None
    unit: str = ""
    predicted: float | None = None
    note: str = ""


@dataclass
class Section:
    """The last run of a part.

    Attributes:
        state: the code, size and card that it measures.
        figures: its figures, in order.
        outcome: how it ended; a run that was cut has none.
    """

    state: Mapping[str, str]
    figures: list[Figure] = field(default_factory=list)
    outcome: str = "failed: it was cut"


class FigureFile:
    """The runs of all parts in one file, of which each line is written at once: a cut loses no earlier line.

    A run is a line with its state, then one per figure, then its outcome. The process of a part and the one that
    started it write in turns.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, part: str, state: Mapping[str, str]) -> None:
        """Begins a run of a part, in the place of its earlier ones."""
        self._write({"part": part, "state": dict(state)})

    def add(self, part: str, figure: Figure) -> None:
        """Adds a figure to the run of a part."""
        self._write({"part": part, "figure": asdict(figure)})

    def end(self, part: str, outcome: str) -> None:
        """Ends the run of a part."""
        self._write({"part": part, "outcome": outcome})

    def _write(self, line: Mapping[str, object]) -> None:
        with self._path.open("a+b") as file:
            file.seek(max(0, file.seek(0, 2) - 1))
            cut = file.read(1) not in (b"", b"\n")  # the process was ended while it wrote
            file.write(b"\n" * cut + json.dumps(line).encode() + b"\n")

    def sections(self) -> dict[str, Section]:
        """Returns the last run of each part, by name."""
        found: dict[str, Section] = {}
        for text in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                line = json.loads(text)
                part = line["part"]
                if "state" in line:
                    found[part] = Section(line["state"])
                elif "figure" in line:
                    found[part].figures.append(Figure(**line["figure"]))
                else:
                    found[part].outcome = line["outcome"]
            except (KeyError, TypeError, ValueError):  # a line that was cut
                continue
        return found


def table(figures: Iterable[Figure]) -> list[str]:
    """Returns the lines of a Markdown table.

    Example:
        >>> table([Figure("host waits, stage 2", 1, "per step", predicted=1)])[2]
        '| host waits, stage 2 | 1 per step | 1 per step |  |'
    """
    lines = ["| what | measured | predicted | note |", "|---|---:|---:|---|"]
    for figure in figures:
        cells = [_with_unit(value, figure.unit) for value in (figure.value, figure.predicted)]
        lines.append(f"| {figure.name} | {cells[0]} | {cells[1]} | {figure.note} |")
    return lines


def _with_unit(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g} {unit}".strip()
