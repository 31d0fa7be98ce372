"""Diverging ranks of a mesh: tensor-parallel sums and pipeline messages are monitored; errors give ranks and places.

The jobs spend their time starting and waiting, so they run side by side.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest

from tests import time_limits
from tests.support.environment import WAIT_LIMIT
from tests.support.job import JobResult, run_job, side_by_side
from tests.support.mesh_training import NEEDS_STAGES

LIMIT = round(time_limits.seconds(2.0), 1)
PROMISE = 15.0  # seconds after the limit within which every rank has ended
JOBS = {
    "layer_sleeps": (2, LIMIT),
    "layer_fails": (2, 500.0),
    "stage_sleeps": (4, LIMIT),
    "stage_fails": (2, 500.0),
}  # number of ranks, limit

Ended = Callable[[str], JobResult]


def _run(scenario: str) -> tuple[JobResult, float]:
    ranks, limit = JOBS[scenario]
    environment = {WAIT_LIMIT: f"{limit:g}"}
    result = run_job(ranks, "tests/multi/parallel/diverging_meshes.py", [scenario], timeout=90, env=environment)
    began = min(float(moment) for moment in re.findall(r"begins (\S+)", result.stdout))
    return result, time.time() - began


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[Ended]:
    """Fixture ``ended(scenario)``: the job's result, after a check that it ended in time, with one message."""
    with side_by_side(request, "scenario", _run) as outcome:

        def result_of(scenario: str) -> JobResult:
            result, seconds = outcome(scenario)
            assert seconds < LIMIT + time_limits.seconds(PROMISE), result.stderr
            assert result.stderr.count("[zeroaccel E]") == 1, result.stderr
            return result

        yield result_of


@pytest.mark.parametrize("scenario", ["layer_sleeps"])
def test_a_rank_that_sleeps_before_the_sum_of_a_layer(ended: Ended, scenario: str) -> None:
    result = ended(scenario)
    assert result.returncodes == (75, 75)
    call = r'for reduce #\d+ all_reduce "sum 2" \(16 x float32, forward\)'
    assert re.search(rf"rank 0 \(tp 0\) has waited [\d.]+ s \(the limit is {LIMIT:g} s\) {call}", result.stderr)
    assert re.search(r"rank 1 \(tp 1\): in no collective, in step 1; .*meshes.py:\d+ in sleep", result.stderr)
    assert "Every rank must do the work that keeps rank 1 (tp 1) busy" in result.stderr


@pytest.mark.parametrize("scenario", ["layer_fails"])
def test_a_rank_that_fails_before_the_sum_of_a_layer(ended: Ended, scenario: str) -> None:
    result = ended(scenario)
    assert result.returncodes == (75, 1)
    # Long before the limit: the sums of a layer need all its ranks.
    assert re.search(
        r"rank 1 \(tp 1\) left the job while rank 0 \(tp 0\) waits for reduce #\d+ all_reduce", result.stderr
    )
    assert "rank 1 (tp 1): left with ValueError: a layer that cannot be, in step 1" in result.stderr
    assert "The cause is the exception on rank 1 (tp 1)." in result.stderr
    assert result.stderr.count("Traceback") == 1  # the rank's own traceback


@pytest.mark.parametrize("scenario", ["stage_sleeps"])
def test_a_rank_that_sleeps_in_a_stage(ended: Ended, scenario: str) -> None:
    result = ended(scenario)
    # The connections close while messages of the schedule are in flight, and no process may crash.
    assert result.returncodes == (75, 75, 75, 75)
    asleep = r"in no collective, in step 1, in the forward of micro-batch 1 on stage 1; .* in sleep"
    assert re.search(rf"rank 3 \(pp 1, dp_shard 1\): {asleep}", result.stderr)
    awaited = r'waiting for control #\d+ receive "gradient of micro-batch 1 from stage 1, after'
    assert re.search(rf"rank 1 \(pp 0, dp_shard 1\): {awaited}", result.stderr)
    assert "Every rank must do the work that keeps rank 3 (pp 1, dp_shard 1) busy" in result.stderr


@NEEDS_STAGES
@pytest.mark.parametrize("scenario", ["stage_fails"])
def test_a_rank_that_leaves_a_pipeline_is_named_with_its_stage(ended: Ended, scenario: str) -> None:
    result = ended(scenario)
    assert result.returncodes[0] == 75
    assert "rank 1 (pp 1): left with ValueError: a layer that cannot be, in step 1" in result.stderr
    assert "in step 1, in the forward of micro-batch 2 on stage 1" in result.stderr
    assert "rank 0 (pp 0): waiting for control" in result.stderr
    assert 'receive "gradient of micro-batch ' in result.stderr
    assert "The cause is the exception on rank 1 (pp 1)." in result.stderr
