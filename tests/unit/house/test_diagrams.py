"""The diagrams of docs/how_it_works.md: up to date, well-formed, and consistent with the plans of the code."""

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
    stale = [
        name for name, draw in diagrams.DIAGRAMS.items() if draw() != (diagrams.FOLDER / f"{name}.svg").read_text()
    ]
    assert stale == [], "run python docs/site/diagrams.py"
    assert {path.stem for path in diagrams.FOLDER.iterdir()} == set(diagrams.DIAGRAMS)


def test_the_page_shows_each_with_a_description(diagrams: ModuleType) -> None:
    shown = re.findall(r"!\[([^\]]+)\]\(diagrams/(\w+)\.svg\)", (ROOT / "docs" / "how_it_works.md").read_text())
    assert [name for _, name in shown] == list(diagrams.DIAGRAMS)
    for name in diagrams.DIAGRAMS:
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
