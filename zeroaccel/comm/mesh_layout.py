"""Partitions of the job into groups: ranks that shard, replicate or share a machine. Makes no process groups.

`MeshLayout` maps a `CommPlan` of the config to the machines that `topology.py` found; `data_groups` and `shard_size_of`
read a `DeviceMesh` that the user passed to `initialize`. `hierarchical.py` makes the collectives.

A DeviceMesh with one axis names the data-parallel ranks of each rank: with `mesh["dp"]` of a larger mesh, ZeRO works on
that axis and leaves the other axis to the library that splits the model on it (tensor parallelism). A mesh with two
axes is (replicate, shard), as for torch's `fully_shard`. A `ParallelConfig` defines its groups itself.

```text
data group       ranks that see different samples: batches, agreement, norms        all ranks, or one axis of a mesh
shard group      consecutive ranks of a data group that hold one model among them   MiCS, HSDP: 2nd axis of the mesh
replicate group  the ranks with the same shard, one of each shard group             HSDP: 1st axis of the mesh
secondary group  consecutive ranks of a shard group with a secondary partition      ZeRO++ hpZ
node group       the ranks of a data group on one machine                           first hop of ZeRO++ qgZ
peer group       one rank of each node group                                        second hop of ZeRO++ qgZ
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroaccel.comm.collectives import Collectives
from zeroaccel.config.comm_plan import CommPlan
from zeroaccel.config.parallel import RankGroups
from zeroaccel.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MeshLayout:
    """The groups of one plan; see the module. A rank is in one group of each kind.

    Attributes:
        data_groups, shard_groups, replicate_groups, secondary_groups: see the module.
        hops: (node groups, peer groups) of int4 reductions; None for exact reductions.
        exact_reason: reason for exact reductions although the plan requests int4; "" if they are int4 or not requested.
    """

    data_groups: RankGroups
    shard_groups: RankGroups
    replicate_groups: RankGroups
    secondary_groups: RankGroups
    hops: tuple[RankGroups, RankGroups] | None
    exact_reason: str = ""

    @classmethod
    def of(cls, plan: CommPlan, data: RankGroups, nodes: Sequence[Sequence[int]]) -> MeshLayout:
        """Maps a plan to the ranks.

        Args:
            data: data groups of one size, which the plan's sizes divide.
            nodes: the ranks on each machine.

        Example:
            >>> plan = CommPlan(world_size=4, shard_size=2, secondary_size=2)
            >>> layout = MeshLayout.of(plan, data=((0, 1, 2, 3),), nodes=((0, 1), (2, 3)))
            >>> layout.shard_groups, layout.replicate_groups
            (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        """
        # Launchers usually number ranks so that consecutive ranks share a machine: the frequent collectives of a shard
        # group then stay on the fast links, and only the one reduction over the replicas crosses machines.
        shard_groups = consecutive(data, plan.shard_size)
        replicate_groups = tuple(ranks[place :: plan.shard_size] for ranks in data for place in range(plan.shard_size))
        secondary_groups = consecutive(shard_groups, plan.secondary_size)
        if not plan.quantized_gradients:
            return cls(data, shard_groups, replicate_groups, secondary_groups, None)
        reasons = [] if plan.forced else [reason for ranks in data if (reason := _exact_reason(ranks, nodes))]
        if reasons:
            return cls(data, shard_groups, replicate_groups, secondary_groups, None, reasons[0])
        return cls(data, shard_groups, replicate_groups, secondary_groups, _hops(data, nodes))


def consecutive(groups: RankGroups, size: int) -> RankGroups:
    """Cuts each group into groups of `size` consecutive ranks."""
    return tuple(ranks[start : start + size] for ranks in groups for start in range(0, len(ranks), size))


def _node_groups(group: tuple[int, ...], nodes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Returns the group's ranks on each machine that has any."""
    per_node = [tuple(rank for rank in group if rank in node) for node in map(set, nodes)]
    return [ranks for ranks in per_node if ranks]


def _exact_reason(group: tuple[int, ...], nodes: Sequence[Sequence[int]]) -> str:
    """Returns the reason why two hops over these machines are useless or impossible; else ""."""
    sizes = [len(ranks) for ranks in _node_groups(group, nodes)]
    if len(sizes) == 1:
        return "all ranks are on one node, so 4 bits save no traffic across nodes"
    if len(set(sizes)) > 1:
        return f"the nodes have different numbers of ranks ({', '.join(map(str, sizes))}), so ranks have no peers"
    return ""


def _hops(data: RankGroups, nodes: Sequence[Sequence[int]]) -> tuple[RankGroups, RankGroups]:
    """Returns (node groups, peer groups): the i-th ranks of all nodes are peers."""
    node_groups: list[tuple[int, ...]] = []
    peer_groups: list[tuple[int, ...]] = []
    for group in data:
        ranks_per_node = _node_groups(group, nodes)
        if len({len(ranks) for ranks in ranks_per_node}) > 1:
            # The config forces int4 on nodes that differ in size, so there are no peers: one hop, all-to-all.
            ranks_per_node = [(rank,) for rank in group]
        node_groups += ranks_per_node
        peer_groups += zip(*ranks_per_node, strict=True)
    return tuple(node_groups), tuple(peer_groups)


# --- the user's DeviceMesh


def data_groups(mesh: DeviceMesh, job: Collectives) -> RankGroups:
    """Returns the data groups of the job from the meshes of all ranks. (all ranks)

    Raises:
        UsageError: on every rank, if the meshes do not put each rank in one group, all of one size.
    """
    members = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    # A rank knows only its own sub-mesh.
    per_rank: list[tuple[int, ...]] = job.gather_objects(members, "initialize: mesh")
    groups = tuple(dict.fromkeys(per_rank))
    ranks = sorted(rank for group in groups for rank in group)
    is_partition = ranks == list(range(job.world_size)) and len({len(group) for group in groups}) == 1
    if mesh.ndim > 2 or not is_partition or any(rank not in group for rank, group in enumerate(per_rank)):
        raise UsageError(
            "initialize(mesh)",
            expected=f"one or two axes that put each of the {job.world_size} ranks in one group, all of one size",
            got=f"{mesh.ndim} axes with ranks {', '.join(str(list(group)) for group in groups)}",
            fix='pass the data-parallel axis of a mesh over all ranks, such as mesh["dp"]',
        )
    return groups


def shard_size_of(mesh: DeviceMesh) -> int | None:
    """Returns the size of a shard group in a (replicate, shard) mesh; None if the mesh has one axis."""
    return None if mesh.ndim == 1 else int(mesh.size(1))
