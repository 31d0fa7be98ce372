"""Loaders on real ranks: all ranks follow rank 0's order, or rank 0 reads for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.pool import Ranks
from tests.support.refusals import message
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.data import DataLoaderConfiguration, prepare_data_loader


class Numbers(Dataset[int]):
    """A dataset that only `readers` may read; item `broken` raises an error, unless it is -1."""

    def __init__(self, length: int, readers: tuple[int, ...] = (0, 1), broken: int = -1) -> None:
        self.length, self.readers, self.broken = length, readers, broken

    def __getitem__(self, index: int) -> int:
        assert torch.distributed.get_rank() in self.readers, "read by a rank that may not read"
        if index == self.broken:
            raise KeyError(f"no item {index}")
        return index

    def __len__(self) -> int:
        return self.length


class RandomStream(IterableDataset[Any]):
    """A stream in a different order on every rank and in every epoch, with items of several kinds and sizes."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(10 * self.epoch + torch.distributed.get_rank())
        for index in torch.randperm(self.length, generator=generator).tolist():
            yield {"x": torch.full((1 + index % 3,), float(index)), "name": f"item {index}"}


def _padded(items: list[Any]) -> dict[str, Any]:
    rows = [torch.nn.functional.pad(item["x"], (0, 3 - len(item["x"]))) for item in items]
    width = max(len(item["x"]) for item in items)  # so that the ranks' batches have different shapes
    return {"x": torch.stack(rows)[:, :width], "name": [item["name"] for item in items]}


def _collectives() -> Collectives:
    return Collectives(init_process_group())


def _epochs(make: Callable[[], DataLoader[Any]], options: dict[str, Any], skip: tuple[int, int] | None) -> Any:
    """Returns (values, end, remainder) of each batch of two epochs; `skip` loads a position first."""
    torch.manual_seed(torch.distributed.get_rank())  # different seeds on the ranks
    loader = prepare_data_loader(make(), DataLoaderConfiguration(**options), collectives=_collectives())
    if skip is not None:
        loader.load_state_dict(loader.state_dict() | {"epoch": skip[0], "batches": skip[1]})
    found = []
    while loader.epoch < 2:
        for batch in loader:
            values = batch["name"] if isinstance(batch, dict) else batch.tolist()
            found.append((values, loader.end_of_dataloader, loader.remainder))
    return len(found), found


def _shuffled() -> DataLoader[Any]:
    return DataLoader(Numbers(11), 2, shuffle=True)


def _read_by_rank_0() -> DataLoader[Any]:
    return DataLoader(Numbers(11, readers=(0,)), 2, shuffle=True)


def _stream() -> DataLoader[Any]:
    return DataLoader(RandomStream(11), 2, collate_fn=_padded)


def _broken() -> DataLoader[Any]:
    return DataLoader(Numbers(11, broken=6), 2)


def _merged(results: list[Any]) -> list[list[Any]]:
    """Returns the epochs that the ranks read together, without repeated samples."""
    epochs: list[list[Any]] = [[]]
    for turns in zip(*(found for _, found in results), strict=True):
        assert len({(end, remainder) for _, end, remainder in turns}) == 1
        items = [item for values, _, _ in turns for item in values]
        _, end, remainder = turns[0]
        epochs[-1] += items[:remainder] if remainder >= 0 else items
        if end:
            epochs.append([])
    return epochs[:-1]


def test_all_ranks_follow_rank_0s_order_and_dispatching_changes_nothing(ranks: Ranks) -> None:
    pool = ranks(2)
    sharded = pool.run(_epochs, _shuffled, {}, None)
    first, second = _merged(sharded)
    assert sorted(first) == sorted(second) == list(range(11))
    assert first != second
    assert pool.run(_epochs, _read_by_rank_0, {"dispatch_batches": True}, None) == sharded
    split = pool.run(_epochs, _read_by_rank_0, {"dispatch_batches": True, "split_batches": True}, None)
    assert _merged(split) == [first, second]
    assert split[0][1][0][0] == first[:1]


def test_a_stream_is_read_by_rank_0_and_resumed(ranks: Ranks) -> None:
    pool = ranks(2)
    whole = pool.run(_epochs, _stream, {}, None)
    orders = _merged(whole)
    for epoch, order in enumerate(orders):
        generator = torch.Generator().manual_seed(10 * epoch)
        assert order == [f"item {index}" for index in torch.randperm(11, generator=generator).tolist()]
    resumed = pool.run(_epochs, _stream, {}, (1, 2))
    assert [found for _, found in resumed] == [found[5:] for _, found in whole]


def test_uneven_rounds_are_dispatched_as_they_are(ranks: Ranks) -> None:
    (zero, _), (one, found) = ranks(2).run(_epochs, _stream, {"even_batches": False}, None)
    assert (zero, one) == (6, 6)
    (zero, _), (one, found) = ranks(2).run(
        _epochs, _read_by_rank_0, {"dispatch_batches": True, "even_batches": False, "split_batches": True}, None
    )
    assert (zero, one) == (12, 10)
    assert found[4][1]


def _failure() -> str:
    return message(KeyError, _epochs, _broken, {"dispatch_batches": True}, None)


def test_an_error_on_rank_0_is_raised_on_all(ranks: Ranks) -> None:
    zero, one = ranks(2).run(_failure, timeout=20.0)
    assert "no item 6" in zero
    assert "no item 6" in one
    assert "[rank 0]" in one


class _CutAtRandom(Numbers):
    """Samples whose lengths differ from rank to rank, as after a random augmentation."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [index] * (1 + (7 * index + 5 * torch.distributed.get_rank()) % 23)}


def _cut_at_random() -> DataLoader[Any]:
    return DataLoader(_CutAtRandom(16), 2, collate_fn=_first_ids)


def _first_ids(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([sample["input_ids"][0] for sample in samples])


def test_balanced_ranks_follow_the_lengths_of_rank_0(ranks: Ranks) -> None:
    for epoch in _merged(ranks(2).run(_epochs, _cut_at_random, {"balance": "tokens"}, None)):
        assert sorted(epoch) == list(range(16))
