"""Ranks whose sums belong to different tensor-parallel layers: an error long before the limit, and no wrong sum.

The jobs spend their time starting and waiting, so they run side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.support.job import JobResult, run_job, side_by_side
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS

pytestmark = NEEDS_SPLIT_LAYERS

OF_LAYERS = r'waiting for reduce #\d+ all_reduce "sum (first|second).2" \((8|12) x float32, forward\), in step 1'
SAYS = {
    # Gloo would add tensors of one size, and crash the processes if the sizes differ.
    "other_sizes": r"ranks 0-1 have issued different collectives by reduce #\d+\.",
    "no_sums": r'rank [01] \(tp [01]\) waits for .*"(sum first.2|gradient overflow check)" .* while rank [01] ',
}


def _run(scenario: str) -> JobResult:
    return run_job(2, "tests/multi/parallel/parting_layers.py", [scenario], timeout=100)


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[Callable[[str], JobResult]]:
    with side_by_side(request, "scenario", _run) as outcome:
        yield outcome


@pytest.mark.parametrize("scenario", SAYS)
def test_diverging_sums_are_named_before_the_limit(ended: Callable[[str], JobResult], scenario: str) -> None:
    result = ended(scenario)
    assert result.returncodes == (75, 75), result.stderr
    assert result.stderr.count("[zeroaccel E]") == 1, result.stderr
    assert re.search(SAYS[scenario], result.stderr), result.stderr
    assert len(re.findall(OF_LAYERS, result.stderr)) == (2 if scenario == "other_sizes" else 1), result.stderr
    assert "The ranks took different paths" in result.stderr
