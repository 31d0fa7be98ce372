"""The samples of each rank, compared with a single process's order and with accelerate's sharding."""

from __future__ import annotations

from itertools import chain, cycle, islice

import pytest
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from zeroaccel.data.batch_sharding import (
    RankBatch,
    ShardingRules,
    batches_of_rank,
    count_rounds,
    shard_batches,
    shard_items,
)


def order(length: int, size: int, *, drop_last: bool = False) -> list[list[int]]:
    """Returns the batches of a single process."""
    return list(BatchSampler(SequentialSampler(range(length)), size, drop_last))


def sharded_batches(batches: list[list[int]], rules: ShardingRules) -> list[list[RankBatch[int]]]:
    """Returns each rank's batches, computed independently, as the ranks do."""
    return [list(batches_of_rank(shard_batches(batches, rules), rank)) for rank in range(rules.world_size)]


def samples(turns: list[RankBatch[int]]) -> list[list[int]]:
    return [turn.samples for turn in turns]


@pytest.mark.parametrize(
    ("length", "size", "options", "expected"),
    [
        (12, 2, {}, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]),
        (9, 2, {}, [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]),
        (6, 2, {}, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]),
        (3, 4, {}, [[[0, 1, 2, 0]], [[1, 2, 0, 1]]]),
        (9, 2, {"drop_last": True}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (9, 2, {"even": False}, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]),
        (6, 4, {"split": True}, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]),
        (5, 4, {"split": True, "even": False}, [[[0, 1], [4]], [[2, 3]]]),
        (6, 4, {"split": True, "drop_last": True}, [[[0, 1]], [[2, 3]]]),
        (0, 2, {}, [[], []]),
    ],
)
def test_batches_of_two_ranks(
    length: int, size: int, options: dict[str, bool], expected: list[list[list[int]]]
) -> None:
    rules = ShardingRules(2, batch_size=size, **options)
    assert [samples(turns) for turns in sharded_batches(order(length, size), rules)] == expected


def test_batches_of_their_own_sizes_are_sharded_as_they_are() -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    turns = sharded_batches(batches, ShardingRules(2))
    assert [samples(part) for part in turns] == [[[0, 1, 2], [4, 5], [10]], [[3], [6, 7, 8, 9], [0, 1, 2]]]
    assert [turn.real for turn in turns[0]] == [None, None, (1, 0)]
    assert [samples(part) for part in sharded_batches(batches, ShardingRules(2, drop_last=True))] == [
        [[0, 1, 2], [4, 5]],
        [[3], [6, 7, 8, 9]],
    ]


dealings = st.fixed_dictionaries(
    {
        "length": st.integers(0, 60),
        "part": st.integers(1, 5),
        "world_size": st.integers(1, 5),
        "drop_last": st.booleans(),
        "even": st.booleans(),
        "split": st.booleans(),
    }
)


def rules_of(case: dict[str, int]) -> tuple[list[list[int]], ShardingRules]:
    size = case["part"] * case["world_size"] if case["split"] else case["part"]
    rules = ShardingRules(case["world_size"], bool(case["split"]), bool(case["even"]), bool(case["drop_last"]), size)
    return order(case["length"], size, drop_last=bool(case["drop_last"])), rules


@settings(max_examples=300, deadline=None)
@given(dealings)
def test_a_round_gathered_by_rank_is_the_single_process_order(case: dict[str, int]) -> None:
    batches, rules = rules_of(case)
    of_ranks = sharded_batches(batches, rules)
    gathered: list[int] = []
    for round_ in range(max(map(len, of_ranks))):
        turns = [turns[round_] for turns in of_ranks if round_ < len(turns)]
        real = turns[0].real
        assert {turn.real for turn in turns} == {real}
        for rank, turn in enumerate(turns):
            gathered += turn.samples if real is None else turn.samples[: real[rank]]
        if real is not None:
            assert all(turn.last for turn in turns)
    everything = list(chain.from_iterable(batches))
    dropped = len(everything) - len(gathered)
    assert gathered == everything[: len(gathered)]
    assert dropped == 0 or (rules.drop_last and dropped < rules.world_size * case["part"])


@settings(max_examples=300, deadline=None)
@given(dealings)
def test_every_rank_knows_its_length_and_its_last_turn(case: dict[str, int]) -> None:
    batches, rules = rules_of(case)
    last_size = len(batches[-1]) if batches else None
    for rank, turns in enumerate(sharded_batches(batches, rules)):
        assert [turn.last for turn in turns] == [False] * (len(turns) - 1) + [True] * bool(turns)
        assert count_rounds(len(batches), rules, rank=rank, last_size=last_size) == len(turns)
        if rules.even or rules.drop_last:
            assert {len(turn.samples) for turn in turns} <= {rules.part}


@settings(max_examples=300, deadline=None)
@given(dealings)
def test_batches_are_those_of_accelerate(case: dict[str, int]) -> None:
    batches, rules = rules_of(case)
    sampler = BatchSampler(SequentialSampler(range(case["length"])), rules.batch_size or 1, rules.drop_last)
    for rank, turns in enumerate(sharded_batches(batches, rules)):
        theirs = BatchSamplerShard(sampler, rules.world_size, rank, rules.split, rules.even)
        assert samples(turns) == list(theirs)


@settings(max_examples=200, deadline=None)
@given(dealings)
def test_items_are_sharded_as_accelerate_shards_an_iterable(case: dict[str, int]) -> None:
    _, rules = rules_of({**case, "even": True})
    for rank in range(rules.world_size):
        turns = batches_of_rank(shard_items(range(case["length"]), rules), rank)
        theirs = IterableDatasetShard(
            range(case["length"]), rules.batch_size or 1, rules.drop_last, rules.world_size, rank, rules.split
        )
        assert list(chain.from_iterable(turn.samples for turn in turns)) == list(theirs)


def test_an_endless_order_is_sharded_lazily() -> None:
    turns = batches_of_rank(shard_items(cycle(range(3)), ShardingRules(2, batch_size=2)), 1)
    assert [turn.samples for turn in islice(turns, 3)] == [[2, 0], [0, 1], [1, 2]]
