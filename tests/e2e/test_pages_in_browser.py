"""The four pages in headless Chromium: both themes, the keyboard, axe-core, and the trace's controls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser_pages import THEMES, axe_source, browser, examine, make_pages, missing
from zeroaccel.cli.pages.frame import MOST_NBYTES

if missing():
    pytest.skip(missing(), allow_module_level=True)


@pytest.fixture(scope="module")
def launched() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_pages(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("name", ["estimate", "checkpoint", "report", "trace"])
def test_a_page_works_in_both_themes_by_keyboard(launched: Any, pages: dict[str, Path], name: str) -> None:
    assert pages[name].stat().st_size <= MOST_NBYTES
    light, dark = (examine(launched, pages[name], theme) for theme in THEMES)
    for found in (light, dark):
        assert (found.errors, found.unreached, found.requests) == ([], [], [])
        assert found.serious == []
        assert found.width == 390
    assert light.paper != dark.paper


@pytest.mark.skipif(axe_source() is None, reason="AXE_CORE does not name axe.min.js")
def test_axe_has_run(launched: Any, pages: dict[str, Path]) -> None:
    assert examine(launched, pages["trace"], "light").violations is not None
    broken = pages["trace"].with_name("broken.html")
    broken.write_text("<!doctype html><html><body><img src='data:,'><button></button></body></html>")
    assert examine(launched, broken, "light").serious


def test_the_trace_shows_another_rank_and_magnifies(launched: Any, pages: dict[str, Path]) -> None:
    shown = launched.new_page()
    shown.goto(pages["trace"].as_uri())
    assert shown.locator("#bars rect[fill='url(#hatch)']").count() > 0
    shown.locator("#rank").select_option("1")
    assert shown.locator("#bars rect[fill='url(#hatch)']").count() == 0  # rank 1 waits for no other
    widths = [float(shown.locator("#bars rect").first.get_attribute("width"))]
    shown.locator("#zoom").focus()
    shown.keyboard.press("ArrowRight")
    widths.append(float(shown.locator("#bars rect").first.get_attribute("width")))
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    assert shown.locator("output[for=zoom]").inner_text() == "2 times"
    shown.close()


def test_without_a_script_the_tables_and_the_drawing_remain(launched: Any, pages: dict[str, Path]) -> None:
    context = launched.new_context(java_script_enabled=False)
    shown = context.new_page()
    shown.goto(pages["trace"].as_uri())
    assert shown.locator("#bars rect").count() > 10
    assert shown.locator("table").count() == 3
    assert not shown.locator("#controls").is_visible()
    context.close()
