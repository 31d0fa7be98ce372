"""Ring attention on threads that act as ranks: values, gradients, blocks, messages and memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.support import simulated_groups
from zeroaccel.comm.collectives import Collectives
from zeroaccel.parallel import ring as ring_module
from zeroaccel.parallel.attention_pattern import Band, Block, Pattern, WholeSequences
from zeroaccel.parallel.dealing import Dealing
from zeroaccel.parallel.ring import Ring, ring_tokens
from zeroaccel.parallel.sequence import SequenceGroup


def _places(dealing: Dealing, rank: int, run: int) -> list[int]:
    return [token for piece in dealing.pieces(rank, run) for token in piece]


def _whole(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of all heads over all tokens.  mask: (B, 1, S, S) bool."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.mT * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.nan_to_num(scores.softmax(-1))
    return weights[..., : k.shape[2]] @ v


@dataclass(frozen=True)
class _Case:
    """Sizes and form of an attention.

    Attributes:
        width, value_width: D of queries and keys, and of values.
        documents: lengths of packed sequences.
        padding: number of tokens of padding at the end of the first row.
    """

    ranks: int
    heads: int
    key_heads: int = 1
    length: int = 24
    window: int | None = None
    is_causal: bool = True
    width: int = 8
    value_width: int = 8
    cap: float | None = None
    sinks: bool = False
    documents: tuple[int, ...] = ()
    padding: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def run(self) -> int:
        return self.length // self.ranks

    @property
    def band(self) -> Band:
        before = float("inf") if self.window is None else self.window - 1
        return Band(before, 0 if self.is_causal else before)

    @property
    def dealing(self) -> Dealing:
        return Dealing(self.heads, self.ranks, in_rings=True)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        random = partial(torch.randn, generator=torch.Generator().manual_seed(5))  # not that of all threads
        q = random(2, self.heads, self.length, self.width)
        k = random(2, self.key_heads, self.length, self.width)
        v = random(2, self.key_heads, self.length, self.value_width)
        grad = random(2, self.heads, self.length, self.value_width)
        sinks = random(self.heads) if self.sinks else None
        for one in (q, k, v, *([] if sinks is None else [sinks])):
            one.data = one.data.to(self.dtype)
            one.requires_grad_()
        return q, k, v, sinks, grad.to(self.dtype)

    def sequences(self) -> WholeSequences:
        packed = padding = None
        if self.documents:
            packed = torch.repeat_interleave(torch.tensor(self.documents)).expand(2, -1)
        if self.padding:
            padding = torch.ones(2, self.length, dtype=torch.bool)
            padding[0, self.length - self.padding :] = False
        return WholeSequences(self.length, torch.device("cpu"), padding, packed)

    def mask(self) -> Tensor:
        q, k = torch.arange(self.length)[:, None], torch.arange(self.length)
        mask = ((k >= q - self.band.before) & (k <= q + self.band.after)).expand(2, 1, -1, -1)
        sequences = self.sequences()
        if sequences.packed is not None:
            mask = mask & (sequences.packed[:, None, :, None] == sequences.packed[:, None, None])
        return mask if sequences.padding is None else mask & sequences.padding[:, None, None]


def _in_ring(case: _Case) -> Callable[[Collectives], dict[str, Tensor]]:
    dealing = case.dealing

    def body(collectives: Collectives) -> dict[str, Tensor]:
        group = SequenceGroup(collectives, cast(Any, None))
        q, k, v, sinks, grad = case.inputs()
        places, share = _places(dealing, group.rank, case.run), list(dealing.share(group.rank))
        keys = dealing.groups(group.rank, case.key_heads)
        pattern = Pattern(case.band, dealing.all_pieces(case.run), sequences=case.sequences())
        ring = Ring(group, dealing, case.run, pattern, 0.3, case.cap)
        own = [q[:, share][:, :, places], *(one[:, keys][:, :, places] for one in (k, v))]
        out = ring.attend(*own, None if sinks is None else sinks[share])
        out.backward(grad[:, share][:, :, places])
        result = torch.zeros_like(grad)
        result[:, share[0] : share[-1] + 1, places] = out.detach()
        grads = {"q": q.grad, "k": k.grad, "v": v.grad} | ({} if sinks is None else {"sinks": sinks.grad})
        return {"out": result, **{name: cast(Tensor, one) for name, one in grads.items()}}

    return body


def _run(case: _Case) -> list[dict[str, Tensor]]:
    return [result for result, _ in simulated_groups.run(case.ranks, _in_ring(case), records_sizes=False)]


def _expected(case: _Case) -> dict[str, Tensor]:
    q, k, v, sinks, grad = case.inputs()
    out = _whole(q, k, v, case.mask(), 0.3, case.cap, sinks)
    out.backward(grad)
    grads = {"q": q.grad, "k": k.grad, "v": v.grad} | ({} if sinks is None else {"sinks": sinks.grad})
    return {"out": out.detach(), **{name: cast(Tensor, one) for name, one in grads.items()}}


CASES = {
    "two heads on eight ranks": _Case(8, 2, 2, 32),
    "one head on five ranks": _Case(5, 1, length=25),
    "two heads of one key head on seven ranks": _Case(7, 2, length=21),
    "three heads on six ranks, two key heads": _Case(6, 4, 2),
    "one token a rank": _Case(6, 2, length=6),
    "window": _Case(6, 1, window=5),
    "window on both sides": _Case(4, 2, window=4, is_causal=False),
    "both directions": _Case(3, 2, 2, is_causal=False),
    "wider keys": _Case(4, 2, width=12),
    "cap": _Case(4, 2, cap=1.5, window=7),
    "sinks": _Case(4, 2, 2, sinks=True),
    "documents": _Case(4, 1, documents=(3, 10, 1, 10)),
    "documents and a window": _Case(6, 2, documents=(13, 11), window=4),
    "padding": _Case(4, 2, padding=9),
    "padding in both directions": _Case(4, 1, padding=9, is_causal=False),
    "fp64": _Case(4, 1, dtype=torch.float64),
}


@pytest.mark.parametrize("name", CASES)
def test_a_ring_computes_attention_over_whole_sequences(name: str) -> None:
    case = CASES[name]
    results = _run(case)
    for part, whole in _expected(case).items():
        total = sum(result[part] for result in results)
        assert torch.allclose(total, whole, rtol=1e-6, atol=1e-6), (part, (total - whole).abs().max())


_TABLE = [(heads, ranks) for heads in (1, 2, 7, 12, 14, 28) for ranks in (3, 5, 6, 7) if ranks > heads]


@pytest.mark.parametrize(("heads", "ranks"), _TABLE)
def test_an_odd_number_of_ranks_shares_few_heads(heads: int, ranks: int) -> None:
    case = _Case(ranks, heads, length=3 * ranks)
    results = _run(case)
    for part, whole in _expected(case).items():
        total = sum(result[part] for result in results)
        assert torch.allclose(total, whole, rtol=1e-6, atol=1e-6), part


def test_half_precision_sums_blocks_in_fp32() -> None:
    case = _Case(4, 2, dtype=torch.bfloat16)
    results = _run(case)
    for part, whole in _expected(_Case(4, 2)).items():
        total = sum(result[part].float() for result in results)
        assert (total - whole).abs().max() < 0.03 * whole.abs().max(), part


@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        # 16 pieces: each attends to itself and all before, forward and backward.
        (_Case(8, 1, length=32), 2 * 16 * 17 // 2),
        (_Case(8, 1, length=32, is_causal=False), 2 * 16 * 16),
        # Pieces of 2 tokens; 4 tokens back reach 2 pieces.
        (_Case(8, 1, length=32, window=4), 2 * (16 + 15 + 14)),
        # Documents of 4 pieces.
        (_Case(8, 1, length=32, documents=(8, 8, 8, 8)), 2 * 4 * 10),
    ],
)
def test_blocks_that_no_query_attends_to_are_neither_computed_nor_sent(
    case: _Case, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[Block] = []
    messages: list[tuple[int, int, int]] = []

    class Counting(ring_module._Kernel):
        def __init__(self, ring: Ring, query: Tensor, visit: Any, queries: range, block: Block) -> None:
            computed.append(block)
            super().__init__(ring, query, visit, queries, block)

    def counted(collectives: Collectives) -> None:
        collectives.meter = lambda tag, rank, nbytes: messages.append((collectives.rank, rank, nbytes))
        _in_ring(case)(collectives)

    monkeypatch.setattr(ring_module, "_Kernel", Counting)
    simulated_groups.run(case.ranks, counted, records_sizes=False)
    assert len(computed) == blocks
    token = 2 * 2 * case.width * 4  # of 2 samples, a key and a value in fp32
    for source in range(case.ranks):
        for rank in range(case.ranks):
            visits, returns = (
                ring_tokens(case.dealing, case.run, case.band, *ranks) for ranks in ((source, rank), (rank, source))
            )
            sent = [nbytes for *ranks, nbytes in messages if ranks == [source, rank]]
            if case.documents:
                assert sum(sent) <= token * (2 * visits + returns)
            else:
                assert sum(sent) == token * (2 * visits + returns)
                assert len(sent) == (2 * visits + returns) // len(case.dealing.pieces(rank, case.run)[0])
    if case.documents:
        needed = sum(ring_tokens(case.dealing, case.run, case.band, a, b) for a in range(8) for b in range(8))
        assert sum(nbytes for *_, nbytes in messages) < token * 3 * needed / 2


@pytest.mark.parametrize(("ranks", "heads"), [(3, 1), (4, 2), (8, 1), (8, 2)])
def test_no_rank_has_the_keys_of_the_whole_sequence(ranks: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _Case(ranks, heads, heads, length=8 * ranks, is_causal=False)
    alive, peak = [0] * ranks, [0] * ranks
    swap = Ring.swap

    def counted(ring: Ring, sent: Tensor, to: int, source: int, count: int, label: str) -> tuple[Any, Tensor]:
        work, out = swap(ring, sent, to, source, count, label)
        rank = ring.group.rank
        if label.startswith("pass keys and values"):
            alive[rank] += count
            peak[rank] = max(peak[rank], alive[rank])
            weakref.finalize(out.untyped_storage(), free, rank, count)
        return work, out

    def free(rank: int, count: int) -> None:
        alive[rank] -= count

    monkeypatch.setattr(Ring, "swap", counted)
    _run(case)
    dealing = case.dealing
    for rank in range(ranks):
        token = 2 * 2 * case.width * len(dealing.share(rank))
        assert alive[rank] == 0
        assert peak[rank] == 2 * len(dealing.pieces(rank, case.run)[0]) * token
        assert case.length // dealing.ring_size + peak[rank] // token < case.length
