"""Engines whose ranks diverge: the job ends on all ranks in time; one message has ranks, collectives and modules."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import time_limits
from tests.support.environment import WAIT_LIMIT
from tests.support.job import JobResult, run_job

LIMIT = round(time_limits.seconds(2.0), 1)
PROMISE = 15.0  # seconds after the limit in which every rank has ended
JOBS = (("branches", 3), ("fewer_batches", 3), ("fewer_batches", 1), ("eval_on_rank_0", 3), ("wrong_loss_on_one", 3))

Ended = Callable[[str, int], JobResult]


def _run(scenario: str, stage: int) -> tuple[JobResult, float]:
    environment = {WAIT_LIMIT: str(LIMIT)}
    result = run_job(2, "tests/multi/zero/diverging_engines.py", [scenario, stage], timeout=90, env=environment)
    began = min(float(moment) for moment in re.findall(r"begins (\S+)", result.stdout))
    return result, time.time() - began


@pytest.fixture(scope="module")
def ended() -> Iterator[Ended]:
    """``ended(scenario, stage)``: the job's result, once it is known to have ended in time. They run side by side."""
    with ThreadPoolExecutor(3) as executor:
        jobs = {job: executor.submit(_run, *job) for job in JOBS}

        def result_of(scenario: str, stage: int) -> JobResult:
            result, seconds = jobs[scenario, stage].result()
            assert seconds < LIMIT + time_limits.seconds(PROMISE), result.stderr
            assert result.stderr.count("[zeroaccel E]") == 1, result.stderr
            assert sorted(re.findall(r"rank (\d) cleaned up", result.stdout)) == ["0", "1"]
            return result

        yield result_of


def test_ranks_that_take_different_branches(ended: Ended) -> None:
    result = ended("branches", 3)
    assert result.returncodes == (75, 75)
    assert '"reduce towers.sound"' in result.stderr  # where rank 0 is: the gradient that never comes, in backward
    assert "rank 1: waiting for gather" in result.stderr
    assert '"unshard towers.sound"' in result.stderr
    assert "diverging_engines.py" in result.stderr


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_with_one_batch_fewer(ended: Ended, stage: int) -> None:
    result = ended("fewer_batches", stage)
    assert result.returncodes == (75, 75)
    module = "root" if stage == 3 else "towers.sound"
    assert f' {module}"' in result.stderr
    assert "in step 4" in result.stderr
    assert "rank 1: waiting for control" in result.stderr
    assert '"end of epoch"' in result.stderr


def test_an_evaluation_on_rank_0_only(ended: Ended) -> None:
    result = ended("eval_on_rank_0", 3)
    assert result.returncodes == (75, 75)
    assert "rank 0: waiting for gather" in result.stderr
    assert '"unshard root"' in result.stderr
    assert '"reduce towers.sound"' in result.stderr
    assert "if rank == 0" in result.stderr


def test_a_rank_that_raises_is_the_cause(ended: Ended) -> None:
    result = ended("wrong_loss_on_one", 3)
    assert result.returncodes == (75, 2) or result.returncodes == (75, 1)
    assert "rank 1: left with UsageError" in result.stderr
    assert "The cause is the exception on rank 1." in result.stderr
    assert result.stderr.count("Traceback") == 1
