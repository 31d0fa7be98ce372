"""Shards an order of samples over the ranks, round by round, like accelerate's BatchSamplerShard.

A *round* is one batch of every rank. The ranks' batches are consecutive parts of it, in the order of the ranks, so that
an all-gather of a round has the order of a single process, with repeated samples at the end. The module uses neither
torch nor a process group; the same order gives the same rounds on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

BALANCED_ROUNDS: Final = 64
"""Number of rounds whose samples `balanced_items` reorders together."""


@dataclass(frozen=True)
class ShardingRules:
    """Settings for sharding an order.

    Attributes:
        world_size: number of ranks, W.
        split: divide each batch of the order among the ranks; otherwise each rank gets complete batches.
        even: fill the last round with the first samples, so that all ranks get the same number of full batches.
        drop_last: drop an incomplete round.
        batch_size: number of samples per batch of the order; None for batches of different sizes, which are not
            divided.
        balanced: the order is that of `balanced_items`.
    """

    world_size: int
    split: bool = False
    even: bool = True
    drop_last: bool = False
    batch_size: int | None = None
    balanced: bool = False

    @property
    def part(self) -> int | None:
        """Number of samples per rank and round; None for batches of different sizes."""
        if self.batch_size is None:
            return None
        return self.batch_size // self.world_size if self.split else self.batch_size


@dataclass(frozen=True)
class RankBatch(Generic[T]):
    """One rank's batch of a round.

    Attributes:
        samples: samples of the batch.
        real: for each rank, the number of samples of its batch that are not repeated; None if no sample is.
        last: True if it is this rank's last batch.
    """

    samples: list[T]
    real: tuple[int, ...] | None
    last: bool


@dataclass(frozen=True)
class _Round(Generic[T]):
    parts: list[list[T]]
    real: tuple[int, ...] | None


def shard_batches(batches: Iterable[Sequence[T]], rules: ShardingRules) -> Iterator[list[RankBatch[T]]]:
    """Yields rounds, each a list of the ranks' batches: fewer than W if the last ranks get no batch.

    Args:
        batches: the order, in batches; all except the last have `rules.batch_size` samples.
    """
    return _with_last(_rounds(batches, rules))


def shard_items(items: Iterable[T], rules: ShardingRules) -> Iterator[list[RankBatch[T]]]:
    """Like `shard_batches`, for an order of single items. Requires `rules.batch_size`."""
    assert rules.batch_size is not None, "shard_items needs a batch size"
    size = rules.batch_size
    source = iter(items)
    return shard_batches(iter(lambda: list(islice(source, size)), []), rules)


def balanced_items(items: Iterable[T], rules: ShardingRules, tokens: Callable[[T], int], epoch: int = 0) -> Iterator[T]:
    """Reorders items so that the ranks' batches of a round have about equally many tokens.

    Every window of 64 rounds keeps its items. A round has items of similar lengths, so that there is little padding,
    and each goes to the rank with the fewest tokens so far. The rounds of a window come in a random order, which
    depends on nothing but the epoch; an incomplete round is the last one.

    Example:
        >>> rules = ShardingRules(world_size=2, batch_size=2)
        >>> list(balanced_items([1, 9, 2, 8, 3, 7, 5], rules, tokens=lambda item: item))
        [9, 1, 8, 2, 3, 7, 5]
    """
    full = rules.world_size * (rules.part or 1)
    for number, group in enumerate(_groups(items, BALANCED_ROUNDS * full)):
        whole = len(group) // full * full
        by_length = sorted(group[:whole], key=tokens, reverse=True)
        rounds = [by_length[start : start + full] for start in range(0, whole, full)]
        random.Random(f"{epoch} {number}").shuffle(rounds)
        for round_items in rounds:
            yield from chain.from_iterable(_equal_parts(round_items, rules.world_size, tokens))
        yield from group[whole:]


def _equal_parts(items: Sequence[T], ranks: int, tokens: Callable[[T], int]) -> list[list[T]]:
    """Divides items, longest first, into parts of as many items, each into the part with the fewest tokens."""
    parts: list[list[T]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for item in items:
        rank = min((n for n in range(ranks) if len(parts[n]) < len(items) // ranks), key=sums.__getitem__)
        parts[rank].append(item)
        sums[rank] += tokens(item)
    return parts


def batches_of_rank(rounds: Iterable[list[RankBatch[T]]], rank: int) -> Iterator[RankBatch[T]]:
    """Yields the batches of one rank; without `even`, it may get one fewer than earlier ranks."""
    return (batches[rank] for batches in rounds if rank < len(batches))


def count_rounds(batches: int, rules: ShardingRules, *, rank: int = 0, last_size: int | None = None) -> int:
    """Returns the number of batches that `rank` gets from an order of `batches` batches.

    Args:
        last_size: number of samples in the order's last batch; None if unknown.
    """
    if rules.split:
        share = rules.part
        assert share, "splitting batches needs a batch size"
        size = rules.batch_size if last_size is None else last_size
        # The last batch may be too small for a full round, or for this rank to get a part of it.
        dropped = rules.drop_last and size != rules.batch_size
        missed = not rules.even and not rules.drop_last and size is not None and size <= rank * share
        return batches - (batches > 0 and (dropped or missed))
    full, remainder = divmod(batches, rules.world_size)
    if rules.drop_last:
        # The last full round has too few samples if the last batch is small.
        small = last_size is not None and rules.batch_size is not None and last_size != rules.batch_size
        return full - (small and remainder == 0 and full > 0)
    return full + (remainder > 0 if rules.even else remainder > rank)


def _with_last(rounds: Iterator[_Round[T]]) -> Iterator[list[RankBatch[T]]]:
    """Reads one round ahead, to mark the last batch of each rank."""
    following = next(rounds, None)
    while (current := following) is not None:
        following = next(rounds, None)
        num_ranks = 0 if following is None else len(following.parts)
        yield [RankBatch(batch, current.real, last=rank >= num_ranks) for rank, batch in enumerate(current.parts)]


def _rounds(batches: Iterable[Sequence[T]], rules: ShardingRules) -> Iterator[_Round[T]]:
    share = rules.part
    assert share != 0, "a part needs at least one sample"
    full = rules.world_size * (share or 1)
    first: list[Any] = []
    for group in _groups(batches, 1 if rules.split else rules.world_size):
        # A round consists of samples, or of whole batches if these have different sizes.
        items: list[Any] = list(map(list, group)) if share is None else list(chain.from_iterable(group))
        first = first or list(items)
        num_real = len(items)
        if num_real < full and rules.drop_last:
            return
        if num_real < full and rules.even:
            # Fill with the first samples of the epoch, like torch's DistributedSampler; `cycle`, because the epoch may
            # have fewer samples than are missing.
            items += islice(cycle(first), full - num_real)
        parts = items if share is None else [items[start : start + share] for start in range(0, len(items), share)]
        if share is None:
            real = tuple(len(batch) if index < num_real else 0 for index, batch in enumerate(items))
        else:
            real = tuple(min(share, max(0, num_real - start)) for start in range(0, len(items), share))
        yield _Round(parts, real if num_real < len(items) else None)


def _groups(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(batches)
    return iter(lambda: list(islice(source, size)), [])
