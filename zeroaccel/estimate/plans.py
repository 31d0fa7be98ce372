"""Tables of plans: memory of every stage with every offload and which one to take, and traffic between machines.

The memory on the device comes from `simulate`; here offload moves parts of it to the host or to disk, with the staging
buffers that it needs. The order of `PLANS` is the recommendation: the first that fits moves the least data. Traffic is
by the formulas of `config/comm_plan.py`, for the model as one unit that is gathered for forward and again for
backward in each micro-step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeroaccel.config import CommPlan
from zeroaccel.config.comm_plan import step_traffic
from zeroaccel.config.schema_zero import OffloadOptimizer, OffloadParam
from zeroaccel.estimate.mesh_parts import places_of
from zeroaccel.estimate.simulate import Simulated, simulate
from zeroaccel.estimate.subject import Subject, numel_of, subject
from zeroaccel.estimate.workload import Capacity, Estimate, MemoryByKind, Offload, Workload
from zeroaccel.zero.storage.swapped_masters import SUB_GROUP_NUMEL, residual_nbytes

HEADROOM = 0.1
"""Fraction of each memory that a plan must leave free: for the backend, fragmentation, other programs."""

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
"""(stage, device of the optimizer, device of the parameters' shards), the best first."""


@dataclass(frozen=True)
class PlanRow:
    """One plan with its estimate.

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
    simulate: Callable[..., Simulated] = simulate,
) -> list[Estimate]:
    """Memory per rank under each plan, without a process group and without the model's weights.

    Args:
        model: a parameter count ("7b"), a Hugging Face folder or config.json, "module:function", or a function that
            returns a model or (model, step); see `subject`.
        plans: (stage, offload of the optimizer, offload of the parameters).
        on_cpu: the ranks compute in host memory and talk through gloo.
        simulate: `ClosedForms`, for one of many workloads.

    Returns:
        One estimate per plan, in the same order.

    Raises:
        ConfigError: `model` names nothing that can be built.
        UsageError: the model's forward needs values.
    """
    what = model if isinstance(model, Subject) else subject(model)
    return list(estimates(what, workload, plans, on_cpu=on_cpu, simulate=simulate))


def estimates(
    what: Subject,
    workload: Workload,
    plans: Sequence[tuple[int, Offload, Offload]],
    *,
    on_cpu: bool,
    simulate: Callable[..., Simulated] = simulate,
) -> Iterator[Estimate]:
    """As `estimate`, each plan when it is asked for."""
    whole_numel = numel_of(what) if workload.mesh.splits_samples else None
    simulated: dict[tuple[int, bool], dict[int, Simulated]] = {}
    for stage, optimizer, param in plans:
        # Without accumulation there is nothing between micro-steps that stage 2 could shard.
        simulated_stage = 1 if stage == 2 and workload.accumulation == 1 else stage
        # One rank alone shards nothing, unless shards are elsewhere than the full parameters.
        kind = simulated_stage, workload.shard_ranks == 1 and param != "none"
        if kind not in simulated:
            simulated[kind] = {
                index: simulate(what, workload, kind[0], on_cpu=on_cpu, offloads_params=kind[1], pipeline_stage=index)
                for index in places_of(what, workload)
            }
        of_stages = {
            index: _with_offload(one, workload, stage, optimizer, param, on_cpu=on_cpu)
            for index, one in simulated[kind].items()
        }
        index = max(of_stages, key=lambda place: of_stages[place].device.total)
        sent = _most_sent(simulated[kind].values())
        most = of_stages[index]
        yield replace(most, pipeline_stage=index, numel=whole_numel or most.numel, sent=sent)


def _most_sent(stages: Collection[Simulated]) -> dict[str, int]:
    """Axis -> bytes, of the stage of a pipeline whose ranks send the most along it."""
    return {axis: max(one.sent.get(axis, 0) for one in stages) for one in stages for axis in one.sent}


def plan_table(
    model: str | nn.Module | Callable[[], Any] | Subject,
    workload: Workload,
    capacity: Capacity,
    *,
    simulate: Callable[..., Simulated] = simulate,
) -> list[PlanRow]:
    """`estimate` of all plans against what a machine has: the recommended row first, then in the order of `PLANS`."""
    plans = _plans_for(workload)
    rows = [
        PlanRow(one, *check_capacity(one, workload, capacity))
        for one in estimate(model, workload, plans, on_cpu=capacity.on_cpu, simulate=simulate)
    ]
    best = next((index for index, row in enumerate(rows) if row.fits), None)
    if best is None:
        return rows
    return [replace(rows[best], recommended=True), *rows[:best], *rows[best + 1 :]]


def first_that_fits(what: Subject, workload: Workload, capacity: Capacity) -> PlanRow:
    """The recommended row of `plan_table`, without estimates of the plans after it; where none fits, the smallest."""
    rows = []
    for one in estimates(what, workload, _plans_for(workload), on_cpu=capacity.on_cpu):
        row = PlanRow(one, *check_capacity(one, workload, capacity))
        if row.fits is not False:
            return replace(row, recommended=bool(row.fits))
        rows.append(row)
    return min(rows, key=lambda row: row.estimate.device.total)


def check_capacity(one: Estimate, workload: Workload, capacity: Capacity) -> tuple[bool | None, str]:
    """(whether it fits, None where no capacity is known; which memory is too small).

    Host and disk are shared by the ranks of a machine.
    """
    fits: bool | None = None
    for name, nbytes, available in _needs(one, workload, capacity):
        if available is None:
            continue
        fits = True
        if nbytes > available * (1 - HEADROOM):
            return False, name
    return fits, ""


def _needs(one: Estimate, workload: Workload, capacity: Capacity) -> Iterator[tuple[str, int, int | None]]:
    local = workload.local_ranks
    if capacity.on_cpu:
        yield "host", (one.device.total + one.host.total) * local, capacity.host
    else:
        yield "device", one.device.total, capacity.device
        yield "host", one.host.total * local, capacity.host
    yield "disk", one.disk.total * local, capacity.disk


def _plans_for(workload: Workload) -> Sequence[tuple[int, Offload, Offload]]:
    """One rank has nothing to shard, so that stage 0 comes first."""
    return sorted(PLANS, key=lambda plan: plan != (0, "none", "none")) if workload.ranks == 1 else PLANS


def _with_offload(
    step: Simulated, workload: Workload, stage: int, optimizer: Offload, param: Offload, *, on_cpu: bool
) -> Estimate:
    """Moves what offload moves from the device to the host or to files, as `zero.storage` does by default."""
    device, host, disk = step.peak, MemoryByKind(), MemoryByKind()
    masters = 4 * sum(step.trained)
    if workload.residual_masters and stage > 0:
        masters = sum(map(residual_nbytes, step.trained))
        device = replace(device, optimizer=device.optimizer - 4 * sum(step.trained) + masters)
    if optimizer != "none":
        # fp32 weights get a separate master too, as the device computes with its own copy.
        states = masters + 4 * workload.states_per_element * sum(step.trained)
        device = replace(device, optimizer=0)
        if not on_cpu:  # there one memory is both
            # Gradients go to the host as they are reduced; the next micro-step's are added there to a sum in fp32.
            itemsize = 4 if workload.precision == "fp32" else 2
            if stage > 1 and workload.accumulation > 1:
                itemsize += 4
            device = replace(device, gradients=device.gradients - step.reduced)
            host = replace(host, gradients=itemsize * sum(step.trained))
        if optimizer == "cpu":
            host = replace(host, optimizer=states)
        else:
            largest = min(max(step.trained, default=0), SUB_GROUP_NUMEL)
            host = replace(host, optimizer=min(states, 4 * OffloadOptimizer().buffer_count * largest))
            disk = replace(disk, optimizer=states)
    if param != "none":
        shards = sum(nbytes for _, nbytes in step.shards)
        in_memory = shards if param == "cpu" else _in_host_memory(step.shards)
        device = replace(device, params=device.params - shards)
        host = replace(host, params=in_memory + min(shards - in_memory, _read_ahead(step.shards, workload)))
        disk = replace(disk, params=shards - in_memory)
        if workload.precision == "fp32" and not on_cpu:
            # The device's masters are no longer its shards; on the host, those of the optimizer are.
            if optimizer == "none":
                device = replace(device, optimizer=device.optimizer + shards)
            elif optimizer == "cpu":
                host = replace(host, optimizer=host.optimizer - in_memory)
    if workload.peer_checkpoints:
        host = replace(host, saved=_saved_in_memory(sum(step.trained), workload, stage))
    return Estimate(stage, optimizer, param, step.numel, device, host, disk, step.when)


def _saved_in_memory(trained: int, workload: Workload, stage: int) -> int:
    """A rank's share of its machine's states in memory: two during a save, and on resuming what they read."""
    of_rank = 4 * (1 + workload.states_per_element) * trained // (1 if stage else workload.shard_ranks)
    if workload.local_ranks == workload.ranks:
        return 2 * of_rank
    whole = of_rank * workload.ranks // workload.local_ranks
    return 4 * of_rank if stage else max(4 * of_rank, whole)


def _in_host_memory(shards: Sequence[tuple[int, int]]) -> int:
    """Bytes of the first shards, which `max_in_cpu` places in memory although files are configured."""
    numel_left, total = OffloadParam().max_in_cpu, 0
    for numel, nbytes in shards:
        if numel > numel_left:
            break
        numel_left, total = numel_left - numel, total + nbytes
    return total


def _read_ahead(shards: Sequence[tuple[int, int]], workload: Workload) -> int:
    """Bytes of the buffers for shards that are read from files; those of codes count as what they stand for."""
    least = 4 if workload.precision == "fp32" else 2
    itemsize = max((max(nbytes // numel, least) for numel, nbytes in shards if numel), default=0)
    return OffloadParam().buffer_count * OffloadParam().buffer_size * itemsize


# -- traffic


@dataclass(frozen=True)
class TrafficRow:
    """Bytes that one rank sends per step.

    Attributes:
        name: "stage 3", or the addition to it.
        inside, across: to ranks on its own machine, and on others.
    """

    name: str
    inside: int
    across: int


def traffic_table(numel: int, workload: Workload) -> list[TrafficRow]:
    """A row per arrangement; empty where all ranks are on one machine.

    Args:
        numel: parameters of the model, all trained.
    """
    ranks, local = workload.ranks, workload.local_ranks
    if local == ranks:
        return []
    plans = {
        "stage 3": CommPlan(ranks, ranks, ranks),
        "hpZ": CommPlan(ranks, ranks, local if local > 1 else ranks),
        "qwZ + hpZ": CommPlan(ranks, ranks, local if local > 1 else ranks, quantized_weights=True),
        "qwZ + hpZ + qgZ": CommPlan(
            ranks, ranks, local if local > 1 else ranks, quantized_weights=True, quantized_gradients=True
        ),
        "replicas of one machine": CommPlan(ranks, local, local),
    }
    itemsize = 4 if workload.precision == "fp32" else 2
    rows = []
    for name, plan in plans.items():
        padded = -(-numel // (32 * ranks)) * 32 * ranks
        sent = step_traffic(plan, [padded], local, itemsize=itemsize, accumulation=workload.accumulation)
        rows.append(TrafficRow(name, round(sent.inside), round(sent.across)))
    return rows
