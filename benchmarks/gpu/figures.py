"""Figures of a run on a GPU: measured values beside predictions, as a table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


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

    def as_json(self) -> dict[str, Any]:
        """Returns the figure for the JSON file of a part."""
        return asdict(self)


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
