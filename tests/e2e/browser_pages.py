"""Small versions of the four pages, examined in a browser: `python -m tests.e2e.browser_pages FOLDER`.

playwright drives Chromium; both must be installed, and neither is a dependency. `AXE_CORE` is the path of the file
axe.min.js of the package axe-core; without it the axe-core check is left out. Run as a program, it writes the pages and
screenshots in both themes to FOLDER, and prints the table of a file of benchmarks/results.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.checkpoint.checkpoint_by_hand import Entry, make_checkpoint
from zeroaccel.cli.main import main as command_line
from zeroaccel.telemetry.trace_file import RankSpans, Span, StepTraceFile, TraceFacts, write_trace
from zeroaccel.telemetry.trackers import JsonlTracker

THEMES = ("light", "dark")
_BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
_FOCUSABLE = "button, input, select, summary, a[href], [tabindex='0']"
_MS = 1_000_000


def missing() -> str:
    """Returns the reason why no browser can be driven here; empty if one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if any(map(shutil.which, _BROWSERS)) else "no Chromium is installed"


def axe_source() -> str | None:
    """Returns the script of axe-core; None if `AXE_CORE` is not set to its file."""
    path = os.environ.get("AXE_CORE")
    return Path(path).read_text(encoding="utf-8") if path else None


def make_pages(folder: Path, model: str = "tests.unit.cli.test_cli_estimate:tiny") -> dict[str, Path]:
    """Makes one page of each kind; returns the files by name.

    Args:
        model: model for `estimate`; a tiny one by default.
    """
    pages = {name: folder / f"{name}.html" for name in ("estimate", "checkpoint", "report", "trace")}
    _command("estimate", model, "--ranks", "8", "--device_memory", "80GB", "--html", str(pages["estimate"]))
    entries = {f"layers.{number}.weight": Entry("F32", np.zeros((8, 9), np.float32)) for number in range(12)}
    make_checkpoint(folder / "out", entries, world_size=3)
    _command("checkpoint", "inspect", str(folder / "out"), "--html", str(pages["checkpoint"]))
    for name, slower in (("first", 1.0), ("second", 1.3)):
        tracker = JsonlTracker("run", folder / name)
        for step in range(1, 60):
            times = {"forward": 0.02, "backward": 0.05, "update": 0.01, "step": 0.09 * slower}
            values = {f"Time/{part}_seconds": seconds for part, seconds in times.items()}
            tracker.log({"Train/loss": 3 / step + slower, "Memory/peak_bytes": 3e9, **values}, step=8 * step)
        tracker.finish()
    _command("report", str(folder / "first"), str(folder / "second"), "-o", str(pages["report"]))
    write_trace(folder / "trace.json", _trace())
    _command("trace", str(folder / "trace.json"))
    return pages


def _command(*words: str) -> None:
    code: object = 0
    try:
        command_line(list(words), prog_name="zeroaccel")
    except SystemExit as exit_:
        code = exit_.code
    assert not code, f"zeroaccel {' '.join(words)} ended with {code}"


def _trace() -> StepTraceFile:
    """Returns the trace of one step of two ranks through eight units; rank 1 is slower."""
    units = tuple(f"layers.{number}" for number in range(8))
    facts = TraceFacts("stage 3, 2 ranks, bfloat16", units, 4, (0, 0), True)
    return StepTraceFile(facts, (_rank(units, 1.0), _rank(units, 1.4)))


def _rank(units: Sequence[str], slower: float) -> RankSpans:
    spans: list[Span] = []
    now = 0.0

    def add(kind: Any, name: str, length: float, detail: str, lane: str = "main") -> None:
        nonlocal now
        spans.append(Span(kind, name, lane, round(now * _MS), round((now + length) * _MS), detail, len(spans)))
        now += length if lane == "main" else 0.0

    for number, unit in enumerate(units):
        add("flight", f"unshard {unit}", 1.0, "gather/all_gather/forward/", "gathers")
        if slower == 1.0 and number % 2:
            add("wait", f"unshard {unit}", 0.6, "gather/all_gather/forward/")
        add("compute", unit, slower, "forward")
    for unit in reversed(units):
        add("compute", unit, 2 * slower, "backward")
        add("flight", f"reduce {unit}", 1.5, "reduce/reduce_scatter/backward/", "reduces")
    for unit in units:
        add("update", unit, 0.2, "")
    return RankSpans(tuple(spans), ((0, 40 * _MS),))


@dataclass
class Findings:
    """Problems of a page in one theme.

    Attributes:
        errors: errors of its scripts.
        violations: (impact, rule, elements) of axe-core; None if axe-core was not run.
        unreached: focusable elements that the Tab key skips or reaches out of page order, and those without a visible
            outline when focused.
        requests: addresses that the page fetched.
        width: pixels that the page takes on a screen of 390.
        paper: colour of the background.
    """

    errors: list[str] = field(default_factory=list)
    violations: list[tuple[str, str, int]] | None = None
    unreached: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    width: int = 0
    paper: str = ""

    @property
    def serious(self) -> list[tuple[str, str, int]]:
        """Violations of axe-core that make a page unusable for some people."""
        return [one for one in self.violations or () if one[0] in ("serious", "critical")]


@contextmanager
def browser() -> Iterator[Any]:
    """Yields a headless Chromium."""
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found, unused-ignore]

    path = next(filter(None, map(shutil.which, _BROWSERS)))
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


def examine(launched: Any, page: Path, theme: str, screenshot: Path | None = None) -> Findings:
    """Opens a page, walks through it by keyboard, and runs axe-core on it."""
    found = Findings()
    shown = launched.new_page(color_scheme=theme, viewport={"width": 1100, "height": 900})
    shown.on("pageerror", lambda error: found.errors.append(str(error)))
    shown.on("request", lambda request: found.requests.append(request.url))
    shown.goto(page.as_uri())
    found.requests = [url for url in found.requests if url != page.as_uri()]
    found.paper = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    if screenshot is not None:
        shown.screenshot(path=str(screenshot), full_page=True)
    found.unreached = _walk(shown)
    if (source := axe_source()) is not None:
        shown.evaluate(source)
        violations = shown.evaluate("axe.run()")["violations"]
        found.violations = [(one["impact"], one["id"], len(one["nodes"])) for one in violations]
    shown.set_viewport_size({"width": 390, "height": 900})
    found.width = shown.evaluate("document.documentElement.scrollWidth")
    shown.close()
    return found


def _walk(shown: Any) -> list[str]:
    """Returns the elements that the Tab key skips, reaches out of order, or focuses without a visible mark."""
    describe = "one => one.tagName + (one.id ? '#' + one.id : '') + ' ' + (one.getAttribute('aria-label') || '')"
    visible = "one => one.checkVisibility()"
    expected = shown.evaluate(f'[...document.querySelectorAll("{_FOCUSABLE}")].filter({visible}).map({describe})')
    reached = []
    for _ in expected:
        shown.keyboard.press("Tab")
        now = "document.activeElement"
        outlined = shown.evaluate(f"getComputedStyle({now}).outlineStyle !== 'none'")
        reached.append(shown.evaluate(f"({describe})({now})") if outlined else "without an outline")
    return [one for one, other in zip(expected, reached, strict=True) if one != other]


def main(folder: Path) -> None:
    """Prints a table of all pages, and leaves them and screenshots in the folder."""
    if reason := missing():
        raise SystemExit(reason)
    folder.mkdir(parents=True)
    pages = make_pages(folder, "7b")
    print("| page | bytes | theme | axe-core | keyboard | errors of scripts | fetched |\n|---|---|---|---|---|---|---|")
    with browser() as launched:
        for name, page in pages.items():
            for theme in THEMES:
                found = examine(launched, page, theme, folder / f"{name}-{theme}.png")
                axe = "not run" if found.violations is None else ", ".join(map(str, found.violations)) or "no finding"
                walk = ", ".join(found.unreached) or "every element in order"
                size = page.stat().st_size
                row = (name, f"{size:,}", theme, axe, walk, len(found.errors), len(found.requests))
                print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
