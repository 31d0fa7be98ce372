"""The building blocks of error messages."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from zeroaccel.checkpoint.weights import plan_files
from zeroaccel.config import load_config
from zeroaccel.errors import ConfigError, compose, cut_traceback, listed


@pytest.mark.parametrize(
    ("names", "expected"), [(["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")]
)
def test_long_lists_are_cut(names: list[str], expected: str) -> None:
    assert listed(names, most=2) == expected


def test_the_address_comes_first_and_the_remedy_last() -> None:
    assert (
        compose("ds.json:1:2: a", expected="1", got=None, fix="write 1")
        == "ds.json:1:2: a: expected 1, got None; write 1"
    )
    assert compose("a") == "a"


def test_the_traceback_of_a_mistake_ends_at_the_line_that_made_the_call() -> None:
    with pytest.raises(ConfigError) as mistake:
        load_config({"zero_optimization": {"stage": 4}})
    assert len(mistake.traceback) > 1
    cut_traceback(mistake.value)
    last = traceback.extract_tb(mistake.value.__traceback__)[-1]
    assert last.line == 'load_config({"zero_optimization": {"stage": 4}})'
    assert mistake.value.__suppress_context__


def test_other_tracebacks_stay_whole() -> None:
    with pytest.raises(KeyError) as failure:
        plan_files([], 1, ".unknown")
    cut_traceback(failure.value)
    frames = traceback.extract_tb(failure.value.__traceback__)
    assert Path(frames[-1].filename).name == "zero_to_fp32.py"


def test_the_import_of_the_errors_leaves_the_interpreter_alone() -> None:
    code = "import sys; before = sys.excepthook; import zeroaccel.errors; assert sys.excepthook is before"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
