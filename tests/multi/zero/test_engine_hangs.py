"""Engines whose ranks diverge: the job ends on all ranks in time; one message gives ranks, collectives and modules."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest

from tests import time_limits
from tests.support.environment import WAIT_LIMIT
from tests.support.job import JobResult, run_job, side_by_side

LIMIT = round(time_limits.seconds(2.0), 1)
PROMISE = 15.0  # seconds after the limit within which every rank has ended

Ended = Callable[[tuple[str, int]], JobResult]


def _run(job: tuple[str, int]) -> tuple[JobResult, float]:
    environment = {WAIT_LIMIT: str(LIMIT)}
    result = run_job(2, "tests/multi/zero/diverging_engines.py", job, timeout=90, env=environment)
    began = min(float(moment) for moment in re.findall(r"begins (\S+)", result.stdout))
    return result, time.time() - began


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[Ended]:
    """Fixture ``ended((scenario, stage))``: the job's result, after a check that it ended in time."""
    with side_by_side(request, "job", _run, 3) as outcome:

        def result_of(job: tuple[str, int]) -> JobResult:
            result, seconds = outcome(job)
            assert seconds < LIMIT + time_limits.seconds(PROMISE), result.stderr
            assert result.stderr.count("[zeroaccel E]") == 1, result.stderr
            assert sorted(re.findall(r"rank (\d) cleaned up", result.stdout)) == ["0", "1"]
            return result

        yield result_of


# Parts of a job's one message, in addition to the ranks that it names.
PARTED: dict[tuple[str, int], tuple[str, ...]] = {
    ("branches", 3): (
        '"reduce towers.sound"',  # rank 0 waits in backward for a missing gradient
        "rank 1: waiting for gather",
        '"unshard towers.sound"',
        "diverging_engines.py",
    ),
    ("fewer_batches", 1): (' towers.sound"', "in step 4", "rank 1: waiting for control", '"end of epoch"'),
    ("fewer_batches", 3): (' root"', "in step 4", "rank 1: waiting for control", '"end of epoch"'),
    ("eval_on_rank_0", 3): (
        "rank 0: waiting for gather",
        '"unshard root"',
        '"reduce towers.sound"',
        "if rank == 0",
    ),
}


@pytest.mark.parametrize("job", PARTED, ids=lambda job: f"{job[0]}-{job[1]}")
def test_diverging_ranks_end_with_the_place_of_each(ended: Ended, job: tuple[str, int]) -> None:
    result = ended(job)
    assert result.returncodes == (75, 75)
    assert [words for words in PARTED[job] if words not in result.stderr] == [], result.stderr


@pytest.mark.parametrize("job", [("wrong_loss_on_one", 3)], ids=lambda job: f"{job[0]}-{job[1]}")
def test_a_rank_that_raises_is_the_cause(ended: Ended, job: tuple[str, int]) -> None:
    result = ended(job)
    assert result.returncodes in ((75, 2), (75, 1))
    assert "rank 1: left with UsageError" in result.stderr
    assert "The cause is the exception on rank 1." in result.stderr
    assert result.stderr.count("Traceback") == 1
