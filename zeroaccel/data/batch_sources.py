"""Where a prepared loader's batches come from: torch's own loader, over the part of the order that a rank is dealt.

A source reads an epoch from any of its rounds on. It wraps torch's `DataLoader` with the user's settings of workers,
collation and pinned memory; orders and parts are `order.py`'s and `batch_sharding.py`'s matter, positions
`prepared_loader.py`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from zeroaccel.comm.agree import from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.data.batch_sharding import (
    RankBatch,
    ShardingRules,
    count_rounds,
    deal_batches,
    deal_items,
    turns_of_rank,
)
from zeroaccel.data.order import Order, undisturbed
from zeroaccel.nested import map_tensors

__all__ = ["BatchSource", "DispatchedSource", "IndexedSource", "StreamSource", "TakenBatch"]


class TakenBatch(NamedTuple):
    """A batch of one rank, with what its `RankBatch` says of it."""

    batch: Any
    real: int | None
    last: bool


class BatchSource(Protocol):
    """Reads epochs."""

    def epoch(self, number: int, skip: int) -> Iterator[TakenBatch]:
        """This rank's batches of an epoch, from round `skip` on."""

    def state(self, *, started: bool) -> Tensor | None:
        """What the order of the epoch that has begun, or else of the next one, is drawn from; None for nothing."""

    def restore(self, state: Tensor | None) -> None:
        """The next epoch is drawn from `state`."""

    def __len__(self) -> int:
        """Batches of this rank per epoch; TypeError where nobody knows."""


@dataclass(frozen=True)
class _Seat:
    """Whose turns are read: one rank's, or with None those of all, in their order."""

    rank: int | None

    def turns(self, rounds: Iterable[list[RankBatch[Any]]]) -> Iterator[RankBatch[Any]]:
        return chain.from_iterable(rounds) if self.rank is None else turns_of_rank(rounds, self.rank)


class IndexedSource:
    """A dataset with indices.

    Args:
        given: the user's loader.
        order: of its sampler.
        rank: whose batches; None for those of all ranks, one after another.
    """

    def __init__(self, given: DataLoader[Any], rules: ShardingRules, order: Order, rank: int | None) -> None:
        self._given, self._rules, self._order, self._seat = given, rules, order, _Seat(rank)
        self._single = given.batch_sampler is None
        self._tags: deque[tuple[int | None, bool]] = deque()
        self._turns: Iterator[RankBatch[Any]] = iter(())
        part = _Indices(self._next_indices)
        how = {"batch_size": None, "sampler": part} if self._single else {"batch_sampler": part}
        self._inner: DataLoader[Any] = DataLoader(given.dataset, **how, **_reading(given))

    def epoch(self, number: int, skip: int) -> Iterator[TakenBatch]:
        """As `BatchSource.epoch`; what is skipped is not read."""
        if callable(set_epoch := getattr(self._given.dataset, "set_epoch", None)):
            set_epoch(number)
        epoch = self._order.begin(number)
        batches = ([index] for index in epoch.batches) if self._single else epoch.batches
        self._turns = self._seat.turns(islice(deal_batches(batches, self._rules), skip, None))
        self._tags.clear()
        assert self._inner.generator is not None, "_reading gives one"
        self._inner.generator.manual_seed(epoch.worker_seed)
        for batch in self._inner:
            yield TakenBatch(batch, *self._tags.popleft())

    def state(self, *, started: bool) -> Tensor | None:
        return self._order.state(started=started)

    def restore(self, state: Tensor | None) -> None:
        self._order.restore(state)

    def __len__(self) -> int:
        return indexed_length(self._given, self._rules, self._seat.rank or 0)

    def _next_indices(self) -> Iterator[Any]:
        for turn in self._turns:
            self._tags.append((turn.real, turn.last))
            yield turn.samples[0] if self._single else turn.samples


class StreamSource:
    """A dataset that is only iterable. To skip, it reads and drops: only the dataset knows what comes later.

    Args:
        given: the user's loader.
        rank: whose batches; None for those of all ranks, one after another.
    """

    def __init__(self, given: DataLoader[Any], rules: ShardingRules, order: Order, rank: int | None, seed: int) -> None:
        self._given, self._rules, self._order, self._seed = given, rules, order, seed
        self._rank = rank
        single = given.batch_size is None
        assert isinstance(given.dataset, IterableDataset), "a stream"
        stream = _TurnStream(given.dataset, rules, rank)
        settings = _reading(given)
        settings["collate_fn"] = _CollateTurns(given.collate_fn, single=single)
        self._inner: DataLoader[Any] = DataLoader(stream, batch_size=None, **settings)

    def epoch(self, number: int, skip: int) -> Iterator[TakenBatch]:
        """As `BatchSource.epoch`."""
        self._order.begin(number)
        assert self._inner.generator is not None, "_reading gives one"
        self._inner.generator.manual_seed(self._seed + number)
        rounds: Iterator[list[TakenBatch]] = iter(self._inner)
        # What the dataset draws while it is read for nothing was drawn before the state was saved.
        with undisturbed() if skip and self._inner.num_workers == 0 else nullcontext():
            for _ in islice(rounds, skip):
                pass
        if self._inner.num_workers:  # each worker knows its own last round only; they read ahead anyway
            rounds = _marked(rounds)
        for turns in rounds:
            yield from (TakenBatch(*turn) for turn in turns)

    def state(self, *, started: bool) -> Tensor | None:
        return self._order.state(started=started)

    def restore(self, state: Tensor | None) -> None:
        self._order.restore(state)

    def __len__(self) -> int:
        return stream_length(self._given, self._rules, self._rank or 0)


class DispatchedSource:
    """Rank 0 reads, and every rank gets its batch of what rank 0 has read. The others' datasets are never touched.

    Args:
        source: of all ranks' turns; read on rank 0 only.
    """

    def __init__(self, source: BatchSource, collectives: Collectives, length: Callable[[], int]) -> None:
        self._source = source
        self._collectives = collectives
        self._length = length

    def epoch(self, number: int, skip: int) -> Iterator[TakenBatch]:
        """As `BatchSource.epoch`. (all ranks, round by round)"""
        rank, world_size = self._collectives.rank, self._collectives.world_size
        taken = self._source.epoch(number, skip) if rank == 0 else iter(())
        label = f"batches of epoch {number} from rank 0"
        while turns := from_rank_0(self._collectives, lambda: [*map(_compact, islice(taken, world_size))], label):
            if rank < len(turns):
                yield TakenBatch(*turns[rank])

    def state(self, *, started: bool) -> Tensor | None:
        return self._source.state(started=started) if self._collectives.rank == 0 else None

    def restore(self, state: Tensor | None) -> None:
        if self._collectives.rank == 0:
            self._source.restore(state)

    def __len__(self) -> int:
        return self._length()


def indexed_length(given: DataLoader[Any], rules: ShardingRules, rank: int) -> int:
    """Batches of `rank` per epoch; TypeError where the sampler has no length."""
    sampler: Any = given.batch_sampler if given.batch_sampler is not None else given.sampler
    batches, last_size = len(sampler), None
    if rules.batch_size is not None and batches:
        try:
            samples = batches if given.batch_sampler is None else len(sampler.sampler)
            last_size = rules.batch_size if samples >= batches * rules.batch_size else samples % rules.batch_size
        except (AttributeError, TypeError):
            last_size = None  # a batch sampler of the user's own
    return count_rounds(batches, rules, rank=rank, last_size=last_size)


def stream_length(given: DataLoader[Any], rules: ShardingRules, rank: int) -> int:
    """Batches of `rank` per epoch; TypeError where the dataset does not know its length."""
    items: int = len(given.dataset)  # type: ignore[arg-type]
    assert rules.batch_size, "streams are dealt in batches of a known size"
    batches = -(-items // rules.batch_size)
    return count_rounds(batches, rules, rank=rank, last_size=items - (batches - 1) * rules.batch_size)


class _Indices:
    """A sampler that gives what it is told."""

    def __init__(self, following: Callable[[], Iterator[Any]]) -> None:
        self._following = following

    def __iter__(self) -> Iterator[Any]:
        return self._following()


class _TurnStream(IterableDataset[Any]):
    """Lists of turns: one rank's, singly, or all ranks' of a round."""

    def __init__(self, items: Iterable[Any], rules: ShardingRules, rank: int | None) -> None:
        self._items, self._rules, self._rank = items, rules, rank

    def __iter__(self) -> Iterator[list[RankBatch[Any]]]:
        rounds = deal_items(self._items, self._rules)
        if self._rank is None:
            return rounds
        return ([turn] for turn in turns_of_rank(rounds, self._rank))


class _CollateTurns:
    """Collates each turn of a list; an object of its own, for it travels to workers."""

    def __init__(self, collate: Callable[[Any], Any], *, single: bool) -> None:
        self._collate, self._single = collate, single

    def __call__(self, turns: list[RankBatch[Any]]) -> list[tuple[Any, int | None, bool]]:
        return [
            (self._collate(turn.samples[0] if self._single else turn.samples), turn.real, turn.last) for turn in turns
        ]


def _reading(given: DataLoader[Any]) -> dict[str, Any]:
    """How the user's loader reads. The generator is a new one: torch draws from it, or else from the run's own."""
    settings: dict[str, Any] = {
        "num_workers": given.num_workers,
        "collate_fn": given.collate_fn,
        "pin_memory": given.pin_memory,
        "timeout": given.timeout,
        "worker_init_fn": given.worker_init_fn,
        "multiprocessing_context": given.multiprocessing_context,
        "persistent_workers": given.persistent_workers,
        "generator": torch.Generator(),
    }
    return settings | ({"prefetch_factor": given.prefetch_factor} if given.num_workers else {})


def _marked(rounds: Iterator[Any]) -> Iterator[Any]:
    """With `last` on the turns of the last round and no other."""
    following = next(rounds, None)
    while (current := following) is not None:
        following = next(rounds, None)
        yield [(batch, real, following is None) for batch, real, _ in current]


def _compact(taken: TakenBatch) -> TakenBatch:
    """A tensor that is a small view of a large storage would be sent with all of it."""
    return TakenBatch(map_tensors(_own_storage, taken.batch), taken.real, taken.last)


def _own_storage(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize else tensor
