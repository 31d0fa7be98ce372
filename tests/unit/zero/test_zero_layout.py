"""Flat layouts: for any shapes and number of ranks, each element has exactly one position and owner."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroaccel.checkpoint.manifest import TensorRecord
from zeroaccel.zero.layout import ALIGN_NUMEL, FlatLayout, FlatRange, FlatTensor, OwnerLoads, Split, round_up

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12)
worlds = st.integers(1, 9)


def _layout(given_shapes: list[tuple[int, ...]], world_size: int) -> FlatLayout:
    return FlatLayout.build([(f"p{i}", shape) for i, shape in enumerate(given_shapes)], world_size)


def _range(ends: tuple[int, int]) -> FlatRange:
    return FlatRange(min(ends), max(ends))


ranges = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(_range)


@given(ranges, ranges, ranges)
def test_ranges_intersect_as_sets_do(one: FlatRange, other: FlatRange, third: FlatRange) -> None:
    both = one & other
    assert [element for element in range(60) if element in both] == [n for n in range(60) if n in one and n in other]
    assert both.numel == len([n for n in range(60) if n in one and n in other]) >= 0
    assert bool(both) == bool(both.numel)
    assert both.start >= max(one.start, other.start), "an empty intersection must not start before either range"
    assert (both & both, other & one) == (both, both)
    assert list(_elements((one & other) & third)) == list(_elements(one & (other & third)))


def _elements(part: FlatRange) -> range:
    return range(part.start, part.end)


@given(ranges, ranges)
def test_a_range_of_a_range_is_a_slice(outer: FlatRange, inner: FlatRange) -> None:
    values = torch.arange(outer.start, outer.end)
    part = outer & inner
    assert FlatTensor(outer, values)[part].tolist() == list(_elements(part))
    assert part.at(part.start) == slice(0, part.numel)


@given(shapes, worlds)
def test_every_element_belongs_to_one_rank(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = _layout(given_shapes, world_size)
    owned: dict[str, list[tuple[int, int]]] = {slot.fqn: [] for slot in layout.slots}
    for rank in range(world_size):
        for slot, part in layout.slots_in(layout.shard(rank)):
            assert part
            assert (part & slot.range & layout.shard(rank)) == part
            owned[slot.fqn].append((part.start - slot.start, part.end - slot.start))
    for slot in layout.slots:
        ends = [end for run in sorted(owned[slot.fqn]) for end in run]
        assert ends[1:-1:2] == ends[2::2], "runs neither overlap nor leave gaps"
        assert (ends[0], ends[-1]) == (0, slot.numel) if ends else slot.numel == 0


@given(shapes, worlds, ranges)
def test_a_range_is_covered_by_padded_slots(
    given_shapes: list[tuple[int, ...]], world_size: int, within: FlatRange
) -> None:
    layout = _layout(given_shapes, world_size)
    cursor = (within & layout.range).start
    first = layout.slots[0].start if layout.slots else layout.numel
    for _, part in layout.slots_in(within, padded=True):
        assert part.start == max(cursor, first)
        cursor = part.end
    assert cursor == (within & layout.range).end or not layout.slots


@given(shapes, worlds, st.data())
def test_runs_of_a_group_tile_each_shard(
    given_shapes: list[tuple[int, ...]], world_size: int, data: st.DataObject
) -> None:
    layout = _layout(given_shapes, world_size)
    count = len(given_shapes)
    groups = sorted(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    for rank in range(world_size):
        runs = layout.group_runs(groups, rank)
        cursor = layout.shard(rank).start
        for run, _ in runs:
            assert run.start == cursor
            cursor = run.end
        assert cursor == layout.shard(rank).end or not runs
        assert len({group for _, group in runs}) == len(runs), "neighbours of one group must form one run"


@given(shapes, worlds)
def test_shards_are_equal_and_aligned(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = _layout(given_shapes, world_size)
    assert layout.split_sizes == (layout.numel // world_size,) * world_size
    assert layout.shard_numel(0) % ALIGN_NUMEL == 0
    assert not layout.uneven_sizes
    assert all(slot.start % ALIGN_NUMEL == 0 for slot in layout.slots)
    assert (layout.shard(0).start, layout.shard(world_size - 1).end) == (0, layout.numel)
    used = sum(slot.numel for slot in layout.slots)
    assert used == sum(math.prod(shape) for shape in given_shapes)
    # Padding is at most one alignment per parameter and one per rank.
    assert layout.numel - used < ALIGN_NUMEL * (len(given_shapes) + world_size)


@given(shapes, worlds)
def test_slots_and_gaps_tile_the_buffer_with_owners_and_without(
    given_shapes: list[tuple[int, ...]], world_size: int
) -> None:
    for layout in (_layout(given_shapes, world_size), _with_owners(given_shapes, world_size)):
        runs = [slot.range for slot in layout.slots if slot.numel] + list(layout.padding())
        assert all(runs)
        cursor = 0
        for run in sorted(runs, key=lambda run: run.start):
            assert run.start == cursor
            cursor = run.end
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
        shard = layout.shard(owner)
        assert shard.start <= slot.start <= slot.end <= shard.end
    seen = [slot for rank in range(world_size) for slot, _ in layout.slots_in(layout.shard(rank))]
    assert seen == [slot for slot in layout.slots if slot.numel], "one owner each, in the order of the shards"


@given(st.lists(st.lists(st.integers(0, 1000), max_size=20), max_size=8), worlds)
def test_owners_are_balanced_within_each_unit(units: list[list[int]], world_size: int) -> None:
    loads = OwnerLoads(world_size)
    for numels in units:
        within = [0] * world_size
        for owner, numel in zip(loads.assign(numels), numels, strict=True):
            within[owner] += numel
        # Graham 1969: at most 4/3 - 1/(3W) of the optimum, of which this is a lower bound.
        best = max([sum(numels) / world_size, *numels, *_two_of_the_largest(numels, world_size)])
        assert max(within) <= best * (4 / 3 - 1 / (3 * world_size)) + 1e-9
    assert sum(loads.numels) == sum(map(sum, units))


def _two_of_the_largest(numels: list[int], world_size: int) -> list[int]:
    """Returns a lower bound: with more parameters than ranks, two of the W + 1 largest are on one rank."""
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
    assert [len(list(layout.slots_in(layout.shard(rank)))) for rank in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("world_size", [1, 4])
def test_an_empty_layout_has_no_elements(world_size: int) -> None:
    layout = FlatLayout.build([], world_size)
    assert (layout.numel, layout.shard_numel(world_size - 1), list(layout.padding())) == (0, 0, [])


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(1, 3))
def test_parts_of_packed_layers_lie_where_every_reader_looks(
    parts: int, blocks: int, width: int, dim: int, others: int
) -> None:
    shape = [others, others, others]
    shape[dim] = parts * blocks * width
    whole = torch.arange(math.prod(shape)).view(shape)
    splits = [Split(dim, parts, index, blocks) for index in range(parts)]
    own = [split.part(whole) for split in splits]
    assert torch.equal(splits[0].join(own), whole)
    # A tensor with several blocks has a part of each block on each rank.
    for index, part in enumerate(own):
        expected = [block.chunk(parts, dim)[index] for block in whole.chunk(blocks, dim)]
        assert torch.equal(part, torch.cat(expected, dim))
    for split, part in zip(splits, own, strict=True):
        for first, run in split.runs(part.shape, FlatRange(0, part.numel())):
            assert part.reshape(-1)[run.at(0)].tolist() == list(range(first, first + run.numel))
    # Each part is saved in a file of its own, and read in row-major order.
    pieces = tuple((index, index * part.numel(), part.numel(), 0) for index, part in enumerate(own))
    record = TensorRecord("I64", tuple(shape), pieces, (dim, parts, blocks))
    read = [
        value
        for file, _, count, offset in record.runs
        for value in own[file].reshape(-1)[offset // 8 :][:count].tolist()
    ]
    assert read == list(range(whole.numel()))
