"""From a model and its param groups to units: cuts, lays out, broadcasts from rank 0, casts and shards.

Runs once, at the start. Afterwards every parameter is a view into a unit's buffer (or NaN while that is sharded).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroaccel.comm.collectives import Collectives
from zeroaccel.config.shard_plan import ShardPlan
from zeroaccel.errors import ConfigError, UsageError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.access.param_registry import ParamHandle, handle_of
from zeroaccel.zero.device_check import check_model_device
from zeroaccel.zero.layout import ALIGN_NUMEL, FlatLayout, OwnerLoads, Split, holders
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.precision import forget_cast
from zeroaccel.zero.quantized_weights import check_quantized, refuse_wrapped
from zeroaccel.zero.storage.code_shards import block_numel
from zeroaccel.zero.storage.placement import BufferPlan, TierSet
from zeroaccel.zero.tensor_subclasses import check_split, is_split, local, scales_of
from zeroaccel.zero.wrap_policy import UnitSpec


@dataclass(frozen=True)
class Placement:
    """How parameters are stored.

    Attributes:
        dtype: what floating parameters become; None keeps each one's own.
        fp32_names: parameters that stay fp32 whatever `dtype` says.
        device: where they live.
        plan: what is sharded.
        groups: id(parameter) -> index of its param group; parameters not in it are not optimized.
        offloads_params: shards of parameters are not on the device, so that even one rank alone has shards.
        code_format: of the frozen parameters that are stored as codes.
        full_tensor_groups: indices of the param groups whose optimizer steps on full tensors.
        coupled: its rule sums over several parameters.
        splits: id(parameter) -> how an axis of the mesh cuts it.
    """

    dtype: torch.dtype | None
    fp32_names: frozenset[str]
    device: torch.device
    plan: ShardPlan
    groups: Mapping[int, int]
    offloads_params: bool = False
    code_format: str = ""
    full_tensor_groups: frozenset[int] = frozenset()
    coupled: bool = False
    splits: Mapping[int, Split] = field(default_factory=dict)

    def param_dtype(self, fqn: str, param: nn.Parameter) -> torch.dtype:
        """The dtype this parameter is stored and computed in."""
        if not param.is_floating_point() or scales_of(param) is not None:
            return param.dtype
        if fqn in self.fp32_names:
            return torch.float32
        return self.dtype or param.dtype

    def trainable(self, param: nn.Parameter) -> bool:
        """Whether an optimizer updates it."""
        return param.requires_grad and id(param) in self.groups

    def needs_owner(self, param: nn.Parameter) -> bool:
        """Whether its optimizer needs the full tensor on one rank; see [Note: owner layout] of `layout.py`."""
        return self.trainable(param) and self.groups[id(param)] in self.full_tensor_groups


_OTHER_ENGINE = "call destroy() of that engine first"
_FROM_META = "load it with zero.load_safetensors, or build the model without the meta device"


def check_model(model: object, device: torch.device) -> None:
    """Refuses what is no module, a model on another accelerator, and parameters that cannot be sharded.

    Args:
        device: where the engine computes.

    Raises:
        UsageError: the model is no module, has TorchScript modules, or is not on `device`; a parameter is a wrapper of
            several tensors, or is on the meta device, or complex, or in another engine, or a copy of a sharded one, or
            shares memory with another, or has no shape yet, or was made in inference mode.
    """
    if not isinstance(model, nn.Module):
        raise UsageError("initialize(model)", expected="a torch.nn.Module", got=type(model).__name__)
    _refuse_divided(model)
    for fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"initialize(model): module {fqn or 'itself'}",
                expected="modules of Python, whose forwards can have hooks",
                got=f"a TorchScript module ({module.original_name})",
                fix="train the module that was scripted or traced, and script or trace the result",
            )
    refuse_wrapped(model)
    # Each of these would fail later, inside a collective or with an error that names no parameter.
    for fqn, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise UsageError(
                f"parameter {fqn}",
                expected="a shape",
                got="that of a lazy module, which has none yet",
                fix="call the model once with an example before",
            )
        if param.is_inference():
            raise UsageError(
                f"parameter {fqn}",
                expected="a tensor that gradients can go through",
                got="one made under torch.inference_mode()",
                fix="build the model outside of it",
            )
        handle = handle_of(param)
        if handle is not None and handle.registry.training is not None:
            raise UsageError(
                f"parameter {fqn}",
                expected="a model of its own",
                got="one that another engine holds",
                fix=_OTHER_ENGINE,
            )
        # A copy of a sharded parameter has the NaN that stands for its values: the values themselves are lost.
        if (handle is None or handle.replaced) and _is_all_nan(param):
            raise UsageError(
                f"parameter {fqn}",
                expected="values",
                got="only NaN, as a copy or a cast of a sharded parameter has",
                fix="copy or cast it inside zero.GatheredParameters; zero.Init(dtype=...) casts while it builds",
            )
        if param.is_meta:
            raise UsageError(f"parameter {fqn}", expected="real values", got="the meta device", fix=_FROM_META)
        if param.is_complex() and param.requires_grad:
            raise UsageError(
                f"parameter {fqn}",
                expected="a real dtype, as master weights are fp32",
                got=str(param.dtype),
                fix="keep it as torch.view_as_real(...), or freeze it",
            )
    check_quantized(model)
    _refuse_shared_memory(model)
    check_model_device(model, device)


def _refuse_divided(model: nn.Module) -> None:
    """Refuses a model of which transformers has left each rank a part: initialize would take it for the whole."""
    divided = getattr(getattr(model, "config", None), "distributed_config", None)
    for key in ("ep_size", "fsdp_size", "pp_size"):
        if (size := getattr(divided, key, None) or 1) > 1:
            raise UsageError(
                "initialize(model)",
                expected="a model with all experts, parameters and layers, which initialize divides",
                got=f"one that from_pretrained(distributed_config=DistributedConfig({key}={size})) has divided",
                fix="load it without, and pass the DistributedConfig as initialize(parallel=)",
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raises UsageError where two parameters share elements, which shards of their own would silently separate."""
    spans: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for fqn, param in model.named_parameters():
        if type(param) is nn.Parameter and handle_of(param) is None and param.layout is torch.strided and param.numel():
            start = int(param.storage_offset())
            reach = sum(int((size - 1) * stride) for size, stride in zip(param.shape, param.stride(), strict=True))
            spans.setdefault(param.untyped_storage()._cdata, []).append((start, start + reach + 1, fqn, param))
    for of_one in spans.values():
        of_one.sort(key=lambda span: span[:2])
        for index, (_, end, fqn, param) in enumerate(of_one):
            for start, _, other_fqn, other in of_one[index + 1 :]:
                if start >= end:
                    break
                if _share_elements(param, other):
                    raise UsageError(
                        f"parameters {fqn} and {other_fqn}",
                        expected="memory of their own, or one nn.Parameter under both names",
                        got="two parameters that share elements of one storage",
                        fix="assign the parameter itself, as in head.weight = embed.weight, or clone() one",
                    )


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Of two tensors of one storage; columns of one matrix lie between each other and share nothing."""
    if one.dtype is not other.dtype:
        return True
    numel = one.untyped_storage().nbytes() // one.itemsize
    used = torch.zeros(numel, dtype=torch.bool)
    used.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def group_index(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, int]:
    """id(parameter) -> index of its param group.

    Args:
        names: id(parameter) -> fqn, for all of the model's parameters.

    Raises:
        ConfigError: a parameter is in two groups.
        UsageError: a parameter is not the model's.
    """
    groups: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise UsageError(
                    f"optimizer.param_groups[{index}]['params'][{position}]",
                    expected="a parameter of the model that is prepared with it",
                    got=f"a tensor of shape {tuple(param.shape)}",
                    fix="create the optimizer from the same model object; freeze a module that only the loss reads",
                )
            if id(param) in groups:
                raise ConfigError(
                    f"parameter {names[id(param)]}",
                    expected="to be in one param group",
                    got=f"groups {groups[id(param)]} and {index}",
                    fix="remove it from one of them",
                )
            groups[id(param)] = index
    return groups


def check_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuses a loss of precision that no 16-bit precision of the config asks for.

    Args:
        dtype: of the precision.

    Raises:
        UsageError: a parameter has 64 bits, and the precision is fp32.
    """
    if dtype is not torch.float32:
        return
    for fqn, param in model.named_parameters():
        if param.dtype is torch.float64:
            raise float64_error(fqn)


def float64_error(fqn: str) -> UsageError:
    """The error for a parameter in float64, whose fp32 master would round it."""
    return UsageError(
        f"parameter {fqn}",
        expected="at most 32 bits: master weights, sums of gradients and optimizer states are fp32",
        got="torch.float64",
        fix='call model.float() before, or choose "bf16" or "fp16" in the config; constants in float64 can be buffers',
    )


def plan_units(specs: Sequence[UnitSpec], placement: Placement, collectives: Collectives) -> list[list[BufferPlan]]:
    """The buffers of each unit; owners are balanced within a unit, and over the units where that leaves a choice."""
    # One for all units: what is uneven in one unit is evened out by the next.
    loads = OwnerLoads(collectives.shard_world_size)
    return [_plan_buffers(spec, placement, loads, collectives) for spec in specs]


def _plan_buffers(
    spec: UnitSpec, placement: Placement, loads: OwnerLoads, collectives: Collectives
) -> list[BufferPlan]:
    check_split(spec.params, placement.param_dtype)
    # One flat buffer per dtype and trainability: a collective moves one dtype, and a frozen buffer needs no gradients,
    # masters or second gather after a step. Split ones apart, as norms count their parts on every rank of their axis,
    # and those that are split in the data group have other shards.
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
        if trainable:  # parameters of one param group side by side: fewer ranges to step
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
    """Raises UsageError: the optimizer of a split parameter needs it whole."""
    raise UsageError(
        f"parameter {fqn}",
        expected="to be whole, since its optimizer looks at whole tensors",
        got="one that tensor or expert parallelism splits",
        fix="use an elementwise optimizer, such as AdamW, for the parameters that are split",
    )


def build_units(
    specs: Sequence[UnitSpec],
    plans: Sequence[Sequence[BufferPlan]],
    placement: Placement,
    collectives: Collectives,
    tiers: TierSet,
) -> list[ParamUnit]:
    """One ParamUnit per spec, with the weights of rank 0.

    Every unit is sharded (where the plan says so), and its masters are in their tier, before the next is built, so
    the peak above the model itself is one unit.

    Args:
        plans: of each spec, by `plan_buffers`.
        tiers: where shards and masters go; stores to them may still be running afterwards.
    """
    return [
        _build_unit(spec, buffers, placement, collectives, tiers) for spec, buffers in zip(specs, plans, strict=True)
    ]


def _build_unit(
    spec: UnitSpec, plans: Sequence[BufferPlan], placement: Placement, collectives: Collectives, tiers: TierSet
) -> ParamUnit:
    buffers = []
    for plan in plans:
        # In the widest dtype of the parameters and not that of the buffer: fp32 masters take the bits that bf16 drops.
        source = initial_values(plan.layout, plan.params, placement.device, collectives, spec.name)
        buffer = FlatBuffer(
            plan.layout,
            plan.params,
            dtype=plan.dtype,
            device=placement.device,
            rank=plan.rank,
            trainable=plan.trainable,
            persistent=plan.persistent,
            key=plan.key,
            watches_uses=True,
        )
        buffer.adopt(source, *tiers.storages(plan, buffer.place()))
        buffers.append(buffer)
    unit = ParamUnit(spec.name, spec.modules, buffers, collectives)
    if not unit.persistent:
        unit.reshard()
    return unit


def initial_values(
    layout: FlatLayout, params: Sequence[nn.Parameter], device: torch.device, collectives: Collectives, name: str
) -> Tensor:
    """(N,) the parameters end to end in the widest of their dtypes: no bit is lost before the master is made.

    Those of rank 0, on every rank. What `zero.Init` sharded is gathered, and is released from its registry. (all ranks)

    Args:
        name: of their unit, for the label of the broadcast.
    """
    dtype = params[0].dtype
    for param in params[1:]:
        dtype = torch.promote_types(dtype, param.dtype)
    source = torch.zeros(layout.numel, dtype=dtype, device=device)
    # Parameters of one unit of `zero.Init` are next to each other: each unit is gathered once, one at a time.
    previous: ParamHandle | None = None
    for slot, param in zip(layout.slots, params, strict=True):
        handle = _initialized(param)
        if (handle and handle.unit) is not (previous and previous.unit):
            if previous is not None:
                previous.registry.release([previous.unit])
            if handle is not None:
                handle.registry.acquire([handle.unit])
            previous = handle
        value = local(param)
        if slot.split is not None:
            if handle is None:  # the parts of one rank's values: each rank may have drawn others
                value = value.to(device, copy=True).contiguous()
                collectives.everyone.broadcast(value.view(-1), 0, f"initial weights of {name}")
            value = slot.split.part(value)
        source[slot.start : slot.end].view(slot.shape).copy_(value)
    if previous is not None:
        previous.registry.release([previous.unit])
    # Gathered values are the same on all ranks already, and parts were cut from such.
    if layout.slots[0].split is None and any(_initialized(param) is None for param in params):
        collectives.everyone.broadcast(source, 0, f"initial weights of {name}")
    _take_over(params)
    return source


def _initialized(param: nn.Parameter) -> ParamHandle | None:
    """The handle of a parameter that `zero.Init` sharded; None for an ordinary one."""
    handle = handle_of(param)
    return handle if handle is not None and handle.registry.training is None and not handle.replaced else None


def _take_over(params: Sequence[nn.Parameter]) -> None:
    """Removes parameters whose values have been copied from their registry; units without any are freed."""
    for param in params:
        # From here on the parameter is the engine's: its dtype is that of its buffer.
        forget_cast(param)
        handle = handle_of(param)
        if handle is not None and handle.registry.training is None:
            handle.registry.drop([param])


def _is_all_nan(param: nn.Parameter) -> bool:
    """Whether all values are NaN; reads more than the first only if that is."""
    if param.is_meta or not param.is_floating_point() or not param.numel():
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a `ShardedParameter` would refuse to be read
        data = param.detach()
        return bool(data[(0,) * data.dim()].isnan()) and bool(data.isnan().all())


def warn_unoptimized(fqns: Sequence[str]) -> None:
    """Warns of trainable parameters that no optimizer updates."""
    if fqns:
        logger.log(
            logging.WARNING,
            "%d trainable parameters are in no param group of the optimizer, so they stay as they are: %s",
            len(fqns),
            listed(fqns, most=5),
        )
