"""Reductions in two hops: over the ranks that share a fast link first, then across.

Both bring to each rank its shard of the sum over all ranks. Each is called by the courier, blocks until it is done, and
issues nothing: its messages belong to one entry of the journal.

Letters: S elements per shard, that of this rank where shards differ in size (`split_sizes` then has that of each); L
ranks inside a cell, R cells across; a rank is (n, l): cell n, place l in it.

[Note: order across replicas] The sum over all ranks in fp32, rank after rank and rounded once, is what sharding over
all ranks computes, and sums of sums are not. So in host memory a running sum goes from cell to cell, each adds its
parts in the order of its ranks, and the last one's result goes round: the same bits as without replicas, in 2 (R - 1)
messages of S elements in a row. An accelerator's backend averages inside and then across, in orders of its own.

[Note: two hops in 4 bits] (ZeRO++, Wang et al. 2023, arXiv:2306.10209, section 3.3) Each rank codes what the l-th of
its cell has to sum, R shards, as one run of bytes, so the l-th gets L runs; it adds them up in fp32, codes the sums
anew, and sends one shard to each of its R peers. So across cells travel S half-bytes per peer, an L-th of what a direct
exchange would send. A rank's own parts are never coded. Per hop the error is that of one code (`quantized.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zeroaccel.comm.buffer_pool import BufferPool
from zeroaccel.comm.collective_tracker import CollectiveTracker
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord
from zeroaccel.comm.quantized import INT4, decode_add, encode
from zeroaccel.comm.transport import Exchanges, NativeTransport, P2PTransport

__all__ = ["AcrossReplicas", "InFourBits", "Reduction"]


class Reduction(Protocol):
    """How gradients are summed."""

    def __call__(
        self, entry: CollectiveRecord, out: Tensor, flat: Tensor, scale: float, split_sizes: Sequence[int]
    ) -> None:
        """out: (S,) = round(scale * this rank's shard of the sum over all ranks of `flat`). Blocks."""

    def nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        """What this rank sends, of `numel` elements of which it keeps `shard_numel`."""


class AcrossReplicas:
    """Reduce-scatter inside a shard group, sum across its replicas. See [Note: order across replicas].

    Args:
        inside: over the L ranks that hold different shards.
        across: over the R ranks that hold the same one, in the order of the replicas.
    """

    def __init__(self, supervisor: CollectiveTracker, inside: Exchanges, across: Exchanges) -> None:
        self._supervisor = supervisor
        self._inside, self._across = inside, across
        self._scratch = BufferPool()

    def __call__(
        self, entry: CollectiveRecord, out: Tensor, flat: Tensor, scale: float, split_sizes: Sequence[int]
    ) -> None:
        inside, across = self._inside[flat.device.type], self._across[flat.device.type]
        if isinstance(inside, P2PTransport) and isinstance(across, P2PTransport):
            self._in_order(entry, inside, across, out, flat, scale, split_sizes)
        else:
            assert isinstance(inside, NativeTransport), "one kind of device has one kind of exchange"
            assert isinstance(across, NativeTransport), "one kind of device has one kind of exchange"
            average = torch.empty_like(out, dtype=flat.dtype)
            self._supervisor.move(entry, inside.reduce_scatter, average, flat, split_sizes)
            if average.numel():
                self._supervisor.move(entry, across.average, average)
            out.copy_(average.float().mul_(scale * inside.world_size * across.world_size))
        self._supervisor.finish(entry)

    def _in_order(
        self,
        entry: CollectiveRecord,
        inside: P2PTransport,
        across: P2PTransport,
        out: Tensor,
        flat: Tensor,
        scale: float,
        split_sizes: Sequence[int],
    ) -> None:
        parts = self._scratch.take(inside.world_size * out.numel(), flat.dtype)
        self._supervisor.move(entry, inside.reduce_scatter, parts, flat, split_sizes)
        if not out.numel():  # the replicas of this rank have no part of it either
            self._scratch.give_back(parts)
            return
        total = self._scratch.take(out.numel(), torch.float32)
        own, last = across.rank, across.world_size - 1
        before, after = (own - 1) % (last + 1), (own + 1) % (last + 1)
        rows = list(parts.view(-1, out.numel()))
        if own:
            self._supervisor.follow(entry, [across.receive(total, before, entry.tag)])
        else:
            total.copy_(rows.pop(0))
        for row in rows:
            total.add_(row)
        if own == last:
            out.copy_(total.mul_(scale))
        else:
            self._supervisor.follow(entry, [across.send(total, after, entry.tag)])
            self._supervisor.follow(entry, [across.receive(out, before, entry.tag)])
        if after != last:
            self._supervisor.follow(entry, [across.send(out, after, entry.tag)])
        self._scratch.give_back(parts)
        self._scratch.give_back(total)

    def nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        across = self._across["cpu"]
        own, last = across.rank, across.world_size - 1
        running = 4 * shard_numel if own != last else 0
        result = dtype.itemsize * shard_numel if (own + 1) % (last + 1) != last else 0
        return (numel - shard_numel) * dtype.itemsize + running + result


class InFourBits:
    """The two hops in 4 bits. See [Note: two hops in 4 bits].

    Args:
        inside: over the L ranks of this rank's cell.
        across: over the R ranks with this rank's place in their cells.
        shard_of: shard_of[l][n] is the number of the shard of rank (n, l).
    """

    def __init__(
        self, supervisor: CollectiveTracker, inside: Exchanges, across: Exchanges, shard_of: Sequence[Sequence[int]]
    ) -> None:
        self._supervisor = supervisor
        self._inside, self._across = inside, across
        self._shard_of = shard_of
        self._scratch = BufferPool(kept=4)

    def __call__(
        self, entry: CollectiveRecord, out: Tensor, flat: Tensor, scale: float, split_sizes: Sequence[int]
    ) -> None:
        assert not split_sizes, "a reduction in two hops is one of equal shards"
        inside, across = self._inside[flat.device.type], self._across[flat.device.type]
        shards = flat.view(-1, out.numel())
        sums = self._take(across.world_size * out.numel(), torch.float32, flat).view(across.world_size, -1)
        rows = [[shards[shard] for shard in column] for column in self._shard_of]
        self._hop(entry, inside, rows, list(sums))
        total = self._take(out.numel(), torch.float32, flat)
        self._hop(entry, across, [[row] for row in sums], [total])
        out.copy_(total.mul_(scale))
        self._give_back(sums, total)
        self._supervisor.finish(entry)

    def nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        code, inside, across = INT4.nbytes(shard_numel), self._inside["cpu"], self._across["cpu"]
        return code * ((inside.world_size - 1) * across.world_size + across.world_size - 1)

    def _hop(
        self,
        entry: CollectiveRecord,
        exchange: P2PTransport | NativeTransport,
        rows: Sequence[Sequence[Tensor]],
        totals: Sequence[Tensor],
    ) -> None:
        """totals[i] = the sum over peers p of their rows[own place][i], those of others by way of a code."""
        own, runs, numel = exchange.rank, len(totals), totals[0].numel()
        width = INT4.nbytes(numel)
        shape = (exchange.world_size, runs, width)
        codes, theirs = (
            self._take(exchange.world_size * runs * width, torch.uint8, totals[0]).view(shape) for _ in "ab"
        )
        for peer, values in enumerate(rows):
            if peer != own:
                for code, row in zip(codes[peer], values, strict=True):
                    encode(row, INT4, code)
        if exchange.world_size > 1:
            self._supervisor.move(
                entry, exchange.swap, theirs.view(exchange.world_size, -1), codes.view(exchange.world_size, -1)
            )
        for index, total in enumerate(totals):
            total.zero_()
            for peer in range(exchange.world_size):
                if peer == own:
                    total.add_(rows[own][index])
                else:
                    decode_add(theirs[peer, index], INT4, total)
        self._give_back(codes, theirs)

    def _take(self, numel: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        if like.device.type == "cpu":
            return self._scratch.take(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=like.device)

    def _give_back(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self._scratch.give_back(tensor)
