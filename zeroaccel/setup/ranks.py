"""`join_ranks`: connects the processes of a training, divides the cores, and sets up the axes of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.environment import core_set, fair_threads, omp_threads_chosen, usable_cores
from zeroaccel.comm.mesh_layout import data_groups, shard_size_of
from zeroaccel.comm.topology import Topology, init_process_group
from zeroaccel.config import Config, Fact
from zeroaccel.config.parallel import ParallelConfig, RankGroups, ShardSize, with_config_axes
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.ops.dispatch import use_threads
from zeroaccel.setup.axis import Axis
from zeroaccel.setup.job import JobSpec
from zeroaccel.zero.tensor_subclasses import is_wrapper


@dataclass(frozen=True)
class JobRanks:
    """The processes of a job, and how they divide the work.

    Attributes:
        collectives: collectives over all ranks.
        mesh: the resolved mesh; with a DeviceMesh of the caller's, one axis of all ranks.
        axes: the axes with several ranks, except those over which ZeRO shards and replicates.
        world_size: number of ranks that average gradients.
        samplers: number of ranks that see different samples, with its source.
        sampler: index of this rank among them.
        data_groups: groups of ranks that average gradients; None if all ranks form one.
        peer_groups: groups of ranks that issue the same collectives; None if all ranks form one.
        shard_size: size of a shard group if an argument sets it; None if the config decides.
    """

    topology: Topology
    collectives: Collectives
    mesh: ParallelConfig
    axes: tuple[Axis, ...]
    world_size: int
    samplers: Fact[int]
    sampler: int
    data_groups: RankGroups | None = None
    peer_groups: RankGroups | None = None
    shard_size: ShardSize | None = None

    @property
    def part(self) -> int:
        """Index of this rank's part of the model: ranks with the same part have the same parameters."""
        if self.peer_groups is None:
            return 0
        return next(index for index, ranks in enumerate(self.peer_groups) if self.topology.rank in ranks)

    def divide(self, job: JobSpec) -> tuple[Any, Any]:
        """Lets each axis reduce the model to this rank's part; returns the optimizer and the remaining params.

        Raises:
            UsageError: an axis divides the model, which has a weight of several tensors.
        """
        optimizer, params = job.optimizer, job.params
        for index, axis in enumerate(self.axes):
            wrapped = next((fqn for fqn, param in job.model.named_parameters() if is_wrapper(param)), None)
            if wrapped is not None and axis.divides_parameters:
                raise UsageError(
                    f"parameter {wrapped}",
                    expected=f"a weight that is a single tensor, because {axis.name} divides the model",
                    got="a quantized weight that consists of several tensors",
                    fix=f"leave {axis.name} at 1, or quantize the base with bitsandbytes",
                )
            axis.divide(job.model, self.axes[:index])
            optimizer, params = axis.own_params(optimizer, params)
        return optimizer, params

    def shard_size_of(self, config: Config) -> int | None:
        """Returns the size of a shard group if an argument sets it; the config must not contradict it."""
        if self.shard_size is None:
            return None
        size, configured = self.shard_size.size, config.zero_optimization.mics_shard_size
        if configured not in (-1, size):
            raise ConfigError(
                config.where("zero_optimization.mics_shard_size"),
                expected=f"{size}, {self.shard_size.source}",
                got=configured,
                fix=f"remove the key, or {self.shard_size.alternative}",
            )
        return size


def join_ranks(job: JobSpec, axes: Sequence[type[Axis]], launched: Callable[[], ParallelConfig | None]) -> JobRanks:
    """Connects the ranks of a job. (all ranks)

    Args:
        axes: the table of axes.
        launched: returns the mesh that the launcher requests, for a caller that names none.

    Raises:
        UsageError: on every rank, if the sizes of the mesh do not fit the job, or differ between ranks.
    """
    topology = init_process_group()
    collectives = job.collectives or Collectives(topology)
    _divide_cores(topology, collectives)
    with agreed(collectives, "initialize: parallel"):
        # The sizes of the axes determine how many ranks see different samples, which the config needs to resolve.
        asked = None if job.parallel is None else ParallelConfig.of(job.parallel, "initialize(parallel)")
        if job.mesh is None and asked is None:
            asked = launched()
        asked = with_config_axes(job.config_tree, asked)
        if job.mesh is not None and asked is not None:
            raise UsageError("initialize", expected="a mesh or a ParallelConfig", got="both", fix="leave one out")
        mesh = (asked or ParallelConfig()).resolve(collectives.world_size)
    samplers, sampler = Fact(mesh.data_parallel_size, "the process group"), mesh.data_parallel_rank(topology.rank)
    data, peers, shards = _or_none(mesh.data_groups), _or_none(mesh.peer_groups), None
    if job.mesh is not None:
        data = data_groups(job.mesh, collectives)
        group = next(ranks for ranks in data if topology.rank in ranks)
        samplers, sampler = Fact(len(group), "initialize(mesh)"), group.index(topology.rank)
        if (size := shard_size_of(job.mesh)) is not None:
            shards = ShardSize(size, "the size of the mesh's second axis", "pass a mesh of one axis")
    elif asked is not None:
        _check_same_mesh(mesh, collectives)
        topology.names.use(mesh)
        samplers, shards = Fact(mesh.data_parallel_size, "initialize(parallel)"), mesh.shard_size
    return JobRanks(
        topology,
        collectives,
        mesh,
        tuple(made for axis in axes if (made := axis.join(mesh, topology, job)) is not None),
        collectives.world_size if data is None else len(data[0]),
        samplers,
        sampler,
        data,
        peers,
        shards,
    )


def _or_none(groups: RankGroups) -> RankGroups | None:
    """Returns None for one group of all ranks, else the groups."""
    return groups if len(groups) > 1 else None


def _check_same_mesh(mesh: ParallelConfig, collectives: Collectives) -> None:
    """Compares the meshes of the ranks; different ones would make different groups, and hang. (all ranks)"""
    of_ranks: list[dict[str, Any]] = collectives.gather_objects(mesh.compared, "initialize: mesh of the job")
    for rank, other in enumerate(of_ranks):
        for key, value in other.items():
            if value != of_ranks[0][key]:
                raise UsageError(
                    f"initialize(parallel): {key} on rank {rank}",
                    expected=f"{of_ranks[0][key]!r} as on rank 0",
                    got=value,
                    fix="pass the same ParallelConfig on every rank",
                )


def _divide_cores(topology: Topology, collectives: Collectives) -> None:
    """Sets the kernels' threads to this rank's share of the cores, unless the environment sets them. (all ranks)"""
    cores = core_set()
    cores_of = collectives.gather_objects(cores, "cores")
    if omp_threads_chosen() or collectives.world_size != topology.world_size:
        return
    node = next(node for node in topology.nodes if topology.rank in node)
    use_threads(fair_threads(usable_cores(), cores, [cores_of[rank] for rank in node]))
