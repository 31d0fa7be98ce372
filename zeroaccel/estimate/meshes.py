"""Compares the meshes of a job: which fit, the memory per rank, and the traffic within and between machines.

Every mesh trains on the same samples per step: if ranks share samples, each runs more micro-steps. `simulate` counts
the bytes that the engine's calls would send, by axis. The part that crosses machines follows from the machines of the
ranks on an axis, with ranks numbered as in `ParallelConfig`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeroaccel.config.parallel import RankGroups
from zeroaccel.errors import UsageError
from zeroaccel.estimate.fake_ranks import EXPERT_SHARDS
from zeroaccel.estimate.mesh_parts import axes_of
from zeroaccel.estimate.plans import PlanRow, first_that_fits
from zeroaccel.estimate.subject import Subject, experts_of, subject
from zeroaccel.estimate.workload import SAMPLE_AXES, Capacity, Workload


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that one rank sends in a step along one axis, averaged over the ranks.

    Attributes:
        axis: "dp" (ranks that ZeRO shards over), "dp of experts" (ranks that it shards experts over), "ep", "sp", "tp"
            or "pp".
        inside, across: bytes to ranks on the same machine, and to ranks on other machines.
    """

    axis: str
    inside: int
    across: int


@dataclass(frozen=True)
class MeshRow:
    """One mesh with its best plan.

    Attributes:
        workload: workload with the mesh and its number of micro-steps.
        plan: the recommended plan, or the one with the least memory if none fits; None if the mesh cannot divide the
            model.
        links: bytes that a rank sends in a step.
        idle: fraction of a step that the ranks of a pipeline wait for others, (pp - 1) / (m + pp - 1).
        refused: reason why the mesh cannot divide the model, or "".
        recommended: True for the best mesh among those that fit; see `mesh_table`.
    """

    workload: Workload
    plan: PlanRow | None = None
    links: tuple[LinkBytes, ...] = ()
    idle: float = 0.0
    refused: str = ""
    recommended: bool = False

    @property
    def inside(self) -> int:
        """Bytes to ranks on the same machine."""
        return sum(link.inside for link in self.links)

    @property
    def across(self) -> int:
        """Bytes to ranks on other machines."""
        return sum(link.across for link in self.links)


def link_bytes(row: PlanRow, workload: Workload) -> tuple[LinkBytes, ...]:
    """Returns the bytes that a rank sends in a step under a plan, by axis."""
    links = []
    for axis, nbytes in row.estimate.sent.items():
        across = round(nbytes * crossing_share(workload, axis))
        links.append(LinkBytes(axis, nbytes - across, across))
    return tuple(links)


def crossing_share(workload: Workload, axis: str) -> float:
    """Returns the fraction of traffic along an axis that goes to other machines.

    See `AxisEstimate.receivers`. For ZeRO, each rank sends the same number of bytes to every other rank.

    Example:
        >>> crossing_share(Workload(ranks=16, ranks_per_machine=8, tp=16), "tp")
        0.125
        >>> crossing_share(Workload(ranks=16, ranks_per_machine=8, tp=8), "tp")
        0.0
    """
    receivers = {item.name: item.receivers for item in axes_of(workload.mesh)}.get(axis, "all")
    crossing = pairs = 0
    for group in _groups(workload, axis):
        machines = [rank // workload.local_ranks for rank in group]
        if receivers == "all":
            pairs += len(group) * (len(group) - 1)
            crossing += len(group) ** 2 - sum(count**2 for count in Counter(machines).values())
        else:
            following = [*machines[1:], *(machines[:1] if receivers == "ring" else [])]
            pairs += len(following)
            crossing += sum(item != other for item, other in zip(machines, following, strict=False))
    return crossing / pairs if pairs else 0.0


def _groups(workload: Workload, axis: str) -> RankGroups:
    """Returns the groups of ranks along an axis."""
    mesh = workload.mesh
    if axis == "dp":
        return mesh.data_groups
    if axis == "ep":
        return mesh.expert_groups
    return mesh.expert_holders if axis == EXPERT_SHARDS else mesh.groups(axis)


def meshes_of(workload: Workload, experts: int = 1) -> Iterator[Workload]:
    """Returns the workload with the same samples on every mesh of its ranks, plain data parallelism first.

    Args:
        experts: maximum number of ranks that can divide the experts of the model's layers.
    """
    divisors = [size for size in range(1, workload.ranks + 1) if workload.ranks % size == 0]
    found = []
    for *sizes, ep in itertools.product(*[divisors] * len(SAMPLE_AXES), divisors):
        if workload.ranks % math.prod(sizes) == 0 and experts % ep == 0:
            try:
                found.append(workload.on_mesh(*sizes, ep=ep))
            except UsageError:  # a mesh that the engine does not have, or a sequence that sp does not divide
                continue
    return iter(sorted(found, key=lambda candidate: (candidate.sample_ranks, candidate.sizes, candidate.ep)))


def mesh_table(
    model: str | nn.Module | Callable[[], Any] | Subject,
    workload: Workload,
    capacity: Capacity,
    *,
    on_row: Callable[[Workload], None] = lambda _: None,
) -> list[MeshRow]:
    """Returns every mesh with its best plan: the recommended mesh first, then the others in the order of `meshes_of`.

    Among the meshes that fit, the recommended one has, in order of priority: the least offload, ranks that share layers
    and sequences only within machines, the fewest ranks per sample, and the least traffic between machines.

    Args:
        workload: the workload; its own mesh is ignored.
        on_row: function to call before the estimate of each mesh.

    Example:
        >>> rows = mesh_table("1m", Workload(ranks=4, sequence=64), Capacity(device=10**9))
        >>> rows[0].recommended, rows[0].workload.mesh_name
        (True, 'dp 4')
    """
    what = model if isinstance(model, Subject) else subject(model)
    rows = []
    for candidate in meshes_of(workload, experts_of(what)):
        on_row(candidate)
        rows.append(mesh_row(what, candidate, capacity))
    best = min((row for row in rows if row.plan is not None and row.plan.fits), key=_order, default=None)
    if best is None:
        return rows
    return [replace(best, recommended=True), *(row for row in rows if row is not best)]


def mesh_row(what: Subject, workload: Workload, capacity: Capacity) -> MeshRow:
    """Estimates one mesh."""
    try:
        plan = first_that_fits(what, workload, capacity)
    except UsageError as error:
        return MeshRow(workload, refused=str(error))
    idle = sum((axis.idle(workload.accumulation) for axis in axes_of(workload.mesh)), 0.0)
    return MeshRow(workload, plan, link_bytes(plan, workload), idle)


def _order(row: MeshRow) -> tuple[float, ...]:
    assert row.plan is not None, "a mesh that fits has a plan"
    estimate = row.plan.estimate
    offloads = (estimate.offload_optimizer != "none") + (estimate.offload_param != "none")
    crosses = any(_crossing_in_blocks(row))  # ranks wait for slow links in every block
    return offloads, crosses, row.workload.sample_ranks, row.across, row.idle, row.inside


def _crossing_in_blocks(row: MeshRow) -> list[LinkBytes]:
    """Returns links between machines whose ranks wait for each other in every block."""
    in_blocks = {axis.name for axis in axes_of(row.workload.mesh) if axis.in_blocks}
    return [link for link in row.links if link.axis in in_blocks and link.across]


def needless_crossing(what: Subject, row: MeshRow, capacity: Capacity) -> str:
    """Describes the traffic of layers or sequences that are split across machines, and a mesh that avoids it.

    Returns:
        The message, or "" if no such traffic crosses machines.
    """
    crossing = _crossing_in_blocks(row)
    if not crossing:
        return ""
    link, chosen, local = max(crossing, key=lambda item: item.across), row.workload, row.workload.local_ranks
    words = (
        f"{link.axis} {getattr(chosen, link.axis)} spans machines of {local} "
        f"rank{'s' if local > 1 else ''}: each rank sends {link.across / 1e9:.3g} GB per step to other machines for it"
    )
    in_blocks = {axis.name for axis in axes_of(chosen.mesh) if axis.in_blocks}
    sizes = dict(zip(SAMPLE_AXES, chosen.sizes, strict=True))
    for axis in reversed(SAMPLE_AXES):  # innermost axes first
        if axis in in_blocks:
            sizes[axis] = math.gcd(sizes[axis], local)
            local //= sizes[axis]
    better = mesh_row(what, chosen.on_mesh(*sizes.values(), ep=chosen.ep), capacity)
    if better.plan is None:
        return words
    fits = {True: "", None: "", False: ", but does not fit"}[better.plan.fits]
    return f"{words}; {better.workload.mesh_name} sends {better.across / 1e9:.3g} GB for the same samples{fits}"
