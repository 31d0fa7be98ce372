"""Shards one order of samples over the ranks, round by round, as accelerate's BatchSamplerShard does.

A *round* is one batch of every rank. The ranks' batches are consecutive parts of it, in the order of the ranks, so that
an all-gather of a round has the order of a single process, with repeated samples at the very end. Pure: no torch, no
process group; the same order makes the same rounds on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ShardingRules:
    """How an order is sharded.

    Attributes:
        world_size: W.
        split: each batch of the order is divided among the ranks; otherwise each rank gets complete batches.
        even: the last round is filled up with the first samples, so that all ranks get equally many full batches.
        drop_last: an incomplete round is dropped.
        batch_size: samples per batch of the order; None where batches differ, which then stay as they are.
    """

    world_size: int
    split: bool = False
    even: bool = True
    drop_last: bool = False
    batch_size: int | None = None

    @property
    def part(self) -> int | None:
        """Samples per rank and round."""
        if self.batch_size is None:
            return None
        return self.batch_size // self.world_size if self.split else self.batch_size


@dataclass(frozen=True)
class RankBatch(Generic[T]):
    """One rank's batch of a round.

    Attributes:
        samples: of the batch.
        num_real: samples of the round, over all ranks, that are not repetitions; None where none is repeated.
        last: it is this rank's last batch.
    """

    samples: list[T]
    num_real: int | None
    last: bool


@dataclass(frozen=True)
class _Round(Generic[T]):
    parts: list[list[T]]
    num_real: int | None


def shard_batches(batches: Iterable[Sequence[T]], rules: ShardingRules) -> Iterator[list[RankBatch[T]]]:
    """Rounds, each a list of the ranks' batches: fewer than W where the last ranks get none.

    Args:
        batches: the order, in batches; all of `rules.batch_size` but the last.
    """
    return _with_last(_rounds(batches, rules))


def shard_items(items: Iterable[T], rules: ShardingRules) -> Iterator[list[RankBatch[T]]]:
    """As `shard_batches`, of an order that is not cut into batches. `rules.batch_size` is needed."""
    assert rules.batch_size is not None, "items are cut into batches of a known size"
    size = rules.batch_size
    source = iter(items)
    return shard_batches(iter(lambda: list(islice(source, size)), []), rules)


def batches_of_rank(rounds: Iterable[list[RankBatch[T]]], rank: int) -> Iterator[RankBatch[T]]:
    """The batches of one rank; without `even` it may have one fewer than the ranks before it."""
    return (batches[rank] for batches in rounds if rank < len(batches))


def count_rounds(batches: int, rules: ShardingRules, *, rank: int = 0, last_size: int | None = None) -> int:
    """How many batches `rank` gets of an order of that many batches.

    Args:
        last_size: samples in the order's last batch, where it is known.
    """
    if rules.split:
        part = rules.part
        assert part, "batches that are split have a size"
        size = rules.batch_size if last_size is None else last_size
        # The last batch may be too small: for a full round, or for this rank to get a part of it.
        dropped = rules.drop_last and size != rules.batch_size
        missed = not rules.even and not rules.drop_last and size is not None and size <= rank * part
        return batches - (batches > 0 and (dropped or missed))
    full, remainder = divmod(batches, rules.world_size)
    if rules.drop_last:
        # The last of the full rounds is incomplete in samples where the last batch is small.
        small = last_size is not None and rules.batch_size is not None and last_size != rules.batch_size
        return full - (small and remainder == 0 and full > 0)
    return full + (remainder > 0 if rules.even else remainder > rank)


def _with_last(rounds: Iterator[_Round[T]]) -> Iterator[list[RankBatch[T]]]:
    """Reads one round ahead, to know which is the last of each rank."""
    following = next(rounds, None)
    while (current := following) is not None:
        following = next(rounds, None)
        num_ranks = 0 if following is None else len(following.parts)
        yield [RankBatch(part, current.num_real, last=rank >= num_ranks) for rank, part in enumerate(current.parts)]


def _rounds(batches: Iterable[Sequence[T]], rules: ShardingRules) -> Iterator[_Round[T]]:
    part = rules.part
    assert part != 0, "a part has at least one sample"
    full = rules.world_size * (part or 1)
    first: list[Any] = []
    for group in _groups(batches, 1 if rules.split else rules.world_size):
        # Batches of several sizes stay as they are: a round is made of them, and else of samples.
        items: list[Any] = list(map(list, group)) if part is None else list(chain.from_iterable(group))
        first = first or list(items)
        num_real = len(items)
        if num_real < full and rules.drop_last:
            return
        if num_real < full and rules.even:
            # Filled with the first ones of the epoch, as torch's DistributedSampler does; `cycle`, as there may be
            # fewer of them than are missing.
            items += islice(cycle(first), full - num_real)
        parts = items if part is None else [items[start : start + part] for start in range(0, len(items), part)]
        num_samples = num_real if part is not None else sum(map(len, items[:num_real]))
        yield _Round(parts, num_samples if num_real < len(items) else None)


def _groups(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(batches)
    return iter(lambda: list(islice(source, size)), [])
