"""The ranks' parts of a dataset: all items, equal sizes, another order per epoch, and an unchanged global RNG."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.datasets import Numbers, SizedStream, Stream
from zeroaccel.data import build_dataloader
from zeroaccel.errors import UsageError


class EpochStream(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + self.length))


def batches(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def parts(dataset: Any, world_size: int, size: int = 2, **options: Any) -> list[list[list[int]]]:
    """Returns the batches of one epoch for each rank."""
    return [batches(build_dataloader(dataset, size, rank, world_size, **options)) for rank in range(world_size)]


def items(part: list[list[int]]) -> list[int]:
    return [item for batch in part for item in batch]


# -- map-style datasets


@pytest.mark.parametrize(("length", "world_size"), [(12, 1), (12, 3), (13, 3), (2, 3)])
def test_ranks_get_every_item_and_equally_many(length: int, world_size: int) -> None:
    of_rank = [items(part) for part in parts(Numbers(length), world_size)]
    assert {len(part) for part in of_rank} == {-(-length // world_size)}
    assert {item for part in of_rank for item in part} == set(range(length))


def test_the_first_order_is_that_of_torchs_distributed_sampler() -> None:
    expected: list[int] = list(torch.utils.data.DistributedSampler(Numbers(10), num_replicas=2, rank=1, seed=7))
    assert items(batches(build_dataloader(Numbers(10), 3, 1, 2, seed=7))) == expected
    assert items(batches(build_dataloader(Numbers(10), 3, 1, 2, seed=8))) != expected


def test_each_iteration_is_another_epoch_of_which_ranks_share_no_item() -> None:
    loaders = [build_dataloader(Numbers(64), 4, rank, 2) for rank in range(2)]
    epochs = [[items(batches(loader)) for loader in loaders] for _ in range(3)]
    assert all(sorted(one + other) == list(range(64)) for one, other in epochs)
    assert len({tuple(epoch[0]) for epoch in epochs}) == 3
    again = build_dataloader(Numbers(64), 4, 0, 2)
    assert [items(batches(again)) for _ in range(3)] == [epoch[0] for epoch in epochs]
    loaders[0].sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert items(batches(loaders[0])) == epochs[1][0]


def test_the_order_of_the_dataset_on_request_and_a_collate_function() -> None:
    assert parts(Numbers(6), 2, shuffle=False) == [[[0, 2], [4]], [[1, 3], [5]]]
    assert list(build_dataloader(["a", "b", "c", "d"], 2, 0, 2, collate_fn="".join, shuffle=False)) == ["ac"]


def test_drop_last_leaves_out_the_batch_that_is_not_full() -> None:
    assert [len(part) for part in parts(Numbers(10), 2, size=2)] == [3, 3]
    assert [len(part) for part in parts(Numbers(10), 2, size=2, drop_last=True)] == [2, 2]
    assert len(build_dataloader(Numbers(10), 2, 0, 2, drop_last=True)) == 2


def test_workers_read_a_dataset_with_indices() -> None:
    alone = build_dataloader(Numbers(8), 2, 0, 2)
    loader = build_dataloader(Numbers(8), 2, 0, 2, num_workers=1)
    assert [batches(loader), batches(loader)] == [batches(alone), batches(alone)]


# -- iterable datasets


@pytest.mark.parametrize("length", [9, 10, 11])
def test_an_iterable_is_sharded_and_short_ranks_repeat(length: int) -> None:
    of_rank = [items(part) for part in parts(Stream(length), 3)]
    for rank, part in enumerate(of_rank):
        own = list(range(rank, length, 3))
        assert part == own + [rank] * (-(-length // 3) - len(own))


def test_an_iterable_shorter_than_the_world_reaches_every_rank_and_an_empty_one_none() -> None:
    assert parts(Stream(2), 5) == [[[0]], [[1]], [[0]], [[1]], [[0]]]
    assert parts(Stream(0), 2) == [[], []]
    with pytest.raises(TypeError):
        len(build_dataloader(Stream(4), 2, 0, 1))


@pytest.mark.parametrize("length", [8, 9, 10])
def test_drop_last_leaves_out_an_incomplete_round(length: int) -> None:
    of_rank = [items(part) for part in parts(Stream(length), 3, size=1, drop_last=True)]
    assert of_rank == [list(range(rank, length - length % 3, 3)) for rank in range(3)]


def test_an_iterable_restarts_in_each_epoch_and_gets_its_number() -> None:
    loader = build_dataloader(EpochStream(4), 2, 1, 2)
    assert [batches(loader), batches(loader)] == [[[1, 3]], [[101, 103]]]


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_of_a_sized_iterable_is_the_number_of_batches(length: int, drop_last: bool) -> None:
    for rank in range(3):
        loader = build_dataloader(SizedStream(length), 2, rank, 3, drop_last=drop_last)
        assert len(loader) == len(batches(loader))  # a difference makes torch warn, which fails


# -- both kinds


@pytest.mark.parametrize("dataset", [Numbers(8), Stream(8)])
def test_loading_leaves_torchs_random_numbers_alone(dataset: Any) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    batches(build_dataloader(dataset, 2, 0, 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Numbers(4), {"micro_batch_size": 0}, "micro_batch_size: expected at least 1, got 0"),
        (Numbers(4), {"rank": 2}, "rank: expected 0 to 1, got 2"),
        (Numbers(4), {"rank": -1}, "rank: expected 0 to 1, got -1"),
        (Numbers(0), {}, "training_data: expected at least one item"),
        (Numbers(4), {"micro_batch_size": 3, "drop_last": True}, "one batch of 3 per rank, got '2 items per rank'"),
        (DataLoader(Numbers(4)), {}, "training_data: expected a dataset"),
        ({"train": Numbers(4), "test": Numbers(4)}, {}, "keys train, test"),
        (iter([1, 2]), {}, "read again in each epoch"),
        (7, {}, "with __getitem__ and __len__, or with __iter__"),
        (None, {}, "with __getitem__ and __len__, or with __iter__"),
        (Stream(4), {"num_workers": 2}, "num_workers: expected 0"),
    ],
)
def test_wrong_datasets_and_options_are_refused_by_name(dataset: Any, options: dict[str, Any], message: str) -> None:
    arguments = {"micro_batch_size": 2, "rank": 0, "world_size": 2, **options}
    with pytest.raises(UsageError, match=message):
        build_dataloader(dataset, **arguments)
