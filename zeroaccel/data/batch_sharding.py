"""Deals one order of samples out to ranks, round by round: what every loader here gives which rank, and nothing else.

No torch, no process group, no state: the same order in makes the same rounds on every rank. A *round* is what all
ranks take at once. Its parts, one per rank, lie in it in the order of the ranks, so that gathering a round by rank
gives back the order of a single process, with what was repeated to fill it up at the very end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Generic, TypeVar

__all__ = ["RankBatch", "ShardingRules", "count_rounds", "deal_batches", "deal_items", "turns_of_rank"]

T = TypeVar("T")


@dataclass(frozen=True)
class ShardingRules:
    """How an order is dealt.

    Attributes:
        world_size: ranks that take part.
        split: a batch of the order is divided among the ranks; otherwise each rank takes a whole one.
        even: the last round is filled up with the first samples, so that all ranks get equally many full batches.
        drop_last: a round that is not full is left out.
        batch_size: samples per batch of the order; None where batches differ, which are then dealt as they are.
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
    """One rank's part of a round.

    Attributes:
        samples: what the rank gets.
        real: samples of the round, all ranks together, that are not repeated ones; None where all are real.
        last: this rank has no turn after this one.
    """

    samples: list[T]
    real: int | None
    last: bool


@dataclass(frozen=True)
class _Round(Generic[T]):
    parts: list[list[T]]
    real: int | None


def deal_batches(batches: Iterable[Sequence[T]], rules: ShardingRules) -> Iterator[list[RankBatch[T]]]:
    """Rounds, each a list of the ranks' turns: shorter than the world where the last ranks get nothing.

    Args:
        batches: the order, in batches; all of `rules.batch_size` but the last.
    """
    rounds = _uneven_sizes(batches, rules) if rules.batch_size is None else _equal_sizes(batches, rules)
    return _with_last(rounds)


def deal_items(items: Iterable[T], rules: ShardingRules) -> Iterator[list[RankBatch[T]]]:
    """As `deal_batches`, of an order that is not cut into batches. `rules.batch_size` is needed."""
    assert rules.batch_size is not None, "items are dealt in batches of a known size"
    size = rules.batch_size
    source = iter(items)
    return deal_batches(iter(lambda: list(islice(source, size)), []), rules)


def turns_of_rank(rounds: Iterable[list[RankBatch[T]]], rank: int) -> Iterator[RankBatch[T]]:
    """The turns of one rank; it may have one fewer than those before it where rounds are not evened."""
    return (turns[rank] for turns in rounds if rank < len(turns))


def count_rounds(batches: int, rules: ShardingRules, *, rank: int = 0, last_size: int | None = None) -> int:
    """How many turns `rank` gets of an order of that many batches.

    Args:
        last_size: samples in the order's last batch, where it is known.
    """
    if rules.split:
        part = rules.part
        assert part, "batches that are split have a size"
        size = rules.batch_size if last_size is None else last_size
        left_out = batches > 0 and (
            (rules.drop_last and size != rules.batch_size)
            or (not rules.even and not rules.drop_last and size is not None and size <= rank * part)
        )
        return batches - left_out
    full, rest = divmod(batches, rules.world_size)
    if rules.drop_last:
        short = rest == 0 and full > 0 and last_size is not None and last_size != rules.batch_size
        return full - (short and rules.batch_size is not None)
    return full + (rest > 0 if rules.even else rest > rank)


def _with_last(rounds: Iterator[_Round[T]]) -> Iterator[list[RankBatch[T]]]:
    """Reads one round ahead, to know which is the last of each rank."""
    following = next(rounds, None)
    while (current := following) is not None:
        following = next(rounds, None)
        left = 0 if following is None else len(following.parts)
        yield [RankBatch(part, current.real, last=rank >= left) for rank, part in enumerate(current.parts)]


def _equal_sizes(batches: Iterable[Sequence[T]], rules: ShardingRules) -> Iterator[_Round[T]]:
    part = rules.part
    assert part, "a part has at least one sample"
    full = part * rules.world_size
    first: list[T] = []
    for samples in _groups(batches, 1 if rules.split else rules.world_size):
        taken = list(chain.from_iterable(samples))
        first = first or taken
        real = len(taken)
        if real < full and rules.drop_last:
            return
        if real < full and rules.even:
            taken += islice(cycle(first), full - real)
        cut = [taken[start : start + part] for start in range(0, len(taken), part)]
        yield _Round(cut, real if real < len(taken) else None)


def _uneven_sizes(batches: Iterable[Sequence[T]], rules: ShardingRules) -> Iterator[_Round[T]]:
    first: list[list[T]] = []
    for group in _groups(batches, rules.world_size):
        parts = [list(batch) for batch in group]
        first = first or list(parts)
        real = len(parts)
        if real < rules.world_size and rules.drop_last:
            return
        if real < rules.world_size and rules.even:
            parts += islice(cycle(first), rules.world_size - real)
        repeated = len(parts) > real
        yield _Round(parts, sum(map(len, parts[:real])) if repeated else None)


def _groups(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(batches)
    return iter(lambda: list(islice(source, size)), [])
