"""The examples in docstrings run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import time_limits

ROOT = Path(__file__).resolve().parents[3]
LEAST = 30  # examples in the package
LIMIT_SECONDS = 120


@pytest.mark.timeout(time_limits.seconds(LIMIT_SECONDS + 60))
def test_every_example_gives_what_it_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.house.docstring_examples"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=time_limits.seconds(LIMIT_SECONDS),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    passed = re.findall(r"^passed (\S+)$", done.stdout, re.MULTILINE)
    assert len(passed) >= LEAST, passed
    assert "zeroaccel.accelerate.accelerator.Accelerator.prepare" in passed
