"""Which ranks see different samples, and how they hold the model: what a `DeviceMesh` given to `initialize` says.

A mesh of one axis names the data-parallel ranks of each rank: with `mesh["dp"]` of a mesh that has another axis, ZeRO
works on this one and leaves the other to whoever splits the model on it. A mesh of two axes is (replicas, shards), as
for torch's `fully_shard`. Only reads the mesh; the groups are made by `comm/topology.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroaccel.comm.collectives import Collectives
from zeroaccel.config import Config
from zeroaccel.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["data_cells", "shard_size_of"]

Cells = tuple[tuple[int, ...], ...]


def data_cells(mesh: DeviceMesh, job: Collectives) -> Cells:
    """The ranks that see different samples, of every rank of the job. (all ranks)

    Raises:
        UsageError: on every rank: the mesh does not have each rank in one group, all of one size.
    """
    own = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    everyone: list[tuple[int, ...]] = job.gather_objects(own, "initialize: mesh")
    cells = tuple(dict.fromkeys(everyone))
    ranks = sorted(rank for cell in cells for rank in cell)
    fits = ranks == list(range(job.world_size)) and len({len(cell) for cell in cells}) == 1
    if mesh.ndim > 2 or not fits or any(rank not in cell for rank, cell in enumerate(everyone)):
        raise UsageError(
            "initialize(mesh)",
            expected=f"one or two axes that have each of the {job.world_size} ranks in one group, all of one size",
            got=f"{mesh.ndim} axes with ranks {', '.join(str(list(cell)) for cell in cells)}",
            fix='pass the data-parallel axis of a mesh of all ranks, such as mesh["dp"]',
        )
    return cells


def shard_size_of(mesh: DeviceMesh, settings: Config) -> int | None:
    """Ranks that hold one model among them, by a mesh of (replicas, shards); None where it has one axis.

    Raises:
        ConfigError: `mics_shard_size` says otherwise.
    """
    if mesh.ndim == 1:
        return None
    size = int(mesh.size(1))
    asked = settings.zero_optimization.mics_shard_size
    if asked not in (-1, size):
        raise ConfigError(
            settings.where("zero_optimization.mics_shard_size"),
            expected=f"{size}, the size of the mesh's second axis",
            got=asked,
            fix="remove the key, or pass a mesh of one axis",
        )
    return size
