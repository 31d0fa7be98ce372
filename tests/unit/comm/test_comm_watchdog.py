"""The watchdog's states: the transition table, and the paths of a watchdog in one process."""

from __future__ import annotations

import time

import pytest
from torch._C._distributed_c10d import HashStore

from tests import time_limits
from zeroaccel.comm.hangs.flight_recorder import Call, CollectiveRecord, FlightRecorder, Kind
from zeroaccel.comm.hangs.hang_report import RankState, rank_list
from zeroaccel.comm.hangs.peer_processes import PeerProcesses, own_process
from zeroaccel.comm.hangs.side_channel import SideChannel
from zeroaccel.comm.hangs.watchdog import Watchdog, WatchdogState, check_transition, user_frame


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (WatchdogState.WATCHING, WatchdogState.REPORTED),
        (WatchdogState.WATCHING, WatchdogState.CLOSED),
        (WatchdogState.REPORTED, WatchdogState.WATCHING),
        (WatchdogState.ENDING, WatchdogState.CLOSED),
        (WatchdogState.CLOSED, WatchdogState.WATCHING),
    ],
)
def test_an_illegal_move_raises(old: WatchdogState, new: WatchdogState) -> None:
    with pytest.raises(AssertionError, match=f"a watchdog that is {old.value} cannot become {new.value}"):
        check_transition(old, new)


def test_every_state_but_the_last_ones_can_be_left() -> None:
    def next_states(state: WatchdogState) -> list[WatchdogState]:
        legal = []
        for other in WatchdogState:
            try:
                check_transition(state, other)
            except AssertionError:
                continue
            legal.append(other)
        return legal

    assert [state for state in WatchdogState if not next_states(state)] == [
        WatchdogState.ENDING,
        WatchdogState.CLOSED,
    ]


def test_a_rank_that_leaves_closes_its_watchdog() -> None:
    store = HashStore()
    channels = [SideChannel(store, rank, 2, generation=1, launcher_owns_store=False) for rank in range(2)]
    peers = PeerProcesses(0, {0: own_process()}, signals=False)
    watchdog = Watchdog(FlightRecorder(), channels[0], peers, limit=60.0, interrupt=lambda: None)
    watchdog.leave("finished and left")
    limit = time_limits.Limit(10.0)
    while watchdog._state is not WatchdogState.CLOSED and not limit.is_over():
        time.sleep(0.01)
    assert watchdog._state is WatchdogState.CLOSED
    assert watchdog.error is None
    assert [state.exit_reason for state in channels[1].exits(skip=0)] == ["finished and left"]
    assert channels[1].num_released() == 1


@pytest.mark.parametrize(("issued", "is_held_up"), [(1, True), (2, False)])
def test_a_rank_that_left_after_its_part_of_a_sum_delays_no_rank(issued: int, is_held_up: bool) -> None:
    recorder = FlightRecorder()
    for label in ("sum up", "sum down"):
        entry = recorder.issue("reduce", "all_reduce", label, 8, "float32")
    recorder.begin_wait(entry)
    watchdog = object.__new__(Watchdog)  # without its thread, which would end the process
    watchdog._rank, watchdog._names, watchdog._followed = 0, rank_list, []
    watchdog._exited = {1: RankState(1, issued={"reduce": 9}, issued_in_groups={"layers": {"reduce": issued}})}
    watchdog.follow("layers", recorder, frozenset({0, 1}), alike=True)
    alarm = watchdog._is_deserted()
    expected = 'rank 1 left the job while rank 0 waits for reduce #2 all_reduce "sum down" (8 x float32)'
    assert (alarm and alarm.headline) == (expected if is_held_up else None)


def _entry(recorder: FlightRecorder, kind: Kind, op: str, label: str) -> CollectiveRecord:
    return recorder.issue(kind, op, label, 8, "float32")


@pytest.mark.parametrize(
    ("theirs", "group", "own_group", "is_crossed"),
    [
        (("control", 3, "all_reduce max"), "", "layers", True),
        (("control", 3, "all_reduce max"), "", "", False),  # both in the job's history, which all ranks compare
        (("control", 2, "all_reduce max"), "", "layers", False),  # rank 1 has issued it, so rank 0 continues
        (("control", 3, "broadcast"), "", "layers", False),  # a broadcast needs its source only
        (("gather", 3, "all_gather"), "", "layers", False),  # a gather may be among other ranks
        (("gather", 1, "all_gather"), "layers", "layers", True),
        (("reduce", 1, "all_reduce"), "layers", "layers", False),
        (("reduce", 2, "all_reduce"), "layers", "", True),
        (("control", 9, "receive"), "pipeline", "layers", False),  # rank 1 does not follow this recorder
    ],
)
def test_ranks_that_wait_for_each_other_in_other_calls(
    theirs: tuple[Kind, int, str], group: str, own_group: str, is_crossed: bool
) -> None:
    of_all, of_layers = FlightRecorder(), FlightRecorder()
    for _ in range(2):
        own = _entry(of_all, "control", "all_reduce max", "check")
    if own_group:
        own = _entry(of_layers, "reduce", "all_reduce", "sum up")
    else:
        _entry(of_layers, "reduce", "all_reduce", "sum up")
    watchdog = object.__new__(Watchdog)  # without its thread, which would end the process
    watchdog._rank, watchdog._names, watchdog._followed, watchdog._flight_recorder = 1, rank_list, [], of_all
    watchdog.follow("layers", of_layers, frozenset({0, 1}), alike=True, in_turn=True)
    channels = [
        SideChannel(store, rank, 2, generation=1, launcher_owns_store=False)
        for store in [HashStore()]
        for rank in range(2)
    ]
    kind, seq, op = theirs
    waiting = Call(kind, seq, op, "other", 8, "float32", "")
    channels[0].publish_stall(RankState(0, waiting, group, issued={"control": 1}, issued_in_groups={}))
    alarm = watchdog._crossed(channels[1], own, own_group)
    assert (alarm is not None) == is_crossed
    if alarm is not None:
        assert alarm.headline == f"rank 0 waits for {waiting} while rank 1 waits for {own.call}"
    # A rank that has issued the awaited call no longer delays this one.
    issued = {"control": 9, "reduce": 9, "gather": 9}
    channels[0].publish_stall(RankState(0, waiting, group, issued=issued, issued_in_groups={"layers": issued}))
    assert watchdog._crossed(channels[1], own, own_group) is None


def test_the_frame_is_of_the_user_not_of_a_library() -> None:
    assert "test_comm_watchdog.py" in user_frame()
    assert "in test_the_frame_is_of_the_user_not_of_a_library" in user_frame()
