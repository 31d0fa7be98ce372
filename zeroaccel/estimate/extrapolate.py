"""Extrapolates the memory of one step over depth: the trace of a deep model from those of three shallow ones.

[Note: extrapolation over depth] Three models with n, n + 1 and n + 2 equal blocks run the same operations, each with
one block more than the one before. At every operation that changes the memory, counted from the nearer end of its phase
or from the turn between two passes over the blocks, the memory must grow from the first to the second model as from the
second to the third. If it does at all of them, the extrapolation assumes linear growth.
The operations in between have amounts between those of their neighbours, so the peak is at one of the compared
operations. Only padding grows in steps, by less than one part in `_ROUNDING`. Pure arithmetic, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import NamedTuple

_ROUNDING = 10**5


class Moment(NamedTuple):
    """Live memory after one operation, in bytes.

    Attributes:
        phase: number of completed phases of the step.
        reduced: bytes of gradients that are summed over the ranks; an optimizer on the host keeps these there.
    """

    phase: int
    total: int
    params: int
    optimizer: int
    gradients: int
    reduced: int = 0


@dataclass(frozen=True)
class MemoryTrace:
    """Memory over one step of a model.

    Attributes:
        numel: number of parameters of the model.
        moments: moments in the order of the operations.
        shards, trained: as in `simulate.Simulated`.
        sent: bytes sent, for each counter in `fake_ranks.SentBytes`.
        operations: the operation before each moment, None for one without memory of its own; () if not recorded.
    """

    numel: int
    moments: tuple[Moment, ...]
    shards: tuple[tuple[int, int], ...]
    trained: tuple[int, ...]
    sent: tuple[int, ...] = ()
    operations: tuple[object, ...] = ()


def changes_of(trace: MemoryTrace) -> MemoryTrace:
    """Drops moments at which neither the memory nor the phase changes."""
    groups = groupby(trace.moments, lambda moment: (moment.phase, moment.total))
    return replace(trace, moments=tuple(next(group) for _, group in groups), operations=())


def extrapolate_depth(
    traces: Sequence[MemoryTrace], more: int, shorter: Sequence[MemoryTrace] | None = None
) -> MemoryTrace | None:
    """Returns the trace of a model with `more` blocks than the last of three; None if they do not grow evenly.

    Args:
        traces: traces of models with n, n + 1 and n + 2 blocks.
        shorter: the first two traces of another workload with the same operations, to return its trace instead; it
            grows at the same operations as the three.
    """
    phases = [_by_phase(trace.moments) for trace in traces]
    others = [_by_phase(trace.moments) for trace in shorter or ()]
    moments: list[Moment] = []
    for groups in zip_longest(*phases, *others, fillvalue=[]):
        grown = _grow(groups, more)
        if grown is None:
            return None
        moments += (Moment(*amounts) for amounts in grown)
    traces = [*traces, *(shorter or ())]
    shards = _grow([trace.shards for trace in traces], more, repeat=True)
    trained = _grow([[(numel,) for numel in trace.trained] for trace in traces], more, repeat=True)
    numel = _grow([[(trace.numel,)] for trace in traces], more)
    if shards is None or trained is None or numel is None:
        return None
    pairs = tuple((elements, nbytes) for elements, nbytes in shards)
    before, last = (trace.sent for trace in traces[-2:])
    more += 1 if shorter else 0
    sent = tuple(new + more * (new - old) for old, new in zip(before, last, strict=True))
    return MemoryTrace(numel[0][0], tuple(moments), pairs, tuple(count for (count,) in trained), sent)


def _by_phase(moments: Sequence[Moment]) -> list[list[Moment]]:
    return [list(group) for _, group in groupby(moments, lambda moment: moment.phase)]


def _grow(
    sequences: Sequence[Sequence[tuple[int, ...]]], more: int, *, repeat: bool = False
) -> list[tuple[int, ...]] | None:
    """Returns the third of three sequences, grown by `more` blocks; None if they do not grow evenly.

    Args:
        sequences: the three sequences; optionally also the first two of another workload, to return its amounts
            instead, which grow at the same places.
        repeat: True to also insert the amounts of `more` blocks between those of the blocks at both ends.
    """
    first, second, third, *others = sequences
    if not any(sequences):
        return []
    if others and [len(sequence) for sequence in others] != [len(first), len(second)]:
        return None
    size = len(third) - len(second)
    if size != len(second) - len(first) or not first or len(third) > 2 * len(first) + 1:
        return None
    grown = []
    largest = max(map(max, third))
    for index, amounts in enumerate(third):
        # Count from the nearer end; between two passes over the blocks in one phase, from the end of the first.
        for skipped in (0 if index < len(third) // 2 else size, size // 2):
            steps = _steps(amounts, second, first, index - skipped, index - 2 * skipped)
            # The second difference is zero except for padding.
            if steps and all(abs(last - before) * _ROUNDING <= largest for last, before in steps):
                break
        else:
            return None
        if others:
            pairs = zip(others[0][index - 2 * skipped], others[1][index - skipped], strict=True)
            grown.append(tuple(new + (more + 1) * (new - old) for old, new in pairs))
        else:
            grown.append(tuple(three + round(more * sum(step) / 2) for three, step in zip(amounts, steps, strict=True)))
    middle = len(third) // 2
    inserted = grown[middle - size : middle] * more if repeat else []
    return [*grown[:middle], *inserted, *grown[middle:]]


def _steps(
    three: tuple[int, ...],
    second: Sequence[tuple[int, ...]],
    first: Sequence[tuple[int, ...]],
    in_second: int,
    in_first: int,
) -> list[tuple[int, int]]:
    """Returns, per amount, its growth from the second model to the third and from the first to the second.

    Returns [] if an index is out of range.
    """
    if not (0 <= in_second < len(second) and 0 <= in_first < len(first)):
        return []
    rows = zip(three, second[in_second], first[in_first], strict=True)
    return [(last - middle, middle - before) for last, middle, before in rows]
