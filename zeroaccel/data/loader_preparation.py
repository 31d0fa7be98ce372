"""From a user's `DataLoader` to one rank's: checks it, chooses who reads, and puts the parts together."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.data.batch_sharding import ShardingRules
from zeroaccel.data.batch_sources import (
    BatchSource,
    DispatchedSource,
    IndexedSource,
    StreamSource,
    indexed_length,
    stream_length,
)
from zeroaccel.data.order import Order, Share
from zeroaccel.data.prepared_loader import LoaderProgress, PreparedLoader
from zeroaccel.errors import UsageError
from zeroaccel.nested import to_device

__all__ = ["DataLoaderConfiguration", "prepare_data_loader"]


@dataclass
class DataLoaderConfiguration:
    """How loaders are prepared.

    Attributes:
        split_batches: a batch of the given loader is divided among the ranks; otherwise each rank gets a whole one,
            and together they get as many times more.
        dispatch_batches: rank 0 reads for all. By default it does for datasets that are only iterable.
        even_batches: the last round is filled up with the first samples, so that all ranks get equally many full
            batches. Without it a rank may get a batch fewer, and must not wait for the others.
        use_seedable_sampler: the order of epoch e is drawn from `data_seed + e` alone.
        data_seed: of the order of samples; by default rank 0's `torch.initial_seed()`.
        non_blocking: copy to the device without waiting, which needs `pin_memory`.
        use_stateful_dataloader: that a loader has `state_dict()` and `load_state_dict()`. All have them.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


def prepare_data_loader(
    loader: DataLoader[Any],
    settings: DataLoaderConfiguration | None = None,
    *,
    collectives: Collectives | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    watch: LoaderProgress | None = None,
) -> PreparedLoader:
    """This rank's loader. One that is prepared already is returned as it is. (all ranks, where there are collectives)

    Args:
        loader: yields what a single process would get; the same on all ranks.
        settings: by default `DataLoaderConfiguration()`.
        collectives: how ranks share a random order, and how rank 0 dispatches.
        rank, world_size: whose part; by default those of `collectives`, or 0 of 1.
        device: where batches go; None leaves them.
        watch: told when the loader is being iterated over.

    Raises:
        UsageError: it is no loader, is dealt out already, or cannot be dealt in the way the settings ask for.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    settings = settings or DataLoaderConfiguration()
    if rank is None:
        rank = collectives.rank if collectives is not None else 0
    if world_size is None:
        world_size = collectives.world_size if collectives is not None else 1
    with nullcontext() if collectives is None else agreed(collectives, "prepare: dataloader"):
        _check(loader)
        rules = _rules(loader, settings, world_size)
    stream = isinstance(loader.dataset, IterableDataset)
    dispatches = stream if settings.dispatch_batches is None else settings.dispatch_batches
    dispatches = dispatches and world_size > 1
    share = _share(collectives) if collectives is not None and world_size > 1 else None
    seed = _seed(settings.data_seed, share)
    order = Order(
        loader.dataset if stream else loader.batch_sampler if loader.batch_sampler is not None else loader.sampler,
        seed=seed,
        seedable=settings.use_seedable_sampler,
        share=None if dispatches else share,
        reads_with=loader.generator,
        stream=stream,
    )
    read_by = None if dispatches else rank
    source: BatchSource
    if stream:
        source = StreamSource(loader, rules, order, read_by, seed)
    else:
        source = IndexedSource(loader, rules, order, read_by)
    if dispatches:
        if collectives is None:
            raise UsageError("prepare_data_loader(collectives)", expected="a way from rank 0 to the others", got=None)
        source = DispatchedSource(source, collectives, lambda: _length(loader, rules, rank))
    return PreparedLoader(
        loader,
        source,
        world_size=world_size,
        samples_per_round=_samples_per_round(loader, rules),
        place=lambda batch: to_device(batch, device, non_blocking=settings.non_blocking) if device else batch,
        watch=watch,
    )


def _check(loader: Any) -> None:
    where = "prepare: dataloader"
    if not isinstance(loader, DataLoader):
        raise UsageError(where, expected="a torch.utils.data.DataLoader", got=type(loader).__name__)
    own = type(loader).__iter__ is not DataLoader.__iter__
    if own and not type(loader).__module__.startswith("torchdata."):
        raise UsageError(
            where,
            expected="a loader that iterates as torch's does, as it is taken apart and read in another order",
            got=f"{type(loader).__name__}, with an __iter__ of its own",
            fix="move what it does into the dataset or collate_fn, or do not prepare it and deal the data out yourself",
        )
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise UsageError(
            where,
            expected="a loader of the whole dataset, which prepare() deals out to the ranks",
            got="one with a DistributedSampler, which has dealt it out already",
            fix="leave the sampler out (shuffle=True if it shuffled), or do not prepare this loader",
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise UsageError(
            where, expected="batches in their order, as a position is a count of them", got="in_order=False"
        )


def _rules(loader: DataLoader[Any], settings: DataLoaderConfiguration, world_size: int) -> ShardingRules:
    batches: Any = loader.batch_sampler
    if loader.batch_size is not None:
        size: int | None = loader.batch_size
    elif batches is None:  # the dataset makes the batches
        size = 1
    else:
        size = getattr(batches, "batch_size", None)
    split = settings.split_batches and world_size > 1
    if split and (size is None or (batches is None and loader.batch_size is None) or size % world_size):
        raise UsageError(
            "split_batches=True: the loader's batch size",
            expected=f"a multiple of the {world_size} ranks, which share each batch",
            got=size if batches is not None or loader.batch_size is not None else "batches that the dataset makes",
            fix="choose another batch_size, or set split_batches to False",
        )
    # A batch sampler of the user's own says itself what it drops.
    drop_last = bool(loader.drop_last or getattr(batches, "drop_last", False))
    return ShardingRules(world_size, split, settings.even_batches, drop_last, size)


def _length(loader: DataLoader[Any], rules: ShardingRules, rank: int) -> int:
    if isinstance(loader.dataset, IterableDataset):
        return stream_length(loader, rules, rank)
    return indexed_length(loader, rules, rank)


def _samples_per_round(loader: DataLoader[Any], rules: ShardingRules) -> int | None:
    if rules.batch_size is None or (loader.batch_sampler is None and loader.batch_size is None):
        return None
    return rules.batch_size * (1 if rules.split else rules.world_size)


def _share(collectives: Collectives) -> Share:
    return lambda tensor, what: collectives.broadcast(tensor, 0, f"loader: {what}")


def _seed(given: int | None, share: Share | None) -> int:
    seed = torch.tensor((torch.initial_seed() if given is None else given) % 2**62)
    if share is not None:
        share(seed, "seed of the order")
    return int(seed.item())
