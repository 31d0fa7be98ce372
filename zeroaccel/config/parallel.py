"""How the ranks of a job share out the work: `ParallelConfig`. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeroaccel.errors import UsageError

AXES = ("dp_replicate", "dp_shard", "sp")
"""Outermost first: ranks next to each other differ in the last axis."""


@dataclass(frozen=True)
class ParallelConfig:
    """The mesh of a job, dp_replicate x dp_shard x sp ranks; names and order as torchtitan's.

    The two data axes see different samples. Ranks that differ in `sp` only have parts of the same sequences (Ulysses,
    Jacobs et al., 2023, arXiv:2309.14509). ZeRO shards over dp_shard x sp ranks, which all have the same parameters.

    Attributes:
        dp_replicate: groups of ranks that each hold one sharded model.
        dp_shard: -1 takes the ranks that the other axes leave.
        sp: ranks that share a sequence.

    Raises:
        UsageError: a size is not a positive integer.

    Example:
        >>> mesh = ParallelConfig(sp=2).resolve(world_size=8)
        >>> mesh.dp_shard, mesh.data_parallel_size
        (4, 4)
        >>> mesh.coordinates(rank=5)
        {'dp_replicate': 0, 'dp_shard': 2, 'sp': 1}
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    sp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and (axis, size) != ("dp_shard", -1)):
                rest = " or -1" if axis == "dp_shard" else ""
                raise UsageError(f"ParallelConfig({axis})", expected=f"a positive number of ranks{rest}", got=size)

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int | None]) -> ParallelConfig:
        """The mesh of accelerate's sizes, axis -> ranks.

        None is 1. A `dp_shard` of 1 beside one replica is -1, since accelerate's files say 1 where nothing is chosen.
        """
        known = {axis: size for axis, size in sizes.items() if size is not None}
        if known.get("dp_replicate", 1) == 1 and known.get("dp_shard") == 1:
            del known["dp_shard"]
        return cls(**known)

    @property
    def splits_samples(self) -> bool:
        """Whether ranks work on parts of one sample: not all of them see different ones."""
        return self.sp > 1

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples; of a resolved mesh."""
        return self.dp_replicate * self.dp_shard

    def resolve(self, world_size: int) -> ParallelConfig:
        """The same with `dp_shard` known.

        Raises:
            UsageError: the axes do not multiply to the ranks of the job.
        """
        others = self._num_others
        mesh = replace(self, dp_shard=world_size // others) if self.dp_shard == -1 else self
        if math.prod(getattr(mesh, axis) for axis in AXES) != world_size:
            raise UsageError(
                "ParallelConfig",
                expected=self._expected(world_size),
                got=self._product,
                fix=f"start a multiple of {others} ranks, or choose other sizes",
            )
        return mesh

    def misfit(self, world_size: int) -> str:
        """What is wrong with the sizes on so many ranks, for a message."""
        return f"{self._product}, where {self._expected(world_size)} are needed"

    @property
    def _num_others(self) -> int:
        """Ranks along the axes other than `dp_shard`."""
        return math.prod(getattr(self, axis) for axis in AXES if axis != "dp_shard")

    @property
    def _product(self) -> str:
        known = [axis for axis in AXES if getattr(self, axis) != -1]
        product = " x ".join(f"{axis} {getattr(self, axis)}" for axis in known)
        return f"{product} = {math.prod(getattr(self, axis) for axis in known)}"

    def _expected(self, world_size: int) -> str:
        return f"sizes that {'divide' if self.dp_shard == -1 else 'multiply to'} the job's {world_size} ranks"

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis of a resolved mesh."""
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return {axis: places[axis] for axis in AXES}
