"""Flat layouts: whatever the shapes and the number of ranks, each element has one place and one owner."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroaccel.zero.layout import ALIGN_NUMEL, FlatLayout, round_up

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12)
worlds = st.integers(1, 9)


def _layout(given_shapes: list[tuple[int, ...]], world_size: int) -> FlatLayout:
    return FlatLayout.build([(f"p{i}", shape) for i, shape in enumerate(given_shapes)], world_size)


@given(shapes, worlds)
def test_every_element_belongs_to_one_rank(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = _layout(given_shapes, world_size)
    owned: dict[str, list[tuple[int, int]]] = {slot.fqn: [] for slot in layout.slots}
    for rank in range(world_size):
        low, high = layout.bounds(rank)
        for interval in layout.intervals(rank):
            slot = next(slot for slot in layout.slots if slot.fqn == interval.fqn)
            assert interval.length > 0
            assert 0 <= interval.offset <= interval.offset + interval.length <= high - low
            assert slot.start + interval.start == low + interval.offset
            owned[interval.fqn].append((interval.start, interval.start + interval.length))
    for slot in layout.slots:
        ends = [end for run in sorted(owned[slot.fqn]) for end in run]
        assert ends[1:-1:2] == ends[2::2], "runs neither overlap nor leave gaps"
        assert (ends[0], ends[-1]) == (0, slot.numel) if ends else slot.numel == 0


@given(shapes, worlds)
def test_shards_are_equal_and_aligned(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = _layout(given_shapes, world_size)
    assert layout.numel == layout.shard_numel * world_size
    assert layout.shard_numel % ALIGN_NUMEL == 0
    assert all(slot.start % ALIGN_NUMEL == 0 for slot in layout.slots)
    assert [layout.bounds(rank) for rank in (0, world_size - 1)][-1][1] == layout.numel
    assert layout.used_numel == sum(math.prod(shape) for shape in given_shapes)
    # Padding is at most one alignment per parameter and one per rank.
    assert layout.numel - layout.used_numel < ALIGN_NUMEL * (len(given_shapes) + world_size)


@given(shapes, worlds)
def test_slots_and_gaps_tile_the_buffer(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = _layout(given_shapes, world_size)
    runs = [(slot.start, slot.end) for slot in layout.slots if slot.numel] + list(layout.gaps())
    assert all(start < end for start, end in runs)
    cursor = 0
    for start, end in sorted(runs):
        assert start == cursor
        cursor = end
    assert cursor == layout.numel


@given(shapes)
def test_another_number_of_ranks_moves_no_parameter(given_shapes: list[tuple[int, ...]]) -> None:
    assert _layout(given_shapes, 2).slots == _layout(given_shapes, 7).slots


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple


def test_a_scalar_and_an_empty_parameter_have_places() -> None:
    layout = FlatLayout.build([("scalar", ()), ("empty", (0, 3)), ("vector", (5,))], 4)
    assert [(slot.start, slot.numel) for slot in layout.slots] == [(0, 1), (32, 0), (32, 5)]
    assert layout.numel == 4 * ALIGN_NUMEL
    assert [len(layout.intervals(rank)) for rank in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("world_size", [1, 4])
def test_nothing_at_all(world_size: int) -> None:
    layout = FlatLayout.build([], world_size)
    assert (layout.numel, layout.shard_numel, list(layout.gaps())) == (0, 0, [])
