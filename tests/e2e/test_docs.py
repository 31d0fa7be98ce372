"""Runs every Python example in docs/ unchanged, each page from top to bottom; it prints the text after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.environment import ROOT
from tests.support.job import run_job

PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if "```python" in page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)))
    result = run_job(1, script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for printed in re.findall(r"```python\n[^`]*```\n\n```text\n(.*?)```", page.read_text(), flags=re.DOTALL):
        assert printed in result.stdout
