"""`tests/interop/scripts`: a row that lacks its script, its launch file or a package is named, not run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

_FOLDER = Path(__file__).resolve().parents[2] / "interop" / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_FOLDER))
    monkeypatch.delitem(sys.modules, "scripts", raising=False)
    import scripts as module

    return module


def test_what_a_row_lacks_is_named(scripts: ModuleType, tmp_path: Path) -> None:
    row = scripts.Script("row", "project/train.py", launch="--config_file {sources}/project/zero2.yaml --num_gpus 2")
    assert scripts.missing(row, tmp_path) == f"{tmp_path}/project/train.py, {tmp_path}/project/zero2.yaml"
    (tmp_path / "project").mkdir()
    for name in ("train.py", "zero2.yaml"):
        (tmp_path / "project" / name).touch()
    assert scripts.missing(row, tmp_path) == ""
    needy = replace(row, needs=("json", "json:dumps", "json:no_such_name", "no_such_package"))
    assert scripts.missing(needy, tmp_path) == "no_such_name of json, package no_such_package"


def test_rows_by_module_need_no_script(scripts: ModuleType, tmp_path: Path) -> None:
    assert scripts.missing(scripts.Script("row", "-m json.tool", launch="--num_gpus 2"), tmp_path) == ""


def test_names_of_rows_are_unique_and_refer_to_rows(scripts: ModuleType) -> None:
    names = [script.name for script in scripts.SCRIPTS]
    assert len(set(names)) == len(names)
    assert {script.after or script.name for script in scripts.SCRIPTS} <= set(names)
    assert {script.plainly or script.name for script in scripts.SCRIPTS} <= set(names)
