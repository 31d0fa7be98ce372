"""Ring attention: ranks that share heads keep their own keys and values, which visit the other ranks piece by piece.

(Liu et al., 2023, arXiv:2310.01889.) `ulysses.py` calls it if there are more ranks than heads; `attention_pattern.py`
has the masks of blocks. After the exchange of heads, each of v ranks has T = S / v tokens of the shared heads, as
queries, keys and values: two pieces in zig-zag order (`dealing.py`). A rank sends each piece of its keys and values
straight to every rank whose queries attend to any of it, in v - 1 rounds: in round t to the t-th rank after it. One
piece travels while another is computed, so a rank holds its own pieces and at most two others.

**Online softmax.** A block, some queries and a piece of keys, has an output and the logarithm of its sum of
exponentials (lse). Outputs are averaged with weights exp(lse). Backward needs only the output and the lse of all blocks
together (Dao, 2023, arXiv:2307.08691, section 3.1): the pieces travel again, and their gradients go back to the owner,
who adds them in the order of the rounds.

Blocks without a mask and those on the diagonal of causal attention use torch's flash attention, which returns its lse;
masked ones and capped scores use plain operations. Sums over blocks are in fp32, or fp64 for fp64.

Letters: B samples, H heads and K key heads of this rank, D width, T tokens of this rank, n queries and m keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroaccel.parallel.attention_pattern import Band, Block, Pattern
from zeroaccel.parallel.dealing import Dealing
from zeroaccel.parallel.sequence import SequenceGroup

_ATEN = torch.ops.aten
_NEVER = float("-inf")
_DEVICE_HEADS = 256  # the widest head of flash attention on a device, whose width is a multiple of 8


def ring_tokens(dealing: Dealing, run: int, band: Band, source: int, rank: int) -> int:
    """Returns the number of keys that rank `source` sends to `rank`."""
    if source == rank or source // dealing.ring_size != rank // dealing.ring_size:
        return 0
    queries = dealing.pieces(rank, run)
    return sum(len(keys) for keys in dealing.pieces(source, run) if any(band.meets(span, keys) for span in queries))


@dataclass(frozen=True)
class _RingStep:
    """One exchange: this rank's piece `place` goes to rank `to`, and that of rank `source`, some tokens, comes."""

    to: int
    source: int
    place: int
    tokens: range
    sends: bool
    receives: bool


@dataclass(frozen=True)
class _Visit:
    """A piece of keys and values on this rank; its own if there is no step.  key, value: (B, K, m, D)."""

    step: _RingStep | None
    place: int
    tokens: range
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Ring:
    """Attention of some heads by the ranks that share them.

    Attributes:
        pattern: which keys each query attends to.
        scale, cap: factor of the scores, and the bound to which a tanh caps them, if any.
    """

    group: SequenceGroup
    dealing: Dealing
    run: int
    pattern: Pattern
    scale: float
    cap: float | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Returns (B, H, T, D of values). Differentiable. (all ranks of the group)

        Args:
            query: (B, H, T, D).
            key, value: (B, K, T, D); D may differ for values.
            sinks: (H,) scores that take part in each softmax, without a value.
        """
        out: Tensor = _Attend.apply(query, key, value, sinks, self)  # type: ignore[no-untyped-call]
        return out

    @property
    def own(self) -> list[range]:
        """Tokens of this rank's pieces in the whole sequence."""
        return self.dealing.pieces(self.group.rank, self.run)

    def blocks(self, keys: range) -> Iterator[tuple[range, slice, Block]]:
        """Yields this rank's pieces of queries that attend to some keys: (tokens, place among the T, block)."""
        start = 0
        for queries in self.own:
            block = self.pattern.block(queries, keys)
            if block is not Block.NONE:
                yield queries, slice(start, start + len(queries)), block
            start += len(queries)

    def steps(self) -> Iterator[_RingStep]:
        """Yields the exchanges in order, the same number on every rank."""
        size, rank = self.dealing.ring_size, self.group.rank
        first = rank - rank % size

        def reads(reader: int, keys: range) -> bool:
            pieces = self.dealing.pieces(reader, self.run)
            return any(self.pattern.block(queries, keys) is not Block.NONE for queries in pieces)

        for distance in range(1, size):
            to, source = first + (rank + distance) % size, first + (rank - distance) % size
            pieces = zip(self.own, self.dealing.pieces(source, self.run), strict=True)
            for place, (mine, theirs) in enumerate(pieces):
                yield _RingStep(to, source, place, theirs, reads(to, mine), reads(rank, theirs))

    def visits(self, key: Tensor, value: Tensor, label: str) -> Iterator[_Visit]:
        """Yields this rank's own pieces, then one for each step; empty ones if nothing comes. (all ranks)"""
        slices = self.own
        sizes = [len(piece) for piece in slices]
        pieces = list(zip(key.split(sizes, 2), value.split(sizes, 2), strict=True))

        def begin(step: _RingStep) -> tuple[Any, Tensor]:
            mine = pieces[step.place]
            flat = _flat(mine) if step.sends else key.new_empty(0)
            row = key[:, :, :1].numel() + value[:, :, :1].numel()
            return self.swap(flat, step.to, step.source, row * len(step.tokens) * step.receives, label)

        steps = list(self.steps())
        coming = begin(steps[0])
        for place, tokens in enumerate(slices):
            yield _Visit(None, place, tokens, *pieces[place])
        for index, step in enumerate(steps):
            work, flat = coming
            work.wait()
            if index + 1 < len(steps):
                coming = begin(steps[index + 1])
            tokens = step.tokens if step.receives else range(0)
            visit = _Visit(step, step.place, tokens, *_unflat(flat, (key, value), len(tokens)))
            del flat
            yield visit
            del visit

    def swap(self, sent: Tensor, to: int, source: int, count: int, label: str) -> tuple[Any, Tensor]:
        """Starts sending a flat tensor to one rank and receiving `count` elements from another. (all ranks)"""
        ranks = range(self.group.size)
        leaving = [sent.numel() if rank == to else 0 for rank in ranks]
        arriving = [count if rank == source else 0 for rank in ranks]
        out = sent.new_empty(count, 1)
        return self.group.collectives.exchange_rows(out, sent.view(-1, 1), arriving, leaving, label), out.view(-1)


def _flat(tensors: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflat(flat: Tensor, like: tuple[Tensor, Tensor], tokens: int) -> list[Tensor]:
    """Returns two tensors like others, with some tokens, from one flat tensor."""
    shapes = [(*tensor.shape[:2], tokens, tensor.shape[3]) for tensor in like]
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [values.view(shape) for values, shape in zip(parts, shapes, strict=True)]


class _Attend(torch.autograd.Function):
    """Attention over all pieces: forward with one round of visits, backward with another, which returns gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=wide)
        lse = query.new_full(query.shape[:3], _NEVER, dtype=wide)
        for visit in ring.visits(key, value, "pass keys and values on"):
            for queries, rows, block in ring.blocks(visit.tokens):
                results = _Kernel(ring, query[:, :, rows], visit, queries, block).forward()
                _merge(out[:, :, rows], lse[:, :, rows], *results)
            del visit  # before the next piece comes
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(wide)[:, None])
            out *= (lse - total).exp().unsqueeze(-1)
            lse = total
        ctx.ring = ring
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        delta = (grad.to(lse.dtype) * out).sum(-1)
        of_query, of_key, of_value = (torch.zeros_like(t, dtype=lse.dtype) for t in (query, key, value))
        of_pieces = list(zip(*(t.split([len(p) for p in ring.own], 2) for t in (of_key, of_value)), strict=True))
        for visit in ring.visits(key, value, "pass keys and values on, backward"):
            total = sums = of_pieces[visit.place]
            if (step := visit.step) is not None:
                sums = (torch.zeros_like(visit.key, dtype=lse.dtype), torch.zeros_like(visit.value, dtype=lse.dtype))
            for queries, rows, block in ring.blocks(visit.tokens):
                of_rows = [t[:, :, rows] for t in (grad, out, lse, delta)]
                results = _Kernel(ring, query[:, :, rows], visit, queries, block).backward(*of_rows)
                _add((of_query[:, :, rows], *sums), results)
            del visit  # before the next piece comes
            if step is not None:
                sent, count = _flat(sums).to(key.dtype), (total[0].numel() + total[1].numel()) * step.sends
                work, flat = ring.swap(sent, step.source, step.to, count, "return gradients of keys and values")
                work.wait()
                if step.sends:
                    _add(total, _unflat(flat, total, total[0].shape[2]))
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.to(lse.dtype)[:, None] - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None


def _add(totals: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
    for total, addend in zip(totals, parts, strict=True):
        total += addend


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Adds a block to the output and the lse over blocks, in place."""
    total = torch.logaddexp(lse, block_lse)
    base = total.masked_fill(total == _NEVER, 0)  # queries that attend to nothing yet
    out *= (lse - base).exp().unsqueeze(-1)
    out += block_out * (block_lse - base).exp().unsqueeze(-1)
    lse.copy_(total)


class _Kernel:
    """Attention of one block.  query: (B, H, n, D)."""

    def __init__(self, ring: Ring, query: Tensor, visit: _Visit, queries: range, block: Block) -> None:
        self._scale, self._cap = ring.scale, ring.cap
        self._query, self._key, self._value = query, visit.key, visit.value
        self._repeats = query.shape[1] // visit.key.shape[1]
        self._is_causal = block is Block.DIAGONAL
        self._is_flash = block is not Block.PART and ring.cap is None and _has_flash(query, visit.value)
        self._mask: Tensor | None = None
        if not self._is_flash and block is not Block.ALL:
            self._mask = ring.pattern.mask(queries, visit.tokens, query.device)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns the output, (B, H, n, D of values), and the lse, (B, H, n)."""
        if self._is_flash:
            options = {"dropout_p": 0.0, "is_causal": self._is_causal, "scale": self._scale}
            out, lse = _flash_of(self._query)(self._query, *self._repeated(), **options)[:2]
            return out, lse
        scores, _ = self._scores()
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == _NEVER, 0).unsqueeze(-1)).exp()
        out = weights @ self._value.to(weights.dtype).unsqueeze(2)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value. `out`, `lse` and `delta` are those of all blocks together."""
        if self._is_flash:
            of_query, *others = _flash_backward(
                grad, self._query, *self._repeated(), out, lse, is_causal=self._is_causal, scale=self._scale
            )
            of_key, of_value = (tensor.unflatten(1, (-1, self._repeats)).sum(2) for tensor in others)
            return of_query, of_key, of_value
        scores, slope = self._scores()
        grouped = (-1, self._repeats)
        lse = lse.masked_fill(lse == _NEVER, 0).unflatten(1, grouped)
        weights = (scores - lse.unsqueeze(-1)).exp()
        grad = grad.to(weights.dtype).unflatten(1, grouped)
        of_value = (weights.mT @ grad).sum(2)
        of_scores = grad @ self._value.to(weights.dtype).unsqueeze(2).mT
        of_scores = weights * (of_scores - delta.unflatten(1, grouped).unsqueeze(-1)) * self._scale
        if slope is not None:
            of_scores *= slope
        of_query = (of_scores @ self._key.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
        of_key = (of_scores.mT @ self._query.to(weights.dtype).unflatten(1, grouped)).sum(2)
        return of_query, of_key, of_value

    def _scores(self) -> tuple[Tensor, Tensor | None]:
        """Returns the scores, (B, K, H / K, n, m), and the slope of the cap in them."""
        wide = torch.promote_types(self._query.dtype, torch.float32)
        query = self._query.to(wide).unflatten(1, (-1, self._repeats))
        scores, slope = query @ self._key.to(wide).unsqueeze(2).mT * self._scale, None
        if self._cap is not None:
            bent = torch.tanh(scores / self._cap)
            scores, slope = bent * self._cap, 1 - bent * bent
        if (mask := self._mask) is not None:
            mask = mask.expand(-1, self._query.shape[1] if mask.shape[1] > 1 else 1, -1, -1)
            mask = mask.unflatten(1, (-1, self._repeats)) if mask.shape[1] > 1 else mask.unsqueeze(2)
            scores = scores.masked_fill(~mask, _NEVER) if mask.dtype == torch.bool else scores + mask
        return scores, slope

    def _repeated(self) -> tuple[Tensor, Tensor]:
        """Returns keys and values of each head, (B, H, m, D)."""
        if self._repeats == 1:
            return self._key, self._value
        return self._key.repeat_interleave(self._repeats, 1), self._value.repeat_interleave(self._repeats, 1)


def _has_flash(query: Tensor, value: Tensor) -> bool:
    """True if torch's flash attention takes these tensors."""
    width = query.shape[3]
    if width != value.shape[3]:
        return False
    if query.device.type == "cpu":
        return True
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return is_half and width <= _DEVICE_HEADS and width % 8 == 0 and torch.backends.cuda.flash_sdp_enabled()


def _flash_of(query: Tensor) -> Any:
    if query.device.type == "cpu":
        return _ATEN._scaled_dot_product_flash_attention_for_cpu
    return _ATEN._scaled_dot_product_flash_attention


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value of a block, from the output and lse of all blocks."""
    tensors = [tensor.contiguous() for tensor in (grad, query, key, value, out, lse)]
    if query.device.type == "cpu":
        gradients = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, scale=scale)
    else:
        # No sequences of various lengths, and no dropout that would need the state of a generator.
        unused, state = [None, None, query.shape[2], key.shape[2]], query.new_empty(0, dtype=torch.int64)
        gradients = _ATEN._scaled_dot_product_flash_attention_backward(
            *tensors, *unused, 0.0, is_causal, state, state, scale=scale
        )
    of_query, of_key, of_value = gradients
    return of_query, of_key, of_value
