"""Flat layouts: for any shapes and number of ranks, each element has one position and one owner."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroaccel.zero.layout import ALIGN_NUMEL, FlatLayout, OwnerLoads, round_up

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
    assert layout.split_sizes == (layout.numel // world_size,) * world_size
    assert layout.shard_numel(0) % ALIGN_NUMEL == 0
    assert not layout.uneven_sizes
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


def _with_owners(given_shapes: list[tuple[int, ...]], world_size: int) -> FlatLayout:
    owners = OwnerLoads(world_size).assign([math.prod(shape) for shape in given_shapes])
    entries = sorted(zip(owners, enumerate(given_shapes), strict=True))
    return FlatLayout.build_with_owners(
        [(f"p{i}", shape) for _, (i, shape) in entries], [owner for owner, _ in entries], world_size
    )


@given(shapes, worlds)
def test_owners_have_their_parameters_whole(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = _with_owners(given_shapes, world_size)
    assert sum(layout.split_sizes) == layout.numel
    assert layout.numel % (ALIGN_NUMEL * world_size) == 0, "equal parts of a secondary copy need no padding"
    assert all(size % ALIGN_NUMEL == 0 for size in layout.split_sizes)
    for slot, owner in zip(layout.slots, layout.owners, strict=True):
        low, high = layout.bounds(owner)
        assert low <= slot.start <= slot.end <= high
    seen = [slot for rank in range(world_size) for slot in layout.owned(rank)]
    assert seen == list(layout.slots), "each parameter has one owner, and shards follow each other"


@given(shapes, worlds)
def test_slots_and_gaps_tile_a_buffer_with_owners(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = _with_owners(given_shapes, world_size)
    cursor = 0
    for start, end in sorted([(slot.start, slot.end) for slot in layout.slots if slot.numel] + list(layout.gaps())):
        assert start == cursor
        cursor = end
    assert cursor == layout.numel


@given(st.lists(st.lists(st.integers(0, 1000), max_size=20), max_size=8), worlds)
def test_owners_are_balanced_within_each_unit(units: list[list[int]], world_size: int) -> None:
    loads = OwnerLoads(world_size)
    for numels in units:
        within = [0] * world_size
        for owner, numel in zip(loads.assign(numels), numels, strict=True):
            within[owner] += numel
        # Graham 1969: at most 4/3 - 1/(3W) of the best possible, which is at least this.
        best = max([sum(numels) / world_size, *numels, *_two_of_the_largest(numels, world_size)])
        assert max(within) <= best * (4 / 3 - 1 / (3 * world_size)) + 1e-9
    assert sum(loads.numels) == sum(map(sum, units))


def _two_of_the_largest(numels: list[int], world_size: int) -> list[int]:
    """With more parameters than ranks, two of the W + 1 largest are on one rank."""
    ordered = sorted(numels, reverse=True)
    return [ordered[world_size - 1] + ordered[world_size]] if len(ordered) > world_size else []


def test_units_of_one_parameter_go_round_the_ranks() -> None:
    loads = OwnerLoads(3)
    assert [loads.assign([10])[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert loads.numels == [20, 20, 20]


def test_a_scalar_and_an_empty_parameter_have_places() -> None:
    layout = FlatLayout.build([("scalar", ()), ("empty", (0, 3)), ("vector", (5,))], 4)
    assert [(slot.start, slot.numel) for slot in layout.slots] == [(0, 1), (32, 0), (32, 5)]
    assert layout.numel == 4 * ALIGN_NUMEL
    assert [len(layout.intervals(rank)) for rank in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("world_size", [1, 4])
def test_nothing_at_all(world_size: int) -> None:
    layout = FlatLayout.build([], world_size)
    assert (layout.numel, layout.shard_numel(world_size - 1), list(layout.gaps())) == (0, 0, [])
