"""The interpreter's work per unit does not grow with the world: counted, on torch's fake process group.

On gloo a collective is one message per peer, which is the transport's nature and not counted here; on NCCL, as in this
test, it is one call.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.multi.environment import ROOT
from tests.multi.job import run_command

CALLS_PER_UNIT = 1000  # about 700 measured at stage 3, torch's own included


@pytest.mark.parametrize("stage", [1, 3])
def test_calls_per_step_are_the_same_at_1024_ranks(stage: int) -> None:

    result = run_command([sys.executable, ROOT / "tests" / "multi" / "counting_calls.py", stage], timeout=100)
    assert result.returncode == 0, result.stderr
    small, large = (json.loads(line) for line in result.stdout.splitlines())
    assert (small["world_size"], large["world_size"]) == (8, 1024)
    assert large["shard_numel"] < small["shard_numel"]
    names = small["by_name"].keys() | large["by_name"].keys()
    grown = {n: (small["by_name"].get(n), large["by_name"].get(n)) for n in names}
    assert {n: pair for n, pair in grown.items() if pair[0] != pair[1]} == {}
    assert large["calls"] / large["units"] < CALLS_PER_UNIT
