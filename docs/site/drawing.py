"""Drawing of all pictures of the pages: shapes, text and colours of an SVG that is readable on light and dark pages.

A picture has its own background and follows the reader's colour scheme; one with a fixed theme has no background, for
pages that choose between two files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroaccel.cli.pages.frame import COLOURS, escaped

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "diagrams"
RECORDED = Path(__file__).resolve().parent / "recorded"
THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "paper": "#fff",
        "text": "#1b1b1f",
        "small": "#55555f",
        "soft": "#d7d7de",
        "theirs": "#b4b8c4",
        "ours": "#4051b5",
    },
    "dark": {
        "paper": "#16171c",
        "text": "#ececf1",
        "small": "#b0b3c0",
        "soft": "#44454f",
        "theirs": "#6c7183",
        "ours": "#97a5f5",
    },
}
_FONT = "text{font:14px system-ui,sans-serif}.end{text-anchor:end}.middle{text-anchor:middle}.title{font-weight:600}"
_FONT += ".small{font-size:12px}.white{fill:#fff!important;font-size:12px;font-weight:600}"
_FONT += ".figure text{font-size:13px}.code{font:13px ui-monospace,monospace;white-space:pre}.bold{font-weight:700}"


def svg(parts: Iterable[str], width: float, height: float, title: str, theme: str = "") -> str:
    """Returns a picture; with the colours of one theme and without a background if `theme` is set."""
    paper = "" if theme else f'<rect width="{width:g}" height="{height:g}" rx="6" class="paper"/>\n'
    style = _rules(theme or "light") + ("" if theme else f"@media(prefers-color-scheme:dark){{{_rules('dark')}}}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">\n'
        f"<title>{escaped(title)}</title>\n<style>{_FONT}{style}</style>\n{paper}" + "\n".join(parts) + "\n</svg>\n"
    )


def _rules(theme: str) -> str:
    colours = THEMES[theme]
    fills = "".join(f".{name}{{fill:{colours[name]}}}" for name in ("paper", "soft", "theirs", "ours"))
    return (
        f"text{{fill:{colours['text']}}}text.small{{fill:{colours['small']}}}{fills}.edge{{stroke:{colours['paper']}}}"
        f".rule,.axis{{stroke:{colours['small']}}}.limit{{stroke:{colours['text']};stroke-dasharray:5 4}}"
    )


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Returns a filled rectangle; `fill` is a colour, or "soft", which depends on the theme."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}"'
    kind = 'class="soft edge"' if fill == "soft" else f'fill="{fill}" class="edge"'
    return f"<rect {size} {kind}/>"


def frame(x: float, y: float, width: float, height: float) -> str:
    """Returns the outline of a rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" fill="none" class="rule"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Returns a line of text; `kind` has the names of its classes."""
    return f'<text x="{x:.1f}" y="{y:g}" class="{kind}">{escaped(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """Returns a line."""
    return f'<line x1="{x1:.1f}" y1="{y1:g}" x2="{x2:.1f}" y2="{y2:g}" class="rule"/>'


def key(x: float, y: float, names: Sequence[str], colours: Sequence[str] = COLOURS) -> str:
    """Returns a legend in one line."""
    parts = []
    for name, colour in zip(names, colours, strict=False):
        parts += [box(x, y - 11, 14, 14, colour), text(x + 20, y + 1, name, "small")]
        x += 40 + 7.2 * len(name)
    return "".join(parts)


def figures_of(page: str) -> list[tuple[str, float, float]]:
    """Returns (inside, width, height) for each figure of an HTML page that a command has written."""
    found = re.findall(r'<svg[^>]* viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*?)</svg>', page, re.DOTALL)
    return [(inside, float(width), float(height)) for width, height, inside in found]


def moved(part: str, x: float, y: float) -> str:
    """Returns a figure of a page at another place, with the text size of pages."""
    return f'<g class="figure" transform="translate({x:g} {y:g})">{part}</g>'


def recorded(name: str) -> Any:
    """Returns the content of a recording, which has the keys `date`, `machine` and `command`."""
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def about(recording: Mapping[str, Any]) -> str:
    """Returns the line below a picture of a recording."""
    return f"{recording['command']}, {recording['machine']}, {recording['date']}"


def write(folder: Path, pictures: Mapping[str, str]) -> None:
    """Writes pictures, name -> SVG, to a folder."""
    folder.mkdir(exist_ok=True)
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
