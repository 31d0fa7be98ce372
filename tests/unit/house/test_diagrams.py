"""The diagrams of docs/how_it_works.md and the picture of measurements: up to date, well-formed, and as in the code."""

from __future__ import annotations

import re
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.support.environment import ROOT
from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def diagrams() -> ModuleType:
    return load_script("docs/site/diagrams.py")


def test_the_files_are_up_to_date(diagrams: ModuleType) -> None:
    drawn = {**diagrams.DIAGRAMS, **diagrams.MEASURED}
    stale = [name for name, draw in drawn.items() if draw() != (diagrams.FOLDER / f"{name}.svg").read_text()]
    assert stale == [], "run python docs/site/diagrams.py"
    pictures = load_script("docs/site/measured.py").PICTURES
    assert {path.stem for path in diagrams.FOLDER.iterdir()} == {*drawn, *pictures}


def test_the_picture_of_measurements_has_the_figures_of_the_results() -> None:
    measured = load_script("docs/site/measured.py")
    for name, theme in measured.PICTURES.items():
        picture = measured.picture(theme)
        assert picture == (measured.FOLDER / f"{name}.svg").read_text(), "run python docs/site/measured.py"
        root = ElementTree.fromstring(picture)
        assert root[0].tag.endswith("title")
        widths = [float(box.get("width", "")) for box in root.iter() if box.tag.endswith("rect")]
        assert len(widths) == 2 * (4 + 5)
        assert max(widths) < 400
    cells = {row["ms/step"] for row in measured.rows_of(measured.RESULTS / "step_time.md", "Beside DeepSpeed").values()}
    assert len(re.findall(r">(\d+) ms, \d+ MiB<", picture)) == 8
    assert cells >= set(re.findall(r">(\d+) ms, \d+ MiB<", picture)[4:])
    with pytest.raises(SystemExit, match="no table under '## Beside nobody'"):
        measured.rows_of(measured.RESULTS / "step_time.md", "Beside nobody")


def test_the_page_shows_each_with_a_description(diagrams: ModuleType) -> None:
    shown = re.findall(r"!\[([^\]]+)\]\(diagrams/(\w+)\.svg\)", (ROOT / "docs" / "how_it_works.md").read_text())
    assert [name for _, name in shown] == list(diagrams.DIAGRAMS)
    assert "](diagrams/long_context.svg)" in (ROOT / "docs" / "sequence_parallel.md").read_text()
    for name in (*diagrams.DIAGRAMS, *diagrams.MEASURED):
        root = ElementTree.parse(diagrams.FOLDER / f"{name}.svg").getroot()
        assert root[0].tag.endswith("title")
        _, _, width, height = map(float, root.get("viewBox", "").split())
        for element in root.iter():
            x, y = float(element.get("x", 0)), float(element.get("y", 0))
            assert 0 <= x + float(element.get("width", "0").rstrip("%")) <= width
            assert 0 <= y <= height


def test_bytes_per_parameter_are_those_of_the_paper(diagrams: ModuleType) -> None:
    found = re.findall(r"([\d.]+) bytes per parameter", diagrams.stages())
    assert [float(one) for one in found] == [16, 2 + 2 + 12 / 4, 2 + (2 + 12) / 4, 16 / 4]
