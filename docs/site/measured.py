"""The picture of step times and memory beside other engines, drawn from results: `python docs/site/measured.py`.

Every figure is a cell of benchmarks/results/step_time.md or gpu.md. A test compares the files in docs/diagrams with the
output of this program, so that new results change the picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from drawing import FOLDER, ROOT, THEMES, svg, text, write

RESULTS = ROOT / "benchmarks" / "results"

Row = Mapping[str, str]
"""Heading -> cell."""

_PAIRS = (
    ("Beside DDP and FSDP2", "DDP with autocast", "ddp-autocast", "stage 2", "zeroaccel-2"),
    ("Beside DDP and FSDP2", "FSDP2", "fsdp2", "stage 3", "zeroaccel-3-lean"),
    ("Beside DeepSpeed", "DeepSpeed, stage 2", "deepspeed-2", "stage 2", "zeroaccel-2"),
    ("Beside DeepSpeed", "DeepSpeed, stage 3", "deepspeed-3-lean", "stage 3", "zeroaccel-3-lean"),
)
"""Section of step_time.md, label and contender of the other engine, and of ours. Contenders of a pair at stage 3 send
the same: each gathers the parameters again in backward."""

_LEFT, _LONGEST, _WIDTH = 304, 300, 740


@dataclass(frozen=True)
class Pair:
    """A measurement of another engine and of ours, in milliseconds a step."""

    theirs: str
    ours: str
    their_ms: float
    our_ms: float
    their_words: str
    our_words: str


def rows_of(page: Path, section: str) -> dict[str, Row]:
    """Returns first cell -> row of the first table in a section of a page.

    Raises:
        SystemExit: the page has no such section, or no table in it.
    """
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for line in (found[1] if found else "").splitlines() if line.startswith("|")]
    if not lines:
        raise SystemExit(f"{page.relative_to(ROOT)}: no table under '## {section}'; change docs/site/measured.py, too")
    headings, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    first: dict[str, Row] = {}
    for row in rows:
        if row == headings:  # a second table
            break
        first.setdefault(row[0], dict(zip(headings, row, strict=False)))
    return first


def on_cpu() -> Iterator[Pair]:
    """Yields the pairs of step_time.md."""
    for section, theirs, contender, ours, our_contender in _PAIRS:
        rows = rows_of(RESULTS / "step_time.md", section)
        one, two = rows[contender], rows[our_contender]
        words = [f"{row['ms/step']} ms, {row['peak MiB']} MiB" for row in (one, two)]
        yield Pair(theirs, f"zeroaccel, {ours}", float(one["ms/step"]), float(two["ms/step"]), *words)


def on_gpu() -> Iterator[Pair]:
    """Yields the pairs of gpu.md, which has our step as a ratio to the other's."""
    for name, row in rows_of(RESULTS / "gpu.md", "side_by_side").items():
        found = re.fullmatch(r"ours(, [^:]+)?: ([\d.]+)x", row["note"])
        assert found is not None, row
        theirs = float(row["measured"].removesuffix(" ms"))
        label = f"zeroaccel{found[1] or ', the same'}"
        yield Pair(name, label, theirs, theirs * float(found[2]), f"{theirs:g} ms", f"{found[2]}x of it")


def picture(theme: str) -> str:
    """Returns the picture as SVG, on a transparent background."""
    parts: list[str] = []
    y = 8
    cpu, gpu = (_date(RESULTS / name) for name in ("step_time.md", "gpu.md"))
    for title, pairs in (
        (f"Two CPU ranks, {cpu}: time of a step, peak memory of a rank", list(on_cpu())),
        (f"One H100, {gpu}: time of a step", list(on_gpu())),
    ):
        y += 20
        parts.append(text(8, y, title, "title"))
        y += 12
        longest = max(max(pair.their_ms, pair.our_ms) for pair in pairs)
        for pair in pairs:
            for kind, label, ms, words in (
                ("theirs", pair.theirs, pair.their_ms, pair.their_words),
                ("ours", pair.ours, pair.our_ms, pair.our_words),
            ):
                width = ms / longest * _LONGEST
                parts.append(text(_LEFT - 8, y + 13, label, "end"))
                parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="17" class="{kind}"/>')
                parts.append(text(_LEFT + width + 6, y + 13, words, "small"))
                y += 19
            y += 7
    title = "Step times and memory of zeroaccel beside DDP, FSDP2 and DeepSpeed"
    return svg(parts, _WIDTH, y, title, theme)


def _date(page: Path) -> str:
    """Returns the date of a page of results."""
    found = re.search(r"^Measured on (\d{4}-\d\d-\d\d)", page.read_text(), re.MULTILINE)
    assert found is not None, page
    return found[1]


PICTURES = {f"measured-{theme}": theme for theme in THEMES}


if __name__ == "__main__":
    write(FOLDER, {name: picture(theme) for name, theme in PICTURES.items()})
