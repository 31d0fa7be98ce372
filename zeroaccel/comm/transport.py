"""How flat tensors travel within one process group: one class per kind of backend, both with the same three moves.

Letters: W = world size, S = elements per rank. Nothing here waits, sums or keeps books; `collectives.py` does.

Parts may differ in size: `split_sizes` has the elements of each rank's part, as in torch's all-to-all, and is empty for
equal parts. S is then this rank's, W*S their sum, and a part without elements costs no message.

[Note: direct exchange]
On gloo every rank posts one receive from and one send to each peer, and the bytes go straight between the caller's
tensors. Measured with torch 2.13 on 2 ranks with a thread each (medians of interleaved rounds, bf16): an all-gather
took 0.6x the time of gloo's own for 64 KiB and 0.3x for 32 MiB, since gloo stages large tensors in fresh memory; a
reduce-scatter, with the sum done here, 0.8x and 0.3x. A direct message is also an untyped run of bytes, so every
dtype travels, and its tag says which call it belongs to, so that ranks that have parted never mix data: gloo itself
takes a shorter message for a complete one, and ends the process on a longer one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "BufferPool",
    "Meter",
    "MeterSource",
    "NativeTransport",
    "P2PTransport",
    "PendingTransfer",
    "SendRecvBackend",
    "Transport",
    "Transports",
    "close_connections",
    "no_meter",
    "send_recv_backend",
    "transport_over",
]

# The names since torch 2.13; the earlier ones are deprecated there, and the only ones before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_all_to_all = dist.all_to_all_single
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingTransfer(Protocol):
    """What torch.distributed returns for a communication under way."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


Meter = Callable[[int, int, int], None]
"""Told of every message that is sent: (tag, place of the receiver in the group, bytes)."""

MeterSource = Callable[[], Meter | None]
"""Who is to be told now; asked once per collective where nobody is, however many ranks there are."""


def no_meter() -> None:
    """No meter."""
    return None


class SendRecvBackend(Protocol):
    """The part of a backend that passes messages between two ranks of its group."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> PendingTransfer: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> PendingTransfer: ...


def send_recv_backend(group: dist.ProcessGroup) -> SendRecvBackend:
    """The group's backend for host memory. Not `dist.isend`, whose bookkeeping costs more than the message."""
    return cast(SendRecvBackend, group._get_backend(torch.device("cpu")))


def close_connections(group: dist.ProcessGroup) -> None:
    """Closes this rank's connections in a gloo group for good: whoever waits for a message, in any thread, raises.

    gloo closes all of them when an operation on one times out, and a receive that nobody sends to does that on demand.
    It has to be tried with every peer: where the peer has closed its end, the receive fails at once and closes nothing.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):  # the purpose of it; or this connection is closed already
                never_sent = send_recv_backend(group).recv([torch.empty(1)], peer, 0)
                never_sent.wait(timedelta(milliseconds=1))


class Transport(Protocol):
    """A move is complete when every returned work has been waited for, and its tensors must live until then."""

    def all_gather(self, out: Tensor, shard: Tensor, split_sizes: Sequence[int], tag: int) -> Sequence[PendingTransfer]:
        """Part r of `out` = shard of rank r.  out: (W*S,), shard: (S,), may be this rank's part of `out`."""

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, split_sizes: Sequence[int], tag: int
    ) -> Sequence[PendingTransfer]:
        """Brings this rank's part of every rank's `flat`, (W*S,), into `out`; in which form, the class says."""

    def broadcast(self, tensor: Tensor, src: int, tag: int) -> Iterable[PendingTransfer]:
        """tensor = that of rank `src`. Each work must have been waited for when the next is asked for."""

    def all_to_all(self, out: Tensor, parts: Tensor, tag: int) -> Sequence[PendingTransfer]:
        """out[r] = parts[own rank] of rank r, for the others; out[own rank] may stay as it is.  Both: (W, n)."""


class P2PTransport:
    """Point-to-point messages between all pairs, for gloo. See [Note: direct exchange].

    A rank sends and receives (W-1)*S elements in 2*(W-1) messages.
    """

    def __init__(self, group: dist.ProcessGroup, meter_source: MeterSource = no_meter) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._gloo, self._meter_source = send_recv_backend(group), meter_source
        self._recv = self._gloo.recv
        # Each rank starts with another peer, so that no rank is everybody's first.
        ahead = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self._targets, self._sources = ahead, ahead[::-1]

    def all_gather(self, out: Tensor, shard: Tensor, split_sizes: Sequence[int], tag: int) -> Sequence[PendingTransfer]:
        parts = out.split(list(split_sizes) or shard.numel())
        sources = [peer for peer in self._sources if split_sizes[peer]] if split_sizes else self._sources
        works = [self._recv([parts[peer]], peer, tag) for peer in sources]
        if shard.numel():
            works += [self._send([shard], peer, tag) for peer in self._targets]
            own = parts[self.rank]
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
        return works

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, split_sizes: Sequence[int], tag: int
    ) -> Sequence[PendingTransfer]:
        """`out` is W times this rank's S: the parts as they come, in the order of the ranks, not summed."""
        numel = out.numel() // self.world_size
        parts = flat.split(list(split_sizes) or numel)
        targets = [peer for peer in self._targets if split_sizes[peer]] if split_sizes else self._targets
        works = []
        if numel:
            slots = out.split(numel)
            works += [self._recv([slots[peer]], peer, tag) for peer in self._sources]
            slots[self.rank].copy_(parts[self.rank])
        works += [self._send([parts[peer]], peer, tag) for peer in targets]
        return works

    def all_to_all(self, out: Tensor, parts: Tensor, tag: int) -> Sequence[PendingTransfer]:
        """Whole rows, each one message; this rank's own stays where it is."""
        works = [self._recv([out[peer]], peer, tag) for peer in self._sources]
        works += [self._send([parts[peer]], peer, tag) for peer in self._targets]
        return works

    def send(self, tensor: Tensor, peer: int, tag: int) -> PendingTransfer:
        """To one peer, who must `receive` it."""
        return self._send([tensor], peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> PendingTransfer:
        """From one peer."""
        return self._recv([tensor], peer, tag)

    def _send(self, tensors: list[Tensor], peer: int, tag: int) -> PendingTransfer:
        meter = self._meter_source()
        if meter is not None:
            meter(tag, peer, tensors[0].nbytes)
        return self._gloo.send(tensors, peer, tag)

    def broadcast(self, tensor: Tensor, src: int, tag: int) -> Iterator[PendingTransfer]:
        """Along a binomial tree rooted at `src`: log2(W) hops, each of a whole tensor."""
        place = (self.rank - src) % self.world_size  # in the tree, the root being 0
        reach = 1
        while reach < self.world_size and not place & reach:
            reach *= 2
        if place:
            yield self._recv([tensor], (self.rank - reach) % self.world_size, tag)
        children = []
        while reach := reach // 2:
            if place + reach < self.world_size:
                children.append(self._send([tensor], (self.rank + reach) % self.world_size, tag))
        yield from children


class NativeTransport:
    """The backend's own collectives, for NCCL and its like. They match calls by order alone; tags are not used.

    The meter is told what direct messages would carry: the backend does not say which way it goes.
    """

    def __init__(self, group: dist.ProcessGroup, meter_source: MeterSource = no_meter) -> None:
        self._group, self._meter_source = group, meter_source
        self.rank, self.world_size = group.rank(), group.size()

    def all_gather(self, out: Tensor, shard: Tensor, split_sizes: Sequence[int], tag: int) -> Sequence[PendingTransfer]:
        self._tell(tag, [shard.nbytes] * self.world_size)
        if not split_sizes:
            return (_all_gather(out, shard, group=self._group, async_op=True),)
        works = []
        for owner, part in self._parts(out, split_sizes):
            if owner == self.rank and part.data_ptr() != shard.data_ptr():
                part.copy_(shard)
            source = dist.get_global_rank(self._group, owner)
            works.append(dist.broadcast(part, source, group=self._group, async_op=True))
        return works

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, split_sizes: Sequence[int], tag: int
    ) -> Sequence[PendingTransfer]:
        """`out` is (S,): the average over the ranks. Not the sum, which in fp16 could overflow before it is scaled.

        With parts of several sizes `flat` is not what it was afterwards.
        """
        self._tell(tag, [size * flat.itemsize for size in split_sizes or [out.numel()] * self.world_size])
        if not split_sizes:
            return (_reduce_scatter(out, flat, op=dist.ReduceOp.AVG, group=self._group, async_op=True),)
        works = []
        for owner, part in self._parts(flat, split_sizes):
            target = dist.get_global_rank(self._group, owner)
            own = out.copy_(part) if owner == self.rank else part
            works.append(dist.reduce(own, target, op=dist.ReduceOp.AVG, group=self._group, async_op=True))
        return works

    @staticmethod
    def _parts(flat: Tensor, split_sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """(owner, part) of each part that has elements: as many collectives as a unit has owners, not as ranks."""
        return ((rank, part) for rank, part in enumerate(flat.split(list(split_sizes))) if part.numel())

    def broadcast(self, tensor: Tensor, src: int, tag: int) -> Iterable[PendingTransfer]:
        source = dist.get_global_rank(self._group, src)
        if self.rank == src:
            self._tell(tag, [tensor.nbytes] * self.world_size)
        return (dist.broadcast(tensor, source, group=self._group, async_op=True),)

    def all_to_all(self, out: Tensor, parts: Tensor, tag: int) -> Sequence[PendingTransfer]:
        """The backend's all-to-all; this rank's own row is copied."""
        self._tell(tag, [parts[0].nbytes] * self.world_size)
        return (_all_to_all(out, parts, group=self._group, async_op=True),)

    def average(self, tensor: Tensor, tag: int) -> Sequence[PendingTransfer]:
        """tensor = the mean over the ranks, in the backend's order. Counted as a reduce-scatter and an all-gather."""
        self._tell(tag, [2 * tensor.nbytes // self.world_size] * self.world_size)
        return (dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self._group, async_op=True),)

    def _tell(self, tag: int, nbytes: Sequence[int]) -> None:
        """`nbytes`: to each rank."""
        meter = self._meter_source()
        if meter is not None:
            for peer in range(self.world_size):
                if peer != self.rank and nbytes[peer]:
                    meter(tag, peer, nbytes[peer])


Transports = Mapping[str, P2PTransport | NativeTransport]
"""Of one set of ranks, by the type of device."""


def transport_over(
    group: dist.ProcessGroup, device: str, meter_source: MeterSource = no_meter
) -> P2PTransport | NativeTransport:
    """What suits the backend that `group` has for tensors on `device`."""
    if device == "cpu" and group._get_backend(torch.device(device)).name() == "gloo":
        return P2PTransport(group, meter_source)
    return NativeTransport(group, meter_source)


_KEPT = 2  # as many as a schedule has reductions under way


class BufferPool:
    """Lends flat tensors in host memory to one thread. It keeps the `kept` largest that came back."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._free: list[Tensor] = []  # uint8, smallest first

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A (numel,) tensor with any content. Goes back with `release`, or to the allocator if it never does."""
        nbytes = numel * dtype.itemsize
        for index, block in enumerate(self._free):
            if block.numel() >= nbytes:
                return self._free.pop(index)[:nbytes].view(dtype)
        return torch.empty(nbytes, dtype=torch.uint8).view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Ends a loan. The caller must not touch the tensor again."""
        block = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._free.append(block)
        self._free.sort(key=Tensor.numel)
        del self._free[: -self._kept]
