"""Which ranks shard, replicate and share a machine: sub-meshes of the job as tuples of ranks. Pure: no process groups.

`MeshLayout` lays a `CommPlan` of the config over the machines that `topology.py` knows; `data_groups` and
`shard_size_of` read a `DeviceMesh` that the user passed to `initialize`. `hierarchical.py` makes the collectives.

A DeviceMesh of one axis names the data-parallel ranks of each rank: with `mesh["dp"]` of a mesh that has another axis,
ZeRO works on this one and leaves the other to the library that splits the model on it (tensor parallelism). A mesh of
two axes is (replicate, shard), as for torch's `fully_shard`.

```text
data group       ranks that see different samples: batches, agreement, norms        all ranks, or one axis of a mesh
shard group      consecutive ranks of a data group that hold one model among them   MiCS, HSDP: 2nd axis of the mesh
replicate group  the ranks with one shard, one in each shard group                  HSDP: 1st axis of the mesh
secondary group  consecutive ranks of a shard group with a secondary partition      ZeRO++ hpZ
node group       the ranks of a data group on one machine                           first hop of ZeRO++ qgZ
peer group       one rank of each node group                                        second hop of ZeRO++ qgZ
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroaccel.comm.collectives import Collectives
from zeroaccel.config import Config
from zeroaccel.errors import ConfigError, UsageError

__all__ = ["data_cells", "shard_size_of"]

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
