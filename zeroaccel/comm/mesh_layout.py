"""Which ranks shard, replicate and share a machine: partitions of the job into groups. Makes no process groups.

`MeshLayout` lays a `CommPlan` of the config over the machines that `topology.py` knows; `data_groups` and
`shard_size_of` read a `DeviceMesh` that the user passed to `initialize`. `hierarchical.py` makes the collectives.

A DeviceMesh of one axis names the data-parallel ranks of each rank: with `mesh["dp"]` of a mesh that has another axis,
ZeRO works on this one and leaves the other to the library that splits the model on it (tensor parallelism). A mesh of
two axes is (replicate, shard), as for torch's `fully_shard`. `AxisGroups` are those of a `ParallelConfig`, which names
all axes.

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
from zeroaccel.config import Config
from zeroaccel.config.comm_plan import CommPlan
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Groups = tuple[tuple[int, ...], ...]
"""Groups of global ranks, every rank of the job in exactly one."""


@dataclass(frozen=True)
class MeshLayout:
    """The groups of one plan; see the module. A rank is in one group of each kind.

    Attributes:
        data_groups, shard_groups, replicate_groups, secondary_groups: see the module.
        hops: (node groups, peer groups) of int4 reductions; None for exact ones.
        exact_reason: why reductions are exact although the plan asks for int4; "" if they are not.
    """

    data_groups: Groups
    shard_groups: Groups
    replicate_groups: Groups
    secondary_groups: Groups
    hops: tuple[Groups, Groups] | None
    exact_reason: str = ""

    @classmethod
    def of(cls, plan: CommPlan, data: Groups, nodes: Sequence[Sequence[int]]) -> MeshLayout:
        """Lays a plan over the ranks.

        Args:
            data: data groups of one size, which the plan's sizes divide.
            nodes: the ranks on each machine.

        Example:
            >>> plan = CommPlan(world_size=4, shard_size=2, secondary_size=2)
            >>> layout = MeshLayout.of(plan, data=((0, 1, 2, 3),), nodes=((0, 1), (2, 3)))
            >>> layout.shard_groups, layout.replicate_groups
            (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        """
        # Consecutive ranks share a machine where launchers number them so: the frequent collectives of a shard group
        # stay on the fast links, and only the one reduction over the replicas crosses machines.
        shard_groups = consecutive(data, plan.shard_size)
        replicate_groups = tuple(ranks[place :: plan.shard_size] for ranks in data for place in range(plan.shard_size))
        secondary_groups = consecutive(shard_groups, plan.secondary_size)
        if not plan.quantized_gradients:
            return cls(data, shard_groups, replicate_groups, secondary_groups, None)
        reasons = [] if plan.forced else [reason for ranks in data if (reason := _exact_reason(ranks, nodes))]
        if reasons:
            return cls(data, shard_groups, replicate_groups, secondary_groups, None, reasons[0])
        return cls(data, shard_groups, replicate_groups, secondary_groups, _hops(data, nodes))


@dataclass(frozen=True)
class AxisGroups:
    """The groups of a `ParallelConfig`: pp x dp_replicate x dp_shard x sp x tp over all ranks, the last axis innermost.

    Attributes:
        stages: the ranks of each stage of a pipeline.
        data: the ranks of a stage with the same parts of its layers: they differ in dp_replicate, dp_shard and sp.
        sequences: the ranks of a data group that share a sequence.
        layers: the ranks that share layers.

    Example:
        >>> groups = AxisGroups.of(ParallelConfig(pp=2, dp_shard=2, tp=2))
        >>> groups.stages, groups.layers
        (((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1), (2, 3), (4, 5), (6, 7)))
        >>> groups.data
        ((0, 2), (1, 3), (4, 6), (5, 7))
    """

    stages: Groups
    data: Groups
    sequences: Groups
    layers: Groups

    @classmethod
    def of(cls, mesh: ParallelConfig) -> AxisGroups:
        """Those of a resolved mesh."""
        # Neighbours share layers, since they exchange the most, and stages are farthest apart: they send the least.
        ranks = (tuple(range(mesh.pp * mesh.data_parallel_size * mesh.sp * mesh.tp)),)
        stages = consecutive(ranks, len(ranks[0]) // mesh.pp)
        blocks = consecutive(ranks, mesh.sp * mesh.tp)
        return cls(
            stages=stages,
            data=tuple(stage[place :: mesh.tp] for stage in stages for place in range(mesh.tp)),
            sequences=tuple(block[place :: mesh.tp] for block in blocks for place in range(mesh.tp)),
            layers=consecutive(ranks, mesh.tp),
        )


def consecutive(groups: Groups, size: int) -> Groups:
    """Each group cut into groups of `size` consecutive ranks."""
    return tuple(ranks[start : start + size] for ranks in groups for start in range(0, len(ranks), size))


def _node_groups(group: tuple[int, ...], nodes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The ranks of a group on each machine that has any."""
    per_node = [tuple(rank for rank in group if rank in node) for node in map(set, nodes)]
    return [ranks for ranks in per_node if ranks]


def _exact_reason(group: tuple[int, ...], nodes: Sequence[Sequence[int]]) -> str:
    """Why two hops over these machines are pointless or impossible; "" if they are neither."""
    sizes = [len(ranks) for ranks in _node_groups(group, nodes)]
    if len(sizes) == 1:
        return "all ranks are on one node, where 4 bits save nothing across nodes"
    if len(set(sizes)) > 1:
        return f"the nodes have different numbers of ranks ({', '.join(map(str, sizes))}), so they have no peers"
    return ""


def _hops(data: Groups, nodes: Sequence[Sequence[int]]) -> tuple[Groups, Groups]:
    """(node groups, peer groups): the i-th ranks of all nodes are peers."""
    node_groups: list[tuple[int, ...]] = []
    peer_groups: list[tuple[int, ...]] = []
    for group in data:
        ranks_per_node = _node_groups(group, nodes)
        if len({len(ranks) for ranks in ranks_per_node}) > 1:
            # The config forces int4 where nodes differ in size, so that there are no peers: one hop, all-to-all.
            ranks_per_node = [(rank,) for rank in group]
        node_groups += ranks_per_node
        peer_groups += zip(*ranks_per_node, strict=True)
    return tuple(node_groups), tuple(peer_groups)


# --- a DeviceMesh of the user


def data_groups(mesh: DeviceMesh, job: Collectives) -> Groups:
    """The data groups of the job, by the mesh of each rank. (all ranks)

    Raises:
        UsageError: on every rank: the mesh does not have each rank in one group, all of one size.
    """
    own = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    # A rank knows the sub-mesh that it is in, not those of the others.
    per_rank: list[tuple[int, ...]] = job.gather_objects(own, "initialize: mesh")
    groups = tuple(dict.fromkeys(per_rank))
    ranks = sorted(rank for group in groups for rank in group)
    is_partition = ranks == list(range(job.world_size)) and len({len(group) for group in groups}) == 1
    if mesh.ndim > 2 or not is_partition or any(rank not in group for rank, group in enumerate(per_rank)):
        raise UsageError(
            "initialize(mesh)",
            expected=f"one or two axes that have each of the {job.world_size} ranks in one group, all of one size",
            got=f"{mesh.ndim} axes with ranks {', '.join(str(list(group)) for group in groups)}",
            fix='pass the data-parallel axis of a mesh of all ranks, such as mesh["dp"]',
        )
    return groups


def shard_size_of(mesh: DeviceMesh, settings: Config) -> int | None:
    """Ranks of a shard group, by a mesh of (replicate, shard); None where it has one axis.

    Raises:
        ConfigError: `mics_shard_size` says otherwise.
    """
    if mesh.ndim == 1:
        return None
    size = int(mesh.size(1))
    check_shard_size(size, settings, "the size of the mesh's second axis", "pass a mesh of one axis")
    return size


def check_shard_size(size: int, settings: Config, source: str, alternative: str) -> None:
    """Refuses a config with shard groups of another size.

    Args:
        source: where `size` is from.
        alternative: what to do instead of removing the key.

    Raises:
        ConfigError: `mics_shard_size` says otherwise.
    """
    configured = settings.zero_optimization.mics_shard_size
    if configured not in (-1, size):
        raise ConfigError(
            settings.where("zero_optimization.mics_shard_size"),
            expected=f"{size}, {source}",
            got=configured,
            fix=f"remove the key, or {alternative}",
        )
