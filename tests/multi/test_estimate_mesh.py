"""The estimate of one rank of a mesh against the bytes of a real run: at the peak, and sent along each axis."""

from __future__ import annotations

import json

import pytest

from tests.multi.environment import ROOT
from tests.multi.job import run_job

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (["--tp", 2], 0.06),  # torch's DTensors hold on to sums a little longer than the estimate does
        (["--pp", 2, "--accumulation", 4], 0.04),
        pytest.param(["--sp", 2, "--stage", 3], 0.01, marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_a_mesh_is_as_estimated(arguments: list[object], difference: float) -> None:
    result = run_job(2, ROOT / "benchmarks" / "estimate_mesh.py", arguments)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    estimated, measured = found["estimated"], found["measured"]
    assert estimated["peak"] == pytest.approx(measured["peak"], rel=difference)
    # Exact, but for the positions that ranks of one sequence bring together.
    assert estimated["sent"] == pytest.approx(measured["sent"], rel=0.002 if "--sp" in arguments else 0)
