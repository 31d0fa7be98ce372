"""Tables of plans: memory of every stage with every offload, the recommended plan, and traffic between machines.

`simulate` measures the device memory; this module moves parts of it to the host or to disk for offload, and adds the
staging buffers. The order of `PLANS` is the recommendation: the first plan that fits moves the least data. The formulas
of `config/comm_plan.py` give the traffic, for the model as one unit that is gathered for forward and again for backward
in each micro-step.
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
"""Fraction of each memory that a plan must leave free for the backend, fragmentation and other programs."""

PLANS: tuple[tuple[int, Offload, Offload], ...] = (
    # Stage 1 takes less memory than stage 0 with the same traffic and fewer updates per rank, so stage 0 is last.
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
"""(stage, device of the optimizer, device of the parameter shards), best first."""


@dataclass(frozen=True)
class PlanRow:
    """One plan with its estimate.

    Attributes:
        fits: True if the plan fits; None if the capacity is unknown.
        short_of: the first memory that is too small: "device", "host", "disk" or "".
        recommended: True for the first of `PLANS` that fits.
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
    """Estimates the memory per rank under each plan, without a process group or the model's weights.

    Args:
        model: a parameter count ("7b"), a Hugging Face folder or config.json, "module:function", or a function that
            returns a model or (model, step); see `subject`.
        plans: (stage, offload of the optimizer, offload of the parameters).
        on_cpu: True if ranks compute in host memory and communicate through gloo.
        simulate: a `ClosedForms` object, for one of many workloads.

    Returns:
        One estimate per plan, in the same order.

    Raises:
        ConfigError: `model` does not name a model that can be built.
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
    """Yields the estimates of `estimate`, computing each plan on demand."""
    whole_numel = numel_of(what) if workload.mesh.splits_samples else None
    simulated: dict[tuple[int, bool], dict[int, Simulated]] = {}
    for stage, optimizer, param in plans:
        # Without accumulation there are no gradients between micro-steps for stage 2 to shard.
        simulated_stage = 1 if stage == 2 and workload.accumulation == 1 else stage
        # A single rank has no shards, unless they are stored apart from the full parameters.
        kind = simulated_stage, workload.shard_ranks == 1 and param != "none"
        if kind not in simulated:
            simulated[kind] = {
                index: simulate(what, workload, kind[0], on_cpu=on_cpu, offloads_params=kind[1], pipeline_stage=index)
                for index in places_of(what, workload)
            }
        of_stages = {
            index: _with_offload(memory, workload, stage, optimizer, param, on_cpu=on_cpu)
            for index, memory in simulated[kind].items()
        }
        index = max(of_stages, key=lambda place: of_stages[place].device.total)
        sent = _most_sent(simulated[kind].values())
        most = of_stages[index]
        yield replace(most, pipeline_stage=index, numel=whole_numel or most.numel, sent=sent)


def _most_sent(stages: Collection[Simulated]) -> dict[str, int]:
    """Returns axis -> bytes for the pipeline stage whose ranks send the most along that axis."""
    return {axis: max(stage.sent.get(axis, 0) for stage in stages) for stage in stages for axis in stage.sent}


def plan_table(
    model: str | nn.Module | Callable[[], Any] | Subject,
    workload: Workload,
    capacity: Capacity,
    *,
    simulate: Callable[..., Simulated] = simulate,
) -> list[PlanRow]:
    """Compares all plans with a machine's capacity: the recommended row first, then the others in order of `PLANS`."""
    plans = _plans_for(workload)
    rows = [
        PlanRow(plan, *check_capacity(plan, workload, capacity))
        for plan in estimate(model, workload, plans, on_cpu=capacity.on_cpu, simulate=simulate)
    ]
    best = next((index for index, row in enumerate(rows) if row.fits), None)
    if best is None:
        return rows
    return [replace(rows[best], recommended=True), *rows[:best], *rows[best + 1 :]]


def first_that_fits(what: Subject, workload: Workload, capacity: Capacity) -> PlanRow:
    """Returns the recommended row of `plan_table` without estimating later plans; the smallest plan if none fits."""
    rows = []
    for plan in estimates(what, workload, _plans_for(workload), on_cpu=capacity.on_cpu):
        row = PlanRow(plan, *check_capacity(plan, workload, capacity))
        if row.fits is not False:
            return replace(row, recommended=bool(row.fits))
        rows.append(row)
    return min(rows, key=lambda row: row.estimate.device.total)


def smaller_that_fits(what: Subject, workload: Workload, capacity: Capacity) -> tuple[Workload, PlanRow] | None:
    """Returns the closest smaller workload with a plan that fits: recomputation, then smaller micro-batches with it.

    The samples per step stay the same, if halving the batch allows it.
    """
    case = workload
    while not case.checkpointing or case.batch > 1:
        if case.checkpointing:
            batch = case.batch // 2
            case = replace(
                case, batch=batch, accumulation=max(case.accumulation, case.accumulation * case.batch // batch)
            )
        else:
            case = replace(case, checkpointing=True)
        row = first_that_fits(what, case, capacity)
        if row.fits:
            return case, row
    return None


def check_capacity(plan: Estimate, workload: Workload, capacity: Capacity) -> tuple[bool | None, str]:
    """Returns (True if the plan fits, or None without known capacity; the memory that is too small, or "").

    The ranks of a machine share its host memory and disk.
    """
    fits: bool | None = None
    for name, nbytes, available in _needs(plan, workload, capacity):
        if available is None:
            continue
        fits = True
        if nbytes > available * (1 - HEADROOM):
            return False, name
    return fits, ""


def _needs(plan: Estimate, workload: Workload, capacity: Capacity) -> Iterator[tuple[str, int, int | None]]:
    local = workload.local_ranks
    if capacity.on_cpu:
        yield "host", (plan.device.total + plan.host.total) * local, capacity.host
    else:
        yield "device", plan.device.total, capacity.device
        yield "host", plan.host.total * local, capacity.host
    yield "disk", plan.disk.total * local, capacity.disk


def _plans_for(workload: Workload) -> Sequence[tuple[int, Offload, Offload]]:
    """Returns the plans in order of preference; a single rank has nothing to shard, so stage 0 comes first."""
    return sorted(PLANS, key=lambda plan: plan != (0, "none", "none")) if workload.ranks == 1 else PLANS


def _with_offload(
    step: Simulated, workload: Workload, stage: int, optimizer: Offload, param: Offload, *, on_cpu: bool
) -> Estimate:
    """Moves memory from the device to the host or to files for offload, with the defaults of `zero.storage`."""
    device, host, disk = step.peak, MemoryByKind(), MemoryByKind()
    masters = 4 * sum(step.trained)
    if workload.residual_masters and stage > 0:
        masters = sum(map(residual_nbytes, step.trained))
        device = replace(device, optimizer=device.optimizer - 4 * sum(step.trained) + masters)
    stays = sum(step.trained) if optimizer == "none" else workload.staying(step.trained)
    share, leaves = stays / max(sum(step.trained), 1), sum(step.trained) - stays
    if optimizer != "none":
        # fp32 weights also get a separate master, because the device computes with its own copy.
        states = round((1.0 - share) * (masters + sum(map(workload.states_nbytes, step.trained))))
        device = replace(device, optimizer=round(share * device.optimizer))
        if not on_cpu:  # on the CPU, device and host are one memory
            # Reduced gradients go to the host; those of later micro-steps are added there to an fp32 sum.
            itemsize = 4 if workload.precision == "fp32" else 2
            if stage > 1 and workload.accumulation > 1:
                itemsize += 4
            device = replace(device, gradients=device.gradients - round((1.0 - share) * step.reduced))
            host = replace(host, gradients=itemsize * leaves)
        if optimizer == "cpu":
            new_weights = 0 if workload.precision == "fp32" else 2 * leaves
            host = replace(host, optimizer=states + (states + new_weights if workload.early_updates else 0))
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
            # Masters on the device no longer share memory with shards; masters on the host do.
            device = replace(device, optimizer=device.optimizer + round(share * shards))
            if optimizer == "cpu":
                host = replace(host, optimizer=host.optimizer - round((1.0 - share) * in_memory))
    if workload.peer_checkpoints:
        host = replace(host, saved=_saved_in_memory(sum(step.trained), workload, stage))
    return Estimate(stage, optimizer, param, step.numel, device, host, disk, step.when)


def _saved_in_memory(trained: int, workload: Workload, stage: int) -> int:
    """Returns a rank's part of the saved states in its machine's memory: two per rank during a save, or more to resume.

    When resuming, ranks read further states into memory.
    """
    # Files have blocks of 8-bit moments as bf16 numbers.
    moment_nbytes = 4 if workload.moments_dtype == "fp32" else 2
    of_element = 4 + moment_nbytes * workload.states_per_element
    of_rank = of_element * trained // (1 if stage else workload.shard_ranks)
    if workload.local_ranks == workload.ranks:
        return 2 * of_rank
    whole = of_rank * workload.ranks // workload.local_ranks
    return 4 * of_rank if stage else max(4 * of_rank, whole)


def _in_host_memory(shards: Sequence[tuple[int, int]]) -> int:
    """Returns the bytes of the first shards, which `max_in_cpu` keeps in memory instead of files."""
    numel_left, total = OffloadParam().max_in_cpu, 0
    for numel, nbytes in shards:
        if numel > numel_left:
            break
        numel_left, total = numel_left - numel, total + nbytes
    return total


def _read_ahead(shards: Sequence[tuple[int, int]], workload: Workload) -> int:
    """Returns the bytes of the buffers for shards that are read from files; a code counts with its dequantized size."""
    least = 4 if workload.precision == "fp32" else 2
    itemsize = max((max(nbytes // numel, least) for numel, nbytes in shards if numel), default=0)
    return OffloadParam().buffer_count * OffloadParam().buffer_size * itemsize


# -- traffic


@dataclass(frozen=True)
class TrafficRow:
    """Bytes that one rank sends per step.

    Attributes:
        name: "stage 3", or a feature on top of it.
        inside, across: bytes to ranks on the same machine, and to ranks on other machines.
    """

    name: str
    inside: int
    across: int


def traffic_table(numel: int, workload: Workload) -> list[TrafficRow]:
    """Returns a row per ZeRO++ or MiCS setting; no rows if all ranks are on one machine.

    Args:
        numel: number of parameters of the model, all trained.
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
