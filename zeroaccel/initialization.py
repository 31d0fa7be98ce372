"""The engine face: one call from a model and a DeepSpeed-format config to an `Engine`.

Resolves, in order: config, process group, optimizer, param groups, units, scheduler, monitors. Everything that can be
wrong on one rank only is agreed on by all ranks before it raises.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from zeroaccel.activations import Recomputation
from zeroaccel.checkpoint.checkpointer import CheckpointingEngine, CheckpointSettings
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.environment import check_own_variables, core_set, fair_threads, omp_threads_chosen, usable_cores
from zeroaccel.comm.hierarchical import arrange
from zeroaccel.comm.mesh_layout import data_groups, shard_size_of
from zeroaccel.comm.topology import Topology, init_process_group
from zeroaccel.config import BatchSizes, Config, Fact, ShardPlan, load_config, solve_batch, tier_plan
from zeroaccel.config import comm_plan as comm_plan
from zeroaccel.config import shard_plan as shard_plan
from zeroaccel.config.normalize import UnknownKeys
from zeroaccel.data import build_dataloader
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.logs import log_once, logger, set_log_level
from zeroaccel.ops.coupled import CoupledOptimizer, Reductions
from zeroaccel.ops.dispatch import use_threads
from zeroaccel.optim.lr_schedules import build_scheduler
from zeroaccel.optim.optimizer_factory import build_optimizer
from zeroaccel.optim.optimizer_kinds import OptimizerKind, OptimizerKinds, check_steppable, classify
from zeroaccel.optim.rank_facts import training_facts
from zeroaccel.telemetry.step_report import StepReport
from zeroaccel.telemetry.trackers import build_monitors
from zeroaccel.telemetry.verification import RecordingReport, Verification, verification
from zeroaccel.zero.build import (
    build_units,
    check_dtypes,
    check_parameters,
    check_same,
    group_index,
    plan_units,
    warn_unoptimized,
)
from zeroaccel.zero.from_config import (
    DTYPES,
    addressed,
    buffer_dtypes_of,
    engine_settings_of,
    facts_from_model,
    loss_scale_of,
    placement_of,
    unit_specs_of,
)
from zeroaccel.zero.hybrid_step import check_update_time, share_updates
from zeroaccel.zero.precision import broadcast_buffers, cast_buffers
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.placement import OffloadRules, TierSet

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["initialize"]

ConfigSource = Mapping[str, Any] | str | os.PathLike[str] | Config
OptimizerSource = Optimizer | Callable[[list[nn.Parameter]], Optimizer]
SchedulerSource = Any


def initialize(
    model: nn.Module,
    optimizer: OptimizerSource | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: Any = None,
    lr_scheduler: SchedulerSource | None = None,
    config: ConfigSource | None = None,
    *,
    collate_fn: Callable[..., Any] | None = None,
    collectives: Collectives | None = None,
    mesh: DeviceMesh | None = None,
    engine_type: type[CheckpointingEngine] = CheckpointingEngine,
    cast_inputs: bool = False,
    optimizer_kind: OptimizerKind | str | None = None,
    unknown_keys: UnknownKeys = "standard",
) -> tuple[CheckpointingEngine, Any, DataLoader[Any] | None, Any]:
    """Makes an engine. (all ranks, with the same arguments)

    Args:
        model: its parameters keep their objects, shapes and names; their storage moves into the engine.
        optimizer: an optimizer over the model's parameters, or a callable that makes one from them. Absent, the
            config's `optimizer` section; absent too, the engine is for inference.
        model_parameters: parameters or param groups for the config's optimizer; all trainable ones by default.
        training_data: a dataset to make a loader for.
        lr_scheduler: a scheduler, or a callable that makes one from the optimizer. Absent, the config's section.
        config: DeepSpeed-format JSON as a dict, path or text. "auto" bucket sizes follow from the model's hidden size.
        collate_fn: for the loader of `training_data`.
        collectives: how ranks talk; a `RecordingCollectives` counts the traffic.
        mesh: which ranks see different samples: one axis, e.g. `mesh["dp"]` of one whose other axis splits the model,
            or two, (replicas, shards). By default all ranks do.
        cast_inputs: cast floating inputs of forward to the precision; without it that happens under fp16 with
            `auto_cast` only.
        engine_type: the class of the engine, for faces that add calls to it.
        optimizer_kind: "elementwise", "per_tensor" or "coupled", what the optimizer's rule looks at, where the engine
            is not to find it out by trying. Over `optimizer.kind` of the config.
        unknown_keys: what unknown keys of the config are, see `load_config`.

    Returns:
        (engine, optimizer, dataloader, lr_scheduler); what there is none of is None.

    Raises:
        ConfigError: the config is wrong or contradicts the arguments.
        UsageError: the model or the optimizer does not fit.

    Example:
        >>> import torch
        >>> import zeroaccel
        >>> config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> engine, optimizer, _, _ = zeroaccel.initialize(model, optimizer, config=config)
        >>> loss = engine(torch.randn(4, 8)).square().mean()
        >>> loss = engine.backward(loss)
        >>> engine.step()
    """
    topology = init_process_group()
    collectives = collectives or Collectives(topology)
    _divide_cores(topology, collectives)
    mesh_groups = None if mesh is None else data_groups(mesh, collectives)
    world_size = collectives.world_size if mesh_groups is None else len(mesh_groups[0])
    with agreed(collectives, "initialize: config"):
        check_own_variables()
        if not isinstance(model, nn.Module):
            raise UsageError("initialize(model)", expected="a torch.nn.Module", got=type(model).__name__)
        check_parameters(model)
        ranks = Fact(world_size, "the process group" if mesh is None else "initialize(mesh)")
        known = replace(facts_from_model(model), world_size=ranks, training=optimizer is not None)
        settings = load_config({} if config is None else config, facts=known, unknown_keys=unknown_keys)
        _apply_process_settings(settings)
        if (order := verification()) is not None:
            settings = order.config(settings, _batch(settings, collectives.world_size, training=False).accumulation)
        plan = shard_plan(settings)
        built = _optimizer(model, optimizer, model_parameters, settings)
        batch = _batch(settings, world_size, training=built is not None)
        check_dtypes(model, DTYPES[settings.precision])
        names = {id(param): fqn for fqn, param in model.named_parameters()}
        groups = group_index(built, names) if built is not None else {}
        if optimizer_kind is None and settings.optimizer is not None:
            optimizer_kind = settings.optimizer.kind
        kinds = None if built is None else _kinds(built, optimizer_kind, settings, plan)
        specs = unit_specs_of(model, settings, plan)
        engine_settings = engine_settings_of(settings, plan, batch, world_size, cast_inputs=cast_inputs)
        spread = comm_plan(settings, world_size, None if mesh is None else shard_size_of(mesh, settings))
        scheduler = _scheduler(lr_scheduler, settings, built)
        trains_by = training_facts(built, scheduler)
        monitors = build_monitors(settings, collectives.rank)
        recomputation = _recomputation(model, settings)
    residences = tier_plan(settings)
    placement = placement_of(
        model, settings, plan, groups, topology.device, residences, () if kinds is None else kinds.groups
    )
    lines = [*str(engine_settings).split(", "), str(spread), str(residences), f"optimizer_kind={optimizer_kind!r}"]
    check_same(model, placement, lines, trains_by, collectives)
    collectives = arrange(collectives, spread, mesh_groups)

    if built is not None and kinds is not None and OptimizerKind.COUPLED in kinds.groups and plan.optimizer:
        _bind_reductions(built, collectives)
    cast_buffers(model, topology.device, buffer_dtypes_of(model, settings))
    broadcast_buffers(model, collectives)
    plans = plan_units(specs, placement, collectives.shard_world_size)
    with agreed(collectives, "initialize: offload"):
        rules = OffloadRules.of(settings, residences.param, residences.optimizer)
        tiers = TierSet(rules, list(chain(*plans)), built, collectives.shard_rank, topology.device)
        if built is not None and residences.optimizer != "device":
            section = f"{rules.where}.offload_optimizer"
            share_updates(built, rules.optimizer_section.ratio, topology.device, section)
            check_update_time(built, rules.optimizer_section.update_during, section)
    _open_tiers(tiers, collectives)
    try:
        units = build_units(specs, plans, placement, collectives, tiers)
        unused = [param for param in model.parameters() if param.requires_grad and id(param) not in groups]
        with agreed(collectives, "initialize: optimizer"):
            tiers.settle()
            shard = None
            if built is not None and kinds is not None:
                warn_unoptimized([names[id(param)] for param in unused])
                buffers = [buffer for unit in units for buffer in unit.buffers if buffer.trainable]
                keys = [plan.key for plan in chain(*plans) if plan.trainable]
                shard = ShardedOptimizer(
                    built,
                    kinds,
                    groups,
                    buffers,
                    replicated=not plan.optimizer,
                    sub_group_numel=settings.zero_optimization.sub_group_size,
                    states=tiers.states,
                    keys={id(buffer): key for buffer, key in zip(buffers, keys, strict=True)},
                    copies=tiers.copies,
                )
            loader = _loader(training_data, settings, batch, collectives, collate_fn)
    except Exception:
        tiers.close()
        raise
    engine = engine_type(
        model,
        units,
        collectives,
        engine_settings,
        optimizer=shard,
        lr_scheduler=scheduler,
        loss_scale=loss_scale_of(settings),
        # Gradients that only pass through a model for inference, on their way to another, would pile up in it.
        discarded=unused,
        tiers=tiers,
        report=_report(
            order,
            settings,
            device=topology.device,
            rank=collectives.rank,
            steps_per_print=settings.steps_per_print,
            wall_clock_breakdown=settings.wall_clock_breakdown,
            memory_breakdown=settings.memory_breakdown,
            monitors=monitors,
        ),
        config=settings.resolved,
        checkpoint=CheckpointSettings(
            background=settings.checkpoint.async_save,
            staging_nbytes=settings.checkpoint.staging_nbytes,
            keep_last=settings.checkpoint.keep_last,
            random_state=settings.checkpoint.save_random_state,
        ),
    )
    if built is not None:
        _let_modes_change_weights(built, engine)
    if recomputation is not None:
        recomputation.apply()
        engine.at_destroy(recomputation.undo)
    if settings.disable_python_gc:
        gc.disable()
        engine.at_destroy(gc.enable)
    if settings.dump_state:
        logger.warning("%s", engine_settings)
    return engine, engine.optimizer, loader, scheduler


def _open_tiers(tiers: TierSet, collectives: Collectives) -> None:
    """All ranks open their tiers, or none. (all ranks)"""
    needs = collectives.gather_objects(tiers.needs(), "space for offload") if tiers.can_fail else []
    try:
        with agreed(collectives, "initialize: open the tiers"):
            tiers.open(list(chain(*needs)))
    except Exception:
        tiers.close()
        raise


def _recomputation(model: nn.Module, settings: Config) -> Recomputation | None:
    section = settings.activation_checkpointing
    return None if section == type(section)() else Recomputation(model, section)


def _divide_cores(topology: Topology, collectives: Collectives) -> None:
    """Gives the kernels this rank's part of the machine's cores, unless somebody said how many threads to use. (all)"""
    own = core_set()
    everybody = collectives.gather_objects(own, "cores")
    if omp_threads_chosen() or collectives.world_size != topology.world_size:
        return
    neighbours = next(node for node in topology.nodes if topology.rank in node)
    use_threads(fair_threads(usable_cores(), own, [everybody[rank] for rank in neighbours]))


def _apply_process_settings(settings: Config) -> None:
    if settings.log_level is not None:
        set_log_level(settings.log_level)
        for note in settings.notes:
            log_once(logging.INFO, note)  # those that were below the level when the config was loaded


def _optimizer(
    model: nn.Module, given: OptimizerSource | None, params: Iterable[Any] | None, settings: Config
) -> Optimizer | None:
    section = settings.optimizer
    named = section is not None and section.type is not None
    if settings.bf16.bf16_optimizer_states and (given is not None or not named):
        raise ConfigError(
            settings.where("bf16.bf16_optimizer_states"),
            expected="an optimizer section with Adam, AdamW, Lion or Adagrad, whose states it is about",
            got="an optimizer passed to initialize()" if given is not None else "none",
            fix="name the optimizer in the config, or remove the key",
        )
    if given is not None:
        if named:
            raise ConfigError(
                settings.where("optimizer"),
                expected="one optimizer",
                got="one in the config and one passed to initialize()",
                fix="remove the section or the argument",
            )
        made = given if isinstance(given, Optimizer) else given([p for p in model.parameters() if p.requires_grad])
        if not isinstance(made, Optimizer):
            raise UsageError("initialize(optimizer)", expected="a torch.optim.Optimizer", got=type(made).__name__)
        return made
    if section is None or section.type is None:
        return None
    chosen = list(params) if params is not None else [p for p in model.parameters() if p.requires_grad]
    _check_param_groups(model, chosen)
    params_of = dict(section.params)
    if settings.bf16.bf16_optimizer_states:
        params_of.setdefault("moments_dtype", "bf16")
    with addressed(settings):
        return build_optimizer(section.type, params_of, chosen, model)


def _kinds(
    optimizer: Optimizer, declared: OptimizerKind | str | None, settings: Config, plan: ShardPlan
) -> OptimizerKinds:
    """What the optimizer's rules look at, and whether this config can give it to them."""
    check_steppable(optimizer)
    kinds = classify(optimizer, declared)
    name, zero = type(optimizer).__name__, settings.zero_optimization
    if OptimizerKind.PER_TENSOR in kinds.groups:
        for key in ("zero_quantized_weights", "zero_quantized_gradients"):
            if plan.params and getattr(zero, key):
                raise ConfigError(
                    settings.where(f"zero_optimization.{key}"),
                    expected=f"false with optimizer {name}, which is stepped on whole tensors: {kinds.reason}",
                    got=True,
                    fix="set it to false; codes are for equal shards, and owners' shards differ in size",
                )
    if OptimizerKind.COUPLED not in kinds.groups:
        return kinds
    if plan.optimizer and not isinstance(optimizer, CoupledOptimizer):
        raise ConfigError(
            f"optimizer {name} at stage {zero.stage}: {kinds.reason}",
            expected="an optimizer that can be stepped on a part of the parameters",
            fix="use stage 0, where every rank has everything; or give the class a use_reductions() method "
            "(zeroaccel.CoupledOptimizer), by which its sums go over all shards",
        )
    needs_memory = {"data_types.master_weights": settings.data_types.master_weights == "residual"}
    tiers = tier_plan(settings)
    for key, residence in (("offload_param", tiers.param), ("offload_optimizer", tiers.optimizer)):
        needs_memory[f"zero_optimization.{key}.device"] = residence == "nvme"
    for key, is_wrong in needs_memory.items():
        if is_wrong:
            raise ConfigError(
                settings.where(key),
                expected=f"states in memory with optimizer {name}, which steps all parameters at once: {kinds.reason}",
                got='"residual"' if key.startswith("data") else '"nvme"',
                fix='use "fp32" and "cpu", or another optimizer',
            )
    return kinds


def _bind_reductions(optimizer: Optimizer, collectives: Collectives) -> None:
    """Lets the sums of a coupled optimizer go over all shards."""
    assert isinstance(optimizer, CoupledOptimizer), "a coupled optimizer on shards, and no way to give it sums"
    label = f"sums of {type(optimizer).__name__}"
    optimizer.use_reductions(
        Reductions(lambda tensor, op: collectives.all_reduce(tensor, op, label), counts=collectives.replica == 0)
    )


def _let_modes_change_weights(optimizer: Optimizer, engine: CheckpointingEngine) -> None:
    """`optimizer.train()` and `.eval()` of classes that train and evaluate with different weights go by the engine."""
    for mode in ("train", "eval"):
        own = getattr(type(optimizer), mode, None)
        if callable(own):
            setattr(optimizer, mode, partial(engine.change_masters, partial(own, optimizer)))
            engine.at_destroy(partial(vars(optimizer).pop, mode, None))


def _check_param_groups(model: nn.Module, chosen: list[Any]) -> None:
    """A parameter in two groups, named; torch would say only that there is one."""
    names = {id(param): fqn for fqn, param in model.named_parameters()}
    seen: dict[int, int] = {}
    for index, group in enumerate(item for item in chosen if isinstance(item, dict)):
        held = group["params"]
        for param in [held] if isinstance(held, torch.Tensor) else (group.update(params=list(held)) or group["params"]):
            if seen.setdefault(id(param), index) != index:
                raise ConfigError(
                    f"parameter {names.get(id(param), '(not of this model)')}",
                    expected="to be in one param group",
                    got=f"groups {seen[id(param)]} and {index}",
                    fix="remove it from one of them",
                )


def _report(order: Verification | None, settings: Config, **report: Any) -> StepReport:
    if order is None:
        return StepReport(**report)
    return RecordingReport(order, stage=settings.zero_optimization.stage, **report)


def _batch(settings: Config, world_size: int, *, training: bool) -> BatchSizes:
    given = settings.train_batch_size or settings.train_micro_batch_size_per_gpu
    if not training and not given:
        return BatchSizes(train=world_size, micro=1, accumulation=1)
    return solve_batch(settings, world_size)


def _scheduler(given: SchedulerSource | None, settings: Config, optimizer: Optimizer | None) -> Any:
    section = settings.scheduler
    if given is not None and section is not None:
        raise ConfigError(
            settings.where("scheduler"),
            expected="one scheduler",
            got="one in the config and one passed to initialize()",
            fix="remove the section or the argument",
        )
    if optimizer is None:
        if given is not None:
            raise UsageError("initialize(lr_scheduler)", expected="an optimizer to schedule", got=None)
        if section is not None:  # the file of a training that is evaluated
            logger.warning(
                "%s is left aside: there is no optimizer to schedule, so this engine is for inference",
                settings.where("scheduler"),
            )
        return None
    if section is not None:
        with addressed(settings):
            return build_scheduler(section.type, dict(section.params), optimizer)
    is_made = hasattr(given, "step") and not isinstance(given, type)
    made = given if given is None or is_made else given(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise UsageError(
            "initialize(lr_scheduler)",
            expected="a schedule that the engine can move on by itself",
            got="ReduceLROnPlateau, which needs a metric at each step",
            fix="leave it out, and step it in the training loop with a metric that is the same on every rank",
        )
    return made


def _loader(
    data: Any,
    settings: Config,
    batch: BatchSizes,
    collectives: Collectives,
    collate_fn: Callable[..., Any] | None,
) -> DataLoader[Any] | None:
    if data is None:
        return None
    return build_dataloader(
        data,
        batch.micro,
        collectives.rank,
        collectives.world_size,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
    )
