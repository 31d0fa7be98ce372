"""From a checked config to what the engine is built with: units, dtypes, placement, settings, the scale of losses.

Pure functions of a model and its `Config`; nothing is allocated. `initialization` builds with them, and the estimate
does so without values, so that the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zeroaccel.config import BatchSizes, Config, ShardPlan, TierPlan, overlaps_communication
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.zero.build import Placement
from zeroaccel.zero.engine import EngineSettings
from zeroaccel.zero.grad_reducer import ReduceRules
from zeroaccel.zero.module_buffers import BufferDtypes
from zeroaccel.zero.precision import DynamicLossScale, LossScale, StaticLossScale, kept_in_fp32
from zeroaccel.zero.prefetch import PrefetchLimits
from zeroaccel.zero.wrap_policy import LeafRules, UnitSpec, group_parameters

__all__ = [
    "DTYPES",
    "buffer_dtypes_of",
    "dtype_of",
    "engine_settings_of",
    "loss_scale_of",
    "placement_of",
    "unit_specs_of",
]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype behind a name of the config."""
    return None if name is None else DTYPES[name]


def unit_specs_of(model: nn.Module, settings: Config, plan: ShardPlan) -> list[UnitSpec]:
    """Which parameters travel together."""
    zero = settings.zero_optimization
    leaf = zero.leaf_module
    rules = LeafRules(
        tuple(leaf.classes), tuple(leaf.names), tuple(leaf.name_suffixes), zero.module_granularity_threshold
    )
    return group_parameters(
        model,
        rules=rules,
        persistence_threshold=zero.param_persistence_threshold if plan.params else 0,
        model_persistence_threshold=zero.model_persistence_threshold,
    )


def placement_of(
    model: nn.Module,
    settings: Config,
    plan: ShardPlan,
    groups: Mapping[int, int],
    device: torch.device,
    residences: TierPlan,
    kinds: Sequence[OptimizerKind] = (),
) -> Placement:
    """In which dtype and where parameters live.

    Args:
        groups: id of a trained parameter -> index of its param group.
        kinds: of each param group; none without an optimizer.
    """
    fp32 = kept_in_fp32(model, settings.data_types.keep_in_fp32_modules)
    offloads_params = residences.param != "device"
    packs_frozen = plan.params and settings.zero_optimization.zero_quantized_nontrainable_weights
    return Placement(
        DTYPES[settings.precision],
        frozenset(fp32),
        device,
        plan,
        groups,
        offloads_params,
        packs_frozen,
        frozenset(index for index, kind in enumerate(kinds) if kind is OptimizerKind.PER_TENSOR),
        OptimizerKind.COUPLED in kinds,
    )


def buffer_dtypes_of(model: nn.Module, settings: Config) -> dict[str, torch.dtype]:
    """Name -> dtype of the model's floating-point buffers; to be asked before parameters are cast."""
    fp32 = frozenset(kept_in_fp32(model, settings.data_types.keep_in_fp32_modules))
    return BufferDtypes(DTYPES[settings.precision], dtype_of(settings.data_types.buffer_dtype), fp32).of(model)


def engine_settings_of(
    settings: Config, plan: ShardPlan, batch: BatchSizes, world_size: int, *, cast_inputs: bool = False
) -> EngineSettings:
    """What the engine is told of the config.

    Args:
        cast_inputs: cast floating inputs of forward to the precision whatever it is.
    """
    zero = settings.zero_optimization
    predivide = float(world_size) if settings.prescale_gradients else settings.gradient_predivide_factor
    mean = settings.gradient_allreduce_op == "mean"
    accumulation = settings.data_types.grad_accum_dtype
    casts = (settings.fp16.enabled and settings.fp16.auto_cast) or (cast_inputs and settings.precision != "fp32")
    return EngineSettings(
        plan=plan,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        managed_accumulation=settings.managed_gradient_accumulation,
        clipping=settings.gradient_clipping,
        compute_norm=zero.compute_grad_norm,
        skip_overflow=settings.fp16.enabled or (settings.bf16.enabled and settings.bf16.check_grad_overflow),
        loss_scaled=settings.fp16.enabled,
        autocast_dtype=DTYPES[settings.precision] if casts else None,
        gather_numel=zero.allgather_bucket_size,
        update_during=zero.offload_optimizer.update_during if zero.offload_optimizer is not None else "step",
        limits=PrefetchLimits(zero.prefetch_bucket_size, zero.max_live_parameters, zero.max_reuse_distance),
        rules=ReduceRules(
            dtype=dtype_of(settings.communication_data_type),
            accumulation_dtype=torch.float32 if accumulation is None else DTYPES[accumulation],
            predivide=predivide,
            postscale=predivide / world_size if mean else predivide,
            bucket_numel=zero.reduce_bucket_size,
            overlap=overlaps_communication(settings),
        ),
    )


def loss_scale_of(settings: Config) -> LossScale:
    """How losses are scaled: under fp16 only."""
    fp16 = settings.fp16
    if not fp16.enabled:
        return LossScale()
    if fp16.loss_scale:
        return StaticLossScale(fp16.loss_scale)
    return DynamicLossScale(
        value=float(2**fp16.initial_scale_power),
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )
