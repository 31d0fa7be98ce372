"""Ranks that part: every process of the job ends in time, one message names who is where, and `finally` blocks run.

The jobs spend their time starting and waiting, so they run a few at a time, before the first test looks at its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests import time_limits
from tests.support.job import JobResult, run_job

LIMIT = round(time_limits.seconds(2.0), 1)
PROMISE = 15.0  # seconds after the limit in which every rank has ended
AT_A_TIME = 2


@dataclass(frozen=True)
class Scenario:
    name: str
    ranks: int
    limit: float = LIMIT

    def run(self) -> tuple[JobResult, float]:
        """The job's result, and how many seconds after the ranks had met it had ended."""
        environment = {"ZEROACCEL_COLLECTIVE_TIMEOUT": f"{self.limit:g}"}
        result = run_job(self.ranks, "tests/multi/comm/hanging_ranks.py", [self.name], timeout=90, env=environment)
        began = min(float(moment) for moment in re.findall(r"begins (\S+)", result.stdout))
        return result, time.time() - began


NEVER = 500.0  # a limit that has no part in how the scenario ends
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("branches", 2, NEVER),
        Scenario("sizes", 2, NEVER),
        Scenario("kinds", 3, NEVER),
        Scenario("fewer_batches", 3, NEVER),
        Scenario("fewer_batches_on_first", 2, NEVER),
        Scenario("exception", 3, NEVER),
        Scenario("killed", 2, NEVER),
        Scenario("killed_first", 2, NEVER),
        Scenario("sleeping", 4),
        Scenario("foreign_barrier", 2),
        Scenario("broadcast", 3),
        Scenario("device", 2),
        Scenario("two_hops", 2, NEVER),
        Scenario("stubborn", 2, NEVER),
        Scenario("orderly", 3),
        Scenario("first_leaves_early", 2),
    )
}

Ended = Callable[[str], JobResult]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[Ended]:
    """``ended(scenario)`` is its result, once it is known that it ended in time."""
    wanted = {name for item in request.session.items for name in SCENARIOS if f"[{name}]" in item.name}
    with ThreadPoolExecutor(AT_A_TIME) as executor:
        jobs: dict[str, Future[tuple[JobResult, float]]] = {
            name: executor.submit(SCENARIOS[name].run) for name in SCENARIOS if name in wanted
        }

        def result_of(name: str) -> JobResult:
            result, seconds = jobs[name].result()
            limit = min(
                SCENARIOS[name].limit, time_limits.seconds(5.0)
            )  # what is certain earlier is not kept waiting for the limit
            assert seconds < limit + time_limits.seconds(PROMISE), result.stderr
            return result

        yield result_of


def _one_message(result: JobResult) -> str:
    """What the job printed, provided that it is one message and nothing else."""
    assert result.stderr.count("[zeroaccel E]") == 1, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert result.stderr.isascii()
    return result.stderr


def _cleaned_up(result: JobResult) -> list[int]:
    return sorted(int(rank) for rank in re.findall(r"rank (\d) cleaned up", result.stdout))


ends = pytest.mark.parametrize  # the name is what the fixture finds the scenarios of this session by


@ends("name", ["branches"])
def test_ranks_in_different_branches(ended: Ended, name: str) -> None:
    result = ended(name)
    message = _one_message(result)
    assert 'rank 0: waiting for gather #4 all_gather "unshard vision_tower" (2000 x float32, forward)' in message
    assert 'rank 1: waiting for gather #4 all_gather "unshard layers.1" (2000 x float32, forward)' in message
    assert "First difference: gather #4" in message
    assert "hanging_ranks.py" in message
    assert result.returncodes == (75, 75)
    assert _cleaned_up(result) == [0, 1]


@ends("name", ["two_hops"])
def test_ranks_in_different_reductions_of_two_hops(ended: Ended, name: str) -> None:
    result = ended(name)
    message = _one_message(result)
    assert (
        'rank 0: waiting for reduce #2 reduce_scatter int4 "reduce vision_tower" (2000 x float32, backward)' in message
    )
    assert 'rank 1: waiting for reduce #2 reduce_scatter int4 "reduce layers.0" (2000 x float32, backward)' in message
    assert result.returncodes == (75, 75)
    assert _cleaned_up(result) == [0, 1]


@ends("name", ["sizes"])
def test_ranks_with_different_sizes(ended: Ended, name: str) -> None:
    result = ended(name)
    assert "of 2000 x float32 on rank 0, all_gather" in _one_message(result)
    assert "of 2002 x float32 on rank 1" in _one_message(result)
    assert result.returncodes == (75, 75)


@ends("name", ["kinds"])
def test_a_save_on_one_rank_only(ended: Ended, name: str) -> None:
    result = ended(name)
    message = _one_message(result)
    assert 'rank 0: waiting for control #1 barrier "save checkpoint"' in message
    assert (
        'ranks 1-2: waiting for gather #3 all_gather "unshard layers.0" (3000 x float32, forward), in step 1' in message
    )
    assert "if rank == 0" in message
    assert result.returncodes == (75, 75, 75)
    assert _cleaned_up(result) == [0, 1, 2]


@ends("name", ["fewer_batches"])
def test_a_rank_with_fewer_batches(ended: Ended, name: str) -> None:
    result = ended(name)
    message = _one_message(result)
    assert 'rank 2: finished and left, in step 2, after reduce #6 reduce_scatter "reduce layers.0"' in message
    assert (
        'ranks 0-1: waiting for gather #7 all_gather "unshard layers.0" (3000 x float32, forward), in step 3' in message
    )
    assert "same number of steps; rank 2 had fewer" in message
    assert result.returncodes == (75, 75, 0)


@ends("name", ["fewer_batches_on_first"])
def test_the_rank_that_keeps_the_store_has_fewer_batches(ended: Ended, name: str) -> None:
    result = ended(name)
    message = _one_message(result)
    assert "rank 0: finished and left, in step 2, after reduce #6" in message
    assert "rank 1: waiting for gather #7" in message
    assert result.returncodes == (0, 75)


@ends("name", ["exception"])
def test_a_rank_that_raises(ended: Ended, name: str) -> None:
    result = ended(name)
    assert result.stderr.count("[zeroaccel E]") == 1
    assert "rank 1: left with ValueError: batch 7 has no labels, in step 0" in result.stderr
    assert "The cause is the exception on rank 1." in result.stderr
    assert result.stderr.count("Traceback") == 1  # its own
    assert result.returncodes == (75, 1, 75)
    assert _cleaned_up(result) == [0, 1, 2]


@ends("name", ["killed"])
def test_a_rank_that_is_killed(ended: Ended, name: str) -> None:
    result = ended(name)
    message = _one_message(result)
    assert "rank 1: no answer" in message
    assert "rank 0: waiting for gather #3" in message
    assert result.returncodes == (75, -9)


@ends("name", ["killed_first"])
def test_the_rank_that_keeps_the_store_is_killed(ended: Ended, name: str) -> None:
    # No store is left to ask, so each survivor reports by itself what it knows.
    result = ended(name)
    assert "rank 1 failed in gather #3" in result.stderr
    assert "rank 0: no answer" in result.stderr
    assert result.returncodes == (-9, 75)
    assert _cleaned_up(result) == [1]


@ends("name", ["sleeping"])
def test_a_rank_that_sleeps(ended: Ended, name: str) -> None:
    result = ended(name)
    message = _one_message(result)
    assert re.search(rf"rank \d has waited [\d.]+ s \(the limit is {LIMIT:g} s\) for gather #3", message)
    assert re.search(r"rank 1: in no collective, in step 0; .*hanging_ranks.py:\d+ in evaluate", message)
    assert 'ranks 0, 2-3: waiting for gather #3 all_gather "unshard layers.0"' in message
    assert result.returncodes == (75, 75, 75, 75)
    assert _cleaned_up(result) == [0, 2, 3]


@ends("name", ["foreign_barrier"])
def test_a_rank_in_a_collective_of_the_users(ended: Ended, name: str) -> None:
    result = ended(name)
    assert re.search(r"rank 1: in no collective.* in foreign_barrier, inside", _one_message(result))
    assert result.returncodes == (75, 75)


@ends("name", ["broadcast"])
def test_ranks_that_wait_for_a_broadcast(ended: Ended, name: str) -> None:
    result = ended(name)
    message = _one_message(result)
    assert 'ranks 1-2: waiting for gather #3 broadcast from 0 "initial weights"' in message
    assert "in broadcast" in message
    assert result.returncodes == (75, 75, 75)


@ends("name", ["device"])
def test_a_collective_that_does_not_block_the_host(ended: Ended, name: str) -> None:
    result = ended(name)
    message = _one_message(result)
    assert re.search(rf"rank 0 has waited [\d.]+ s \(the limit is {LIMIT:g} s\) for gather #3", message)
    assert 'rank 0: waiting for gather #3 all_gather "unshard layers.0" (1000 x bfloat16, backward)' in message
    assert "rank 1: in no collective" in message
    assert result.returncodes == (75, 75)


@ends("name", ["stubborn"])
def test_a_rank_that_catches_the_error_and_stays(ended: Ended, name: str) -> None:
    result = ended(name)
    assert "First difference" in _one_message(result)
    assert result.stdout.count("goes on") == 2
    assert _cleaned_up(result) == []
    assert result.returncodes == (75, 75)


@ends("name", ["orderly"])
def test_a_job_without_trouble_says_nothing(ended: Ended, name: str) -> None:
    result = ended(name)
    assert result.stderr == ""
    assert result.returncodes == (0, 0, 0)


@ends("name", ["first_leaves_early"])
def test_the_store_may_leave_before_a_rank_that_needs_it_no_more(ended: Ended, name: str) -> None:
    result = ended(name)
    assert result.stderr == ""
    assert result.returncodes == (0, 0)
