"""Every stage with every offload as a row: what it takes, whether it fits, and which one to take.

What a rank holds on the device comes from `simulate`; what offload moves away from there, and what stays to stage it,
is worked out here. The order of `PLANS` is the advice: the first that fits moves the least data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeroaccel.config.schema_zero import OffloadOptimizer, OffloadParam
from zeroaccel.estimate.simulate import Simulated, simulate
from zeroaccel.estimate.subject import Subject, subject
from zeroaccel.estimate.workload import Capacity, Estimate, MemoryByKind, Offload, Workload
from zeroaccel.zero.storage.swapped_masters import SUB_GROUP_NUMEL, residual_nbytes

__all__ = ["HEADROOM", "PLANS", "PlanRow", "estimate", "plan_table", "verdict"]

HEADROOM = 0.1
"""The part of each memory that a plan must leave free: for the backend itself, allocators' gaps, other programs."""

PLANS: tuple[tuple[int, Offload, Offload], ...] = (
    # Stage 1 takes less memory than stage 0 for the same traffic and fewer updates; so 0 is no advice but for one rank.
    (1, "none", "none"),
    (2, "none", "none"),
    (3, "none", "none"),
    (2, "cpu", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "none"),
    (3, "nvme", "cpu"),
    (3, "nvme", "nvme"),
    (1, "cpu", "none"),
    (0, "none", "none"),
)
"""(stage, where the optimizer is, where the parameters' shards are), the best first."""


@dataclass(frozen=True)
class PlanRow:
    """One plan and what is to be said of it.

    Attributes:
        fits: None where the capacity is not known.
        short_of: "device", "host", "disk" or "", the first that is too small.
        recommended: the first of `PLANS` that fits.
    """

    estimate: Estimate
    fits: bool | None
    short_of: str
    recommended: bool = False


def estimate(
    model: str | nn.Module | Callable[[], Any] | Subject,
    workload: Workload,
    plans: Sequence[tuple[int, Offload, Offload]] = PLANS,
    *,
    on_cpu: bool = False,
) -> list[Estimate]:
    """Memory per rank under each plan, without a process group and without the model's weights.

    Args:
        model: a parameter count ("7b"), a Hugging Face folder or config.json, "module:function", or a function that
            returns a model or (model, step); see `subject`.
        plans: (stage, offload of the optimizer, offload of the parameters).
        on_cpu: the ranks compute in host memory and talk through gloo.

    Returns:
        One estimate per plan, in the same order.

    Raises:
        ConfigError: `model` names nothing that can be built.
        UsageError: the model's forward needs values.
    """
    what = model if isinstance(model, Subject) else subject(model)
    seen: dict[int, Simulated] = {}
    rows = []
    for stage, optimizer, param in plans:
        # Without accumulation there is nothing between micro-steps that stage 2 could shard.
        kind = 1 if stage == 2 and workload.accumulation == 1 else stage
        if kind not in seen:
            seen[kind] = simulate(what, workload, kind, on_cpu=on_cpu)
        rows.append(_placed(seen[kind], workload, stage, optimizer, param))
    return rows


def plan_table(
    model: str | nn.Module | Callable[[], Any] | Subject, workload: Workload, capacity: Capacity
) -> list[PlanRow]:
    """`estimate` of all plans against what a machine has: the recommended row first, then in the order of `PLANS`."""
    rows = [
        PlanRow(one, *verdict(one, workload, capacity))
        for one in estimate(model, workload, _plans_for(workload), on_cpu=capacity.on_cpu)
    ]
    best = next((index for index, row in enumerate(rows) if row.fits), None)
    if best is None:
        return rows
    return [replace(rows[best], recommended=True), *rows[:best], *rows[best + 1 :]]


def verdict(one: Estimate, workload: Workload, capacity: Capacity) -> tuple[bool | None, str]:
    """(whether it fits, what it is short of). Host and disk are shared by the ranks of a machine."""
    known = False
    for name, needed, there in _needs(one, workload, capacity):
        if there is None:
            continue
        known = True
        if needed > there * (1 - HEADROOM):
            return False, name
    return (True if known else None), ""


def _needs(one: Estimate, workload: Workload, capacity: Capacity) -> Iterator[tuple[str, int, int | None]]:
    local = workload.local_ranks
    if capacity.on_cpu:
        yield "host", (one.device.total + one.host.total) * local, capacity.host
    else:
        yield "device", one.device.total, capacity.device
        yield "host", one.host.total * local, capacity.host
    yield "disk", one.disk.total * local, capacity.disk


def _plans_for(workload: Workload) -> Sequence[tuple[int, Offload, Offload]]:
    """Alone there is nothing to shard, and no stage is simpler than 0."""
    return sorted(PLANS, key=lambda plan: plan != (0, "none", "none")) if workload.ranks == 1 else PLANS


def _placed(held: Simulated, workload: Workload, stage: int, optimizer: Offload, param: Offload) -> Estimate:
    """Moves what offload moves from the device to the host or to files, as `zero.tiers` does it by default."""
    device, host, disk = held.peak, MemoryByKind(), MemoryByKind()
    masters = 4 * sum(held.trained)
    if workload.residual_masters and stage > 0:
        masters = sum(map(residual_nbytes, held.trained))
        device = replace(device, optimizer=device.optimizer - 4 * sum(held.trained) + masters)
    if optimizer != "none":
        # A master of its own also for fp32 weights: the device keeps those it computes with.
        away = masters + 4 * workload.states_per_element * sum(held.trained)
        device = replace(device, optimizer=0)
        if optimizer == "cpu":
            host = replace(host, optimizer=away)
        else:
            largest = min(max(held.trained, default=0), SUB_GROUP_NUMEL)
            host = replace(host, optimizer=min(away, 4 * OffloadOptimizer().buffer_count * largest))
            disk = replace(disk, optimizer=away)
    if param != "none":
        shards = sum(nbytes for _, nbytes in held.shards)
        kept = shards if param == "cpu" else _kept_in_memory(held.shards)
        device = replace(device, params=device.params - shards)
        host = replace(host, params=kept + min(shards - kept, _read_ahead(held.shards)))
        disk = replace(disk, params=shards - kept)
    return Estimate(stage, optimizer, param, held.numel, device, host, disk, held.when)


def _kept_in_memory(shards: Sequence[tuple[int, int]]) -> int:
    """Bytes of the first shards, which `max_in_cpu` keeps in memory although files are asked for."""
    room, kept = OffloadParam().max_in_cpu, 0
    for numel, nbytes in shards:
        if numel > room:
            break
        room, kept = room - numel, kept + nbytes
    return kept


def _read_ahead(shards: Sequence[tuple[int, int]]) -> int:
    """Bytes of the buffers for shards that are read from files."""
    itemsize = max((nbytes // numel for numel, nbytes in shards if numel), default=0)
    return OffloadParam().buffer_count * OffloadParam().buffer_size * itemsize
