"""The text of a hang report for every kind of desynchronization."""

from __future__ import annotations

from contextlib import suppress

import pytest

from zeroaccel.comm.hangs.flight_recorder import Call, Kind
from zeroaccel.comm.hangs.hang_report import (
    Alarm,
    ProcessStatus,
    RankNames,
    RankState,
    compose,
    first_difference,
    rank_list,
)
from zeroaccel.config.parallel import ParallelConfig

ALARM = Alarm(rank=0, headline="rank 0 has waited 3.0 s", timed_out=True)


def _call(seq: int, label: str, kind: Kind = "gather", numel: int = 8) -> Call:
    return Call(kind, seq, "all_gather", label, numel, "float32", "forward")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([2, 0], "ranks 0, 2"), ([9, 0, 1, 2, 4, 5], "ranks 0-2, 4-5, 9")],
)
def test_ranks_are_listed_in_spans(ranks: list[int], text: str) -> None:
    assert rank_list(ranks) == text


def test_a_state_survives_the_wire() -> None:
    position = RankState(
        rank=3,
        waiting=_call(5, "unshard a"),
        waited_seconds=1.5,
        finished=_call(4, "unshard b"),
        issued={"gather": 5},
        recent=(_call(4, "unshard b"), _call(5, "unshard a")),
        phase="eval",
        step=7,
        issued_in_groups={"layers of ranks (2, 3)": {"reduce": 4}},
        activity="forward of micro-batch 0 on stage 1",
        where="train.py:3 in main",
    )
    assert RankState.from_json(position.to_json()) == position
    assert RankState.from_json(RankState(rank=1).to_json()) == RankState(rank=1)


def test_the_first_difference_is_found_where_memories_overlap() -> None:
    recent = {
        0: [_call(4, "a"), _call(5, "b"), _call(6, "c")],
        1: [_call(5, "b"), _call(6, "x"), _call(7, "y")],
        2: [_call(6, "c")],
    }
    assert first_difference(recent) == (
        'gather #6 is all_gather "c" of 8 x float32 on ranks 0, 2, all_gather "x" of 8 x float32 on rank 1'
    )
    assert first_difference({0: [_call(1, "a")], 1: [_call(1, "a"), _call(2, "b")]}) == "", "rank 1 is only ahead"


def test_each_kind_is_compared_by_itself() -> None:
    recent = {
        0: [_call(1, "a"), _call(1, "r", "reduce", 8)],
        1: [_call(1, "b"), _call(1, "r", "reduce", 9)],
    }
    difference = first_difference(recent)
    assert 'gather #1 is all_gather "a"' in difference
    assert 'reduce #1 is all_gather "r" of 8 x float32 on rank 0, all_gather "r" of 9' in difference


def test_ranks_at_one_place_share_a_line() -> None:
    within = ("", ", inside wait", ", inside follow")
    waiting = {
        rank: RankState(rank, waiting=_call(3, "a"), where=f"t.py:1 in f{within[rank % 3]}") for rank in range(1000)
    }
    text = compose(ALARM, waiting | {500: RankState(500, finished=_call(2, "z"), where="t.py:9 in eval")}, 1000)
    assert text.splitlines()[1:3] == [
        '  ranks 0-499, 501-999: waiting for gather #3 all_gather "a" (8 x float32, forward); '
        "main thread at t.py:1 in f",
        '  rank 500: in no collective; last finished gather #2 all_gather "z" (8 x float32, forward); '
        "main thread at t.py:9 in eval",
    ]
    assert "Every rank must do the work that keeps rank 500 busy" in text


def test_a_rank_that_left_is_reported_from_one_that_failed() -> None:
    waiting = RankState(0, waiting=_call(3, "a"))
    left = RankState(1, finished=_call(2, "z"), step=9, exit_reason="finished and left")
    text = compose(ALARM, {0: waiting, 1: left}, 2)
    assert '  rank 1: finished and left, in step 9, after gather #2 all_gather "z" (8 x float32, forward)' in text
    assert "same number of steps; rank 1 had fewer" in text
    failed = RankState(1, exit_reason="left with ValueError: no labels", failed=True)
    text = compose(ALARM, {0: waiting, 1: failed}, 2)
    assert "rank 1: left with ValueError: no labels, before any collective" in text
    assert "The cause is the exception on rank 1." in text


def test_an_exception_that_the_others_were_not_told_of_comes_first() -> None:
    told = "ValueError: no labels, at t.py:7 in main"
    states = {
        rank: RankState(rank, waiting=call, recent=[call], exception="" if rank else told)
        for rank, call in enumerate([_call(1, "agree", "control"), _call(1, "save", "control")])
    }
    lines = compose(ALARM, states, 2).splitlines()
    assert lines[0] == "rank 0 raised ValueError: no labels, at t.py:7 in main."
    assert lines[1] == "  The other ranks could not be told: rank 0 has waited 3.0 s."
    assert lines[-2].startswith("  First difference: control #1")
    assert lines[-1] == "  The cause is the exception on rank 0."


def test_a_sharded_parameter_that_one_rank_uses_alone_is_named() -> None:
    using = RankState(0, waiting=_call(3, "unshard 0.weight")._replace(phase=""), where="train.py:9 in <module>")
    elsewhere = (
        RankState(1, finished=_call(2, "z"), where="train.py:11 in <module>"),
        RankState(1, finished=_call(2, "z"), exit_reason="finished and left"),
        RankState(1, waiting=_call(1, "cores", "control")),
    )
    for other in elsewhere:
        text = compose(ALARM, {0: using, 1: other}, 2)
        assert '"unshard 0.weight" (8 x float32); main thread at train.py:9' in text
        assert "for a use of it that only rank 0 makes, as under `if rank == 0`" in text.splitlines()[-1]
        in_forward = RankState(0, waiting=_call(3, "unshard 0.weight"))
        assert "a use of it" not in compose(ALARM, {0: in_forward, 1: other}, 2)


def test_a_silent_rank_and_one_in_a_collective_of_another_kind_are_named() -> None:
    text = compose(ALARM, {0: RankState(0, waiting=_call(3, "a"))}, 2)
    assert "rank 1: no answer" in text
    assert "the end of the output of rank 1" in text
    positions = {0: RankState(0, waiting=_call(1, "save", "control")), 1: RankState(1, waiting=_call(3, "a"))}
    assert "if rank == 0" in compose(ALARM, positions, 2)


@pytest.mark.parametrize(
    ("status", "text", "advice"),
    [
        (ProcessStatus("stopped", "pid 7"), "its process (pid 7) is stopped", "Rank 1 was stopped by a signal"),
        (ProcessStatus("gone", "pid 7"), "its process (pid 7) is gone", "the end of the output of rank 1"),
        (
            ProcessStatus("running", "pid 7"),
            "its process (pid 7) runs, but is stuck",
            "the end of the output of rank 1",
        ),
        (ProcessStatus("unseen", "node7"), "node7 cannot be reached, or its process is", "the network to node7 is cut"),
        (ProcessStatus("unseen"), "its process is gone, stopped, or stuck", "is killed without a message."),
    ],
)
def test_a_rank_that_does_not_answer_is_described_as_it_is_seen(status: ProcessStatus, text: str, advice: str) -> None:
    message = compose(ALARM, {0: RankState(0, waiting=_call(3, "a"))}, 2, {1: status})
    assert f"  rank 1: no answer; {text}" in message
    assert advice in message.splitlines()[-1]


def test_a_store_that_does_not_answer_is_named() -> None:
    silence = "the rendezvous store at node0:29500 has not answered for 5 s"
    statuses = {0: ProcessStatus("unseen", "node0"), 2: ProcessStatus("running", "pid 7")}
    lines = compose(ALARM, {1: RankState(1, waiting=_call(3, "a"))}, 3, statuses, silence).splitlines()
    assert lines[1] == "  ranks 0, 2: not heard from"
    assert lines[-2] == "  The rendezvous store at node0:29500 has not answered for 5 s."
    assert "the network between the machines is cut" in lines[-1]
    stopped = compose(ALARM, {1: RankState(1)}, 2, {0: ProcessStatus("stopped", "pid 7")}, silence)
    assert stopped.splitlines()[-1].startswith("  Rank 0 was stopped by a signal")


def test_ranks_of_a_mesh_are_named_with_their_places() -> None:
    names = RankNames()
    names.use(ParallelConfig(pp=2, dp_shard=2))
    states = {
        0: RankState(0, waiting=_call(3, "a")),
        1: RankState(1, waiting=_call(3, "a")),
        3: RankState(3, step=2, activity="forward of micro-batch 1 on stage 1", exit_reason="left with OSError: full"),
    }
    lines = compose(ALARM, states, 4, {2: ProcessStatus("stopped", "pid 7")}, names=names).splitlines()
    assert lines[1].startswith("  ranks 0-1 (pp 0): waiting for gather #3")
    assert lines[2] == "  rank 2 (pp 1, dp_shard 0): no answer; its process (pid 7) is stopped"
    assert lines[3] == (
        "  rank 3 (pp 1, dp_shard 1): left with OSError: full, in step 2, in the forward of micro-batch 1 on stage 1, "
        "before any collective"
    )
    assert lines[4].startswith("  Rank 2 (pp 1, dp_shard 0) was stopped by a signal")
    differing = {0: [_call(1, "a")], 3: [_call(1, "b")]}
    assert first_difference(differing, names) == (
        'gather #1 is all_gather "a" of 8 x float32 on rank 0 (pp 0, dp_shard 0), '
        'all_gather "b" of 8 x float32 on rank 3 (pp 1, dp_shard 1)'
    )


def test_ranks_of_data_alone_have_numbers_only() -> None:
    names = RankNames()
    names.use(ParallelConfig(dp_shard=4))
    assert names([1]) == "rank 1"
    student = ParallelConfig(dp_shard=2, sp=2)
    names.use(student)
    names.use(ParallelConfig(dp_shard=4))  # another model's mesh; the names from the first one stay
    assert names([1]) == "rank 1 (dp_shard 0, sp 1)"
    assert _name_while_it_fails(names) == "rank 1 (tp 1)"
    assert names([1]) == "rank 1 (dp_shard 0, sp 1)"
    names.forget(student)
    assert names([1]) == "rank 1"


def test_a_mesh_that_ends_while_another_fails_names_no_rank() -> None:
    names = RankNames()
    old = ParallelConfig(dp_shard=2, sp=2)
    names.use(old)
    with suppress(ValueError), names.unless_raised():
        names.forget(old)
        raise ValueError("the engine that replaces the old one could not be made")
    assert names([1]) == "rank 1"


def _name_while_it_fails(names: RankNames) -> str:
    with suppress(ValueError), names.unless_raised():
        names.use(ParallelConfig(dp_shard=1, tp=4))
        named = names([1])
        raise ValueError("an engine that could not be made")
    return named
