"""Collectives over a `MeshLayout`: HSDP replicas (MiCS), secondary partitions and quantized transfers (ZeRO++).

The engine uses these exactly like `Collectives`: it gathers, reduces and reads its shard rank. `arrange` makes the
collectives of a `CommPlan`, and returns the plain ones for a plan without options.

Gathers of weights run over the shard group or, in backward, over the smaller secondary group. Reductions have two hops:
over the ranks that share a fast link first, then across. Both kinds of reduction give each rank its shard of the sum
over all ranks, block until they are done, and run one after another on a `SerialExecutor`; all messages of one
reduction belong to one call of the flight recorder.

Letters: S = elements per shard, this rank's if shards differ in size (`split_sizes` then lists them); L = ranks in a
node group; R = node groups; a rank is (n, l): node n, position l on it.

[Note: order across replicas] Sharding over all ranks computes an fp32 sum in rank order, rounded once; a sum of partial
sums has other bits. In host memory a running sum therefore passes from one shard group to the next, each group adds its
parts in rank order, and the last group's result is passed around: the same bits as without replicas, in 2 (R - 1)
sequential messages of S elements. An accelerator's backend averages within the shard group and then across, each in an
order of its choice.

[Note: two hops in 4 bits] (ZeRO++, Wang et al. 2023, arXiv:2306.10209, section 3.3) Each rank quantizes the R shards
that rank l of its node has to sum into one run of bytes. Rank l thus receives L runs, adds them in fp32, quantizes the
sums again, and sends one shard to each of its R peers. Across nodes S half-bytes per peer travel, 1/L of a direct
all-to-all. A rank's own parts are never quantized. The error per hop is that of one code (`quantized.py`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeroaccel.comm.collective_tracker import DONE, CollectiveTracker, Work
from zeroaccel.comm.collectives import Collectives, check_split
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord, FlightRecorder
from zeroaccel.comm.mesh_layout import MeshLayout, consecutive
from zeroaccel.comm.quantized import (
    FP8,
    INT4,
    INT8,
    QUANTIZABLE,
    Codec,
    RowOrder,
    dequantize,
    dequantize_rows,
    load_kernels_of_sums,
    quantize,
    quantize_rows,
    sum_rows,
)
from zeroaccel.comm.topology import RankGroup, Topology, connect, peer_recorder, subgroup
from zeroaccel.comm.transport import (
    GATHERS,
    HOPS,
    REDUCTIONS,
    BufferPool,
    NativeTransport,
    P2PTransport,
    Transport,
    Transports,
)
from zeroaccel.config.comm_plan import CommPlan
from zeroaccel.config.parallel import RankGroups
from zeroaccel.logs import log_once, logger
from zeroaccel.ops.device_threads import start_thread
from zeroaccel.ops.reductions import scale_rounded_once


def arrange(
    collectives: Collectives, plan: CommPlan, data: RankGroups | None = None, peers: RankGroups | None = None
) -> Collectives:
    """Returns the collectives of a plan; for a plan without options, `collectives` themselves. (all ranks)

    Args:
        data: the data groups of the job; by default one group of all ranks.
        peers: the groups of ranks that issue the same collectives, each made of one or more data groups; by default one
            group of all ranks.
    """
    topology = collectives.topology
    if plan.plain and data is None:
        return collectives
    all_ranks = (topology.all_ranks.ranks,)
    nodes = topology.nodes if plan.node_size is None else consecutive(all_ranks, plan.node_size)
    layout = MeshLayout.of(plan, data or all_ranks, nodes)
    if layout.exact_reason and topology.rank == 0:
        key = "zero_optimization.zero_quantized_gradients"
        log_once(logging.WARNING, f"{key}: gradients are not quantized: {layout.exact_reason}")
    hierarchical = HierarchicalCollectives(
        topology,
        layout,
        weight_codec=(FP8 if plan.fp8_weights else INT8) if plan.quantized_weights else None,
        watch_interval=plan.watch_interval,
        peers=peers,
    )
    hierarchical.nodes = nodes
    return collectives.over(hierarchical)


class HierarchicalCollectives(Collectives):
    """The collectives of one layout. (all ranks make it, with the same arguments)

    Args:
        weight_codec: format in which gathers transfer weights to compute with; None transfers them unquantized.
        watch_interval: steps between two comparisons with exact collectives; 0 for none.
        peers: see `arrange`.

    Attributes:
        layout: the given layout.
        watch: monitor that makes the comparisons; None without them.
    """

    def __init__(
        self,
        topology: Topology,
        layout: MeshLayout,
        *,
        weight_codec: Codec | None = None,
        watch_interval: int = 0,
        peers: RankGroups | None = None,
    ) -> None:
        # Making process groups is collective: every rank makes all of them in this order, even those without it.
        data_group = subgroup(topology, layout.data_groups)
        own_ranks = topology.all_ranks if peers is None else subgroup(topology, peers)
        shard_group = subgroup(topology, layout.shard_groups)
        replicate_group = subgroup(topology, layout.replicate_groups)
        secondary_group = subgroup(topology, layout.secondary_groups)
        hops = [subgroup(topology, partition) for partition in layout.hops or ()]
        # Other stages have other units and collectives, so the watchdog does not compare their histories.
        recorder = peer_recorder(topology, peers)
        super().__init__(topology, data_group, recorder=recorder)
        self.layout = layout
        if layout.hops is not None:
            load_kernels_of_sums(INT4, topology.device)
        if len(layout.data_groups) > 1:
            self.job = self.peers = Collectives(topology)
            self.is_first_data_group = own_ranks.ranks[0] in data_group.ranks
        if peers is not None:
            self.peers = self if own_ranks == data_group else Collectives(topology, own_ranks, recorder=recorder)
        self.quantized_weights, self._weight_codec = weight_codec is not None, weight_codec
        self.shard_rank, self.shard_world_size = shard_group.rank, shard_group.size
        self.shard_ranks = shard_group.ranks
        self.secondary_rank, self.secondary_world_size = secondary_group.rank, secondary_group.size
        self.replica = replicate_group.rank
        self.watch = QuantErrorMonitor(watch_interval, logs=self.rank == 0) if watch_interval else None
        self._executor = SerialExecutor()
        self._reduction: Reduction | None = None
        if self.world_size == 1:
            return
        self._shard_gathers = self._transports(shard_group, shard_group.gather_group)
        self._secondary_gathers = self._transports(secondary_group, secondary_group.gather_group)
        groups = {
            "gathers": (data_group.gather_group, GATHERS),
            "reductions": (data_group.reduce_group, REDUCTIONS),
            "gathers of shards": (shard_group.gather_group, GATHERS),
            "secondary gathers": (secondary_group.gather_group, GATHERS),
        }
        connect(topology, groups | self._choose_reduction(hops, shard_group, replicate_group))

    def _choose_reduction(
        self, hops: Sequence[RankGroup], shard_group: RankGroup, replicate_group: RankGroup
    ) -> dict[str, tuple[dist.ProcessGroup, Sequence[str]]]:
        """Makes the layout's reduction, unless it is the plain one; returns the groups that it uses, by name.

        Args:
            hops: the node group and the peer group of an int4 reduction; empty for exact ones.
        """
        if self.layout.hops is not None:
            node_group, peer_group = hops
            self._reduction = Int4Reduction(
                self._tracker,
                self._transports(node_group, node_group.reduce_group),
                self._transports(peer_group, peer_group.reduce_group),
                _shards_of_peers(self.layout.hops[1], shard_group, node_group),
            )
            return {"hop 1": (node_group.reduce_group, HOPS), "hop 2": (peer_group.reduce_group, HOPS)}
        if replicate_group.size == 1:
            return {}
        shards, replicas = shard_group.reduce_group, replicate_group.reduce_group
        self._reduction = ReplicatedReduction(
            self._tracker, self._transports(shard_group, shards), self._transports(replicate_group, replicas)
        )
        return {"sums of shards": (shards, REDUCTIONS), "sums of replicas": (replicas, REDUCTIONS)}

    def gather_weights(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        codec = self._weight_codec
        if codec is None or shard.dtype not in QUANTIZABLE:
            return self.all_gather(out, shard, label, split_sizes)
        assert not split_sizes, f"{label}: quantized gathers need parts of equal size"
        # qwZ (ZeRO++ section 3.1): each rank quantizes its shard blockwise, which halves the bytes of bf16.
        code = shard.new_empty(codec.nbytes(shard.numel()), dtype=torch.uint8)
        quantize(shard, codec, code)
        work = self._gather_codes(out, code, label, codec)
        return self._measured(
            "gather", label, work, out, lambda exact: self.all_gather(exact, shard, f"{label}, exact")
        )

    def _gather_codes(self, out: Tensor, code: Tensor, label: str, codec: Codec) -> Work:
        """Runs `all_gather` on codes of the shards.

        Args:
            code: (codec.nbytes(S),) uint8, this rank's code; must not change until `wait`.
        """
        ranks = self.shard_world_size
        if ranks == 1 or out.numel() == 0:
            dequantize(code, codec, out)
            return DONE
        entry = self._tracker.issue("gather", "all_gather fp8" if codec.floating else "all_gather int8", label, out)
        transport = self._shard_gathers[out.device.type]
        codes = self._buffer_pool.acquire(ranks * code.numel(), torch.uint8, out.device)

        def decode() -> None:
            dequantize_rows(codes.view(ranks, -1), codec, out.view(ranks, -1))
            if out.device.type != "cpu":
                # If the gather was issued behind a copy from the host, the codes are in memory of that copy's stream.
                # The current stream, which waited for the gather, reads them: they must not be reused before that.
                stream = torch.get_device_module(out.device).current_stream(out.device)
                code.record_stream(stream)
                codes.record_stream(stream)
            self._buffer_pool.release(codes)

        return self._start(entry, transport, transport.all_gather, codes, code, (), complete=decode)

    def gather_secondary(self, out: Tensor, secondary: Tensor, label: str) -> Work:
        assert out.numel() == self.secondary_world_size * secondary.numel(), (
            f"{label}: cannot gather {self.secondary_world_size} x {secondary.numel()} elements into {out.numel()}"
        )
        if self.secondary_world_size == 1:
            out.copy_(secondary)
            return DONE
        return self._gather(self._secondary_gathers, out, secondary, (), "all_gather secondary", label)

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        # Without replicas and quantization, use the plain reduce-scatter over the data group.
        reduction = self._reduction
        if reduction is None or flat.numel() == 0:
            return super().reduce_scatter(out, flat, label, scale, split_sizes)
        check_split(flat, out, split_sizes, self.shard_rank, self.shard_world_size, f"{label}: a reduction")
        # Numbered here, in call order, which is the same on all ranks; the executor runs it later.
        is_int4 = isinstance(reduction, Int4Reduction)
        op = "reduce_scatter int4" if is_int4 else "reduce_scatter across replicas"
        entry = self._tracker.issue("reduce", op, label, flat)
        call = self.flight_recorder, entry
        work = self._executor.submit(lambda: reduction(entry, out, flat, scale, split_sizes), flat.device, call)
        if not is_int4:
            return work
        plain = super().reduce_scatter
        return self._measured("reduction", label, work, out, lambda exact: plain(exact, flat, f"{label}, exact", scale))

    def _measured(
        self, kind: QuantKind, label: str, work: Work, out: Tensor, run_exact: Callable[[Tensor], Work]
    ) -> Work:
        """Returns `work`, or a `MeasuredWork` with the exact collective if the monitor asks for a comparison."""
        # All ranks issue the exact collective: `is_due` depends only on the step and the order of calls.
        monitor, step = self.watch, self.flight_recorder.step
        if monitor is None or not monitor.is_due(kind, step):
            return work
        exact = torch.empty_like(out)
        return MeasuredWork(work, run_exact(exact), lambda: monitor.compare(kind, step, label, out, exact))

    def reduction_nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        if self._reduction is None:
            return super().reduction_nbytes(numel, shard_numel, dtype)
        return self._reduction.nbytes(numel, shard_numel, dtype)


def _shards_of_peers(partition: RankGroups, shard_group: RankGroup, node_group: RankGroup) -> list[list[int]]:
    """Returns `shard_of[l][n]` of `Int4Reduction`: for each rank of this node, the shard ranks of its peers."""
    peers = {rank: group for group in partition for rank in group}
    return [[shard_group.ranks.index(peer) for peer in peers[rank]] for rank in node_group.ranks]


# --- reductions


class Reduction(Protocol):
    """A way to sum gradients over the ranks."""

    def __call__(
        self, entry: CollectiveRecord, out: Tensor, flat: Tensor, scale: float, split_sizes: Sequence[int]
    ) -> None:
        """out: (S,) = round(scale * this rank's shard of the sum over all ranks of `flat`). Blocks."""

    def nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        """Bytes that this rank sends to reduce `numel` elements, of which it keeps `shard_numel`."""


class ReplicatedReduction:
    """Reduce-scatter over the shard group, then a sum over the replicate group. See [Note: order across replicas].

    Args:
        shard_transports: transports over the L ranks with different shards.
        replicate_transports: transports over the R ranks with the same shard, in replica order.
    """

    def __init__(
        self, tracker: CollectiveTracker, shard_transports: Transports, replicate_transports: Transports
    ) -> None:
        self._tracker = tracker
        self._shard_transports, self._replicate_transports = shard_transports, replicate_transports
        self._buffer_pool = BufferPool()

    def __call__(
        self, entry: CollectiveRecord, out: Tensor, flat: Tensor, scale: float, split_sizes: Sequence[int]
    ) -> None:
        device = flat.device.type
        shards, replicas = self._shard_transports[device], self._replicate_transports[device]
        if isinstance(shards, P2PTransport) and isinstance(replicas, P2PTransport):
            self._reduce_in_order(entry, shards, replicas, out, flat, scale, split_sizes)
        else:
            assert isinstance(shards, NativeTransport), "one type of device has one kind of transport"
            assert isinstance(replicas, NativeTransport), "one type of device has one kind of transport"
            # HSDP as in FSDP2: reduce-scatter within the shard group, then all-reduce of the shard over the replicas.
            average = torch.empty_like(out, dtype=flat.dtype)
            self._tracker.transfer(entry, shards.reduce_scatter, average, flat, split_sizes)
            if average.numel():
                self._tracker.transfer(entry, replicas.average, average)
            scale_rounded_once(out, average, scale * shards.world_size * replicas.world_size)
        self._tracker.finish(entry)

    def _reduce_in_order(
        self,
        entry: CollectiveRecord,
        shards: P2PTransport,
        replicas: P2PTransport,
        out: Tensor,
        flat: Tensor,
        scale: float,
        split_sizes: Sequence[int],
    ) -> None:
        # Hop 1: receives this rank's part from every rank of its shard group, unsummed.
        parts = self._buffer_pool.acquire(shards.world_size * out.numel(), flat.dtype)
        self._tracker.transfer(entry, shards.reduce_scatter, parts, flat, split_sizes)
        if not out.numel():  # this rank's part is empty on its replicas, too
            self._buffer_pool.release(parts)
            return

        # Hop 2: replica 0 begins the running sum; each next replica adds its parts to the received sum, rank by rank.
        total = self._buffer_pool.acquire(out.numel(), torch.float32)
        rank, last = replicas.rank, replicas.world_size - 1
        before, after = (rank - 1) % (last + 1), (rank + 1) % (last + 1)
        rows = list(parts.view(-1, out.numel()))
        if rank:
            self._tracker.follow(entry, [replicas.receive(total, before, entry.tag)])
        else:
            total.copy_(rows.pop(0))
        for row in rows:
            total.add_(row)

        # The last replica has the sum. It rounds it once and passes it around, starting with replica 0.
        if rank == last:
            out.copy_(total.mul_(scale))
        else:
            self._tracker.follow(entry, [replicas.send(total, after, entry.tag)])
            self._tracker.follow(entry, [replicas.receive(out, before, entry.tag)])
        if after != last:
            self._tracker.follow(entry, [replicas.send(out, after, entry.tag)])
        self._buffer_pool.release(parts)
        self._buffer_pool.release(total)

    def nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        replicas = self._replicate_transports["cpu"]
        # All replicas except the last send the running sum in fp32; all except the second last send the result.
        rank, last = replicas.rank, replicas.world_size - 1
        running = 4 * shard_numel if rank != last else 0
        result = dtype.itemsize * shard_numel if (rank + 1) % (last + 1) != last else 0
        return (numel - shard_numel) * dtype.itemsize + running + result


class Int4Reduction:
    """A reduction with two hops in 4 bits. See [Note: two hops in 4 bits].

    Args:
        node_transports: transports over the L ranks of this rank's node group.
        peer_transports: transports over the R ranks with this rank's position on their nodes.
        shard_of: shard_of[l][n] is the shard number of rank (n, l).
    """

    def __init__(
        self,
        tracker: CollectiveTracker,
        node_transports: Transports,
        peer_transports: Transports,
        shard_of: Sequence[Sequence[int]],
    ) -> None:
        self._tracker = tracker
        self._node_transports, self._peer_transports = node_transports, peer_transports
        self._order = RowOrder([shard for column in shard_of for shard in column])
        self._buffer_pool = BufferPool(capacity=4)

    def __call__(
        self, entry: CollectiveRecord, out: Tensor, flat: Tensor, scale: float, split_sizes: Sequence[int]
    ) -> None:
        assert not split_sizes, "a reduction in two hops needs shards of equal size"
        device = flat.device.type
        node, peers = self._node_transports[device], self._peer_transports[device]
        # Hop 1, on the node: rank l receives the R shards that the l-th ranks of all nodes hold.
        shards = flat.view(-1, out.numel())
        pool, runs = self._buffer_pool, peers.world_size
        sums = pool.acquire(runs * out.numel(), torch.float32, flat.device).view(runs, -1)
        self._hop(entry, node, shards, sums, self._order)
        # Hop 2, across nodes: each peer receives its shard of the sums of every node.
        total = pool.acquire(out.numel(), torch.float32, flat.device)
        self._hop(entry, peers, sums, total.view(1, -1))
        out.copy_(total.mul_(scale))
        pool.release(sums)
        pool.release(total)
        self._tracker.finish(entry)

    def nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        code, node, peers = INT4.nbytes(shard_numel), self._node_transports["cpu"], self._peer_transports["cpu"]
        return code * ((node.world_size - 1) * peers.world_size + peers.world_size - 1)

    def _hop(
        self,
        entry: CollectiveRecord,
        transport: Transport,
        values: Tensor,
        totals: Tensor,
        order: RowOrder | None = None,
    ) -> None:
        """totals[i] = the sum over ranks r of row own rank * R + i of their `values`; other ranks' rows are quantized.

        Args:
            values: (W * R, S), in the order of the row numbers, or in `order`.
            totals: (R, S) float32.
        """
        rank, (runs, numel) = transport.rank, totals.shape
        width = INT4.nbytes(numel)
        ranks, pool = transport.world_size, self._buffer_pool
        # One message per rank, with the codes of all rows that it sums.
        codes, received = (pool.acquire(ranks * runs * width, torch.uint8, totals.device) for _ in range(2))
        quantize_rows(values, INT4, codes.view(-1, width), order, skip=(rank * runs, (rank + 1) * runs))
        if ranks > 1:
            self._tracker.transfer(entry, transport.all_to_all, received.view(ranks, -1), codes.view(ranks, -1))
        # Summed in rank order, so that the result does not depend on the arrival order of the messages.
        sum_rows(received.view(ranks, runs, width), INT4, values, rank, totals, order)
        pool.release(codes)
        pool.release(received)


# --- a background executor for reductions with several hops


class ExecutorJob:
    """A job of a `SerialExecutor`; a `Work`.

    Args:
        device: device of the tensors that the function works on.
        call: the collective's recorder and record; None for a job that is no collective.
    """

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        call: tuple[FlightRecorder, CollectiveRecord] | None = None,
    ) -> None:
        self._call = call
        self._function: Callable[[], None] | None = function
        self._device = device
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._event: torch.Event | None = None

    def wait(self) -> None:
        """Blocks until the job is done and raises its error, if any; an accelerator's current stream waits for it."""
        listener = None if self._call is None or self._done.is_set() else self._call[0].listener
        if listener is None or self._call is None:
            self._done.wait()
        else:
            listener.wait_begins(self._call[1])
            self._done.wait()
            listener.wait_ends(self._call[1])
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        """True if `wait` would not block."""
        return self._done.is_set() and (self._event is None or self._event.query())

    def run(self) -> None:
        """Runs the job. The executor calls this once."""
        assert self._function is not None, "a job runs once"
        function, self._function = self._function, None  # the function refers to tensors
        try:
            function()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def run_on(self, stream: torch.Stream) -> None:
        """Queues the job's kernels on a stream, behind those of the current stream. The executor calls this once."""
        streams = torch.get_device_module(self._device)
        stream.wait_stream(streams.current_stream(self._device))
        with streams.stream(stream):
            self.run()
            self._event = streams.Event()
            self._event.record()


class SerialExecutor:
    """Runs jobs in the order of submission, concurrently with the thread that computes.

    A reduction with two hops has arithmetic between them. In host memory it runs in a separate thread, on an
    accelerator on a separate stream. The order is the same on all ranks, so a rank never has to wait for one reduction
    before it can take part in the next, and the second hop overlaps with computation too. The thread ends when no jobs
    are left.

    Example:
        >>> executor = SerialExecutor()
        >>> order = []
        >>> first = executor.submit(lambda: order.append("first"), torch.device("cpu"))
        >>> second = executor.submit(lambda: order.append("second"), torch.device("cpu"))
        >>> second.wait()
        >>> order
        ['first', 'second']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[ExecutorJob] = deque()
        self._is_running = False
        self._stream: torch.Stream | None = None

    def submit(
        self,
        function: Callable[[], None],
        device: torch.device,
        call: tuple[FlightRecorder, CollectiveRecord] | None = None,
    ) -> ExecutorJob:
        """Queues a function that works on tensors of `device`, which must not change until the job is done."""
        # The stream of an accelerator queues kernels without a thread; on the CPU a thread runs the queue.
        job = ExecutorJob(function, device, call)
        if device.type != "cpu":
            self._stream = self._stream or torch.get_device_module(device).Stream(device)
            job.run_on(self._stream)
            return job
        with self._lock:
            self._queue.append(job)
            if not self._is_running:
                self._is_running = True
                start_thread(self._work, "zeroaccel-executor", device, daemon=True)
        return job

    def _work(self) -> None:
        while True:
            # Under the lock, so that no job is queued between this check and the end of the thread.
            with self._lock:
                if not self._queue:
                    self._is_running = False
                    return
                job = self._queue.popleft()
            job.run()


# --- measures the error of quantized collectives during training (`zeropp.watch_interval`)

QuantKind = Literal["gather", "reduction"]

_monitor_logger = logger.getChild("watch")
_monitor_logger.setLevel(logging.INFO)  # the config requests these lines


@dataclass(frozen=True)
class QuantError:
    """The result of one comparison on this rank.

    Attributes:
        step: step of the engine.
        kind: "gather" (of weights) or "reduction" (of gradients).
        label: label of the collective, such as "unshard layers.0".
        relative_error: norm of the difference over the norm of the exact result; NaN if that is not finite.
    """

    step: int
    kind: QuantKind
    label: str
    relative_error: float


class QuantErrorMonitor:
    """Decides when a quantized collective also runs exactly, and records and logs the difference.

    In such a step the traffic of one exact unit is added. Results do not change: the engine continues with the
    quantized ones.

    Args:
        interval: steps between two comparisons.
        logs: True if this rank logs them.

    Attributes:
        seen: every comparison, in order.
    """

    def __init__(self, interval: int, *, logs: bool) -> None:
        self._interval = interval
        self._logs = logs
        self._last_steps: dict[QuantKind, int] = {}
        self.seen: list[QuantError] = []

    def is_due(self, kind: QuantKind, step: int) -> bool:
        """True for the first collective of its kind in a step whose number is a multiple of the interval."""
        if step < 0 or step % self._interval or self._last_steps.get(kind) == step:
            return False
        self._last_steps[kind] = step
        return True

    def compare(self, kind: QuantKind, step: int, label: str, quantized: Tensor, exact: Tensor) -> None:
        """Records the error between the two results of one collective."""
        reference = exact.float()
        error = float(torch.linalg.vector_norm(quantized.float() - reference) / torch.linalg.vector_norm(reference))
        self.seen.append(QuantError(step, kind, label, error))
        if self._logs:
            _monitor_logger.info('step %d: the quantized %s "%s" is off by %.3g %%', step, kind, label, 100 * error)


class MeasuredWork:
    """A quantized collective and the exact one for comparison.

    Args:
        compare: called once, when both are done.
    """

    def __init__(self, quantized: Work, exact: Work, compare: Callable[[], None]) -> None:
        self._quantized, self._exact = quantized, exact
        self._compare: Callable[[], None] | None = compare

    def wait(self) -> None:
        """See `Work`."""
        self._quantized.wait()
        self._exact.wait()
        if self._compare is not None:
            compare, self._compare = self._compare, None
            compare()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._quantized.is_completed() and self._exact.is_completed()
