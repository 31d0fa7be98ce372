"""The page of models that fit: every row is there, and rows that are estimated again are as on the page."""

from __future__ import annotations

import re

import pytest

from tests.support.environment import ROOT
from tests.support.scripts import load_script

TABLE = load_script("docs/site/model_table.py")
PAGE = (ROOT / "docs" / "models.md").read_text()


def test_the_page_has_every_row_and_the_command_of_a_cell() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| (full|LoRA|QLoRA) \| (\d) \|", PAGE, re.MULTILINE)
    assert rows == [(line.model, line.method, str(line.ranks)) for line in TABLE.lines()]
    command = TABLE.Line("llama-3.1-8b", "full", 2).command(24)
    assert command in re.sub(r" \\\n\s+", " ", PAGE)
    script = (ROOT / "docs" / "models.js").read_text()
    words = command.replace("llama-3.1-8b", "").replace("--ranks 2", "--ranks").replace("24GB", "").split()
    assert [word for word in words if word not in script] == []


@pytest.mark.parametrize(
    ("model", "method", "ranks"),
    [("llama-3.1-8b", "full", 2), pytest.param("qwen3-8b", "QLoRA", 1, marks=pytest.mark.slow)],
)
def test_a_row_is_as_estimated(model: str, method: str, ranks: int) -> None:
    line = TABLE.Line(model, method, ranks)
    assert TABLE.row(line, line.cells()) in PAGE.splitlines(), "run python docs/site/model_table.py"
