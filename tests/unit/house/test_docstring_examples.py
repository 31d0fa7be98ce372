"""The examples in docstrings run and give the documented results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import time_limits
from tests.support.job import run_command

LEAST = 30  # examples in the package
LIMIT_SECONDS = 120


@pytest.mark.timeout(time_limits.seconds(LIMIT_SECONDS + 60))
def test_every_example_gives_the_documented_result(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.unit.house.docstring_examples"]
    done = run_command(words, LIMIT_SECONDS, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    passed = re.findall(r"^passed (\S+)$", done.stdout, re.MULTILINE)
    assert len(passed) >= LEAST, passed
    assert "zeroaccel.accelerate.accelerator.Accelerator.prepare" in passed
