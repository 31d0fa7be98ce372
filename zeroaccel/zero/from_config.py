"""Derives settings of the engine, rules for a model's tensors, and checks from a config.

Pure functions of a model and its `Config`; they allocate nothing. `check_training` serves `zeroaccel config validate`:
it builds the optimizer and the schedule that the config names over a few numbers, with the calls of `initialize`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroaccel.config import BatchSizes, Config, ShardPlan, TierPlan
from zeroaccel.config.shard_plan import UpdateTime
from zeroaccel.errors import ConfigError, UsageError, listed
from zeroaccel.logs import log_once
from zeroaccel.optim.lr_schedules import build_scheduler
from zeroaccel.optim.optimizer_factory import build_optimizer
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.zero.build_units import Placement
from zeroaccel.zero.grad_reducer import ReduceRules
from zeroaccel.zero.layout import Split
from zeroaccel.zero.precision import (
    BufferDtypes,
    DynamicLossScale,
    LossScale,
    StaticLossScale,
    kept_in_fp32,
    not_autocast,
)
from zeroaccel.zero.prefetch import PrefetchLimits
from zeroaccel.zero.tensor_subclasses import scales_of
from zeroaccel.zero.wrap_policy import LeafRules, UnitSpec, group_parameters


@dataclass(frozen=True)
class LoopRules:
    """How the caller's loop drives the engine; the defaults are those of `zeroaccel.initialize`.

    Attributes:
        casts_inputs: forward casts floating inputs to the precision; otherwise only fp16 with `auto_cast` does so.
        divides_direct: the engine divides a plain `loss.backward()` by the accumulation steps, as `engine.backward`.
        counts_micro_steps: the engine counts micro-steps to find the boundary; otherwise the loop calls
            `decide_boundary`, and every step is a boundary until it does.
        empty_when_sharded: `state_dict()` returns tensors of shape (0,) for sharded parameters, with a warning;
            otherwise it raises EngineStateError.
        saves_within_accumulation: `save_checkpoint` inside an accumulation omits the gradients so far, with a warning;
            otherwise it raises EngineStateError.
        resumes: the loop saves states in the memory of the machines and resumes from them; otherwise `checkpoint.peer`
            in the config is an error.
    """

    casts_inputs: bool = False
    divides_direct: bool = True
    counts_micro_steps: bool = True
    empty_when_sharded: bool = False
    saves_within_accumulation: bool = False
    resumes: bool = False


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine, all resolved.

    Attributes:
        plan: which of optimizer states, gradients and parameters are sharded.
        micro_batch_size: samples per rank and forward.
        data_parallel_size: number of ranks that see different samples.
        accumulation: backwards per step.
        managed_accumulation: False makes every `step()` a boundary.
        clipping: maximal global gradient norm; 0 disables clipping.
        compute_norm: compute the norm even if clipping does not need it.
        skip_overflow: skip steps whose gradients are not finite.
        loss_scaled: losses are scaled for fp16, so a plain `loss.backward()` would miss the scale.
        input_dtype: dtype to which forward casts floating inputs; None leaves them unchanged.
        gather_numel: elements of all-gathers in flight after a step (`allgather_bucket_size`).
        sub_group_numel: elements per update of optimizers that need their gradients in fp32.
        update_during: time at which masters on the host are updated.
        limits: bounds on unsharded and prefetched parameters.
        rules: rules for summing gradients.
        loop: how the caller's loop drives the engine.
    """

    plan: ShardPlan
    micro_batch_size: int
    accumulation: int
    data_parallel_size: int
    managed_accumulation: bool = True
    clipping: float = 0.0
    compute_norm: bool = True
    skip_overflow: bool = True
    loss_scaled: bool = False
    input_dtype: torch.dtype | None = None
    gather_numel: int = 500_000_000
    sub_group_numel: int = 10**9
    update_during: UpdateTime = "step"
    limits: PrefetchLimits = field(default_factory=PrefetchLimits)
    rules: ReduceRules = field(default_factory=ReduceRules)
    loop: LoopRules = field(default_factory=LoopRules)


_DEVICE_SUB_GROUP_NUMEL = 50_000_000
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(name: str | None) -> torch.dtype | None:
    """Returns the dtype that a config names."""
    return None if name is None else DTYPES[name]


def autocast_of(settings: Config) -> torch.dtype | None:
    """Returns the dtype of `torch_autocast`; None if it is not enabled."""
    return DTYPES[settings.torch_autocast.dtype] if settings.torch_autocast.enabled else None


@dataclass(frozen=True)
class ModelRules:
    """The config's rules for the tensors of a model.

    Attributes:
        buffer_dtypes: name -> dtype of the floating-point buffers.
        units: the parameters by unit; a unit shares its collectives.
        placement: dtype, device and sharding in which parameters are stored.
    """

    buffer_dtypes: Mapping[str, torch.dtype]
    units: Sequence[UnitSpec]
    placement: Placement


def model_rules_of(
    model: nn.Module,
    plain: Callable[[str], str],
    settings: Config,
    plan: ShardPlan,
    residences: TierPlan,
    device: torch.device,
    groups: Mapping[int, int],
    kinds: Sequence[OptimizerKind],
    splits: Mapping[int, Split],
) -> ModelRules:
    """Decides how the tensors of a model are grouped and stored; call it before parameters are cast.

    Args:
        plain: result of `plain_names` for the model.
        groups: id of a trained parameter -> index of its param group.
        kinds: kind of optimizer per param group; empty without an optimizer.
        splits: id of a parameter -> its split by tensor parallelism.

    Raises:
        UsageError: the config asks for codes, but the model has no frozen matrix that can be quantized.
    """
    zero, precision, autocast = settings.zero_optimization, DTYPES[settings.precision], autocast_of(settings)
    # The quantized format of frozen weights; "" if they keep their dtype.
    codes = _code_format(model, settings) or (
        "int8" if plan.params and zero.zero_quantized_nontrainable_weights else ""
    )
    in_fp32 = _fp32_modules(model, settings, plain)
    fp32 = kept_in_fp32(model, in_fp32, precision, plain)
    buffer_dtypes = BufferDtypes(precision, dtype_of(settings.data_types.buffer_dtype), frozenset(fp32)).of(model)
    dtype, fp32_params = precision, fp32 if autocast is None else kept_in_fp32(model, in_fp32, autocast, plain)
    if autocast is not None and settings.precision == "fp32":
        dtype = autocast
        where = settings.where("torch_autocast.lower_precision_safe_modules")
        fp32_params |= not_autocast(model, settings.torch_autocast.lower_precision_safe_modules, where, plain)
    leaf = zero.leaf_module
    units = group_parameters(
        model,
        rules=LeafRules(
            tuple(leaf.classes), tuple(leaf.names), tuple(leaf.name_suffixes), zero.module_granularity_threshold
        ),
        # Without sharded parameters every unit is persistent; a unit of small ones would only add a collective.
        persistence_threshold=zero.param_persistence_threshold if plan.params else 0,
        model_persistence_threshold=zero.model_persistence_threshold,
        coded=_coded(model, settings, fp32, plain) if codes else frozenset(),
        plain=plain,
    )
    placement = Placement(
        dtype,
        frozenset(fp32_params),
        device,
        plan,
        groups,
        residences.param != "device",
        codes,
        frozenset(index for index, kind in enumerate(kinds) if kind is OptimizerKind.PER_TENSOR),
        OptimizerKind.COUPLED in kinds,
        splits,
    )
    return ModelRules(buffer_dtypes, units, placement)


def _fp32_modules(model: nn.Module, settings: Config, plain: Callable[[str], str]) -> Sequence[str]:
    """Returns keep_in_fp32_modules; warns of entries that fit no module of this rank, as with pipeline stages."""
    entries = settings.data_types.keep_in_fp32_modules
    found = (
        [] if entries == "auto" else [each for each in entries if not kept_in_fp32(model, [each], torch.float32, plain)]
    )
    if found:
        log_once(
            logging.WARNING,
            f"{settings.where('data_types.keep_in_fp32_modules')}: no parameter or buffer of this rank's model is in a "
            f"module {listed(found)}; an entry is one or several whole names of a path, such as lora_A or model.norm",
        )
    return entries


def _code_format(model: nn.Module, settings: Config) -> str:
    """Returns the format that the engine encodes frozen matrices in; "" for none, and for codes of a checkpoint.

    Raises:
        UsageError: the config keeps a checkpoint's codes, and the model has none.
    """
    format = settings.zero_optimization.frozen_weights
    if format != "codes":
        return format or ""
    if not any(scales_of(param) is not None for param in model.parameters()):
        raise UsageError(
            settings.where("zero_optimization.frozen_weights"),
            expected="a model with codes: from_pretrained keeps those of FP8 and MXFP4 checkpoints",
            got='"codes", and a model without any',
            fix="load the model after TrainingArguments or Accelerator, whose config then applies to from_pretrained; "
            'or set "nf4", "int8" or "mxfp4", which encode any frozen matrices',
        )
    return ""


def _coded(model: nn.Module, settings: Config, fp32: Container[str], plain: Callable[[str], str]) -> frozenset[int]:
    """Returns id() of the parameters that are stored as codes: frozen, with two dimensions or more.

    Excludes embeddings (unless DeepSpeed's key asks for codes), parameters that stay in fp32, and a library's codes.

    Raises:
        UsageError: the config asks for codes, but the model has no frozen matrix that can be quantized.
    """
    explicit = settings.zero_optimization.frozen_weights is not None
    rows = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters() if explicit}
    matrices = {
        fqn: param
        for fqn, param in ((plain(name), param) for name, param in model.named_parameters())
        if param.dim() > 1 and param.is_floating_point() and id(param) not in rows and fqn not in fp32
    }
    coded = frozenset(id(param) for param in matrices.values() if not param.requires_grad and scales_of(param) is None)
    if explicit and not coded:
        where = f"parameter {next(iter(matrices), '')}: {settings.where('zero_optimization.frozen_weights')}"
        if any(scales_of(param) is not None for param in model.parameters()):
            raise UsageError(
                where,
                expected="frozen matrices that no library has quantized",
                got="matrices that are either trained or already quantized by a library",
                fix="remove the key, or load the base unquantized",
            )
        raise UsageError(
            where,
            expected="frozen matrices, because quantized codes cannot be trained",
            got="a model whose matrices all have requires_grad=True",
            fix="call requires_grad_(False) on the base and train adapters (peft.get_peft_model), or remove the key",
        )
    return coded


def engine_settings_of(
    settings: Config,
    plan: ShardPlan,
    batch: BatchSizes,
    world_size: int,
    data_parallel_size: int,
    loop: LoopRules,
    *,
    has_streams: bool,
    overlaps: bool,
) -> EngineSettings:
    """Returns the engine's part of the config.

    Args:
        world_size: number of ranks whose gradients are averaged.
        data_parallel_size: number of these ranks that see different samples.
        has_streams: the device has streams.
        overlaps: reductions overlap with backward.
    """
    zero = settings.zero_optimization
    # The mean is a division by W, split in two: before the sum, so that fp16 sums do not overflow, and after it, so
    # that small gradients do not vanish (DeepSpeed's `prescale_gradients` and `gradient_predivide_factor`).
    predivide = float(world_size) if settings.prescale_gradients else settings.gradient_predivide_factor
    mean = settings.gradient_allreduce_op == "mean"
    accumulation = settings.data_types.grad_accum_dtype
    # DeepSpeed casts inputs under fp16 with `auto_cast` only; the Accelerator casts them in every mixed precision.
    casts = (settings.fp16.enabled and settings.fp16.auto_cast) or (loop.casts_inputs and settings.precision != "fp32")
    return EngineSettings(
        plan=plan,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        data_parallel_size=data_parallel_size,
        managed_accumulation=settings.managed_gradient_accumulation,
        clipping=settings.gradient_clipping,
        compute_norm=zero.compute_grad_norm,
        # Scaling cannot overflow bf16 and fp32, so an infinity there is an error of the training and must show.
        skip_overflow=settings.scales_loss or (settings.bf16.enabled and settings.bf16.check_grad_overflow),
        loss_scaled=settings.scales_loss,
        input_dtype=DTYPES[settings.precision] if casts else None,
        gather_numel=zero.allgather_bucket_size,
        sub_group_numel=_sub_group_numel(settings, has_streams=has_streams),
        update_during=zero.offload_optimizer.update_during if zero.offload_optimizer is not None else "step",
        limits=PrefetchLimits(
            zero.prefetch_bucket_size,
            zero.max_live_parameters,
            zero.max_reuse_distance,
            next_always="max_live_parameters" not in zero.model_fields_set,
        ),
        rules=ReduceRules(
            dtype=dtype_of(settings.communication_data_type),
            accumulation_dtype=torch.float32 if accumulation is None else DTYPES[accumulation],
            predivide=predivide,
            postscale=predivide / world_size if mean else predivide,
            bucket_numel=zero.reduce_bucket_size,
            overlap=overlaps,
        ),
        loop=loop,
    )


def _sub_group_numel(settings: Config, *, has_streams: bool) -> int:
    zero = settings.zero_optimization
    # The format's default of 10^9 needs 4 GB of fp32 gradients, too much for most GPUs; an explicit value takes effect.
    if has_streams and "sub_group_size" not in zero.model_fields_set:
        return min(zero.sub_group_size, _DEVICE_SUB_GROUP_NUMEL)
    return zero.sub_group_size


def loss_scale_of(settings: Config) -> LossScale:
    """Returns the loss scale: fp16 needs one, since its smallest normal number is 6e-5; bf16 has fp32's exponents."""
    fp16 = settings.fp16
    if not settings.scales_loss:
        return LossScale()
    if not fp16.enabled:  # autocast, with the defaults of torch.amp.GradScaler
        return DynamicLossScale(value=65536.0, window=2000, hysteresis=1)
    if fp16.loss_scale:
        return StaticLossScale(fp16.loss_scale)
    return DynamicLossScale(
        value=float(2**fp16.initial_scale_power),
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


# Values for required arguments that are "auto" until the whole job is known.
_STAND_INS: Mapping[str, Any] = {"total_num_steps": 1000, "warmup_num_steps": 10, "lr": 1e-3}


@contextmanager
def addressed(config: Config) -> Iterator[None]:
    """Adds the file and line of a key of `config` to errors that begin with the path of the key.

    Raises:
        ConfigError: from inside, with "optimizer.params.lr: ..." as "ds_config.json:7:9: optimizer.params.lr: ...".
    """
    try:
        yield
    except ConfigError as error:
        path, colon, rest = str(error).partition(":")
        key, space, more = path.partition(" ")
        where = config.where(key) if key.partition(".")[0] in ("optimizer", "scheduler") else key
        if where == key:
            raise
        raise ConfigError(f"{where}{space}{more}{colon}{rest}") from error


def check_training(config: Config) -> None:
    """Checks the optimizer and the schedule that a config names; accepts "auto" among their arguments.

    Raises:
        ConfigError: all errors that `initialize` would raise for them.
    """
    # All errors at once: users validate a config before they queue a job for hours.
    lines: list[str] = []
    optimizer: Optimizer | None = None
    try:
        optimizer = _optimizer(config)
    except ConfigError as error:
        lines.append(str(error))
    try:
        _check_schedule(config, optimizer)
    except ConfigError as error:
        lines.append(str(error))
    lines += _batch_sizes(config)
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError("\n  ".join([f"{len(lines)} settings are wrong", *lines]))


def _optimizer(config: Config) -> Optimizer | None:
    section = config.optimizer
    if section is None or section.type is None:
        return None
    params = _with_stand_ins(config, "optimizer", section.params)
    if config.bf16.bf16_optimizer_states:
        params.setdefault("moments_dtype", "bf16")
    model = nn.Linear(4, 4, bias=False)
    with addressed(config):
        return build_optimizer(section.type, params, list(model.parameters()), model)


def _check_schedule(config: Config, optimizer: Optimizer | None) -> None:
    section = config.scheduler
    if section is None:
        return
    params = _with_stand_ins(config, "scheduler", section.params)
    groups = max((len(value) for value in params.values() if isinstance(value, (list, tuple))), default=1)
    stand_in = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(max(groups, 1))])
    one_group = groups == 1 and optimizer is not None
    with addressed(config):
        try:
            build_scheduler(section.type, params, optimizer if one_group and optimizer is not None else stand_in)
        except UsageError as error:
            raise ConfigError(str(error)) from error


def _with_stand_ins(config: Config, section: str, params: Mapping[str, Any]) -> dict[str, Any]:
    start = f"{section}.params."
    unknown = {path.removeprefix(start) for path in config.unresolved if path.startswith(start)}
    return {**{name: _STAND_INS[name] for name in unknown if name in _STAND_INS}, **params}


def _batch_sizes(config: Config) -> list[str]:
    """Returns the errors in the batch sizes that hold on any number of ranks."""
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    per_rank = (micro or 1) * (steps or 1)
    if train is None or train % per_rank == 0:
        return []
    factors = [
        f"{name} {value}"
        for name, value in (("train_micro_batch_size_per_gpu", micro), ("gradient_accumulation_steps", steps))
        if value is not None
    ]
    fix = f"set it to a multiple of {per_rank}, the number of samples that each rank takes per step"
    return [
        str(
            ConfigError(f"{config.where('train_batch_size')}: {train} is no multiple of {' * '.join(factors)}", fix=fix)
        )
    ]
