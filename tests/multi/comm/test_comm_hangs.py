"""Diverging ranks: every process of the job ends in time, one message names each rank's position, `finally` runs.

The jobs spend their time starting and waiting, so several run at once, before the first test checks its result.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests import time_limits
from tests.support.job import JobResult, run_job, side_by_side

LIMIT = round(time_limits.seconds(2.0), 1)
NEVER = 500.0  # a limit that does not affect how the scenario ends
PROMISE = 15.0  # seconds after the limit within which every rank has ended


@dataclass(frozen=True)
class Scenario:
    """Behaviour of the ranks (a function of `hanging_ranks.py`) and the expected end of their job.

    Attributes:
        says: patterns of the one message.
        cleaned: ranks whose `finally` blocks ran; None if it does not matter.
        tracebacks: number of tracebacks in stderr beside the message; None if each rank reports by itself.
    """

    name: str
    ranks: int
    codes: tuple[int, ...]
    says: tuple[str, ...] = ()
    cleaned: tuple[int, ...] | None = None
    limit: float = NEVER
    tracebacks: int | None = 0

    def run(self) -> tuple[JobResult, float]:
        """Runs the job; returns its result, and the seconds from the ranks' rendezvous to its end."""
        environment = {"ZEROACCEL_COLLECTIVE_TIMEOUT": f"{self.limit:g}"}
        result = run_job(self.ranks, "tests/multi/comm/hanging_ranks.py", [self.name], timeout=90, env=environment)
        began = min(float(moment) for moment in re.findall(r"begins (\S+)", result.stdout))
        return result, time.time() - began


GATHER = r'gather #{} all_gather "unshard {}" \({} x float32, forward\)'
WAITED = rf"rank \d has waited [\d.]+ s \(the limit is {LIMIT:g} s\) for gather #3"
PARTED = {
    "ranks in different branches": Scenario(
        "branches",
        2,
        (75, 75),
        (
            f"rank 0: waiting for {GATHER.format(4, 'vision_tower', 2000)}",
            f"rank 1: waiting for {GATHER.format(4, 'layers.1', 2000)}",
            "First difference: gather #4",
            r"hanging_ranks\.py",
        ),
        cleaned=(0, 1),
    ),
    "different reductions of two hops": Scenario(
        "two_hops",
        2,
        (75, 75),
        tuple(
            rf'rank {rank}: waiting for reduce #2 reduce_scatter int4 "reduce {name}" \(2000 x float32, backward\)'
            for rank, name in enumerate(("vision_tower", "layers.0"))
        ),
        cleaned=(0, 1),
    ),
    "different sizes": Scenario(
        "sizes", 2, (75, 75), ("of 2000 x float32 on rank 0, all_gather", "of 2002 x float32 on rank 1")
    ),
    "a save on one rank only": Scenario(
        "kinds",
        3,
        (75, 75, 75),
        (
            'rank 0: waiting for control #1 barrier "save checkpoint"',
            f"ranks 1-2: waiting for {GATHER.format(3, 'layers.0', 3000)}, in step 1",
            "if rank == 0",
        ),
        cleaned=(0, 1, 2),
    ),
    "a rank with fewer batches": Scenario(
        "fewer_batches",
        3,
        (75, 75, 0),
        (
            'rank 2: finished and left, in step 2, after reduce #6 reduce_scatter "reduce layers.0"',
            f"ranks 0-1: waiting for {GATHER.format(7, 'layers.0', 3000)}, in step 3",
            "same number of steps; rank 2 had fewer",
        ),
    ),
    "fewer batches on the rank that has the store": Scenario(
        "fewer_batches_on_first",
        2,
        (0, 75),
        ("rank 0: finished and left, in step 2, after reduce #6", "rank 1: waiting for gather #7"),
    ),
    "a rank that raises": Scenario(
        "exception",
        3,
        (75, 1, 75),
        (
            "rank 1: left with ValueError: batch 7 has no labels, in step 0",
            r"The cause is the exception on rank 1\.",
        ),
        cleaned=(0, 1, 2),
        tracebacks=1,  # the rank's own traceback
    ),
    "a rank that raises in GatheredParameters while others run a forward": Scenario(
        "gathered_block",
        2,
        (1, 75),
        (
            r"\[zeroaccel E\] rank 0 raised RuntimeError: The size of tensor .*, at .*hanging_ranks\.py:\d+ in gather",
            r"The other ranks could not be told: rank 0 waits for .*GatheredParameters\(0\.weight",
            r"The cause is the exception on rank 0\.",
        ),
        cleaned=(0, 1),
        tracebacks=1,  # the rank's own traceback
    ),
    "a rank whose exception no other rank agrees about": Scenario(
        "agreement",
        2,
        (1, 75),
        (
            r"\[zeroaccel E\] rank 0 raised KeyError: 'batch 7 .*', at .*hanging_ranks\.py:\d+ in agreement\.",
            r"The cause is the exception on rank 0\.",
        ),
        cleaned=(0, 1),
        tracebacks=None,  # of the report and of the exception
    ),
    "a rank that is killed": Scenario("killed", 2, (75, -9), ("rank 1: no answer", "rank 0: waiting for gather #3")),
    "the rank that has the store is killed": Scenario(
        # Without the store, each survivor reports only its own state.
        "killed_first",
        2,
        (-9, 75),
        ("rank 1 failed in gather #3", "rank 0: no answer"),
        cleaned=(1,),
        tracebacks=None,
    ),
    "a rank that sleeps": Scenario(
        "sleeping",
        4,
        (75, 75, 75, 75),
        (
            WAITED,
            r"rank 1: in no collective, in step 0; .*hanging_ranks.py:\d+ in evaluate",
            'ranks 0, 2-3: waiting for gather #3 all_gather "unshard layers.0"',
        ),
        cleaned=(0, 2, 3),
        limit=LIMIT,
    ),
    "a rank in a collective of the users": Scenario(
        "foreign_barrier", 2, (75, 75), (r"rank 1: in no collective.* in foreign_barrier, inside",), limit=LIMIT
    ),
    "ranks that wait for a broadcast": Scenario(
        "broadcast",
        3,
        (75, 75, 75),
        ('ranks 1-2: waiting for gather #3 broadcast from 0 "initial weights"', "in broadcast"),
        limit=LIMIT,
    ),
    "a collective that does not block the host": Scenario(
        "device",
        2,
        (75, 75),
        (
            WAITED,
            r'rank 0: waiting for gather #3 all_gather "unshard layers.0" \(1000 x bfloat16, backward\)',
            "rank 1: in no collective",
        ),
        limit=LIMIT,
    ),
    "a rank that catches the error and stays": Scenario("stubborn", 2, (75, 75), ("First difference",), cleaned=()),
    "a job without trouble": Scenario("orderly", 3, (0, 0, 0)),
    "a rank without need of the store outlives it": Scenario("first_leaves_early", 2, (0, 0)),
}
DEEPER = (
    "ranks in different branches",
    "different reductions of two hops",
    "a rank whose exception no other rank agrees about",
)  # others end in the same way

Ended = Callable[[Scenario], JobResult]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[Ended]:
    """Fixture ``ended(scenario)``: returns the result after checking that the job ended in time."""
    with side_by_side(request, "scenario", Scenario.run) as outcome:

        def result_of(scenario: Scenario) -> JobResult:
            result, seconds = outcome(scenario)
            # A cause that is certain earlier is reported before the limit.
            assert seconds < min(scenario.limit, time_limits.seconds(5.0)) + time_limits.seconds(PROMISE), result.stderr
            return result

        yield result_of


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=title, marks=pytest.mark.slow if title in DEEPER else ())
        for title, scenario in PARTED.items()
    ],
)
def test_every_process_ends_in_time_and_one_message_names_who_is_where(ended: Ended, scenario: Scenario) -> None:
    result = ended(scenario)
    if not scenario.says:
        assert result.stderr == ""
    elif scenario.tracebacks is not None:
        seen = [result.stderr.count(word) for word in ("[zeroaccel E]", "Traceback")]
        assert seen == [1, scenario.tracebacks], result.stderr
        assert scenario.tracebacks or result.stderr.isascii()
    assert [says for says in scenario.says if not re.search(says, result.stderr)] == [], result.stderr
    assert result.returncodes == scenario.codes
    if scenario.cleaned is not None:
        cleaned = sorted(int(rank) for rank in re.findall(r"rank (\d) cleaned up", result.stdout))
        assert tuple(cleaned) == scenario.cleaned
    assert result.stdout.count("goes on") == (2 if scenario.name == "stubborn" else 0)
