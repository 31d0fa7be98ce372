"""The collectives of the engine: all-gather, reduce-scatter, and small ones for control.

`transport.py` moves the bytes, `collective_tracker.py` waits and explains failures, `topology.py` makes ranks and
groups. Nothing here knows what the tensors mean; the caller's label names them in hang reports.

Letters: W = world size, S = elements per rank. If the ranks' parts differ in size, `split_sizes` lists the elements of
each part, S is this rank's, and W*S stands for their sum. In host memory every sum runs in rank order, in fp32, and is
rounded once: it depends neither on timing nor on the position of an element in its tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeroaccel.comm.collective_tracker import DONE, CollectiveTracker, DeviceWork, MessageWork, Work
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord, FlightRecorder
from zeroaccel.comm.topology import RankGroup, Topology
from zeroaccel.comm.transport import (
    BufferPool,
    Meter,
    P2PTransport,
    PendingTransfer,
    Transport,
    Transports,
    gather_pickles,
    no_meter,
    transport_over,
)
from zeroaccel.errors import UsageError
from zeroaccel.ops.device_values import begin_together
from zeroaccel.ops.reductions import scale_rounded_once, sum_ranks

__all__ = ["Collectives", "Metered", "PartitionedTensors", "Work", "check_split"]


class Metered(Protocol):
    """An object that sends messages outside of `Collectives`.

    Attributes:
        flight_recorder: recorder of the calls that its messages belong to.
        meter: callback for every message, as in `Collectives`.
    """

    flight_recorder: FlightRecorder
    meter: Meter | None


class Collectives:
    """The collectives of one topology. All ranks call the same ones, in the same order, with the same labels.

    Gathers and reductions may interleave differently on different ranks, since they use separate groups. In this class
    all ranks form one shard group; `hierarchical.py` has the collectives for smaller shard groups.

    Example:
        >>> from zeroaccel.comm.topology import destroy, init_process_group
        >>> ranks = Collectives(init_process_group())
        >>> shard = torch.arange(4.0)
        >>> full = torch.empty(ranks.world_size * 4)
        >>> ranks.all_gather(full, shard, "unshard weights").wait()
        >>> full
        tensor([0., 1., 2., 3.])
        >>> destroy()

    Args:
        topology: shared with every other engine of the process.
        group: the data group, whose ranks see different samples; by default all ranks.
        records_sizes: see `CollectiveTracker`.
        recorder: flight recorder for these calls; by default the one for calls that all ranks issue.

    Attributes:
        rank, world_size: this rank and the number of ranks in the data group.
        ranks: global ranks of the data group, by their rank in it.
        shard_ranks: global ranks of the shard group, by their rank in it.
        shard_rank, shard_world_size: this rank and the number of ranks in the shard group.
        replica: rank in the replicate group; 0 if there is one shard group.
        secondary_rank, secondary_world_size: rank and size in the secondary group, over which backward gathers
            (ZeRO++ hpZ); without one, those of the shard group.
        job: collectives over all ranks of the job; these themselves if they cover all ranks.
        peers: collectives over the ranks that issue the same calls: `job`, or the ranks of one pipeline stage.
        is_first_data_group: True on one data group of the job, or of each stage; values that all data groups hold are
            counted only there.
        parts: collectives over the ranks that hold the other parts of split parameters; None if no parameter is split.
        part_holders: collectives over the ranks of the data group that hold the same experts; its `parts` are over
            those. None if all ranks of the data group hold the same parameters.
        nodes: global ranks on each machine.
        quantized_weights: True if `gather_weights` rounds.
        flight_recorder: recorder of the issued calls; the engine sets its `phase` and `step`.
        meter: called for every message of gathers, reductions and broadcasts with (tag of the call, global rank of the
            receiver, bytes). None turns metering off.
    """

    rank: int
    world_size: int
    ranks: Sequence[int]
    shard_ranks: Sequence[int]
    shard_rank: int
    shard_world_size: int
    replica: int
    secondary_rank: int
    secondary_world_size: int
    quantized_weights: bool
    nodes: Sequence[Sequence[int]]
    job: Collectives
    peers: Collectives
    is_first_data_group: bool
    parts: Collectives | None
    part_holders: Collectives | None
    flight_recorder: FlightRecorder
    topology: Topology
    meter: Meter | None

    def __init__(
        self,
        topology: Topology,
        group: RankGroup | None = None,
        *,
        records_sizes: bool = True,
        recorder: FlightRecorder | None = None,
    ) -> None:
        group = group or topology.all_ranks
        self.topology = topology
        self.rank = self.shard_rank = self.secondary_rank = group.rank
        self.world_size = self.shard_world_size = self.secondary_world_size = group.size
        self.ranks = self.shard_ranks = group.ranks
        self.replica = 0
        self.quantized_weights = False
        self.nodes = topology.nodes
        self.job = self.peers = self
        self.is_first_data_group = True
        self.parts = self.part_holders = None
        self.meter = None
        self.flight_recorder = recorder or topology.flight_recorder
        self._tracker = CollectiveTracker(self.flight_recorder, topology.watchdog, records_sizes=records_sizes)
        self._buffer_pool = BufferPool()
        if self.world_size > 1:
            self._gathers = self._transports(group, group.gather_group)
            self._reductions = self._transports(group, group.reduce_group)
            # On gloo even if gathers use NCCL: there, control calls would queue behind them on the device.
            self._control = self.topology.transports(group.control_group, "cpu", no_meter)
            self._shard_gathers = self._gathers

    @property
    def everyone(self) -> Collectives:
        """Collectives over the ranks that hold this model or parts of it; an error on one is raised on all of them."""
        return self if self.parts is None else self.peers

    def _transports(self, group: RankGroup, over: dist.ProcessGroup) -> Transports:
        """Returns metered transports over one process group of `group`, by device type."""

        def meter_source() -> Meter | None:
            meter = self.meter
            return None if meter is None else lambda tag, rank, nbytes: meter(tag, group.ranks[rank], nbytes)

        devices = {"cpu", self.topology.device.type}
        return {device: self.topology.transports(over, device, meter_source) for device in devices}

    def all_gather(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        """out[r*S:(r+1)*S] = shard of rank r. Runs over the gather group; sends (W-1)*S elements.

        Args:
            out: (W*S,), contiguous.
            shard: (S,), of the dtype of `out`; may be this rank's part of `out`. Must not change until `wait`.
            label: name of the collective in messages and traces, the same on all ranks: "unshard layers.3".
            split_sizes: elements of each rank's shard, in the order of `out`; empty for equal shards.
        """
        # In-place gather: if `shard` is a view of `out`, no rank copies its own part.
        check_split(out, shard, split_sizes, self.shard_rank, self.shard_world_size, f"{label}: a gather")
        assert out.dtype == shard.dtype, f"{label}: cannot gather {shard.dtype} into {out.dtype}"
        if self.shard_world_size == 1:
            if not begin_together(out, shard):
                out.copy_(shard)
            return DONE
        return self._gather(self._shard_gathers, out, shard, split_sizes, "all_gather", label)

    def _gather(
        self, transports: Transports, out: Tensor, shard: Tensor, split_sizes: Sequence[int], op: str, label: str
    ) -> Work:
        entry = self._tracker.issue("gather", op, label, out)
        if out.numel() == 0:
            return self._finish_empty(entry)
        transport = transports[out.device.type]
        return self._start(entry, transport, transport.all_gather, out, shard, split_sizes)

    def _start(
        self,
        entry: CollectiveRecord,
        transport: Transport,
        operation: Callable[..., Sequence[PendingTransfer]],
        out: Tensor,
        *args: Any,
        complete: Callable[[], None] | None = None,
    ) -> Work:
        """Starts an operation of a transport; `wait` runs `complete` on the received data."""
        pending = self._tracker.start(entry, operation, out, *args)
        if isinstance(transport, P2PTransport):
            return MessageWork(self._tracker, entry, pending, complete)
        return DeviceWork(self._tracker, entry, pending, out.device, complete)

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        """out = round(scale * sum over ranks of their flat[rank*S:(rank+1)*S]). Runs over the reduce group.

        In host memory this rank adds the parts, during `wait`. On an accelerator the backend adds, in the dtype of
        `flat` and in its own order. Sends all of `flat` except this rank's part.

        Args:
            out: (S,), of any floating dtype.
            flat: (W*S,), contiguous. Must not change until `wait`; with `split_sizes` it may be overwritten.
            label: name of the collective in messages and traces, the same on all ranks: "reduce layers.3".
            scale: factor, usually 1/W.
            split_sizes: elements of each rank's part, in the order of `flat`; empty for equal parts.
        """
        check_split(flat, out, split_sizes, self.rank, self.world_size, f"{label}: a reduction")
        if self.world_size == 1:
            _scale_into(out, flat, scale)
            return DONE
        entry = self._tracker.issue("reduce", "reduce_scatter", label, flat)
        if flat.numel() == 0:
            return self._finish_empty(entry)
        transport = self._reductions[flat.device.type]
        # In host memory every rank's part arrives unreduced. `wait` sums them, rather than each arrival: the order of
        # the sum is the rank order, never the order of the messages.
        if isinstance(transport, P2PTransport):
            parts = self._buffer_pool.acquire(self.world_size * out.numel(), flat.dtype)
            add = partial(self._sum_parts, parts, out, scale)
            return self._start(entry, transport, transport.reduce_scatter, parts, flat, split_sizes, complete=add)
        # On an accelerator the backend averages, in the dtype of its input (see `NativeTransport.reduce_scatter`).
        average = out if out.dtype == flat.dtype else torch.empty_like(out, dtype=flat.dtype)
        premultiplied = scale if transport.scales(scale) else None
        issue = partial(transport.reduce_scatter, scale=premultiplied)
        factor = scale * self.world_size if premultiplied is None else 1.0
        finish = partial(_scale_average, average, out, factor)
        return self._start(entry, transport, issue, average, flat, split_sizes, complete=finish)

    def _sum_parts(self, parts: Tensor, out: Tensor, scale: float) -> None:
        """out: (S,) = scale * the sum of the W parts; returns their buffer to the pool."""
        if out.numel():
            sum_ranks(out, parts.view(-1, out.numel()), scale)
        self._buffer_pool.release(parts)

    def gather_weights(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        """Runs `all_gather` on weights to compute with; rounds them if `quantized_weights` is True."""
        return self.all_gather(out, shard, label, split_sizes)

    def gather_secondary(self, out: Tensor, secondary: Tensor, label: str) -> Work:
        """Runs `all_gather` over the secondary group.  secondary: (N / secondary_world_size,)."""
        return self.all_gather(out, secondary, label)

    def all_to_all(self, out: Tensor, parts: Tensor, label: str) -> Work:
        """out[r] = parts[this rank] of rank r. Runs over the gather group; sends (W-1)*n elements.

        Args:
            out, parts: (W, n), contiguous and of one dtype; `parts` must not change until `wait`.
            label: name of the collective in messages and traces, the same on all ranks: "exchange heads".
        """
        entry = self._tracker.issue("gather", "all_to_all", label, parts)
        if self.world_size == 1 or parts.numel() == 0:
            out.copy_(parts)
            return self._finish_empty(entry)
        transport = self._gathers[parts.device.type]
        return self._start(entry, transport, transport.all_to_all, out, parts)

    def exchange_rows(
        self, out: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], label: str
    ) -> Work:
        """Sends runs of rows to the ranks and receives theirs. Runs over the gather group, even if there are no rows.

        Args:
            out: (sum of `received`, n), the rows from rank 0, rank 1 and so on; contiguous.
            rows: (sum of `sent`, n), the rows for rank 0, rank 1 and so on; contiguous. Must not change until `wait`.
            received, sent: number of rows from and to each rank.
            label: name of the collective in messages and traces, the same on all ranks: "send tokens to experts".
        """
        entry = self._tracker.issue("gather", "all_to_all", label, rows)
        if self.world_size == 1:
            out.copy_(rows)
            return self._finish_empty(entry)
        transport = self._gathers[rows.device.type]
        return self._start(entry, transport, transport.exchange_rows, out, rows, received, sent)

    def named(self, ranks: Iterable[int]) -> str:
        """Names some of its ranks for messages, with their coordinates on the mesh of the job.

        Args:
            ranks: ranks in the data group.
        """
        return self.topology.names(self.ranks[rank] for rank in ranks)

    def observe(self, axis: str, source: Metered) -> None:
        """Counts the traffic of `source` along an axis of the mesh too, if this object counts traffic."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Returns a context in which no traffic is counted."""
        return nullcontext()

    def over(self, hierarchical: Collectives) -> Collectives:
        """Returns `hierarchical` in the same wrapper as this object, to replace it if a plan needs shard groups."""
        return hierarchical

    def reduction_nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        """Bytes that this rank sends in a `reduce_scatter` of `numel` elements; its own part has `shard_numel`."""
        return (numel - shard_numel) * dtype.itemsize

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"], label: str) -> None:
        """tensor = its sum or maximum over the ranks, the same bits on all of them. Blocks.

        Runs over the control group, for small tensors: a tensor on an accelerator goes through host memory. The sum
        runs in rank order; a NaN on any rank makes the maximum NaN.
        """
        if self.world_size == 1:
            return
        rows = self._gather_rows(tensor.detach().reshape(-1).cpu(), f"all_reduce {op}", label)
        # A cumulative sum has one order for every shape; the order of `sum` depends on the shape.
        result = rows.cumsum(0)[-1] if op == "sum" else rows.amax(0)
        tensor.detach().copy_(result.view(tensor.shape))

    def all_reduce_on_device(self, tensor: Tensor, op: Literal["sum", "max"], label: str) -> None:
        """Runs `all_reduce` over the reduce group without blocking the host: the current stream waits instead.

        Use it for values that do not depend on the order of the sum, such as integers and maxima, or that are only
        displayed. If the backend does not compute on the device, this is `all_reduce`.
        """
        if self.world_size == 1:
            return
        transport = self._reductions[tensor.device.type]
        if isinstance(transport, P2PTransport):
            self.all_reduce(tensor, op, label)
            return
        entry = self._tracker.issue("reduce", f"all_reduce {op}", label, tensor)
        pending = self._tracker.start(entry, transport.all_reduce, tensor, op)
        DeviceWork(self._tracker, entry, pending, tensor.device).wait()

    def broadcast(self, tensor: Tensor, src: int, label: str) -> None:
        """Copies `tensor` from rank `src` to all ranks. Blocks. Runs over the gather group; contiguous tensors only."""
        assert tensor.is_contiguous(), f"{label}: broadcast requires a contiguous tensor"
        if self.world_size == 1:
            return
        entry = self._tracker.issue("gather", f"broadcast from {src}", label, tensor)
        if tensor.numel() == 0:
            self._finish_empty(entry)
            return
        transport = self._gathers[tensor.device.type]
        pending = self._tracker.start(entry, transport.broadcast, tensor.detach().view(-1), src)
        self._tracker.wait(entry, pending)

    def gather_objects(self, obj: Any, label: str) -> list[Any]:
        """Returns the `obj` of every rank, by rank, on every rank. Pickled; over the control group. Blocks."""
        if self.world_size == 1:
            return [obj]
        return gather_pickles(obj, lambda row, what: self._gather_rows(row, "gather_objects", f"{label}{what}"))

    def barrier(self, label: str) -> None:
        """Returns after every rank has called it. Runs over the control group."""
        if self.world_size > 1:
            self._gather_rows(torch.zeros(1, dtype=torch.uint8), "barrier", label)

    def _gather_rows(self, row: Tensor, op: str, label: str) -> Tensor:
        """Returns the (n,) tensors of all ranks as (W, n). Blocks. Over the control group; sends (W-1)*n elements.

        A point-to-point transport takes ceil(log2(W)) messages.
        """
        entry = self._tracker.issue("control", op, label, row)
        rows = row.new_empty(self.world_size, row.numel())
        if row.numel() == 0:
            self._finish_empty(entry)
        elif isinstance(self._control, P2PTransport):
            self._tracker.wait(entry, self._control.gather_rows(rows, row, entry.tag))
        else:
            pending = self._tracker.start(entry, self._control.all_gather, rows.view(-1), row, ())
            self._tracker.wait(entry, pending)
        return rows

    def _finish_empty(self, entry: CollectiveRecord) -> Work:
        self.flight_recorder.finish(entry)
        return DONE


def check_split(full: Tensor, shard: Tensor, split_sizes: Sequence[int], rank: int, world_size: int, what: str) -> None:
    """Asserts that the ranks' parts make up the full tensor; a violation is a bug in this package."""
    if split_sizes:
        fits = len(split_sizes) == world_size and split_sizes[rank] == shard.numel()
        fits = fits and sum(split_sizes) == full.numel()
    else:
        fits = full.numel() == world_size * shard.numel()
    assert fits, f"{what} of {full.numel()} elements, {shard.numel()} on rank {rank} of {world_size}: {split_sizes}"


def _scale_average(average: Tensor, out: Tensor, factor: float) -> None:
    """out: (S,) = factor * average; `average` may be `out`."""
    if average is not out or factor != 1.0:
        scale_rounded_once(out, average, factor)


def _scale_into(out: Tensor, flat: Tensor, scale: float) -> None:
    """Reduces over one rank: out = round(scale * flat), rounded like the sum over several."""
    if out.device.type == "cpu":
        sum_ranks(out, flat.view(1, -1), scale)
    else:
        scale_rounded_once(out, flat, scale)


# --- over a group made by another library

_FIRST_TAG, _NUM_TAGS = 1 << 28, 1 << 20  # apart from the tags of other code that sends messages in the group


class PartitionedTensors:
    """Shards of tensors that are the same on every rank of a group, such as activations under tensor parallelism.

    Args:
        group: a process group that contains this rank. All its ranks must make the same calls in the same order.

    Raises:
        UsageError: there is no process group, or this rank is not in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not dist.is_initialized() or not isinstance(group, dist.ProcessGroup):
            raise UsageError("tensor_parallel_group", expected="a process group with this rank in it", got=group)
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._calls = 0
        if self.rank < 0:
            raise UsageError("tensor_parallel_group", expected="a process group with this rank in it", got=group)

    def shard_numel(self, numel: int) -> int:
        """Returns S, the number of elements of a shard; the last shards may contain padding."""
        return -(-numel // self.size)

    def shard(self, flat: Tensor) -> Tensor:
        """Returns a copy (S,) of this rank's part of `flat`, (numel,), padded with zeros."""
        length = self.shard_numel(flat.numel())
        out = flat.new_zeros(length)
        shard = flat[self.rank * length : (self.rank + 1) * length]
        out[: shard.numel()].copy_(shard)
        return out

    def unshard(self, shard: Tensor, numel: int) -> Tensor:
        """Returns the tensor, (numel,), whose shards the ranks hold. (all ranks of the group)"""
        out = torch.empty(self.size * shard.numel(), dtype=shard.dtype, device=shard.device)
        self._calls += 1
        transport = transport_over(self._group, shard.device.type)
        for work in transport.all_gather(out, shard, (), _FIRST_TAG + self._calls % _NUM_TAGS):
            work.wait()
        return out[:numel]
