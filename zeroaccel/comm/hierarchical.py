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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroaccel.comm.collective_tracker import DONE, Work
from zeroaccel.comm.collectives import Collectives, check_split
from zeroaccel.comm.quant_error import MeasuredWork, QuantErrorMonitor
from zeroaccel.comm.quantized import CODABLE, INT8, encode
from zeroaccel.comm.reductions import AcrossReplicas, InFourBits, Reduction
from zeroaccel.comm.serial_executor import SerialExecutor
from zeroaccel.comm.topology import RankGroup, Topology, connect
from zeroaccel.config.comm_plan import CommPlan
from zeroaccel.logs import log_once

__all__ = ["HierarchicalCollectives", "MeshLayout", "arrange", "nodes_of"]

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
        if plan.codes_gradients:
            refused = next(filter(None, (_refusal(cell, nodes, forced=plan.forced) for cell in data)), "")
            hops = None if refused else _hops(data, nodes)
        return cls(data, shards, replicas, _runs(shards, plan.second_size), hops, refused)


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
        codes_weights: gather weights to compute with as int8.
        watch_interval: steps between two comparisons with exact collectives; 0 is never.

    Attributes:
        arrangement: as given.
        watch: of those comparisons; None where there are none.
    """

    def __init__(
        self, topology: Topology, arrangement: MeshLayout, *, codes_weights: bool = False, watch_interval: int = 0
    ) -> None:
        super().__init__(topology, connect(topology, arrangement.data))
        self.arrangement = arrangement
        if len(arrangement.data) > 1:
            self.job = Collectives(topology)
            self.leads = topology.rank in arrangement.data[0]
        self.codes_weights = codes_weights
        shards, replicas = connect(topology, arrangement.shards), connect(topology, arrangement.replicas)
        second = connect(topology, arrangement.second)
        self.shard_rank, self.shard_world_size, self.replica = shards.place, shards.size, replicas.place
        self.second_rank, self.second_world_size = second.place, second.size
        self.watch = QuantErrorMonitor(watch_interval, logs=self.rank == 0) if watch_interval else None
        self._courier = SerialExecutor()
        self._reduction: Reduction | None = None
        if self.world_size == 1:
            return
        self._shard_gathers = self._exchanges(shards, shards.gather_group)
        self._second_gathers = self._exchanges(second, second.gather_group)
        if arrangement.hops is not None:
            inside, across = (connect(topology, cells) for cells in arrangement.hops)
            self._reduction = InFourBits(
                self._supervisor,
                self._exchanges(inside, inside.reduce_group),
                self._exchanges(across, across.reduce_group),
                _shard_numbers(arrangement, shards, inside),
            )
        elif replicas.size > 1:
            self._reduction = AcrossReplicas(
                self._supervisor,
                self._exchanges(shards, shards.reduce_group),
                self._exchanges(replicas, replicas.reduce_group),
            )

    def gather_weights(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        if not (self.codes_weights and shard.dtype in CODABLE):
            return self.all_gather(out, shard, label, split_sizes)
        assert not split_sizes, f"{label}: codes of parts that may differ in size"
        packed = shard.new_empty(INT8.nbytes(shard.numel()), dtype=torch.uint8)
        encode(shard, INT8, packed)
        coded = self.gather_packed(out, packed, label)
        step = self.journal.step
        if self.watch is None or not self.watch.due("gather", step):
            return coded
        watch, exact = self.watch, torch.empty_like(out)
        beside = self.all_gather(exact, shard, f"{label}, exact")
        return MeasuredWork(coded, beside, lambda: watch.compare("gather", step, label, out, exact))

    def gather_second(self, out: Tensor, second: Tensor, label: str) -> Work:
        assert out.numel() == self.second_world_size * second.numel(), (
            f"{label}: a gather of {self.second_world_size} x {second.numel()} into {out.numel()}"
        )
        if self.second_world_size == 1:
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
        op = "reduce_scatter int4" if isinstance(reduction, InFourBits) else "reduce_scatter across replicas"
        entry = self._supervisor.issue("reduce", op, label, flat)
        work = self._courier.send(lambda: reduction(entry, out, flat, scale, split_sizes), flat.device)
        step = self.journal.step
        codes = isinstance(reduction, InFourBits)
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
    """shard_of[l][n] of `InFourBits`: for each rank of this one's cell, the shards of its peers across."""
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
        topology, arrangement, codes_weights=plan.codes_weights, watch_interval=plan.watch_interval
    )
    made.nodes = nodes_of(topology, plan)
    return collectives.over(made)
