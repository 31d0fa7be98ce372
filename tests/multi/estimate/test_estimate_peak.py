"""The estimates for small models against the bytes of torch's allocator in real runs on two ranks."""

from __future__ import annotations

import json
from importlib.util import find_spec

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "base"), [("llama", "nf4"), ("llama", "bnb_nf4_double"), ("mixtral", "nf4"), ("mixtral", "bnb_nf4")]
)
def test_the_peak_of_adapters_on_frozen_codes_is_as_estimated(model: str, base: str) -> None:
    if find_spec("peft") is None or (base.startswith("bnb") and find_spec("bitsandbytes") is None):
        pytest.skip("needs peft, and for its codes bitsandbytes")
    plan = ["--stage", 3, "--model", model, "--base", base]
    result = run_job(2, ROOT / "benchmarks" / "estimate_peak.py", plan)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["measured"] == pytest.approx(found["estimated"], rel=0.05)
