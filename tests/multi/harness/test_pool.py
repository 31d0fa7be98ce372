"""The pool of ranks: results by rank, every rank's traceback, and a new start after a failure or a hang."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import MOST_THREADS, Pool, RankFailure, Ranks, RankTimeout

# torch is imported by the functions that need it: most of these tests use bare processes, which start at once.


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Pool]:
    """Two ranks without torch and process group, new for every test."""
    pool = Pool(2, tmp_path, warning_filters=["error", "ignore:expected:UserWarning"], join=False)
    yield pool
    pool.close()


def _rank() -> int:
    return int(os.environ["RANK"])


def _sum_over_ranks(start: int, *, step: int = 1) -> tuple[int, Any]:
    import torch

    total = torch.full((3,), float(start + step * _rank()))
    torch.distributed.all_reduce(total)
    return torch.distributed.get_rank(), total


def _draw() -> tuple[int, int, float]:
    import torch

    return os.getpid(), torch.get_num_threads(), float(torch.rand(()))


def _process_id() -> int:
    return os.getpid()


def _job_variables() -> list[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    return [os.environ[name] for name in names]


def _refuse_odd_ranks() -> int:
    if _rank() % 2:
        raise ValueError(f"{_rank()} is odd")
    return _rank()


def _fail_on_all() -> None:
    measured = _rank() + 40
    assert measured == 0


def _fail_on_one_and_sleep_on(rank: int) -> None:
    if _rank() != rank:
        raise ValueError("stays away")
    time.sleep(600)


def _sleep_on(rank: int) -> None:
    if _rank() == rank:
        time.sleep(600)


def _crash_on(rank: int) -> None:
    if _rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=1)


def _return_a_lambda() -> object:
    return lambda: None


def _leave_threads(count: int) -> None:
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_come_by_rank_through_a_real_collective(ranks: Ranks, world_size: int) -> None:
    results = ranks(world_size).run(_sum_over_ranks, 10, step=2)
    assert [rank for rank, _ in results] == list(range(world_size))
    expected = sum(10 + 2 * rank for rank in range(world_size))
    assert [total.tolist() for _, total in results] == [[expected] * 3] * world_size


def test_ranks_are_reused_have_one_thread_and_start_each_call_from_the_same_seed(ranks: Ranks) -> None:
    first, second = ranks(2).run(_draw), ranks(2).run(_draw)
    assert first == second
    (pid0, threads0, drawn0), (pid1, threads1, drawn1) = first
    assert len({pid0, pid1, os.getpid()}) == 3
    assert (threads0, threads1) == (1, 1)
    assert drawn0 == drawn1


def test_each_rank_has_the_environment_of_a_job(bare: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "9")
    assert bare.run(_job_variables) == [[str(rank), "2", str(rank), "2", "127.0.0.1", "1"] for rank in range(2)]


def test_a_failure_names_the_ranks_that_raised_and_no_other(bare: Pool) -> None:
    with pytest.raises(RankFailure, match="_refuse_odd_ranks: 1 of 2 ranks failed") as caught:
        bare.run(_refuse_odd_ranks)
    assert list(caught.value.reports) == [1]
    assert "ValueError: 1 is odd" in str(caught.value)


def test_the_tracebacks_of_all_ranks_are_shown_with_their_variables(bare: Pool) -> None:
    with pytest.raises(RankFailure) as caught:
        bare.run(_fail_on_all)
    for rank in range(2):
        assert f"--- rank {rank}: AssertionError" in str(caught.value)
        assert "assert measured == 0" in caught.value.reports[rank]
        assert f"measured = {rank + 40}" in caught.value.reports[rank]


def test_a_waiting_rank_is_shown_with_the_one_that_failed(bare: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.pool.GRACE_SECONDS", 0.2)
    with pytest.raises(RankFailure, match="1 of 2 ranks failed") as caught:
        bare.run(_fail_on_one_and_sleep_on, 1)
    assert "stays away" in caught.value.reports[0]
    assert "still running" in caught.value.reports[1]
    assert "_fail_on_one_and_sleep_on" in caught.value.reports[1]


def test_a_hang_shows_the_stack_and_the_next_call_has_new_processes(bare: Pool) -> None:
    before = bare.run(_process_id)
    with pytest.raises(RankTimeout, match=r"1 of 2 ranks had not returned in 0\.2 s") as caught:
        bare.run(_sleep_on, 1, timeout=0.2)
    assert list(caught.value.reports) == [1]
    assert "in _sleep_on" in caught.value.reports[1]
    for process_id in before:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
    assert not set(before) & set(bare.run(_process_id))


def test_a_rank_that_crashes_is_reported_with_its_signal_and_stack(bare: Pool) -> None:
    with pytest.raises(RankFailure, match="rank 1: the process ended with exit code -11") as caught:
        bare.run(_crash_on, 1)
    assert "in _crash_on" in caught.value.reports[1]


def test_a_warning_is_an_error_in_a_rank_unless_a_filter_says_otherwise(bare: Pool) -> None:
    assert bare.run(_warn, "expected") == [None, None]
    with pytest.raises(RankFailure, match="UserWarning: surprise"):
        bare.run(_warn, "surprise")


def test_a_result_that_cannot_travel_is_the_failure_of_its_rank(bare: Pool) -> None:
    with pytest.raises(RankFailure, match="2 of 2 ranks failed"):
        bare.run(_return_a_lambda)


def test_a_function_that_cannot_be_pickled_costs_no_process(bare: Pool) -> None:
    before = bare.run(_process_id)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        bare.run(lambda: None)
    assert bare.run(_process_id) == before


def test_a_file_that_leaves_threads_or_does_not_use_the_ranks_ends_them(bare: Pool) -> None:
    process_ids = [bare.run(_process_id)]
    bare.rest()
    assert bare.run(_process_id) == process_ids[0]
    bare.run(_leave_threads, MOST_THREADS)
    bare.rest()
    process_ids.append(bare.run(_process_id))
    bare.rest()
    bare.rest()
    process_ids.append(bare.run(_process_id))
    assert len({number for numbers in process_ids for number in numbers}) == 6
