"""The step of a long model from those of three short ones: blocks that are alike take alike, so one is enough to know.

[Note: lengthening] Three models that have the same blocks, one more each, take steps of the same operations, one block
more of them each. What is held at an operation grows by the same amount from the first to the second model as from the
second to the third, if it is counted from the nearer end of its phase; that is checked, for every operation. Then it
grows on like this. Operations of blocks between those that are looked at hold something between what the same operation
holds in the outer ones, so that the peak is at one of those. Pure arithmetic, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

__all__ = ["Course", "Moment", "lengthen"]

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
class Course:
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


def lengthen(courses: Sequence[Course], more: int) -> Course | None:
    """The step of a model with `more` blocks than the last of three; None if they do not grow evenly.

    Args:
        courses: of models with n, n + 1 and n + 2 blocks.
    """
    first, second, third = courses
    phases = [[list(part) for _, part in groupby(one.moments, lambda moment: moment.phase)] for one in courses]
    if len({len(parts) for parts in phases}) > 1 or third.numel - second.numel != second.numel - first.numel:
        return None
    moments: list[Moment] = []
    for short, middle, long in zip(*phases, strict=True):
        if len(long) - len(middle) != len(middle) - len(short) or len(long) > 2 * len(short):
            return None
        for index, moment in enumerate(long):
            before = middle[_nearer(index, long, middle)]
            growth = [now - then for now, then in zip(moment, before, strict=True)]
            earlier = short[_nearer(index, long, short)]
            if growth != [now - then for now, then in zip(before, earlier, strict=True)]:
                return None
            moments.append(Moment(*(now + more * step for now, step in zip(moment, growth, strict=True))))
    shards, trained = (_extended([getattr(one, name) for one in courses], more) for name in ("shards", "trained"))
    if shards is None or trained is None:
        return None
    return Course(third.numel + more * (third.numel - second.numel), tuple(moments), shards, trained)


def _nearer(index: int, long: Sequence[T], short: Sequence[T]) -> int:
    """The place in a shorter sequence that is as far from the nearer end."""
    return index if index < len(long) // 2 else index - len(long) + len(short)


def _extended(sequences: Sequence[tuple[T, ...]], more: int) -> tuple[T, ...] | None:
    """The third of three sequences that grow by the same part in their middle, grown `more` times again."""
    first, second, third = sequences
    size, middle = len(second) - len(first), len(first) // 2
    part = second[middle : middle + size]
    begin, end = first[:middle], first[middle:]
    if second != begin + part + end or third != begin + part * 2 + end:
        return None
    return begin + part * (2 + more) + end
