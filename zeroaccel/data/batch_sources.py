"""Sources of a prepared loader's batches: an order that all ranks share, and torch's loader for a rank's part of it.

`Order` makes the epochs of a sampler equal on all ranks, and reproducible: at the start of every epoch the sampler's
generator gets rank 0's state, which `Order` stores. A sampler without a generator runs under a seed that all ranks
share.

Sources read an epoch of that order, starting at any round, with torch's `DataLoader` and the user's settings for
workers, collation and pinned memory. `batch_sharding.py` assigns samples to ranks, `prepared_loader.py` keeps the
position in an epoch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from zeroaccel.checkpoint.plain_codec import preserved_random_state
from zeroaccel.comm.agree import from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.data.batch_sharding import (
    RankBatch,
    ShardingRules,
    balanced_items,
    batches_of_rank,
    count_rounds,
    shard_batches,
    shard_items,
)
from zeroaccel.logs import logger
from zeroaccel.nested import map_tensors

Share = Callable[[Tensor, str], None]
"""Broadcasts a tensor from rank 0; the text is the name of the collective in messages and traces."""

_CPU = torch.device("cpu")


# -- the order of an epoch


@dataclass(frozen=True)
class _Epoch:
    """One epoch, before the sampler draws it.

    Attributes:
        batches: the sampler's items: lists of indices, or single indices.
        worker_seed: seed of the loader's workers.
    """

    batches: Iterable[Any]
    worker_seed: int


class Order:
    """The epochs of one sampler.

    Args:
        sampler: a batch sampler or a sampler; if its `generator` is None, it gets a generator.
        seed: seed, the same on all ranks.
        seedable: draw epoch e of a `RandomSampler` from only the seed `seed + e`.
        share: broadcasts rank 0's state of a generator; None without other ranks.
        worker_generator: generator from which torch's loader draws the seed of its workers.
        stream: True if `sampler` is an iterable dataset, which determines its own order.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        seed: int,
        seedable: bool = False,
        share: Share | None = None,
        worker_generator: torch.Generator | None = None,
        stream: bool = False,
    ) -> None:
        self._sampler = sampler
        self._chain = _chain(sampler)
        self._seed = seed
        self._stream = stream
        self._share = share
        self._owner = next((sampler for sampler in self._chain if hasattr(sampler, "generator")), None)
        self._seedable = seedable and isinstance(self._owner, RandomSampler)
        self._start: Tensor | None = None
        if self._owner is not None and self._owner.generator is None:
            self._owner.generator = torch.Generator().manual_seed(seed)
        self._worker_generator: torch.Generator | None = None
        if self._owner is not None and worker_generator is self._owner.generator:
            self._worker_generator = worker_generator

    def begin(self, number: int) -> _Epoch:
        """Begins epoch `number` and returns it. (all ranks, with `share`)"""
        for sampler in self._chain:
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(number)
        seed = self._seed + number
        if self._owner is None:
            return _Epoch(self._drawn(seed), seed)
        generator: torch.Generator = self._owner.generator
        if self._seedable:
            generator.manual_seed(seed)
        elif self._share is not None:
            state = generator.get_state()
            self._share(state, f"generator of epoch {number}")
            generator.set_state(state)
        self._start = generator.get_state()
        if self._worker_generator is not None:
            # torch's loader draws its workers' seed before the order; a shared generator must advance in the same way.
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        return _Epoch(self._sampler, seed)

    def state(self, *, started: bool) -> Tensor | None:
        """Returns the generator's state at the start of the current epoch (`started`) or of the next one."""
        if self._owner is None or self._seedable:
            return None
        return self._start if started else self._owner.generator.get_state()

    def restore(self, state: Tensor | None) -> None:
        """Sets the generator's state for the next epoch."""
        if state is not None and self._owner is not None and not self._seedable:
            self._owner.generator.set_state(state)

    def _drawn(self, seed: int) -> Iterable[Any]:
        sequential = all(type(sampler) in (BatchSampler, SequentialSampler) for sampler in self._chain)
        if self._stream or sequential or not isinstance(self._sampler, Sized):
            return self._sampler  # type: ignore[no-any-return]
        # A user's sampler may draw from any global generator: seed all of them, and run it in full.
        with preserved_random_state(_CPU):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            return list(self._sampler)  # type: ignore[call-overload, no-any-return]


def _chain(sampler: Any) -> list[Any]:
    """Returns a batch sampler, its inner sampler, that sampler's inner one, and so on."""
    chain: list[Any] = []
    while sampler is not None and sampler not in chain:
        chain.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return chain


# -- sources


class LoadedBatch(NamedTuple):
    """A collated batch of one rank, with the fields of its `RankBatch`."""

    batch: Any
    real: tuple[int, ...] | None
    last: bool


Epochs = Callable[[int, int], Iterator[LoadedBatch]]
"""Reads this rank's batches of an epoch: (number of the epoch, first round)."""


def _of_rank(rounds: Iterable[list[RankBatch[Any]]], rank: int | None) -> Iterator[RankBatch[Any]]:
    """Yields the batches of one rank, or with None those of all ranks in order."""
    return chain.from_iterable(rounds) if rank is None else batches_of_rank(rounds, rank)


def _reader_of(loader: DataLoader[Any], generator: torch.Generator, dataset: Any, **changed: Any) -> DataLoader[Any]:
    """Returns a loader with the user's settings and its own generator; torch's would draw from the global one."""
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "persistent_workers": loader.persistent_workers,
        "generator": generator,
    }
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(dataset, **{**settings, **changed})


class IndexedSource:
    """A dataset with indices, which this process reads with torch's loader.

    Args:
        loader: the user's loader.
        order: order of its sampler.
        rank: rank whose batches it reads; None for those of all ranks in order.
        lengths: index -> number of tokens, if the rules balance them.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        rules: ShardingRules,
        order: Order,
        rank: int | None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self._dataset, self._rules, self._order, self._rank = loader.dataset, rules, order, rank
        self._lengths = lengths
        self._generator = torch.Generator()
        self._single = loader.batch_sampler is None
        self._fields: deque[tuple[tuple[int, ...] | None, bool]] = deque()
        self._batches: Iterator[RankBatch[Any]] = iter(())
        indices = _Indices(self._next_indices)
        sampling = {"batch_size": None, "sampler": indices} if self._single else {"batch_sampler": indices}
        self._reader = _reader_of(loader, self._generator, loader.dataset, **sampling)

    def epoch(self, number: int, skip: int) -> Iterator[LoadedBatch]:
        """See `Epochs`; skipped batches are not read."""
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(number)
        epoch = self._order.begin(number)
        batches = ([index] for index in epoch.batches) if self._single else epoch.batches
        if self._lengths is None:
            rounds = shard_batches(batches, self._rules)
        else:
            indices = chain.from_iterable(batches)
            rounds = shard_items(balanced_items(indices, self._rules, self._lengths.__getitem__, number), self._rules)
        self._batches = _of_rank(islice(rounds, skip, None), self._rank)
        self._fields.clear()
        self._generator.manual_seed(epoch.worker_seed)
        for batch in self._reader:
            yield LoadedBatch(batch, *self._fields.popleft())

    def _next_indices(self) -> Iterator[Any]:
        # The reader may prefetch, so the fields wait in a queue for their batch.
        for batch in self._batches:
            self._fields.append((batch.real, batch.last))
            yield batch.samples[0] if self._single else batch.samples


class StreamSource:
    """Like `IndexedSource`, for an iterable dataset. It reads and drops skipped rounds to reach the later ones."""

    def __init__(
        self, loader: DataLoader[Any], rules: ShardingRules, order: Order, rank: int | None, seed: int
    ) -> None:
        self._order, self._seed = order, seed
        self._generator = torch.Generator()
        stream = _BatchStream(cast(Iterable[Any], loader.dataset), rules, rank)
        collate = _CollateBatches(loader.collate_fn, single=loader.batch_size is None)
        self._reader = _reader_of(loader, self._generator, stream, batch_size=None, collate_fn=collate)

    def epoch(self, number: int, skip: int) -> Iterator[LoadedBatch]:
        """See `Epochs`."""
        self._order.begin(number)
        self._generator.manual_seed(self._seed + number)
        rounds: Iterator[list[LoadedBatch]] = iter(self._reader)
        # The saved state already includes the random numbers that the dataset drew for skipped rounds.
        with preserved_random_state(_CPU) if skip and self._reader.num_workers == 0 else nullcontext():
            for _ in islice(rounds, skip):
                pass
        if self._reader.num_workers:  # each worker marks its own last round
            rounds = _with_last_of_all(rounds)
        for batches in rounds:
            yield from (LoadedBatch(*batch) for batch in batches)


def dispatched_epoch(
    read: Epochs, collectives: Collectives, rank: int, world_size: int, number: int, skip: int
) -> Iterator[LoadedBatch]:
    """Reads the batches of all ranks on rank 0 and sends them; other ranks do not read their datasets. (all ranks)

    Args:
        read: reads all ranks' batches; called only on rank 0.
        rank, world_size: this rank's share of the data; ranks with the same `rank` get the same batches.
        number, skip: see `Epochs`.
    """
    loaded = read(number, skip) if collectives.rank == 0 else iter(())

    def next_round() -> list[Any]:
        return [*map(_compact, islice(loaded, world_size))]

    while batches := from_rank_0(collectives, next_round, f"batches of epoch {number} from rank 0"):
        if rank < len(batches):
            yield LoadedBatch(*batches[rank])


def length_of(loader: DataLoader[Any], rules: ShardingRules, rank: int) -> int:
    """Returns the number of batches of `rank` per epoch; TypeError if the sampler or stream has no length."""
    if isinstance(loader.dataset, IterableDataset):
        items: int = len(loader.dataset)  # type: ignore[arg-type]
        assert rules.batch_size, "the length of a stream needs a batch size"
        batches = -(-items // rules.batch_size)
        return count_rounds(batches, rules, rank=rank, last_size=items - (batches - 1) * rules.batch_size)
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    batches, last_size = len(sampler), None
    if rules.batch_size is not None and batches:
        try:
            samples = batches if loader.batch_sampler is None else len(sampler.sampler)
            last_size = rules.batch_size if samples >= batches * rules.batch_size else samples % rules.batch_size
        except (AttributeError, TypeError):
            last_size = None  # the user's own batch sampler
    return count_rounds(batches, rules, rank=rank, last_size=last_size)


# -- tokens of samples


def tokens_of(sample: Any) -> int:
    """Returns the number of tokens of a sample: its `input_ids`, its first part if it is a tuple, or the sample itself.

    Raises:
        TypeError: it has no length.

    Example:
        >>> tokens_of({"input_ids": [5, 6, 7]}), tokens_of((torch.arange(4), 1)), tokens_of([1, 2])
        (3, 4, 2)
    """
    ids = sample
    if isinstance(sample, Mapping):
        ids = sample.get("input_ids")
    elif isinstance(sample, tuple) and sample:
        ids = sample[0]
    if isinstance(ids, str) or not isinstance(ids, Sized) or (isinstance(ids, Tensor) and ids.dim() == 0):
        raise TypeError(f"{type(sample).__name__!r} has no number of tokens")
    return len(ids)


def warn_unbalanced(dataset: Any, reason: object) -> None:
    """Warns that the batches of a dataset have no balance."""
    logger.warning(
        'DataLoaderConfiguration(balance="tokens"): loader of %s: %s, so its batches have no balance; pass '
        "DataLoaderConfiguration(lengths=[number of tokens of each sample]), or give samples `input_ids`",
        type(dataset).__name__,
        reason,
    )


def lengths_of(dataset: Any, lengths: Sequence[int] | str | None) -> list[int]:
    """Returns the number of tokens of each sample, for a dataset with indices.

    Args:
        lengths: the numbers, or the name of the column that has them; by default the column `length`, or else those of
            the samples, which are read once.

    Raises:
        TypeError: the samples have no length, or there are fewer or more numbers than samples.
    """
    if lengths is None and "length" in (getattr(dataset, "column_names", None) or ()):
        lengths = "length"
    if isinstance(lengths, str):
        lengths = dataset[lengths]
    if lengths is None:
        with preserved_random_state(_CPU):
            return [tokens_of(dataset[index]) for index in range(len(dataset))]
    if len(lengths) != len(dataset):
        raise TypeError(f"{len(lengths)} lengths for {len(dataset)} samples")
    return [int(length) for length in lengths]


class _Indices:
    """A sampler that yields the current epoch of a source."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()


class _BatchStream(IterableDataset[Any]):
    """Yields lists of batches: one batch of one rank, or all ranks' batches of a round."""

    def __init__(self, items: Iterable[Any], rules: ShardingRules, rank: int | None) -> None:
        self._items, self._rules, self._rank = items, rules, rank

    def __iter__(self) -> Iterator[list[RankBatch[Any]]]:
        rounds = shard_items(self._balanced() if self._rules.balanced else self._items, self._rules)
        if self._rank is None:
            return rounds
        return ([batch] for batch in batches_of_rank(rounds, self._rank))

    def _balanced(self) -> Iterable[Any]:
        items = iter(self._items)
        first = list(islice(items, 1))
        try:
            _ = [tokens_of(item) for item in first]
        except TypeError as error:
            warn_unbalanced(self._items, error)
            return chain(first, items)
        # Persistent workers do not learn the number of the epoch, so the order of rounds does not depend on it.
        return balanced_items(chain(first, items), self._rules, tokens_of)


class _CollateBatches:
    """Collates each batch of a list. It is a class, because workers pickle it."""

    def __init__(self, collate: Callable[[Any], Any], *, single: bool) -> None:
        self._collate, self._single = collate, single

    def __call__(self, batches: list[RankBatch[Any]]) -> list[tuple[Any, tuple[int, ...] | None, bool]]:
        return [
            (self._collate(batch.samples[0] if self._single else batch.samples), batch.real, batch.last)
            for batch in batches
        ]


def _with_last_of_all(rounds: Iterator[Any]) -> Iterator[Any]:
    """Sets `last` only in the last of all rounds; workers read ahead anyway, so this costs no time."""
    following = next(rounds, None)
    while (current := following) is not None:
        following = next(rounds, None)
        yield [(batch, real, following is None) for batch, real, _ in current]


def _compact(loaded: LoadedBatch) -> LoadedBatch:
    # Pickle sends the whole storage of a tensor, even for a small view.
    return LoadedBatch(map_tensors(_own_storage, loaded.batch), loaded.real, loaded.last)


def _own_storage(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize else tensor
