"""Charts of estimates: stacked bars of what the device holds per plan, and a line at what it has.

An .html is one file with the drawing inside, made here, and needs nothing to be seen; a .png is drawn by matplotlib,
which is an extra. Called by `estimate`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zeroaccel.errors import ConfigError

if TYPE_CHECKING:
    from zeroaccel.estimate import Capacity, PlanRow

__all__ = ["draw"]

# Distinguishable also without colours: each darker than the next (after Wong, Nature Methods 8:441, 2011).
_COLOURS = {"params": "#0072b2", "optimizer": "#d55e00", "gradients": "#009e73", "activations": "#f0e442"}
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 270, 640, 22, 12, 74


def draw(path: Path, title: str, rows: Sequence[PlanRow], capacity: Capacity) -> None:
    """Writes the chart; its kind follows from the ending of the file.

    Raises:
        ConfigError: it cannot be written, or matplotlib is not installed.
    """
    limit = capacity.device
    try:
        if path.suffix == ".png":
            _draw_png(path, title, rows, limit)
        else:
            path.write_text(_page(title, rows, limit), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}", fix="name another file") from None


def _page(title: str, rows: Sequence[PlanRow], limit: int | None) -> str:
    largest = max([row.estimate.device.total for row in rows] + ([limit] if limit else []))
    scale = _WIDTH / (largest * 1.12)
    height = _TOP + len(rows) * (_BAR + _GAP) + 30
    parts = [f'<text x="10" y="24" class="title">{html.escape(title)}</text>']
    for index, (name, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 130 * index
        parts.append(f'<rect x="{x}" y="40" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="52">{name}</text>')
    for index, row in enumerate(rows):
        parts += _bar(row, _TOP + index * (_BAR + _GAP), scale)
    if limit:
        at = _LEFT + limit * scale
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 8}" y2="{height - 22}" class="limit"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - 6}" class="middle">{limit / 1e9:.0f} GB on the device</text>')
    drawing = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>'
        "text{font:14px sans-serif}.title{font-weight:bold}.best{font-weight:bold}.middle{text-anchor:middle}"
        ".end{text-anchor:end}.limit{stroke:#000;stroke-dasharray:5 4}</style></head><body>\n"
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" width="{_LEFT + _WIDTH + 20}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">\n{drawing}\n</svg></body></html>\n'
    )


def _bar(row: PlanRow, y: int, scale: float) -> list[str]:
    one = row.estimate
    mark = " best" if row.recommended else ""
    parts = [f'<text x="{_LEFT - 10}" y="{y + 16}" class="end{mark}">{html.escape(one.name)}</text>']
    right = float(_LEFT)
    for name, colour in _COLOURS.items():
        nbytes = getattr(one.device, name)
        parts.append(
            f'<rect x="{right:.1f}" y="{y}" width="{nbytes * scale:.1f}" height="{_BAR}" fill="{colour}">'
            f"<title>{name}: {nbytes:,} bytes</title></rect>"
        )
        right += nbytes * scale
    total = f"{one.device.total / 1e9:.3g} GB" + (" (recommended)" if row.recommended else "")
    parts.append(f'<text x="{right + 6:.1f}" y="{y + 16}">{total}</text>')
    return parts


def _draw_png(path: Path, title: str, rows: Sequence[PlanRow], limit: int | None) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        fix = "pip install 'zeroaccel[plot]', or name an .html file, which needs nothing"
        raise ConfigError(f"--plot {path}: a .png is drawn by matplotlib, which is not installed", fix=fix) from None
    figure = Figure(figsize=(10, 1.5 + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel="GB per rank on the device, at the peak of a step")
    names = [row.estimate.name + (" (recommended)" if row.recommended else "") for row in rows]
    left = [0.0] * len(rows)
    for part, colour in _COLOURS.items():
        widths = [getattr(row.estimate.device, part) / 1e9 for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=part)
        left = [x + width for x, width in zip(left, widths, strict=True)]
    if limit:
        axes.axvline(limit / 1e9, color="black", linestyle="--", label="on the device")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=120)
