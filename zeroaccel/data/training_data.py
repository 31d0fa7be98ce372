"""The loader of `zeroaccel.initialize(training_data=...)`: each rank's shard of a dataset, in micro-batches.

Every rank gets the same number of batches for any length of the dataset: with fewer batches on one rank, the others
would wait in a collective. The module uses no process group and no device; batches stay on the CPU, as collated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zeroaccel.config import BatchSizes, Config
from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once
from zeroaccel.telemetry.throughput import data_wait


def build_dataloader(
    dataset: Any,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    *,
    seed: int = 0,
    shuffle: bool = True,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """Returns a loader of this rank's shard of `dataset`.

    A dataset with indices is shuffled differently in each epoch: every iteration over the loader is the next epoch
    (`loader.sampler.set_epoch(n)` sets another one, for example to resume). For an iterable dataset, rank
    i mod world_size gets item i, so the items must have the same order on all ranks; the loader calls its `set_epoch`,
    if any, before each iteration. If the length is not a multiple of the world size, the last ranks repeat an earlier
    item; with `drop_last`, an iterable's last incomplete round is dropped instead.

    Args:
        dataset: has `__getitem__` and `__len__` (indices), or `__iter__`.
        micro_batch_size: number of items per batch.
        rank, world_size: index of the shard, and number of shards.
        collate_fn: converts a list of items to a batch; torch's default stacks tensors.
        drop_last: drop an incomplete last batch.
        seed: seed for shuffling, the same on all ranks.
        shuffle: shuffle a dataset with indices.
        num_workers: number of processes that read a dataset with indices.
        pin_memory: copy batches to page-locked memory.

    Raises:
        UsageError: the dataset has neither interface, or no batch for this rank; or an argument is out of range.

    Example:
        >>> from zeroaccel.data import build_dataloader
        >>> loader = build_dataloader(range(10), micro_batch_size=2, rank=0, world_size=2, shuffle=False)
        >>> [batch.tolist() for batch in loader]
        [[0, 2], [4, 6], [8]]
    """
    if micro_batch_size < 1:
        raise UsageError("build_dataloader: micro_batch_size", expected="at least 1", got=micro_batch_size)
    if not 0 <= rank < world_size:
        raise UsageError("build_dataloader: rank", expected=f"0 to {world_size - 1}", got=rank)
    shard: Dataset[Any]
    sampler: DistributedSampler[Any] | None = None
    if _has_indices(dataset):
        shard = dataset
        sampler = _EpochSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
        _check_length(dataset, len(sampler), micro_batch_size, drop_last)
    else:
        _check_iterable(dataset, num_workers)
        shard = _RoundRobin(dataset, rank, world_size, drop_last)
    # A separate generator, because the loader would otherwise draw from torch's and shift the run's random numbers.
    generator = torch.Generator().manual_seed(seed + rank)
    return _TimedLoader(
        shard,
        batch_size=micro_batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=generator,
    )


def loader_of(
    dataset: Any,
    batch: BatchSizes,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    config: Config,
) -> DataLoader[Any] | None:
    """Returns the loader of `initialize(training_data=...)`; warns if a step needs more items than there are."""
    if dataset is None:
        return None
    loader = build_dataloader(
        dataset, batch.micro, rank, world_size, collate_fn=collate_fn, drop_last=config.dataloader_drop_last
    )
    items = len(dataset) if isinstance(dataset, Sized) else batch.train
    if items < batch.train:
        epochs = -(-batch.accumulation // len(loader))
        sizes = f"{batch.micro} per micro-batch, {batch.accumulation} micro-batches per step, {world_size} ranks"
        effect = f"a step reads {epochs} epochs" if epochs > 1 else "every step has fewer items"
        log_once(
            logging.WARNING,
            f"training_data: {items} items, fewer than the {batch.train} of one step ({sizes}): {effect}; lower "
            "train_micro_batch_size_per_gpu or gradient_accumulation_steps, or use fewer processes",
        )
    return loader


class _TimedLoader(DataLoader[Any]):
    """Adds the time until each batch to that of waiting for data."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return data_wait.timed(super().__iter__())


class _EpochSampler(DistributedSampler[Any]):
    """Advances to the next epoch, and so to another order, at every iteration."""

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


class _RoundRobin(IterableDataset[Any]):
    """Every `world_size`-th item of an iterable, with the same number of items on each rank."""

    def __init__(self, items: Iterable[Any], rank: int, world_size: int, drop_last: bool) -> None:
        self._items = items
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        if callable(set_epoch := getattr(self._items, "set_epoch", None)):
            set_epoch(self.epoch)
        self.epoch += 1
        items = iter(self._items)
        first: list[Any] = []
        while group := list(islice(items, self._world_size)):
            first = first or group
            if self._rank < len(group) and (len(group) == self._world_size or not self._drop_last):
                yield group[self._rank]
            elif not self._drop_last:
                yield first[self._rank % len(first)]

    def __len__(self) -> int:
        """Returns the number of items of this rank; TypeError if the iterable has no length."""
        items = len(self._items)  # type: ignore[arg-type]
        return items // self._world_size if self._drop_last else -(-items // self._world_size)


def _has_indices(dataset: Any) -> bool:
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "training_data",
            expected="a dataset",
            got=dataset,
            fix="pass loader.dataset, or omit training_data and iterate over the loader",
        )
    if isinstance(dataset, Mapping):
        raise UsageError(
            "training_data",
            expected="one dataset",
            got=f"{type(dataset).__name__} with the keys {', '.join(map(str, dataset))}",
            fix="pass one of its datasets, such as its training split",
        )
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _check_length(dataset: Sized, share: int, micro_batch_size: int, drop_last: bool) -> None:
    if len(dataset) == 0:
        raise UsageError("training_data", expected="at least one item", got=dataset)
    if drop_last and share < micro_batch_size:
        raise UsageError(
            "training_data",
            expected=f"at least one batch of {micro_batch_size} per rank",
            got=f"{share} items per rank",
            fix="lower train_micro_batch_size_per_gpu, or set dataloader_drop_last to false",
        )


def _check_iterable(dataset: Any, num_workers: int) -> None:
    if not hasattr(dataset, "__iter__"):
        raise UsageError(
            "training_data", expected="a dataset with __getitem__ and __len__, or with __iter__", got=dataset
        )
    if isinstance(dataset, Iterator):
        raise UsageError(
            "training_data",
            expected="a dataset that can be read again in each epoch",
            got=dataset,
            fix="pass an object whose __iter__ returns a new iterator, or a list",
        )
    if num_workers:
        raise UsageError(
            "build_dataloader: num_workers",
            expected="0 for a dataset that is only iterable, because each worker would read all of it",
            got=num_workers,
        )
