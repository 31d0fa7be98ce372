"""The pictures of the pages: up to date, well-formed, readable in both colour schemes, and as in the code."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.support.environment import ROOT
from tests.support.scripts import load_script
from zeroaccel.cli.pages import estimate_page, frame
from zeroaccel.estimate import subject
from zeroaccel.estimate.simulate import simulate


@pytest.fixture(scope="module")
def diagrams() -> ModuleType:
    return load_script("docs/site/diagrams.py")


def test_the_files_are_up_to_date(diagrams: ModuleType) -> None:
    drawn = {**diagrams.DIAGRAMS, **diagrams.MEASURED}
    stale = [name for name, draw in drawn.items() if draw() != (diagrams.FOLDER / f"{name}.svg").read_text()]
    assert stale == [], "run python docs/site/diagrams.py"
    pictures = {**load_script("docs/site/measured.py").PICTURES, **load_script("docs/site/pictures.py").PICTURES}
    assert {path.stem for path in diagrams.FOLDER.iterdir()} == {*drawn, *pictures}


def test_labels_of_the_measured_picture_fit() -> None:
    measured = load_script("docs/site/measured.py")
    found = re.findall(r'<text x="([\d.]+)"[^>]*class="end">([^<]+)', measured.picture("light"))
    assert len(found) > 15
    assert [label for x, label in found if 7.6 * len(label) > float(x)] == []  # the widest letters that browsers draw


def test_pictures_and_pages_of_recorded_runs_are_up_to_date() -> None:
    made = load_script("docs/site/pictures.py")
    stale = [name for name, draw in made.PICTURES.items() if draw() != (made.FOLDER / f"{name}.svg").read_text()]
    stale += [name for name, make in made.PAGES.items() if make() != (made.SHOWN / f"{name}.html").read_text()]
    assert stale == [], "run python docs/site/pictures.py"
    estimate = (made.SHOWN / "estimate.html").read_text()
    assert frame._STYLE in estimate, "run python docs/site/record.py estimate"
    assert estimate_page._SCRIPT in estimate, "run python docs/site/record.py estimate"
    for name in ("demo", "trace"):
        recording = made.recorded(name)
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", recording["date"])
        assert recording["machine"]
        assert recording["command"] in made.PICTURES["demo" if name == "demo" else "timeline"]()


@pytest.mark.slow
def test_the_recorded_memory_is_what_the_estimate_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = load_script("docs/site/record.py")
    monkeypatch.setattr(record, "RECORDED", tmp_path)
    record.memory()
    assert (tmp_path / "memory.json").read_text() == (ROOT / "docs/site/recorded/memory.json").read_text()


def test_the_recorded_memory_has_the_peak_of_the_estimate() -> None:
    record, recording = load_script("docs/site/record.py"), load_script("docs/site/pictures.py").recorded("memory")
    estimated = simulate(subject(record.MODEL), record.WORKLOAD, stage=3)
    assert max(total for _, total, *_ in recording["moments"]) == pytest.approx(estimated.peak.total, rel=1e-3)


def test_every_picture_is_shown_with_a_description_and_has_both_colour_schemes(diagrams: ModuleType) -> None:
    pages = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    for path in diagrams.FOLDER.iterdir():
        said = [
            words
            for page in pages
            for words in re.findall(
                rf'!\[([^\]]+)\]\(diagrams/{path.name}\)|alt="([^"]+)" src="docs/diagrams/measured', page
            )
        ]
        assert said, f"no page shows {path.name}"
        assert all(len(" ".join(words).split()) >= 5 for words in said), path.name
        if not path.stem.startswith("measured"):
            assert "prefers-color-scheme:dark" in path.read_text()


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
