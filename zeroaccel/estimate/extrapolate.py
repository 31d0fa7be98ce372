"""The step of a long model from those of three short ones: blocks that are alike take alike, so a few tell of all.

[Note: lengthening] Three models that have the same blocks, one more each, take steps of the same operations, one block
more of them each. What is held at an operation, counted from the nearer end of its phase, grows from the first to the
second model as from the second to the third; that is checked for every operation, and then it grows on like this. At
operations between those that are looked at something between their amounts is held, so that the peak is at one of them.
Only what is padded grows in steps, by less than a part in `_ROUNDING`. Pure arithmetic, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import NamedTuple, TypeVar

__all__ = ["MemoryTrace", "Moment", "lengthen"]

_ROUNDING = 10**5

T = TypeVar("T")


class Moment(NamedTuple):
    """What is held after one operation, in bytes.

    Attributes:
        phase: how many parts of the step are over.
    """

    phase: int
    total: int
    params: int
    optimizer: int
    gradients: int


@dataclass(frozen=True)
class MemoryTrace:
    """One step of a model.

    Attributes:
        numel: parameters of the model.
        moments: in order.
        shards, trained: as in `simulate.Simulated`.
    """

    numel: int
    moments: tuple[Moment, ...]
    shards: tuple[tuple[int, int], ...]
    trained: tuple[int, ...]


def lengthen(courses: Sequence[MemoryTrace], more: int) -> MemoryTrace | None:
    """The step of a model with `more` blocks than the last of three; None if they do not grow evenly.

    Args:
        courses: of models with n, n + 1 and n + 2 blocks.
    """
    phases = [[list(part) for _, part in groupby(one.moments, lambda moment: moment.phase)] for one in courses]
    moments: list[Moment] = []
    for parts in zip_longest(*phases, fillvalue=[]):
        grown = _grown(parts, more)
        if grown is None:
            return None
        moments += (Moment(*amounts) for amounts in grown)
    shards = _grown([one.shards for one in courses], more, repeat=True)
    trained = _grown([[(numel,) for numel in one.trained] for one in courses], more, repeat=True)
    numel = _grown([[(one.numel,)] for one in courses], more)
    if shards is None or trained is None or numel is None:
        return None
    pairs = tuple((elements, nbytes) for elements, nbytes in shards)
    return MemoryTrace(numel[0][0], tuple(moments), pairs, tuple(one for (one,) in trained))


def _grown(
    sequences: Sequence[Sequence[tuple[int, ...]]], more: int, *, repeat: bool = False
) -> list[tuple[int, ...]] | None:
    """The amounts of the third of three sequences, grown `more` times again; None if they do not grow evenly.

    Args:
        repeat: put in the amounts of `more` blocks, too, and not only those of the blocks at the ends.
    """
    first, second, third = sequences
    size = len(third) - len(second)
    if size != len(second) - len(first) or not first or len(third) > 2 * len(first) + 1:
        return None
    grown = []
    largest = max(map(max, third))
    for index, amounts in enumerate(third):
        before, earlier = (other[_nearer(index, third, other)] for other in (second, first))
        for now, then, once in zip(amounts, before, earlier, strict=True):
            if abs((now - then) - (then - once)) * _ROUNDING > largest:
                return None
        grown.append(tuple(now + round(more * (now - once) / 2) for now, once in zip(amounts, earlier, strict=True)))
    middle = len(third) // 2
    return [*grown[:middle], *(grown[middle - size : middle] * more if repeat else ()), *grown[middle:]]


def _nearer(index: int, long: Sequence[T], short: Sequence[T]) -> int:
    """The place in a shorter sequence that is as far from the nearer end."""
    return index if index < len(long) // 2 else index - len(long) + len(short)
