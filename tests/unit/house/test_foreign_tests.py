"""`tests/interop/suites`: the outcomes of other projects' tests in its tables; their processes have the facade."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

_FOLDER = Path(__file__).resolve().parents[2] / "interop" / "suites"

_FOREIGN = """
import subprocess
import sys
import unittest


class Told(unittest.TestCase):
    def test_a_child_has_the_facade(self):
        code = "import deepspeed; print(deepspeed.__version__)"
        version = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        assert "zeroaccel" in version

    def test_of_another_opinion(self):
        assert 1 == 2, "one is not two"

    def test_that_fails(self):
        raise RuntimeError("something else")

    @unittest.skip("no such device")
    def test_that_asks_for_a_device(self):
        pass
"""


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_FOLDER))
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    import harness as module

    return module


def test_outcomes_are_counted_by_file_and_listed_with_their_reasons(harness: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_told.py").write_text(_FOREIGN)
    environment = harness.facade_environment({})
    found = harness.run_files(["test_told.py"], source=tmp_path, environment=environment, limit_seconds=120)
    causes = [harness.Cause("we hold that they are", test="opinion", report="one is not two", status=harness.DIFFERS)]
    outcomes = harness.explained(found, causes)
    assert {outcome.test: (outcome.status, outcome.reason) for outcome in outcomes} == {
        "Told::test_a_child_has_the_facade": ("passed", ""),
        "Told::test_of_another_opinion": ("differs by decision", "we hold that they are"),
        "Told::test_that_fails": ("failed", "RuntimeError: something else"),
        "Told::test_that_asks_for_a_device": ("skipped by itself", "no such device"),
    }
    text = harness.markdown("Told", "a command", outcomes)
    assert "| test_told.py | 1 | 1 | 1 | 1 | 0 |" in text
    assert "| `Told::test_that_fails` | failed | RuntimeError: something else |" in text
    assert "a_child_has_the_facade" not in text


def test_a_file_that_cannot_be_read_counts_as_failed(harness: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("def test(:\n")
    (outcome,) = harness.run_files(["test_broken.py"], source=tmp_path, environment=os.environ, limit_seconds=120)
    assert outcome.status == harness.FAILED
    assert "SyntaxError" in outcome.text


def test_a_cause_does_not_apply_to_a_test_that_passed(harness: ModuleType) -> None:
    passed = harness.Outcome("a.py", "test", harness.PASSED)
    assert harness.explained([passed], [harness.Cause("it cannot")]) == [passed]


_SCRIPTS = Path(__file__).resolve().parents[2] / "interop" / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    monkeypatch.delitem(sys.modules, "scripts", raising=False)
    import scripts as module

    return module


def test_missing_requirements_of_a_row_are_named(scripts: ModuleType, tmp_path: Path) -> None:
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
