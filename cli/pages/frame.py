"""The frame of every page: dark and light styles, tables, and shared drawings.

A page is one file that needs no network: inline SVG, inline style, a short script. A table on the same page has the
numbers of every drawing, for use without scripts and for screen readers. Colours are those of Wong (Nature Methods
8:441, 2011), darker if they must be visible on white. Pure text, without torch.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroaccel.checkpoint.atomic_write import write_durably
from zeroaccel.errors import ConfigError

MOST_NBYTES = 300_000
"""Size limit of a page; to stay below it, pages omit rows and print their number."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b58900", "#cc79a7", "#56b4e9", "#7a6f9b", "#8c6d31")

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1b1f;--soft:#55555f;--rule:#c9c9d2;--mark:#e8f3ec}
@media(prefers-color-scheme:dark){:root:not([data-theme=light]){
  --paper:#16171c;--ink:#ececf1;--soft:#b0b0bd;--rule:#44454f;--mark:#1d3328}}
:root[data-theme=dark]{color-scheme:dark;--paper:#16171c;--ink:#ececf1;--soft:#b0b0bd;--rule:#44454f;--mark:#1d3328}
:root[data-theme=light]{color-scheme:light}
*{box-sizing:border-box}[hidden]{display:none!important}
body{margin:0 auto;max-width:68rem;padding:1.5rem;background:var(--paper);
  color:var(--ink);font:16px/1.5 system-ui,sans-serif}
header{display:flex;gap:1rem;justify-content:space-between;align-items:start}
h1{font-size:1.5rem;margin:0;min-width:0;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2rem 0 .5rem}
p,figcaption{color:var(--soft);margin:.4rem 0}
button{font:inherit;color:inherit;background:none;border:1px solid var(--soft);border-radius:4px;
  padding:.25rem .7rem;cursor:pointer}
:focus-visible{outline:3px solid #0072b2;outline-offset:2px}
figure{margin:0;overflow-x:auto}svg{display:block;max-width:100%;height:auto}
@media(max-width:40rem){body{padding:.8rem}svg .line text{font-size:26px}th,td{padding:.2rem .3rem;font-size:12px}
  th[scope=row]{min-width:6rem;white-space:normal;overflow-wrap:anywhere}
  #summary :is(th,td):nth-child(n+6){display:none}}
svg text{fill:var(--ink);font:13px system-ui,sans-serif}
svg .axis{stroke:var(--rule)}svg .limit{stroke:var(--ink);stroke-dasharray:5 4}
svg .end{text-anchor:end}svg .middle{text-anchor:middle}
.wide{overflow-x:auto}pre{white-space:pre-wrap;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding:.3rem 0}
th,td{padding:.25rem .5rem;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
thead th{white-space:normal;vertical-align:bottom}
th:first-child,td.text,th.text{text-align:left}
tr.best{background:var(--mark);font-weight:600}
ul.key{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:0;margin:.4rem 0}
ul.key svg{display:inline-block;vertical-align:middle;margin-right:.35rem}
.controls{display:flex;flex-wrap:wrap;gap:.6rem 2rem;margin:.6rem 0}
.controls label{display:flex;gap:.6rem;align-items:center}
output{min-width:4.5rem;font-variant-numeric:tabular-nums}
code{font:14px ui-monospace,monospace;overflow-wrap:anywhere}
"""

_SCRIPT = """
const root=document.documentElement,themeButton=document.getElementById('theme');
themeButton.hidden=false;
themeButton.addEventListener('click',()=>{
  const dark=root.dataset.theme?root.dataset.theme==='dark':matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme=dark?'light':'dark';
});
"""


@dataclass(frozen=True)
class Table:
    """A table with headings and a caption.

    Attributes:
        caption: description of the rows.
        headings: one per column.
        rows: texts of the cells; the first of each row is its name.
        texts: columns to align to the left.
        best: the row to mark; None marks no row.
        identity: id of the element, for scripts.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    texts: Sequence[int] = (0,)
    best: int | None = None
    identity: str = ""

    def html(self) -> str:
        """Returns the table as HTML."""
        heads = "".join(
            f'<th scope="col"{self._class(index)}>{escaped(heading)}</th>'
            for index, heading in enumerate(self.headings)
        )
        rows = []
        for number, row in enumerate(self.rows):
            cells = "".join(f"<td{self._class(index + 1)}>{escaped(cell)}</td>" for index, cell in enumerate(row[1:]))
            mark = ' class="best"' if number == self.best else ""
            rows.append(f'<tr{mark}><th scope="row" class="text">{escaped(row[0])}</th>{cells}</tr>')
        identity = f' id="{self.identity}"' if self.identity else ""
        return (
            f'<div class="wide" tabindex="0" role="region" aria-label="{escaped(self.caption)}"><table{identity}>'
            f"<caption>{escaped(self.caption)}</caption><thead><tr>{heads}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )

    def _class(self, index: int) -> str:
        return ' class="text"' if index in self.texts else ""


def page(title: str, body: Sequence[str], *, about: str = "", data: Any = None, script: str = "") -> str:
    """Returns the text of one HTML file.

    Args:
        body: pieces of HTML, in order.
        about: a sentence below the title.
        data: value of the variable `data` in the script.
        script: JavaScript to run after the page is loaded.

    Example:
        >>> text = page("Memory", [Table("Plans", ["plan", "GB"], [["stage 3", "2.1"]]).html()])
        >>> text.startswith("<!doctype html>"), "http" in text
        (True, False)
    """
    # "</script>" in a name must not end the element.
    texts = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c") if data is not None else ""
    loaded = f'<script type="application/json" id="data">{texts}</script>' if texts else ""
    read = "const data=JSON.parse(document.getElementById('data').textContent);" if texts else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head><body>\n"
        f'<header><h1>{escaped(title)}</h1><button id="theme" type="button" hidden>Dark or light</button></header>\n'
        f"<main>{f'<p>{escaped(about)}</p>' if about else ''}\n{chr(10).join(body)}\n</main>\n{loaded}"
        f"<script>{_SCRIPT}{read}{script}</script></body></html>\n"
    )


def write_page(path: Path, text: str, flag: str = "--html") -> None:
    """Writes the file atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_durably(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", fix="name another file") from None


def check_page_path(path: str | None, flag: str = "--html", kinds: Sequence[str] = (".html",)) -> None:
    """Checks the path of a page before the computation starts.

    Raises:
        ConfigError: the path does not end in one of `kinds`, or its folder does not exist.
    """
    if path is None:
        return
    if Path(path).suffix not in kinds:
        raise ConfigError(flag, expected=f"a file that ends in {' or '.join(kinds)}", got=path)
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {Path(path).parent}", fix="make it, or name another")


def escaped(value: object) -> str:
    """Returns the text of a value, escaped for HTML."""
    return html.escape(str(value))


def legend(names: Mapping[str, str]) -> str:
    """Returns a legend, name -> colour, as an HTML list."""
    items = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><rect width="14" height="14" fill="{colour}"/></svg>'
        f"{escaped(name)}</li>"
        for name, colour in names.items()
    )
    return f'<ul class="key">{items}</ul>'


def bar(x: float, y: float, width: float, height: int, colour: str, said: str) -> str:
    """Returns a rectangle of a figure with a tooltip, `said`."""
    shape = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}">'
    return f"{shape}<title>{said}</title></rect>"


def figure(drawing: str, width: int, height: int, label: str, identity: str = "") -> str:
    """Returns an SVG with a label; the caller adds a table of its numbers."""
    name = f' id="{identity}"' if identity else ""
    return (
        f'<figure tabindex="0" role="region" aria-label="{escaped(label)}"><svg{name} viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="{escaped(label)}">{drawing}</svg></figure>'
    )


def line_chart(series: Mapping[str, Sequence[tuple[float, float]]], label: str, unit: str = "step") -> str:
    """Returns a chart with one coloured line per series over steps.

    Args:
        series: name -> (step, value), with finite values.
        unit: word for the numbers along the axis.
    """
    width, height, left, bottom, top = 1040, 260, 80, 30, 10
    points = [point for line in series.values() for point in line]
    (first, last), (low, high) = (
        (min(values), max(values)) for values in ([x for x, _ in points], [y for _, y in points])
    )
    across, up = (last - first) or 1, (high - low) or 1

    def place(x: float, y: float) -> str:
        at = left + (x - first) / across * (width - left - 10)
        return f"{at:.1f},{height - bottom - (y - low) / up * (height - bottom - top):.1f}"

    parts = [
        f'<line class="axis" x1="{left}" x2="{width - 10}" y1="{height - bottom}" y2="{height - bottom}"/>',
        f'<text class="end" x="{left - 8}" y="{height - bottom}">{low:.4g}</text>',
        f'<text class="end" x="{left - 8}" y="{top + 10}">{high:.4g}</text>' if high > low else "",
        f'<text x="{left}" y="{height - 8}">{first:g}</text>',
        f'<text class="end" x="{width - 10}" y="{height - 8}">{unit} {last:g}</text>',
    ]
    for number, (name, line) in enumerate(series.items()):
        if not line:
            continue
        colour, dashes = COLOURS[number % len(COLOURS)], ("", ' stroke-dasharray="6 4"')[number % 2]
        path = " ".join(place(*point) for point in _thinned(line))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}>'
            f"<title>{escaped(name)}</title></polyline>"
        )
    return figure(f'<g class="line">{"".join(parts)}</g>', width, height, label)


_MOST_POINTS = 400


def _thinned(line: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Returns at most `_MOST_POINTS` points: the lowest and the highest of each interval, so that no peak is lost."""
    if len(line) <= _MOST_POINTS:
        return line
    size = -(-2 * len(line) // _MOST_POINTS)
    runs = [line[start : start + size] for start in range(0, len(line), size)]
    return [point for run in runs for point in sorted({min(run, key=lambda at: at[1]), max(run, key=lambda at: at[1])})]
