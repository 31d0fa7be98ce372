"""Transports move flat tensors within one process group: point-to-point on gloo, with native collectives elsewhere.

Letters: W = world size, S = elements per rank. This module does not wait, sum or record; `collectives.py` does.

Parts may differ in size: `split_sizes` has the elements of each rank's part, as in torch's all-to-all, and is empty for
equal parts. S is then this rank's, W*S their sum, and an empty part costs no message.

[Note: point-to-point collectives]
On gloo every rank posts one receive from and one send to each peer, and the bytes go straight between the caller's
tensors. Measured with torch 2.13 on 2 ranks with one thread each (medians of interleaved rounds, bf16): an all-gather
took 0.6x the time of gloo's own for 64 KiB and 0.3x for 32 MiB, because gloo stages large tensors in fresh memory; a
reduce-scatter, with the sum computed here, took 0.8x and 0.3x. A direct message is also an untyped run of bytes, so
every dtype works, and its tag identifies its call, so that ranks that have desynced never mix data: gloo itself accepts
a shorter message as complete, and ends the process on a longer one.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zeroaccel.ops.device_values import begin_together

# torch 2.13 introduced these names and deprecated the earlier ones, which are the only ones in older versions.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_all_to_all = dist.all_to_all_single
_premul_sum: Callable[[float], Any] | None = getattr(torch._C._distributed_c10d, "_make_nccl_premul_sum", None)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingTransfer(Protocol):
    """The part of `torch.distributed.Work` that this package uses."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


Meter = Callable[[int, int, int], None]
"""Called for every sent message with (tag, rank of the receiver in the group, bytes)."""

MeterSource = Callable[[], Meter | None]
"""Returns the current meter or None; called once per collective, so that metering costs nothing when off."""


def no_meter() -> None:
    """Returns None: no metering."""
    return None


class SendRecvBackend(Protocol):
    """The part of a backend that sends messages between two ranks of its group."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> PendingTransfer: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> PendingTransfer: ...


def send_recv_backend(group: dist.ProcessGroup) -> SendRecvBackend:
    """Returns the group's backend for host memory. `dist.isend` costs more in bookkeeping than the message itself."""
    return cast(SendRecvBackend, group._get_backend(torch.device("cpu")))


_FIRST_GATHERS_TAG = (1 << 31) - 2
_UNUSED_TAG = (1 << 31) - 1  # torch's messages have tag 0; receiving one of them here would end the process


def close_connections(group: dist.ProcessGroup) -> None:
    """Permanently closes this rank's connections in a gloo group: every thread that waits for a message raises.

    gloo closes all connections when an operation on one of them times out, so a receive without a sender closes them on
    demand. Every peer has to be tried: if a peer has closed its end, the receive fails at once and closes nothing.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            close_connection(send_recv_backend(group), peer)


def close_connection(backend: SendRecvBackend, peer: int) -> None:
    """Closes the connection to one peer, as in `close_connections`."""
    with contextlib.suppress(RuntimeError):  # always raised: timed out, or already closed
        never_sent = backend.recv([torch.empty(1)], peer, _UNUSED_TAG)
        never_sent.wait(timedelta(milliseconds=1))


class PairLink:
    """This rank's link to another one, for threads that send while the main thread trains; one at a time per direction.

    A collective in a thread would interleave with those of training in a different order on each rank; messages between
    two ranks in a group without other traffic cannot. Waits end with the process group's own timeout.

    Args:
        gloo: backend of these two ranks, from `pair_backends`.
        is_first: True on the lower of the two ranks.
    """

    def __init__(self, gloo: SendRecvBackend, *, is_first: bool) -> None:
        self._gloo = gloo
        self._own, self._peer = (0, 1) if is_first else (1, 0)

    def begin_send(self, tensor: Tensor) -> PendingTransfer:
        """Sends a tensor in host memory, which must not change until the transfer is complete."""
        return self._gloo.send([tensor], self._peer, self._own)

    def receive(self, tensor: Tensor) -> None:
        """Receives the next tensor that the other rank sends. Blocks. Raises RuntimeError if that rank has ended."""
        self._gloo.recv([tensor], self._peer, self._peer).wait()

    def send_bytes(self, content: bytes) -> None:
        """Sends a byte string of any length. Blocks."""
        self.begin_send(torch.tensor([len(content)])).wait()
        if content:
            self.begin_send(torch.frombuffer(bytearray(content), dtype=torch.uint8)).wait()

    def receive_bytes(self) -> bytes:
        """Returns the bytes that the other rank sent with `send_bytes`. Blocks."""
        length = torch.empty(1, dtype=torch.int64)
        self.receive(length)
        content = torch.empty(int(length), dtype=torch.uint8)
        if content.numel():
            self.receive(content)
        return content.numpy().tobytes()


class Transport(Protocol):
    """The collectives of one group for one device type.

    A transfer is complete when the caller has waited for every returned work; its tensors must live until then.

    Attributes:
        rank, world_size: this rank and the number of ranks in the group.
    """

    rank: int
    world_size: int

    def all_gather(self, out: Tensor, shard: Tensor, split_sizes: Sequence[int], tag: int) -> Sequence[PendingTransfer]:
        """Part r of `out` = shard of rank r.  out: (W*S,), shard: (S,), may be this rank's part of `out`."""

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, split_sizes: Sequence[int], tag: int
    ) -> Sequence[PendingTransfer]:
        """Brings this rank's part of every rank's `flat`, (W*S,), into `out`; the class decides if it sums them."""

    def broadcast(self, tensor: Tensor, src: int, tag: int) -> Iterable[PendingTransfer]:
        """Copies the tensor of rank `src`. The iterator may block: wait for each work before taking the next."""

    def all_to_all(self, out: Tensor, parts: Tensor, tag: int) -> Sequence[PendingTransfer]:
        """out[r] = parts[own rank] of rank r.  Both: (W, n)."""

    def exchange_rows(
        self, out: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], tag: int
    ) -> Sequence[PendingTransfer]:
        """Exchanges `sent[r]` rows with `received[r]` rows of each rank r, itself included, in rank order."""


class P2PTransport(Transport):
    """Point-to-point messages between all pairs, for gloo. See [Note: point-to-point collectives].

    A rank sends and receives (W-1)*S elements in 2*(W-1) messages.
    """

    def __init__(self, group: dist.ProcessGroup, meter_source: MeterSource = no_meter) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._gloo, self._meter_source = send_recv_backend(group), meter_source
        self._recv = self._gloo.recv
        # Each rank starts with a different peer, so that no rank is the first target of all others.
        ahead = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self._targets, self._sources = ahead, ahead[::-1]

    def all_gather(self, out: Tensor, shard: Tensor, split_sizes: Sequence[int], tag: int) -> Sequence[PendingTransfer]:
        parts = out.split(list(split_sizes) or shard.numel())
        # Receives first: if a receive is posted, its message goes straight into `out`.
        sources = [peer for peer in self._sources if split_sizes[peer]] if split_sizes else self._sources
        works = [self._recv([parts[peer]], peer, tag) for peer in sources]
        if shard.numel():
            works += [self._send([shard], peer, tag) for peer in self._targets]
            local_piece = parts[self.rank]
            if not begin_together(local_piece, shard):
                local_piece.copy_(shard)
        return works

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, split_sizes: Sequence[int], tag: int
    ) -> Sequence[PendingTransfer]:
        """`out` has W times this rank's S: the unsummed parts, in the order of the ranks."""
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
        """Sends one message per row."""
        works = [self._recv([out[peer]], peer, tag) for peer in self._sources]
        works += [self._send([parts[peer]], peer, tag) for peer in self._targets]
        out[self.rank].copy_(parts[self.rank])
        return works

    def exchange_rows(
        self, out: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], tag: int
    ) -> Sequence[PendingTransfer]:
        """Sends one message to each rank that gets any rows."""
        arriving, leaving = _runs(out, received), _runs(rows, sent)
        works = [self._recv([arriving[peer]], peer, tag) for peer in self._sources if received[peer]]
        works += [self._send([leaving[peer]], peer, tag) for peer in self._targets if sent[peer]]
        if received[self.rank]:
            arriving[self.rank].copy_(leaving[self.rank])
        return works

    def gather_rows(self, rows: Tensor, row: Tensor, tag: int) -> Iterator[PendingTransfer]:
        """rows[r] = own of rank r, in ceil(log2(W)) messages per rank: for small rows.  rows: (W, n), own: (n,).

        After Bruck et al., Efficient Algorithms for All-to-All Communications (1997), section 4.
        """
        # Row i is the row of rank (rank + i) % W. As in `broadcast`, a rank forwards rows that it has received.
        ahead = torch.empty_like(rows)
        ahead[0].copy_(row)
        count = 1
        while count < self.world_size:
            end = min(2 * count, self.world_size)
            arriving = self._recv([ahead[count:end]], (self.rank + count) % self.world_size, tag)
            yield self._send([ahead[: end - count]], (self.rank - count) % self.world_size, tag)
            yield arriving
            count = end
        rows.copy_(ahead.roll(self.rank, 0))

    def send(self, tensor: Tensor, peer: int, tag: int) -> PendingTransfer:
        """Sends to one peer, which must `receive` it."""
        return self._send([tensor], peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> PendingTransfer:
        """Receives from one peer."""
        return self._recv([tensor], peer, tag)

    def _send(self, tensors: list[Tensor], peer: int, tag: int) -> PendingTransfer:
        meter = self._meter_source()
        if meter is not None:
            meter(tag, peer, tensors[0].nbytes)
        return self._gloo.send(tensors, peer, tag)

    def broadcast(self, tensor: Tensor, src: int, tag: int) -> Iterator[PendingTransfer]:
        """Broadcasts along a binomial tree rooted at `src`: log2(W) hops, each of the entire tensor."""
        # The caller waits for each work before taking the next, so a rank forwards only complete tensors.
        place = (self.rank - src) % self.world_size  # position in the tree; the root has 0
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


def _runs(rows: Tensor, counts: Sequence[int]) -> dict[int, Tensor]:
    """Returns each rank's rows; ranks without rows are left out."""
    ends = accumulate(counts)
    return {rank: rows[end - count : end] for rank, (count, end) in enumerate(zip(counts, ends, strict=True)) if count}


_NOTHING = torch.empty(0, dtype=torch.uint8)


def gather_pickles(obj: object, gather: Callable[[Tensor, str], Tensor]) -> list[Any]:
    """Returns the `obj` of every rank, by rank. (all ranks of the group)

    Args:
        gather: `gather(own, what)` returns the (n,) tensors of all ranks as (W, n).
    """
    # The sizes first, then the pickles, padded to the largest. None has no pickle: if no rank has an error to report,
    # the sizes are the only message.
    payload = _NOTHING if obj is None else torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes: list[int] = gather(torch.tensor([payload.numel()]), ", sizes").view(-1).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    rows = gather(padded, "").numpy()
    parts = (rows[rank, :size].tobytes() for rank, size in enumerate(sizes))
    return [pickle.loads(pickled) if pickled else None for pickled in parts]


def gather_at_first(obj: object, control: dist.ProcessGroup) -> list[Any]:
    """Runs `gather_pickles` over a gloo group that has no other traffic yet."""
    transport = P2PTransport(control)

    def gather(row: Tensor, what: str) -> Tensor:
        rows = row.new_empty(transport.world_size, row.numel())
        for work in transport.gather_rows(rows, row, _FIRST_GATHERS_TAG) if row.numel() else ():
            work.wait()
        return rows

    return gather_pickles(obj, gather)


def _bits(tensor: Tensor) -> Tensor:
    """Returns 8-bit floats as bytes, in the same memory: backends move only some of their dtypes."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


class NativeTransport(Transport):
    """The backend's own collectives, for NCCL and similar backends, which match calls by order alone and ignore tags.

    The meter counts the bytes that point-to-point messages would carry, because the backend does not report its
    algorithm.
    """

    def __init__(self, group: dist.ProcessGroup, meter_source: MeterSource = no_meter) -> None:
        self._group, self._meter_source = group, meter_source
        self.rank, self.world_size = group.rank(), group.size()

    def all_gather(self, out: Tensor, shard: Tensor, split_sizes: Sequence[int], tag: int) -> Sequence[PendingTransfer]:
        self._count(tag, [shard.nbytes] * self.world_size)
        out, shard = _bits(out), _bits(shard)
        if not split_sizes:
            return (_all_gather(out, shard, group=self._group, async_op=True),)
        # all_gather_into_tensor takes equal parts only. In an owner layout few ranks have a part at all, so a broadcast
        # from each of them sends no more than an all-gather would.
        works = []
        for owner, piece in self._parts(out, split_sizes):
            if owner == self.rank and not begin_together(piece, shard):
                piece.copy_(shard)
            source = dist.get_global_rank(self._group, owner)
            works.append(dist.broadcast(piece, source, group=self._group, async_op=True))
        return works

    def scales(self, scale: float) -> bool:
        """True if `reduce_scatter` multiplies by `scale` (not 1/W) before it adds, and so rounds only once."""
        is_mean = scale * self.world_size == 1.0
        return not is_mean and _premul_sum is not None and "nccl" in dist.get_backend_config(self._group)

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, split_sizes: Sequence[int], tag: int, *, scale: float | None = None
    ) -> Sequence[PendingTransfer]:
        """`out`, (S,), is the average over the ranks. An fp16 sum could overflow before it is scaled.

        If the parts differ in size, `flat` is overwritten: the backend reduces in place.

        Args:
            scale: factor instead of 1/W; requires that the backend `scales`.
        """
        op: Any = dist.ReduceOp.AVG
        if scale is not None:
            assert _premul_sum is not None, "a scale needs a backend with premultiplied sums"
            op = _premul_sum(scale)
        self._count(tag, [size * flat.itemsize for size in split_sizes or [out.numel()] * self.world_size])
        if not split_sizes:
            return (_reduce_scatter(out, flat, op=op, group=self._group, async_op=True),)
        works = []
        for owner, piece in self._parts(flat, split_sizes):
            target = dist.get_global_rank(self._group, owner)
            received = out.copy_(piece) if owner == self.rank else piece
            works.append(dist.reduce(received, target, op=op, group=self._group, async_op=True))
        return works

    @staticmethod
    def _parts(flat: Tensor, split_sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yields (owner, part) for each nonempty part: one collective per owner of a unit, not per rank."""
        return ((rank, piece) for rank, piece in enumerate(flat.split(list(split_sizes))) if piece.numel())

    def broadcast(self, tensor: Tensor, src: int, tag: int) -> Iterable[PendingTransfer]:
        source = dist.get_global_rank(self._group, src)
        if self.rank == src:
            self._count(tag, [tensor.nbytes] * self.world_size)
        return (dist.broadcast(_bits(tensor), source, group=self._group, async_op=True),)

    def all_to_all(self, out: Tensor, parts: Tensor, tag: int) -> Sequence[PendingTransfer]:
        self._count(tag, [parts[0].nbytes] * self.world_size)
        return (_all_to_all(_bits(out), _bits(parts), group=self._group, async_op=True),)

    def exchange_rows(
        self, out: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], tag: int
    ) -> Sequence[PendingTransfer]:
        """Runs the backend's all-to-all with parts of different sizes."""
        nbytes = rows[0].nbytes if len(rows) else 0
        self._count(tag, [count * nbytes for count in sent])
        return (_all_to_all(_bits(out), _bits(rows), list(received), list(sent), group=self._group, async_op=True),)

    def average(self, tensor: Tensor, tag: int) -> Sequence[PendingTransfer]:
        """tensor = the mean over the ranks, in the backend's order. Counted as a reduce-scatter and an all-gather."""
        self._count(tag, [2 * tensor.nbytes // self.world_size] * self.world_size)
        return (dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self._group, async_op=True),)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"], tag: int) -> Sequence[PendingTransfer]:
        """tensor = its sum or maximum over the ranks, in the backend's order. For small control values: not metered."""
        operation = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return (dist.all_reduce(tensor, op=operation, group=self._group, async_op=True),)

    def _count(self, tag: int, nbytes: Sequence[int]) -> None:
        """Counts `nbytes[r]` sent to each rank r."""
        meter = self._meter_source()
        if meter is not None:
            for peer in range(self.world_size):
                if peer != self.rank and nbytes[peer]:
                    meter(tag, peer, nbytes[peer])


# -- connecting the ranks of a group: see `topology.connect`

GATHERS = ("all_gather", "broadcast")  # issued by `NativeTransport`, which broadcasts parts of different sizes
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
HOPS = ("all_to_all",)


def issue_first(kind: str, probe: Tensor, group: dist.ProcessGroup) -> None:
    """Runs one collective of a kind, with one element per rank. (all ranks of the group)

    Args:
        probe: (1,), overwritten.
    """
    ones = probe.new_ones(group.size())
    if kind == "all_gather":
        _all_gather(ones, probe, group=group)
    elif kind == "reduce_scatter":
        _reduce_scatter(probe, ones, group=group)
    elif kind == "all_to_all":
        _all_to_all(torch.empty_like(ones), ones, group=group)
    elif kind == "all_reduce":
        dist.all_reduce(probe, group=group)
    else:
        first = dist.get_global_rank(group, 0)
        dist.broadcast(probe, first, group=group) if kind == "broadcast" else dist.reduce(probe, first, group=group)


def exchange_first(probe: Tensor, group: dist.ProcessGroup, peers: Sequence[int], *, alone: bool) -> None:
    """Exchanges messages between this rank and some others, which call it too.

    Args:
        peers: global ranks of the others.
        alone: also send one message outside of a batch for each pair; NCCL makes a separate communicator for these.
    """
    rank = dist.get_rank()
    for low, high in sorted((min(rank, peer), max(rank, peer)) for peer in peers if alone):
        # All ranks take the pairs in one order, so that no two ranks wait for each other.
        dist.send(probe, high, group) if rank == low else dist.recv(torch.empty_like(probe), low, group)
    operations = [dist.P2POp(dist.isend, probe, peer, group) for peer in peers]
    operations += [dist.P2POp(dist.irecv, torch.empty_like(probe), peer, group) for peer in peers]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


Transports = Mapping[str, P2PTransport | NativeTransport]
"""Transports of one group, by device type."""

TransportFactory = Callable[[dist.ProcessGroup, str, MeterSource], P2PTransport | NativeTransport]
"""Makes the transport of a group for tensors on a device type, like `transport_over`."""


def transport_over(
    group: dist.ProcessGroup, device: str, meter_source: MeterSource = no_meter
) -> P2PTransport | NativeTransport:
    """Returns the transport for the backend that `group` uses for tensors on `device`."""
    if device == "cpu" and _backend_name(group, device) == "gloo":
        return P2PTransport(group, meter_source)
    return NativeTransport(group, meter_source)


def _backend_name(group: dist.ProcessGroup, device: str) -> str:
    """Returns the name of the backend that `group` uses for tensors on `device`; "" for a backend without a name."""
    try:
        return group._get_backend(torch.device(device)).name()
    except RuntimeError as error:
        if "getBackendName" not in str(error):  # torch 2.6 has none for its fake backend
            raise
        return ""


_CPU = torch.device("cpu")
_POOL_CAPACITY = 2  # the number of reductions that the engine keeps in flight


class BufferPool:
    """Receive buffers; those in host memory are reused. For one thread; keeps the `capacity` largest released buffers.

    The kernel backs a new tensor of 32 MiB or more with new pages, and touching them for the first time takes longer
    than the message that fills them: without this pool a reduce-scatter of that size took 1.8-3x as long (torch 2.13,
    gloo).

    Example:
        >>> pool = BufferPool()
        >>> buffer = pool.acquire(1000, torch.float32)
        >>> address = buffer.data_ptr()
        >>> pool.release(buffer)
        >>> pool.acquire(500, torch.bfloat16).data_ptr() == address
        True
    """

    def __init__(self, capacity: int = _POOL_CAPACITY) -> None:
        self._capacity = capacity
        self._free: list[Tensor] = []  # uint8, smallest first

    def acquire(self, numel: int, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
        """Returns an uninitialized (numel,) tensor. `release` returns its memory to the pool or the allocator."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize
        for index, block in enumerate(self._free):
            if block.numel() >= nbytes:
                return self._free.pop(index)[:nbytes].view(dtype)
        return torch.empty(nbytes, dtype=torch.uint8).view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Takes a buffer back. The caller must not use the tensor afterwards."""
        if tensor.device.type != "cpu":
            return
        block = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._free.append(block)
        self._free.sort(key=Tensor.numel)
        del self._free[: -self._capacity]
