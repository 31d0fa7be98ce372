"""Dealing of heads to the ranks that share a sequence, and the exchange between runs of tokens and shares of heads.

Before an operation along the sequence, each rank has s tokens of all heads; for it, all S tokens of some heads:

```text
(H, s, ...)  of each rank  <->  (H_r, S, ...), H_r heads of rank r
```

**Heads** need not divide: 28 heads of 8 ranks are 3 or 4 each. **Groups** (key heads of grouped-query attention, B and
C of Mamba-2) go with the heads that read them. An operation expects the same number of heads for each group, so a share
that reads 2 heads of one group and 4 of the next receives the second one twice (`groups_of`); autograd sums the
gradients of copies.

**More ranks than heads**: v ranks share heads in a ring and deal their tokens (`ring.py`). Of 2 v pieces in order, a
rank takes the i-th from the front and from the end, so that causal attention costs each the same (zig-zag order: Zhu,
2024, github.com/zhuzilin/ring-flash-attention).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zeroaccel.parallel.sequence import SequenceGroup


def groups_of(share: range, heads: int, groups: int) -> list[int]:
    """Returns the groups that a share of heads reads, one for each equal run of its heads.

    Example:
        >>> groups_of(range(2, 6), 8, 2), groups_of(range(0, 3), 6, 3), groups_of(range(1, 4), 4, 2)
        ([0, 1], [0, 0, 1], [0, 1, 1])
    """
    of_heads = [head * groups // heads for head in share]
    run = math.gcd(*(len(list(same)) for _, same in itertools.groupby(of_heads)))
    return of_heads[::run] if run else []


@dataclass(frozen=True)
class Dealing:
    """The heads and tokens of each rank.

    Attributes:
        heads: H.
        ranks: P.
        in_rings: more ranks than heads share the tokens of a head; otherwise some ranks have no head.
    """

    heads: int
    ranks: int
    in_rings: bool = False

    @cached_property
    def ring_size(self) -> int:
        """Number of ranks that share each head, v."""
        if not self.in_rings or self.ranks <= self.heads:
            return 1
        return next(
            parts for parts in range(1, self.ranks + 1) if self.ranks % parts == 0 and self.ranks // parts <= self.heads
        )

    def share(self, rank: int) -> range:
        """Returns the heads of a rank."""
        rings, ring = self.ranks // self.ring_size, rank // self.ring_size
        return range(ring * self.heads // rings, (ring + 1) * self.heads // rings)

    def groups(self, rank: int, groups: int) -> list[int]:
        """Returns the groups of a rank, of `groups` in all."""
        return groups_of(self.share(rank), self.heads, groups)

    def spans(self, source: int, rank: int, run: int) -> list[range]:
        """Returns which of the tokens of rank `source`, a run of s, rank `rank` has of its heads, in order.

        Example:
            >>> Dealing(heads=2, ranks=2).spans(0, 1, run=5), Dealing(1, 2, in_rings=True).spans(0, 1, run=4)
            ([range(0, 5)], [range(2, 3), range(3, 4)])
        """
        first, end = source * run, (source + 1) * run
        spans = (range(max(piece.start, first), min(piece.stop, end)) for piece in self.pieces(rank, run))
        return [range(span.start - first, span.stop - first) for span in spans if span]

    def count(self, source: int, rank: int, run: int) -> int:
        """Returns the number of tokens in `spans`."""
        return sum(map(len, self.spans(source, rank, run)))

    def pieces(self, rank: int, run: int) -> list[range]:
        """Returns the tokens of a rank in the whole sequence: all, or the pieces of one that shares its heads."""
        size, length = self.ring_size, self.ranks * run
        if size == 1:
            return [range(length)]
        # Smaller ones between two ranks: each has half of the sequence, besides pieces of the other on their way.
        split = 2 if size == 2 else 1
        place, count = rank % size, 2 * size * split
        numbers = [position * split + piece for position in (place, 2 * size - 1 - place) for piece in range(split)]
        return [range(length * number // count, length * (number + 1) // count) for number in numbers]

    def all_pieces(self, run: int) -> list[range]:
        """Returns the pieces of all ranks that share heads: the whole sequence."""
        return [piece for rank in range(self.ring_size) for piece in self.pieces(rank, run)]


@dataclass(frozen=True)
class Dealt:
    """A tensor that an exchange deals to the ranks.

    Attributes:
        tokens: dim of this rank's tokens.
        heads: dim of heads or groups; None if each rank needs the whole tensor.
        in_ring: only some tokens go to each rank.
    """

    tensor: Tensor
    tokens: int
    heads: int | None = None
    in_ring: bool = False

    def places(self, dealing: Dealing, rank: int) -> list[int]:
        """Returns the heads or groups that a rank receives; the only one if there is no such dim."""
        return [0] if self.heads is None else dealing.groups(rank, self.tensor.shape[self.heads])


def to_heads(group: SequenceGroup, dealing: Dealing, dealt: Sequence[Dealt], label: str) -> list[Tensor]:
    """Returns each tensor with all tokens and this rank's heads. Differentiable. (all ranks of the group)

    Tensors of one dtype are exchanged together.
    """
    results: list[Tensor | None] = [None] * len(dealt)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, item in enumerate(dealt):
        by_dtype.setdefault(item.tensor.dtype, []).append(index)
    for indices in by_dtype.values():
        fronts = [_front(dealt[index]) for index in indices]
        parts, shapes = [], []
        for rank in range(group.size):
            shards = []
            for index, front in zip(indices, fronts, strict=True):
                item = dealt[index]
                sent = _taken(front, 0, item.places(dealing, rank))
                if item.in_ring:
                    sent = _cut(sent, dealing.spans(group.rank, rank, front.shape[1]))
                shards.append(sent.reshape(-1))
            parts.append(torch.cat(shards))
            shapes.append(
                [
                    _received(dealt[index], front, dealing, rank, group.rank)
                    for index, front in zip(indices, fronts, strict=True)
                ]
            )
        received = group.exchange_parts(parts, [sum(map(math.prod, of_rank)) for of_rank in shapes], label)
        runs = [
            flat.split([math.prod(shape) for shape in of_rank]) for flat, of_rank in zip(received, shapes, strict=True)
        ]
        for place, index in enumerate(indices):
            whole = torch.cat([runs[r][place].view(shapes[r][place]) for r in range(group.size)], 1)
            item = dealt[index]
            back = (
                whole[0].movedim(0, item.tokens)
                if item.heads is None
                else whole.movedim((0, 1), (item.heads, item.tokens))
            )
            results[index] = back
    return [result for result in results if result is not None]


def to_tokens(group: SequenceGroup, dealing: Dealing, dealt: Dealt, run: int, label: str) -> Tensor:
    """Returns this rank's tokens of all heads, from its heads over all tokens. Differentiable. (all ranks)"""
    front = _front(dealt)
    counts = [dealing.count(rank, group.rank, run) for rank in range(group.size)]
    parts = [tokens.reshape(-1) for tokens in front.split(counts, 1)]
    spans = [dealing.spans(group.rank, rank, run) for rank in range(group.size)]
    shapes = [(len(dealing.share(rank)), sum(map(len, spans[rank])), *front.shape[2:]) for rank in range(group.size)]
    received = group.exchange_parts(parts, list(map(math.prod, shapes)), label)
    pieces = [flat.view(shape) for flat, shape in zip(received, shapes, strict=True)]
    together = dealing.ring_size
    if together > 1:
        shares = []
        for first in range(0, group.size, together):
            places = list(itertools.chain(*spans[first : first + together]))
            split = torch.cat(pieces[first : first + together], 1).split(list(map(len, places)), 1)
            order = sorted(range(len(places)), key=lambda index: places[index].start)
            shares.append(torch.cat([split[index] for index in order], 1))
        pieces = shares
    assert dealt.heads is not None, "the outputs of an operation have heads"
    return torch.cat(pieces, 0).movedim((0, 1), (dealt.heads, dealt.tokens))


def _front(item: Dealt) -> Tensor:
    """Returns the tensor as (heads, tokens, ...)."""
    if item.heads is None:
        return item.tensor.movedim(item.tokens, 0).unsqueeze(0)
    return item.tensor.movedim((item.heads, item.tokens), (0, 1))


def _received(item: Dealt, front: Tensor, dealing: Dealing, source: int, rank: int) -> tuple[int, ...]:
    tokens = dealing.count(source, rank, front.shape[1]) if item.in_ring else front.shape[1]
    return (len(item.places(dealing, rank)), tokens, *front.shape[2:])


def _cut(tensor: Tensor, spans: Sequence[range]) -> Tensor:
    """Returns spans of dim 1, one after the other; a single one without a copy."""
    parts = [tensor.narrow(1, span.start, len(span)) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts or [tensor[:, :0]], 1)


def _taken(tensor: Tensor, dim: int, places: list[int]) -> Tensor:
    """Selects places of a dim; consecutive ones without a copy."""
    if not places:
        return tensor.narrow(dim, 0, 0)
    if places == list(range(places[0], places[0] + len(places))):
        return tensor.narrow(dim, places[0], len(places))
    return tensor.index_select(dim, torch.tensor(places, device=tensor.device))
