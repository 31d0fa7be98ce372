"""Ranks in messages: their numbers, and where they are on the mesh of the job.

`topology.py` has one `RankNames` for all messages of a process; `initialize` says the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable

from zeroaccel.comm.hangs.hang_report import rank_list
from zeroaccel.config.parallel import AXES, ParallelConfig


class RankNames:
    """Puts ranks into words. Without a mesh, or on one of `dp_shard` alone, they have their numbers only.

    Attributes:
        mesh: resolved; that of the engine made last among those that have more axes than `dp_shard`.

    Example:
        >>> names = RankNames()
        >>> names([5])
        'rank 5'
        >>> names.use(ParallelConfig(pp=2, tp=2, dp_shard=2))
        >>> names([5]), names([4, 5]), names([0, 3])
        ('rank 5 (pp 1, dp_shard 0, tp 1)', 'ranks 4-5 (pp 1, dp_shard 0)', 'ranks 0, 3 (pp 0)')
    """

    def __init__(self) -> None:
        self.mesh: ParallelConfig | None = None

    def use(self, mesh: ParallelConfig) -> None:
        """Names ranks by a resolved mesh from now on, unless its only axis is `dp_shard`, where numbers say it all."""
        if any(getattr(mesh, axis) > 1 for axis in AXES if axis != "dp_shard"):
            self.mesh = mesh

    def __call__(self, ranks: Iterable[int]) -> str:
        """The ranks, with the coordinates that all of them have."""
        ranks = list(ranks)
        mesh = self.mesh
        if mesh is None or not ranks:
            return rank_list(ranks)
        places = [mesh.coordinates(rank) for rank in ranks]
        # An axis of one rank says nothing, and one along which these ranks differ is said by their numbers.
        shared = [
            f"{axis} {places[0][axis]}"
            for axis in AXES
            if getattr(mesh, axis) > 1 and len({place[axis] for place in places}) == 1
        ]
        return f"{rank_list(ranks)} ({', '.join(shared)})" if shared else rank_list(ranks)
