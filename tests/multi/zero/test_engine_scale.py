"""The interpreter's work per unit does not grow with the world size: counted on torch's fake process group.

On gloo a collective sends one message per peer, which is not counted here; on NCCL, as in this test, it is one call.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.support.environment import ROOT
from tests.support.job import run_command

STAGES = (1, 3)
CALLS_PER_UNIT = 1070  # 1,025 counted at stage 3, including torch's own and the names for torch's profiler
CALLS_PER_PARAMETER = 23  # 21 counted per additional parameter of a unit; two are the weak reference to the engine


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    script = ROOT / "tests" / "multi" / "zero" / "counting_calls.py"
    result = run_command([sys.executable, script, *STAGES], timeout=100)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("stage", STAGES)
def test_calls_per_step_are_the_same_at_1024_ranks(measured: list[dict[str, Any]], stage: int) -> None:
    small, large = (one for one in measured if (one["stage"], one["parameters"]) == (stage, 2))
    assert (small["world_size"], large["world_size"]) == (8, 1024)
    assert large["shard_numel"] < small["shard_numel"]
    names = small["by_name"].keys() | large["by_name"].keys()
    grown = {name: (small["by_name"].get(name), large["by_name"].get(name)) for name in names}
    assert {name: counts for name, counts in grown.items() if counts[0] != counts[1]} == {}
    assert large["calls"] / large["units"] < CALLS_PER_UNIT


def test_a_further_parameter_of_a_unit_takes_few_calls(measured: list[dict[str, Any]]) -> None:
    few, many = (one for one in measured if (one["stage"], one["world_size"]) == (3, 8))
    added = many["units"] * (many["parameters"] - few["parameters"])
    assert (many["calls"] - few["calls"]) / added < CALLS_PER_PARAMETER
    # One call copies all gradients of a unit.
    assert many["by_name"]["_VariableFunctionsClass._foreach_copy_"] == many["units"]
