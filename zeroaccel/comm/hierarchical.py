"""Collectives for which ranks are not all alike: replicas, nodes, second copies, and codes on the way.

The engine is the same over these as over `Collectives`: it gathers, reduces and asks for its place among the shards.
Which ranks belong together is a `CommPlan` of the config, laid over the machines that `topology.py` knows; the
reductions are in `reductions.py`. `arrange` makes the collectives of a plan, and the plain ones where it asks for
nothing.

```text
data     all ranks that see different samples: samples, agreement, norms
shards   consecutive ranks that hold one model among them         replicas   those with the same place in their shards
second   consecutive ranks of these, with a second copy           inside, across   one node, and its peers elsewhere
```
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from zeroaccel.comm.collective_tracker import DONE, CollectiveTracker, Work
from zeroaccel.comm.collectives import Collectives, check_split
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord
from zeroaccel.comm.quantized import INT4, INT8, QUANTIZABLE, dequantize_add, quantize
from zeroaccel.comm.topology import RankGroup, Topology, connect
from zeroaccel.comm.transport import BufferPool, NativeTransport, P2PTransport, Transports
from zeroaccel.config.comm_plan import CommPlan
from zeroaccel.logs import log_once, logger

__all__ = [
    "ExecutorJob",
    "HierarchicalCollectives",
    "Int4Reduction",
    "MeasuredWork",
    "MeshLayout",
    "QuantError",
    "QuantErrorMonitor",
    "Reduction",
    "ReplicatedReduction",
    "SerialExecutor",
    "arrange",
    "nodes_of",
]

Cell = tuple[int, ...]
Cells = tuple[Cell, ...]


@dataclass(frozen=True)
class MeshLayout:
    """Which ranks belong together, in cells of their numbers in the job; a rank is in one cell of each kind.

    Attributes:
        data, shards, replicas, second: see the module.
        hops: (inside, across) of reductions in 4 bits; None for exact ones.
        refused: why they are exact although they were asked not to be.
    """

    data: Cells
    shards: Cells
    replicas: Cells
    second: Cells
    hops: tuple[Cells, Cells] | None
    refused: str = ""

    @classmethod
    def of(cls, plan: CommPlan, data: Cells, nodes: Cells) -> MeshLayout:
        """Lays a plan over the ranks.

        Args:
            data: cells of one size, which the plan's sizes divide.
            nodes: the ranks on each machine.
        """
        shards = _runs(data, plan.shard_size)
        replicas = tuple(cell[place :: plan.shard_size] for cell in data for place in range(plan.shard_size))
        hops, refused = None, ""
        if plan.quantized_gradients:
            refused = next(filter(None, (_refusal(cell, nodes, forced=plan.forced) for cell in data)), "")
            hops = None if refused else _hops(data, nodes)
        return cls(data, shards, replicas, _runs(shards, plan.secondary_size), hops, refused)


def nodes_of(topology: Topology, plan: CommPlan) -> Cells:
    """The ranks on each machine, or on what the plan says to take for one."""
    if plan.node_size is None:
        return topology.nodes
    return _runs((topology.everyone.ranks,), plan.node_size)


def _runs(cells: Cells, size: int) -> Cells:
    return tuple(cell[start : start + size] for cell in cells for start in range(0, len(cell), size))


def _within(cell: Cell, nodes: Cells) -> list[Cell]:
    """The ranks of a cell on each machine that has any."""
    found = [tuple(rank for rank in cell if rank in node) for node in map(set, nodes)]
    return [ranks for ranks in found if ranks]


def _refusal(cell: Cell, nodes: Cells, *, forced: bool) -> str:
    """Why two hops over these machines are pointless or impossible; "" if they are neither."""
    sizes = [len(ranks) for ranks in _within(cell, nodes)]
    if forced:
        return ""
    if len(sizes) == 1:
        return "all ranks are on one node, where 4 bits save nothing across nodes"
    if len(set(sizes)) > 1:
        return f"the nodes have different numbers of ranks ({', '.join(map(str, sizes))}), so they have no peers"
    return ""


def _hops(data: Cells, nodes: Cells) -> tuple[Cells, Cells]:
    inside: list[Cell] = []
    across: list[Cell] = []
    for cell in data:
        found = _within(cell, nodes)
        if len({len(ranks) for ranks in found}) > 1:
            found = [(rank,) for rank in cell]  # forced, and without peers: one hop from everybody to everybody
        inside += found
        across += zip(*found, strict=True)
    return tuple(inside), tuple(across)


class HierarchicalCollectives(Collectives):
    """The collectives of one arrangement. (all ranks make it, with the same arguments)

    Args:
        quantized_weights: gather weights to compute with as int8.
        watch_interval: steps between two comparisons with exact collectives; 0 is never.

    Attributes:
        arrangement: as given.
        watch: of those comparisons; None where there are none.
    """

    def __init__(
        self, topology: Topology, arrangement: MeshLayout, *, quantized_weights: bool = False, watch_interval: int = 0
    ) -> None:
        super().__init__(topology, connect(topology, arrangement.data))
        self.arrangement = arrangement
        if len(arrangement.data) > 1:
            self.job = Collectives(topology)
            self.is_first_data_group = topology.rank in arrangement.data[0]
        self.quantized_weights = quantized_weights
        shards, replicas = connect(topology, arrangement.shards), connect(topology, arrangement.replicas)
        second = connect(topology, arrangement.second)
        self.shard_rank, self.shard_world_size, self.replica = shards.place, shards.size, replicas.place
        self.secondary_rank, self.secondary_world_size = second.place, second.size
        self.watch = QuantErrorMonitor(watch_interval, logs=self.rank == 0) if watch_interval else None
        self._executor = SerialExecutor()
        self._reduction: Reduction | None = None
        if self.world_size == 1:
            return
        self._shard_gathers = self._transports(shards, shards.gather_group)
        self._second_gathers = self._transports(second, second.gather_group)
        if arrangement.hops is not None:
            inside, across = (connect(topology, cells) for cells in arrangement.hops)
            self._reduction = Int4Reduction(
                self._tracker,
                self._transports(inside, inside.reduce_group),
                self._transports(across, across.reduce_group),
                _shard_numbers(arrangement, shards, inside),
            )
        elif replicas.size > 1:
            self._reduction = ReplicatedReduction(
                self._tracker,
                self._transports(shards, shards.reduce_group),
                self._transports(replicas, replicas.reduce_group),
            )

    def gather_weights(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        if not (self.quantized_weights and shard.dtype in QUANTIZABLE):
            return self.all_gather(out, shard, label, split_sizes)
        assert not split_sizes, f"{label}: codes of parts that may differ in size"
        packed = shard.new_empty(INT8.nbytes(shard.numel()), dtype=torch.uint8)
        quantize(shard, INT8, packed)
        coded = self.gather_quantized(out, packed, label)
        step = self.flight_recorder.step
        if self.watch is None or not self.watch.due("gather", step):
            return coded
        watch, exact = self.watch, torch.empty_like(out)
        beside = self.all_gather(exact, shard, f"{label}, exact")
        return MeasuredWork(coded, beside, lambda: watch.compare("gather", step, label, out, exact))

    def gather_secondary(self, out: Tensor, second: Tensor, label: str) -> Work:
        assert out.numel() == self.secondary_world_size * second.numel(), (
            f"{label}: a gather of {self.secondary_world_size} x {second.numel()} into {out.numel()}"
        )
        if self.secondary_world_size == 1:
            out.copy_(second)
            return DONE
        return self._gather(self._second_gathers, out, second, (), "all_gather second", label)

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        reduction = self._reduction
        if reduction is None or flat.numel() == 0:
            return super().reduce_scatter(out, flat, label, scale, split_sizes)
        check_split(flat, out, split_sizes, self.shard_rank, self.shard_world_size, f"{label}: a reduction")
        op = "reduce_scatter int4" if isinstance(reduction, Int4Reduction) else "reduce_scatter across replicas"
        entry = self._tracker.issue("reduce", op, label, flat)
        work = self._executor.send(lambda: reduction(entry, out, flat, scale, split_sizes), flat.device)
        step = self.flight_recorder.step
        codes = isinstance(reduction, Int4Reduction)
        if not codes or self.watch is None or not self.watch.due("reduction", step):
            return work
        watch, exact = self.watch, torch.empty_like(out)
        beside = super().reduce_scatter(exact, flat, f"{label}, exact", scale)
        return MeasuredWork(work, beside, lambda: watch.compare("reduction", step, label, out, exact))

    def reduction_nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        if self._reduction is None:
            return super().reduction_nbytes(numel, shard_numel, dtype)
        return self._reduction.nbytes(numel, shard_numel, dtype)


def _shard_numbers(arrangement: MeshLayout, shards: RankGroup, inside: RankGroup) -> list[list[int]]:
    """shard_of[l][n] of `Int4Reduction`: for each rank of this one's cell, the shards of its peers across."""
    assert arrangement.hops is not None, "asked for the hops of an exact reduction"
    peers = {rank: cell for cell in arrangement.hops[1] for rank in cell}
    return [[shards.ranks.index(peer) for peer in peers[rank]] for rank in inside.ranks]


def arrange(collectives: Collectives, plan: CommPlan, data: Cells | None = None) -> Collectives:
    """The collectives of a plan; `collectives` themselves where it asks for nothing.

    Args:
        data: the ranks that see different samples, for each rank of the job; by default all of them.
    """
    topology = collectives.topology
    if plan.plain and data is None:
        return collectives
    cells = data or (topology.everyone.ranks,)
    arrangement = MeshLayout.of(plan, cells, nodes_of(topology, plan))
    if arrangement.refused and topology.rank == 0:
        key = "zero_optimization.zero_quantized_gradients"
        log_once(logging.WARNING, f"{key}: gradients travel as they are: {arrangement.refused}")
    made = HierarchicalCollectives(
        topology, arrangement, quantized_weights=plan.quantized_weights, watch_interval=plan.watch_interval
    )
    made.nodes = nodes_of(topology, plan)
    return collectives.over(made)


class Reduction(Protocol):
    """How gradients are summed."""

    def __call__(
        self, entry: CollectiveRecord, out: Tensor, flat: Tensor, scale: float, split_sizes: Sequence[int]
    ) -> None:
        """out: (S,) = round(scale * this rank's shard of the sum over all ranks of `flat`). Blocks."""

    def nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        """What this rank sends, of `numel` elements of which it keeps `shard_numel`."""


class ReplicatedReduction:
    """Reduce-scatter inside a shard group, sum across its replicas. See [Note: order across replicas].

    Args:
        inside: over the L ranks that hold different shards.
        across: over the R ranks that hold the same one, in the order of the replicas.
    """

    def __init__(self, tracker: CollectiveTracker, inside: Transports, across: Transports) -> None:
        self._tracker = tracker
        self._inside, self._across = inside, across
        self._buffer_pool = BufferPool()

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
            self._tracker.move(entry, inside.reduce_scatter, average, flat, split_sizes)
            if average.numel():
                self._tracker.move(entry, across.average, average)
            out.copy_(average.float().mul_(scale * inside.world_size * across.world_size))
        self._tracker.finish(entry)

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
        parts = self._buffer_pool.acquire(inside.world_size * out.numel(), flat.dtype)
        self._tracker.move(entry, inside.reduce_scatter, parts, flat, split_sizes)
        if not out.numel():  # the replicas of this rank have no part of it either
            self._buffer_pool.release(parts)
            return
        total = self._buffer_pool.acquire(out.numel(), torch.float32)
        own, last = across.rank, across.world_size - 1
        before, after = (own - 1) % (last + 1), (own + 1) % (last + 1)
        rows = list(parts.view(-1, out.numel()))
        if own:
            self._tracker.follow(entry, [across.receive(total, before, entry.tag)])
        else:
            total.copy_(rows.pop(0))
        for row in rows:
            total.add_(row)
        if own == last:
            out.copy_(total.mul_(scale))
        else:
            self._tracker.follow(entry, [across.send(total, after, entry.tag)])
            self._tracker.follow(entry, [across.receive(out, before, entry.tag)])
        if after != last:
            self._tracker.follow(entry, [across.send(out, after, entry.tag)])
        self._buffer_pool.release(parts)
        self._buffer_pool.release(total)

    def nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        across = self._across["cpu"]
        own, last = across.rank, across.world_size - 1
        running = 4 * shard_numel if own != last else 0
        result = dtype.itemsize * shard_numel if (own + 1) % (last + 1) != last else 0
        return (numel - shard_numel) * dtype.itemsize + running + result


class Int4Reduction:
    """The two hops in 4 bits. See [Note: two hops in 4 bits].

    Args:
        inside: over the L ranks of this rank's cell.
        across: over the R ranks with this rank's place in their cells.
        shard_of: shard_of[l][n] is the number of the shard of rank (n, l).
    """

    def __init__(
        self, tracker: CollectiveTracker, inside: Transports, across: Transports, shard_of: Sequence[Sequence[int]]
    ) -> None:
        self._tracker = tracker
        self._inside, self._across = inside, across
        self._shard_of = shard_of
        self._buffer_pool = BufferPool(kept=4)

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
        self._tracker.finish(entry)

    def nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        code, inside, across = INT4.nbytes(shard_numel), self._inside["cpu"], self._across["cpu"]
        return code * ((inside.world_size - 1) * across.world_size + across.world_size - 1)

    def _hop(
        self,
        entry: CollectiveRecord,
        transport: P2PTransport | NativeTransport,
        rows: Sequence[Sequence[Tensor]],
        totals: Sequence[Tensor],
    ) -> None:
        """totals[i] = the sum over peers p of their rows[own place][i], those of others by way of a code."""
        own, runs, numel = transport.rank, len(totals), totals[0].numel()
        width = INT4.nbytes(numel)
        shape = (transport.world_size, runs, width)
        codes, theirs = (
            self._take(transport.world_size * runs * width, torch.uint8, totals[0]).view(shape) for _ in "ab"
        )
        for peer, values in enumerate(rows):
            if peer != own:
                for code, row in zip(codes[peer], values, strict=True):
                    quantize(row, INT4, code)
        if transport.world_size > 1:
            self._tracker.move(
                entry, transport.all_to_all, theirs.view(transport.world_size, -1), codes.view(transport.world_size, -1)
            )
        for index, total in enumerate(totals):
            total.zero_()
            for peer in range(transport.world_size):
                if peer == own:
                    total.add_(rows[own][index])
                else:
                    dequantize_add(theirs[peer, index], INT4, total)
        self._give_back(codes, theirs)

    def _take(self, numel: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        if like.device.type == "cpu":
            return self._buffer_pool.acquire(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=like.device)

    def _give_back(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self._buffer_pool.release(tensor)


class ExecutorJob:
    """A job that is under way; a `Work`."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Blocks until the job is done, and raises what it raised; on CUDA, makes the current stream wait for it."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._done.is_set() and (self._event is None or self._event.query())

    def run(self) -> None:
        """Does the job. For the courier."""
        assert self._job is not None, "a job is done once"
        job, self._job = self._job, None  # it holds tensors
        try:
            job()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def run_on(self, stream: torch.cuda.Stream) -> None:
        """Queues the job on a stream, behind what the current one has been given. For the courier."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
            self._event = torch.cuda.Event()
            self._event.record()


class SerialExecutor:
    """Does jobs in order. Its thread lives as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[ExecutorJob] = deque()
        self._running = False
        self._stream: torch.cuda.Stream | None = None

    def send(self, job: Callable[[], None], device: torch.device) -> ExecutorJob:
        """Takes a job that works on tensors of `device`, which must stay as they are until it is done."""
        delivery = ExecutorJob(job)
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            delivery.run_on(self._stream)
            return delivery
        with self._lock:
            self._waiting.append(delivery)
            if not self._running:
                self._running = True
                threading.Thread(target=self._work, name="zeroaccel-courier", daemon=True).start()
        return delivery

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                delivery = self._waiting.popleft()
            delivery.run()


Kind = Literal["gather", "reduction"]

_lines = logger.getChild("watch")
_lines.setLevel(logging.INFO)  # somebody asked for them


@dataclass(frozen=True)
class QuantError:
    """What one comparison showed on this rank.

    Attributes:
        step: of the engine.
        kind: of weights, or of gradients.
        label: of the collective: "unshard layers.0".
        relative_error: norm of the difference over the norm of the exact result; NaN where that is not finite.
    """

    step: int
    kind: Kind
    label: str
    relative_error: float


class QuantErrorMonitor:
    """When to look, and what was seen.

    Args:
        interval: steps between two looks.
        logs: whether this rank tells what it finds.

    Attributes:
        seen: every comparison, in order.
    """

    def __init__(self, interval: int, *, logs: bool) -> None:
        self._interval = interval
        self._logs = logs
        self._looked: dict[Kind, int] = {}
        self.seen: list[QuantError] = []

    def due(self, kind: Kind, step: int) -> bool:
        """Whether to look at this one: the first of its kind in a step whose number the interval divides."""
        if step < 0 or step % self._interval or self._looked.get(kind) == step:
            return False
        self._looked[kind] = step
        return True

    def compare(self, kind: Kind, step: int, label: str, coded: Tensor, exact: Tensor) -> None:
        """Takes note of two results of one collective."""
        reference = exact.float()
        error = float(torch.linalg.vector_norm(coded.float() - reference) / torch.linalg.vector_norm(reference))
        self.seen.append(QuantError(step, kind, label, error))
        if self._logs:
            _lines.info('step %d: the quantised %s "%s" is off by %.3g %%', step, kind, label, 100 * error)


class MeasuredWork:
    """A coded collective and the exact one beside it.

    Args:
        compare: called once, when both are done.
    """

    def __init__(self, coded: Work, exact: Work, compare: Callable[[], None]) -> None:
        self._coded, self._exact = coded, exact
        self._compare: Callable[[], None] | None = compare

    def wait(self) -> None:
        """See `Work`."""
        self._coded.wait()
        self._exact.wait()
        if self._compare is not None:
            compare, self._compare = self._compare, None
            compare()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._coded.is_completed() and self._exact.is_completed()
