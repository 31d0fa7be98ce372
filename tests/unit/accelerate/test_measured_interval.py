"""The number of steps between two in-memory states that "auto" chooses, on synthetic times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from zeroaccel.accelerate.memory_states import MOST_COST, MeasuredInterval

STEP = 0.1


def train(
    seconds: Iterator[float], cost: Callable[[int], float], beside: int, num_states: int
) -> tuple[list[int], float, float]:
    """Returns (intervals, seconds of the steps alone, seconds added by the states).
    Args:
        cost: seconds that each state adds, as a function of the state's number.
        beside: number of steps during which a state is copied.
    """
    measured = MeasuredInterval()
    intervals, alone, added = [2], 0.0, 0.0
    for number in range(num_states):
        for _ in range(intervals[-1]):
            alone += (step := next(seconds))
            measured.note_step(step)
        own = sum(itertools.islice(seconds, beside))
        alone, added = alone + own, added + cost(number)
        measured.note_state(beside, own + cost(number), 0.01)
        intervals.append(measured.interval)
    return intervals[1:], alone, added


@pytest.mark.parametrize(("cost", "beside"), [(0.02, 1), (0.13, 3), (2.0, 30)])
def test_states_cost_two_percent(cost: float, beside: int) -> None:
    intervals, alone, added = train(itertools.repeat(STEP), lambda _: cost, beside, 30)
    exact = round(cost / MOST_COST / STEP)
    assert all(exact <= interval <= exact + 1 for interval in intervals)
    # The first state comes after two steps; the cost of each later one is at most 2 % of the steps before it.
    assert 0.01 < (added - cost) / alone <= MOST_COST


def test_noise_of_steps_is_not_taken_for_a_cost() -> None:
    draw = random.Random(0)
    steps = iter(lambda: draw.gauss(STEP, 0.01), None)
    intervals, alone, added = train(steps, lambda _: 0.13, 3, 60)
    assert all(40 < interval < 100 for interval in intervals[3:]), intervals  # exact: 65
    assert 0.015 < added / alone < 0.023


def test_a_pause_beside_a_state_is_no_cost_of_states() -> None:
    intervals, *_ = train(itertools.repeat(STEP), lambda number: 60.0 if number == 7 else 0.13, 3, 20)
    assert set(intervals) == {65}


def test_a_first_state_that_takes_longer_is_forgotten() -> None:
    intervals, *_ = train(itertools.repeat(STEP), lambda number: 1.3 if number == 0 else 0.13, 3, 4)
    assert intervals == [650, 650, 65, 65]


def test_the_interval_follows_longer_steps_and_costlier_states() -> None:
    longer = itertools.chain(itertools.repeat(STEP, 2000), itertools.repeat(5 * STEP))
    intervals, *_ = train(longer, lambda _: 0.5, 1, 40)
    assert (intervals[0], intervals[-1]) == (250, 50)
    intervals, *_ = train(itertools.repeat(STEP), lambda number: 0.1 if number < 10 else 0.4, 1, 20)
    assert (intervals[5], intervals[-1]) == (50, 200)


def test_the_time_that_training_is_blocked_is_a_lower_bound() -> None:
    measured = MeasuredInterval()
    measured.note_step(STEP)
    measured.note_state(3, 3 * STEP - 0.05, blocked_seconds=0.02)
    assert measured.interval == 10
