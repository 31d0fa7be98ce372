"""The estimate of the demo model against the bytes of torch's allocator in a real run on two ranks."""

from __future__ import annotations

import json

import pytest

from tests.support.environment import ROOT
from tests.support.job import run_job


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation"),
    [
        (0, "bf16", 2),
        pytest.param(1, "fp32", 1, marks=pytest.mark.slow),
        pytest.param(2, "bf16", 2, marks=pytest.mark.slow),
        (3, "bf16", 1),
    ],
)
def test_the_peak_is_as_estimated(stage: int, precision: str, accumulation: int) -> None:
    plan = ["--stage", stage, "--precision", precision, "--accumulation", accumulation]
    result = run_job(2, ROOT / "benchmarks" / "estimate_peak.py", plan)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["measured"] == pytest.approx(found["estimated"], rel=0.001)
