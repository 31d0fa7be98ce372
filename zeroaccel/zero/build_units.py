"""Builds units from a model and its param groups: groups, lays out, broadcasts from rank 0, casts and shards.

Runs once, at the start. Afterwards every parameter is a view into a unit's buffer (or NaN while that is sharded).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.config.shard_plan import ShardPlan
from zeroaccel.errors import UsageError
from zeroaccel.zero.access.param_registry import ParamHandle, handle_of
from zeroaccel.zero.layout import ALIGN_NUMEL, FlatLayout, OwnerLoads, Split, holders
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.precision import forget_cast
from zeroaccel.zero.storage.code_shards import block_numel
from zeroaccel.zero.storage.masters import MasterStorage
from zeroaccel.zero.storage.placement import BufferPlan, TierSet
from zeroaccel.zero.tensor_subclasses import check_split, is_split, local, scales_of
from zeroaccel.zero.wrap_policy import UnitSpec


@dataclass(frozen=True)
class Placement:
    """How parameters are stored.

    Attributes:
        dtype: dtype that floating-point parameters get.
        fp32_names: names of parameters that stay fp32 under any `dtype`.
        device: device of the parameters.
        plan: which of optimizer states, gradients and parameters are sharded.
        groups: id(parameter) -> index of its param group; parameters not in it are not optimized.
        offloads_params: True if shards of parameters are not on the device; then even a single rank has shards.
        code_format: quantized format of the frozen parameters that are stored as codes.
        full_tensor_groups: indices of the param groups whose optimizer steps on full tensors.
        coupled: True if the rule of the optimizer sums over several parameters.
        splits: id(parameter) -> its split along an axis of the mesh.
    """

    dtype: torch.dtype
    fp32_names: frozenset[str]
    device: torch.device
    plan: ShardPlan
    groups: Mapping[int, int]
    offloads_params: bool
    code_format: str
    full_tensor_groups: frozenset[int]
    coupled: bool
    splits: Mapping[int, Split]

    def param_dtype(self, fqn: str, param: nn.Parameter) -> torch.dtype:
        """Returns the dtype in which this parameter is stored and computed."""
        if not param.is_floating_point() or scales_of(param) is not None:
            return param.dtype
        return torch.float32 if fqn in self.fp32_names else self.dtype

    def trainable(self, param: nn.Parameter) -> bool:
        """Returns True if an optimizer updates the parameter."""
        return param.requires_grad and id(param) in self.groups

    def needs_owner(self, param: nn.Parameter) -> bool:
        """Returns True if its optimizer needs the full tensor on one rank; see [Note: owner layout] of `layout.py`."""
        return self.trainable(param) and self.groups[id(param)] in self.full_tensor_groups


def plan_units(specs: Sequence[UnitSpec], placement: Placement, collectives: Collectives) -> list[list[BufferPlan]]:
    """Plans the buffers of each unit; balances owners within a unit, and over all units where that leaves a choice."""
    # One for all units: later units even out the imbalance of earlier ones.
    loads = OwnerLoads(collectives.shard_world_size)
    return [_plan_buffers(spec, placement, loads, collectives) for spec in specs]


def _plan_buffers(
    spec: UnitSpec, placement: Placement, loads: OwnerLoads, collectives: Collectives
) -> list[BufferPlan]:
    check_split(spec.params, placement.param_dtype)
    # One flat buffer per dtype and trainability: a collective moves one dtype, and a frozen buffer needs no gradients,
    # masters or second gather after a step. Split parameters are separate, because norms count their parts on every
    # rank of their axis; those that are split in the data group also have other shards.
    kinds: dict[tuple[torch.dtype, bool, bool, bool, bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for fqn, param in spec.params:
        kind = placement.param_dtype(fqn, param), placement.trainable(param), placement.needs_owner(param)
        cut = placement.splits.get(id(param))
        apart = cut is not None or is_split(param), cut is not None and cut.in_data_group, scales_of(param) is not None
        kinds.setdefault((*kind, *apart), []).append((fqn, param))
    plans = []
    for index, ((dtype, trainable, has_owners, split, *_), named) in enumerate(kinds.items()):
        if has_owners and split:
            refuse_split(named[0][0])
        if trainable:  # parameters of one param group are adjacent, so there are fewer ranges to step
            named = sorted(named, key=lambda item: placement.groups[id(item[1])])
        if has_owners:
            # Sorted by owner, so that the tensors of a rank are one range of the buffer: its shard.
            owners = loads.assign([param.numel() for _, param in named])
            order = sorted(range(len(named)), key=owners.__getitem__)
            named, owners = [named[i] for i in order], [owners[i] for i in order]
        splits = {fqn: placement.splits[id(param)] for fqn, param in named if id(param) in placement.splits}
        entries = []
        for fqn, param in named:
            shape = tuple(local(param).shape)
            entries.append((fqn, splits[fqn].part_shape(shape) if fqn in splits else shape))
        ranks = holders(splits.get(named[0][0]), collectives)
        world_size = ranks.shard_world_size
        alone = world_size == 1 and not placement.offloads_params
        persistent = not spec.is_code and (spec.persistent or not placement.plan.params or alone)
        code_format = placement.code_format if spec.is_code else ""
        align_numel = block_numel(code_format) if code_format else ALIGN_NUMEL
        plans.append(
            BufferPlan(
                f"{spec.name}/{index}",
                ranks.shard_rank,
                FlatLayout.build_with_owners(entries, owners, world_size)
                if has_owners
                else FlatLayout.build(entries, world_size, splits, align_numel),
                tuple(param for _, param in named),
                dtype,
                tuple(placement.groups[id(param)] for _, param in named) if trainable else (),
                persistent,
                replicated=not placement.plan.optimizer,
                by_parameter=has_owners or (placement.coupled and not placement.plan.optimizer),
                code_format=code_format,
                whole=spec.is_code and not placement.plan.params,
            )
        )
    return plans


def refuse_split(fqn: str) -> None:
    """Raises UsageError, because the optimizer of a split parameter needs the whole tensor."""
    raise UsageError(
        f"parameter {fqn}",
        expected="a whole parameter, since its optimizer needs whole tensors",
        got="a parameter that tensor or expert parallelism splits",
        fix="use an elementwise optimizer, such as AdamW, for the split parameters",
    )


def build_units(
    specs: Sequence[UnitSpec],
    plans: Sequence[Sequence[BufferPlan]],
    placement: Placement,
    collectives: Collectives,
    tiers: TierSet,
) -> list[ParamUnit]:
    """Builds one ParamUnit per spec, with the weights of rank 0.

    Each unit is sharded (if the plan shards parameters), and its masters are in their tier, before the next is built,
    so the peak above the model itself is one unit.

    Args:
        plans: the buffers of each spec, from `plan_units`.
        tiers: tiers that receive shards and masters; their writes may still be running when this returns.
    """
    memory = _SourceMemory(placement.device)
    return [
        _build_unit(spec, buffers, placement, collectives, tiers, memory)
        for spec, buffers in zip(specs, plans, strict=True)
    ]


class _SourceMemory:
    """Memory of initial values: that of the weights or masters that keep them, else of the last buffer's values.

    The system would fill new pages for each buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self._spare = torch.empty(0, device=device)

    def of(self, buffer: FlatBuffer, masters: MasterStorage, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns (numel,) uninitialized memory for the values of a buffer, until the next call."""
        if dtype is buffer.dtype:
            return buffer.full
        whole = dtype is torch.float32 and masters.range.numel == numel
        if whole and (memory := masters.new_memory(self._spare.device)) is not None:
            return memory
        if (self._spare.numel(), self._spare.dtype) != (numel, dtype):
            self._spare = self._spare.new_empty(0)  # before the new memory
            self._spare = self._spare.new_empty(numel, dtype=dtype)
        return self._spare


def _build_unit(
    spec: UnitSpec,
    plans: Sequence[BufferPlan],
    placement: Placement,
    collectives: Collectives,
    tiers: TierSet,
    memory: _SourceMemory,
) -> ParamUnit:
    buffers = []
    for plan in plans:
        buffer = FlatBuffer(plan, placement.device, watches_uses=True)
        shard, masters = tiers.storages(plan, buffer.place())
        # In the widest dtype of the parameters, not the buffer's: fp32 masters keep the bits that bf16 would drop.
        place = functools.partial(memory.of, buffer, masters)
        source = initial_values(plan.layout, plan.params, placement.device, collectives, spec.name, place)
        buffer.adopt(source, shard, masters)
        buffers.append(buffer)
    unit = ParamUnit(spec.name, spec.modules, buffers, collectives)
    if not unit.persistent:
        unit.reshard()
    return unit


def initial_values(
    layout: FlatLayout,
    params: Sequence[nn.Parameter],
    device: torch.device,
    collectives: Collectives,
    name: str,
    memory: Callable[[int, torch.dtype], Tensor] | None = None,
) -> Tensor:
    """Returns (N,) the parameters end to end in the widest of their dtypes, so the master gets all bits. (all ranks)

    Every rank gets the values of rank 0. Parameters that `zero.Init` sharded are gathered and leave its registry.

    Args:
        name: name of their unit, for the label of the broadcast.
        memory: (N, dtype) -> memory for the result; None for new memory.
    """
    dtype = functools.reduce(torch.promote_types, (param.dtype for param in params))
    source = memory(layout.numel, dtype) if memory else torch.empty(layout.numel, dtype=dtype, device=device)
    # Parameters of one unit of `zero.Init` are adjacent: this gathers each unit once, one at a time.
    previous: ParamHandle | None = None
    for index, (slot, param) in enumerate(zip(layout.slots, params, strict=True)):
        handle = _initialized(param)
        if (handle and handle.unit) is not (previous and previous.unit):
            if previous is not None:
                previous.registry.release([previous.unit])
            if handle is not None:
                handle.registry.acquire([handle.unit])
            previous = handle
        value = local(param)
        if slot.split is not None:
            if handle is None:  # parts of one rank's values: other ranks may have drawn different ones
                value = value.to(device, copy=True).contiguous()
                collectives.everyone.broadcast(value.view(-1), 0, f"initial weights of {name}")
            value = slot.split.part(value)
        source[slot.start : slot.end].view(slot.shape).copy_(value)
        source[slot.end : layout.padded(index).end].zero_()
    if previous is not None:
        previous.registry.release([previous.unit])
    # Gathered values are already the same on all ranks, and so are parts of them.
    if layout.slots[0].split is None and any(_initialized(param) is None for param in params):
        collectives.everyone.broadcast(source, 0, f"initial weights of {name}")
    _take_over(params)
    return source


def _initialized(param: nn.Parameter) -> ParamHandle | None:
    """Returns the handle of a parameter that `zero.Init` sharded; None for an ordinary one."""
    handle = handle_of(param)
    return handle if handle is not None and handle.registry.training is None and not handle.replaced else None


def _take_over(params: Sequence[nn.Parameter]) -> None:
    """Removes copied parameters from their `zero.Init` registry, which frees units that become empty."""
    for param in params:
        # From here on the engine owns the parameter: its dtype is that of its buffer.
        forget_cast(param)
        handle = handle_of(param)
        if handle is not None and handle.registry.training is None:
            handle.registry.drop([param])
