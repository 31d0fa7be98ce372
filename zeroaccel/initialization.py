"""`zeroaccel.initialize`: one call from a model and a DeepSpeed-format config to an `Engine`.

Five stages: join the ranks, plan, compare the plans, build the units, assemble the engine. What can be wrong on one
rank only is agreed on by all ranks before it raises, so that no rank is left waiting in a collective.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from zeroaccel.activations import Recomputation
from zeroaccel.checkpoint.checkpointer import Checkpointer, CheckpointSettings
from zeroaccel.comm.agree import agreed, names_ranks
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.environment import check_own_variables, core_set, fair_threads, omp_threads_chosen, usable_cores
from zeroaccel.comm.hierarchical import arrange
from zeroaccel.comm.mesh_layout import AxisGroups, Groups, check_shard_size, data_groups, shard_size_of
from zeroaccel.comm.pipeline_group import PipelineGroup
from zeroaccel.comm.topology import RankGroup, Topology, connect, init_process_group, mesh_of, subgroup, track
from zeroaccel.config import (
    BatchSizes,
    Config,
    Fact,
    ShardPlan,
    TierPlan,
    comm_plan,
    load_config,
    shard_plan,
    solve_batch,
    tier_plan,
)
from zeroaccel.config.diagnostics import names_meant
from zeroaccel.config.document import read_document
from zeroaccel.config.launch.launch_sources import from_environment
from zeroaccel.config.normalize import UnknownKeys
from zeroaccel.config.parallel import AXES, ParallelConfig, PipelineConfig, with_config_axes
from zeroaccel.data import build_dataloader
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.logs import log_always, log_once, logger, set_log_level
from zeroaccel.offload.host_buffers import empty_on_host
from zeroaccel.ops.coupled import CoupledOptimizer, Reductions
from zeroaccel.ops.dispatch import use_threads
from zeroaccel.ops.shard_step import ShardOptimizer
from zeroaccel.optim.lr_schedules import build_scheduler
from zeroaccel.optim.optimizer_factory import build_optimizer
from zeroaccel.optim.optimizer_kinds import OptimizerKind, OptimizerKinds, check_steppable, classify
from zeroaccel.optim.rank_facts import training_facts
from zeroaccel.parallel.sequence import SequenceGroup
from zeroaccel.parallel.ulysses import UlyssesAttention
from zeroaccel.pipeline.model_cut import Stage, cut, own_params
from zeroaccel.pipeline.stage_check import check_stage, facts_of
from zeroaccel.telemetry.step_report import EventSink, StepReport
from zeroaccel.telemetry.trackers import build_monitors
from zeroaccel.telemetry.verification import RecordingReport, Verification, verification
from zeroaccel.zero.build import (
    build_units,
    check_dtypes,
    check_parameters,
    check_same,
    group_index,
    plan_units,
    refuse_split,
    warn_unoptimized,
)
from zeroaccel.zero.device_check import check_model_device
from zeroaccel.zero.engine import Engine, EngineParts
from zeroaccel.zero.from_config import (
    DTYPES,
    addressed,
    autocast_of,
    buffer_dtypes_of,
    engine_settings_of,
    facts_from_model,
    loss_scale_of,
    placement_of,
    unit_specs_of,
)
from zeroaccel.zero.hooks import check_not_compiled
from zeroaccel.zero.param_unit import ParamUnit
from zeroaccel.zero.precision import Autocast, broadcast_buffers, cast_buffers
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.step_trace import record_if_asked
from zeroaccel.zero.storage.placement import BufferPlan, OffloadRules, TierSet, check_update_time, share_updates
from zeroaccel.zero.tensor_parallel import SplitLayers
from zeroaccel.zero.wrap_policy import UnitSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["initialize"]

ConfigSource = Mapping[str, Any] | str | os.PathLike[str] | Config
OptimizerSource = Optimizer | Callable[[list[nn.Parameter]], Optimizer]
SchedulerSource = Any


@names_meant
@names_ranks
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
    parallel: ParallelConfig | None = None,
    pipeline: PipelineConfig | None = None,
    engine_type: type[Engine] = Engine,
    cast_inputs: bool = False,
    optimizer_kind: OptimizerKind | str | None = None,
    unknown_keys: UnknownKeys = "standard",
) -> tuple[Engine, Any, DataLoader[Any] | None, Any]:
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
        collectives: the communication backend; a `RecordingCollectives` counts the traffic.
        mesh: which ranks see different samples: one axis, e.g. `mesh["dp"]` of one whose other axis splits the model,
            or two, (replicas, shards). By default all ranks do.
        parallel: replicas, and ranks that share sequences or layers, by their numbers; instead of a mesh.
        pipeline: how the model is cut where `parallel` has stages; the engine is a `PipelineEngine` then, or with this
            argument alone.
        cast_inputs: cast floating inputs of forward to the precision; without it that happens under fp16 with
            `auto_cast` only.
        engine_type: the class of the engine, for frontends that add calls to it.
        optimizer_kind: "elementwise", "per_tensor" or "coupled", what the update of an element depends on, instead of
            a trial of the optimizer. Takes precedence over `optimizer.kind` of the config.
        unknown_keys: how unknown keys of the config are treated, see `load_config`.

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
    # 1. The ranks: which processes train together, on which cores and which axis of the mesh.
    ranks = _join_ranks(collectives, mesh, parallel, config, pipeline)

    # 2. The plan: all that can be decided, and be wrong, before a tensor moves. An error on one rank raises on all.
    with agreed(ranks.collectives, "initialize: config"):
        check_own_variables()
        _check_model(model)
        check_model_device(model, ranks.topology.device)
        known = replace(facts_from_model(model), world_size=ranks.samplers, training=optimizer is not None)
        settings = load_config({} if config is None else config, facts=known, unknown_keys=unknown_keys)
        _apply_process_settings(settings)
        # Of the whole model, whose layers a plan names, and before any of them are on other ranks.
        tensor_parallel = _split_layers(model, ranks)
        stage = _stage(model, ranks.pipeline, pipeline, tensor_parallel)
        optimizer, model_parameters = own_params(stage, optimizer, model_parameters)
        request = verification()
        if request is not None:  # `zeroaccel verify` trains a script once more, as plainly as gives the same numbers
            accumulation = _batch(settings, ranks.samplers.value, training=False).accumulation
            settings = request.config(settings, accumulation)
        job = _plan(model, optimizer, model_parameters, lr_scheduler, settings, ranks.samplers.value, optimizer_kind)
        _check_tensor_parallel(tensor_parallel, job)
        engine_settings = engine_settings_of(
            settings, job.plan, job.batch, ranks.world_size, ranks.samplers.value, cast_inputs=cast_inputs
        )
        communication = comm_plan(settings, ranks.world_size, _shard_size(ranks, mesh, settings))
        check_stage(stage, pipeline or PipelineConfig(), settings, engine_settings, job.kinds, job.groups)
        facts = training_facts(job.optimizer, job.scheduler)
        monitors = build_monitors(settings, ranks.collectives.rank)
        recomputation = _recomputation(model, settings)

    # 3. Agreement: the plans are compared rank by rank while the ranks still share one simple group; a difference that
    #    went unnoticed would show as a hang in some later collective. Then the groups of ZeRO++ and replicas are made.
    residences = tier_plan(settings)
    splits = {} if tensor_parallel is None else tensor_parallel.splits
    kinds = () if job.kinds is None else job.kinds.groups
    placement = placement_of(model, settings, job.plan, job.groups, ranks.topology.device, residences, kinds, splits)
    lines = [
        *str(engine_settings).split(", "),
        str(communication),
        str(residences),
        f"optimizer_kind={job.declared_kind!r}",
        *facts_of(stage, pipeline or PipelineConfig()),
    ]
    check_same(model, placement, lines, facts, ranks.collectives, part=0 if stage is None else stage.index)
    collectives = arrange(ranks.collectives, communication, ranks.mesh_groups, ranks.stages)
    job_ranks = collectives.everyone if ranks.stages is None else collectives.job
    # What stages call within themselves is no part of the history that all ranks have in common.
    recorder = collectives.flight_recorder
    if ranks.tensor_group is not None:
        collectives.tensor = Collectives(ranks.topology, ranks.tensor_group, recorder=recorder)
    sequences = SequenceGroup.of(ranks.topology, ranks.parallel.sp, stride=ranks.parallel.tp, recorder=recorder)
    _observe_axes(collectives, ranks, sequences)
    if job.optimizer is not None and OptimizerKind.COUPLED in kinds and job.plan.optimizer:
        _bind_reductions(job.optimizer, collectives)

    # 4. The units: tensors move from here on. Buffers first, since their dtypes follow from those of the parameters.
    cast_buffers(model, ranks.topology.device, buffer_dtypes_of(model, settings))
    broadcast_buffers(model, collectives.everyone)
    plans = plan_units(job.specs, placement, collectives.shard_world_size)
    with agreed(job_ranks, "initialize: offload"):
        tiers = _plan_tiers(settings, residences, plans, job.optimizer, collectives, ranks.topology.device)
    _open_tiers(tiers, job_ranks)
    attention: UlyssesAttention | None = None
    try:
        with agreed(job_ranks, "initialize: sequence parallelism"):
            attention = _sequence_attention(model, sequences, ranks.parallel.tp)
        units = build_units(job.specs, plans, placement, collectives, tiers)
        with agreed(job_ranks, "initialize: optimizer"):
            tiers.settle()
            shard = _shard_optimizer(job, units, tiers)
            loader = _loader(training_data, settings, job.batch, collectives.rank, ranks, collate_fn)
    except Exception:
        tiers.close()
        if attention is not None:
            attention.undo()
        raise

    # 5. The engine: hooks on the model, and what the config patches outside of it.
    parts = EngineParts(
        optimizer=shard,
        lr_scheduler=job.scheduler,
        loss_scale=loss_scale_of(settings),
        report=_report(request, settings, ranks.topology.device, job_ranks.rank, monitors),
        tiers=tiers,
        # Gradients that only pass through a model for inference, on their way to another, would pile up in it.
        unoptimized=job.unoptimized,
        sequence_group=sequences,
    )
    engine = _engine_type(engine_type, stage)(model, units, collectives, engine_settings, parts, settings.resolved)
    engine.checkpointer = Checkpointer(
        engine, _checkpoint_settings(settings), None if stage is None or stage.count == 1 else stage.whole
    )
    engine.at_destroy(partial(ranks.topology.names.forget, ranks.parallel))
    if attention is not None:
        engine.at_destroy(attention.undo)
    _compute_under_autocast(model, engine, settings)
    if tensor_parallel is not None:
        # Stages compare their batches by themselves, as not all of them run the model at the same time.
        tensor_parallel.attach(model, None if ranks.stages is not None else collectives)
        engine.at_destroy(tensor_parallel.detach)
    if job.optimizer is not None:
        _let_modes_change_weights(job.optimizer, engine)
    else:
        _say_for_inference(config)
    if recomputation is not None:
        recomputation.apply()
        engine.at_destroy(recomputation.undo)
    if settings.disable_python_gc:
        gc.disable()
        engine.at_destroy(gc.enable)
    if settings.dump_state:
        logger.warning("%s", engine_settings)
    _attach(engine, stage, ranks, pipeline, loader)
    record_if_asked(engine)
    return engine, engine.optimizer, loader, job.scheduler


def _compute_under_autocast(model: nn.Module, engine: Engine, settings: Config) -> None:
    """Where the config says so, until the engine is destroyed."""
    if (dtype := autocast_of(settings)) is not None:
        engine.at_destroy(Autocast(model, engine.collectives.topology.device, dtype).undo)


def _say_for_inference(config: ConfigSource | None) -> None:
    """Of an engine without an optimizer, where a config was probably forgotten."""
    if config is None:
        log_always("initialize: no config and no optimizer, so the engine is for inference and keeps the model whole")


# -- 1. ranks


@dataclass(frozen=True)
class _Ranks:
    """The processes of a job.

    Attributes:
        mesh_groups: of a mesh: the groups of ranks that average gradients; None where all ranks do.
        world_size: ranks that average gradients.
        parallel: resolved; of a mesh, one axis of all ranks.
        tensor_group: the ranks that share this one's layers; None without tensor parallelism.
        stages: the ranks of each stage of a pipeline; None where there is one.
        samplers: how many ranks see different samples, with the source, for values that are "auto".
        pipeline: the ranks with the stages of this one's pipeline; None where models are not cut.
    """

    topology: Topology
    collectives: Collectives
    mesh_groups: tuple[tuple[int, ...], ...] | None
    world_size: int
    parallel: ParallelConfig
    samplers: Fact[int]
    tensor_group: RankGroup | None = None
    stages: Groups | None = None
    pipeline: PipelineGroup | None = None


def _join_ranks(
    collectives: Collectives | None,
    mesh: DeviceMesh | None,
    parallel: ParallelConfig | None,
    config: ConfigSource | None,
    pipeline: PipelineConfig | None,
) -> _Ranks:
    topology = init_process_group()
    collectives = collectives or Collectives(topology)
    _divide_cores(topology, collectives)
    with agreed(collectives, "initialize: parallel"):
        # How many ranks share layers decides on how many see different samples, which the config is resolved with.
        if mesh is None and parallel is None:
            parallel = _launched_mesh()
        parallel = with_config_axes(_as_written(config), parallel)
        if mesh is not None and parallel is not None:
            raise UsageError("initialize", expected="a mesh or a ParallelConfig", got="both", fix="leave one out")
        resolved = (parallel or ParallelConfig()).resolve(collectives.world_size)
    if mesh is None:
        source = "the process group" if parallel is None else "initialize(parallel)"
        samplers = Fact(resolved.data_parallel_size, source)
        if parallel is not None:
            _check_same_mesh(resolved, collectives)
            topology.names.use(resolved)
        axes = AxisGroups.of(resolved)
        tensor_group, stage_group = None, None
        if resolved.pp > 1 or pipeline is not None:
            stage_group = PipelineGroup(topology, resolved.pp)
        if resolved.tp > 1:
            tensor_group = subgroup(topology, axes.layers)
            connect(topology, {"layers": tensor_group.reduce_group})
            track(topology, axes.layers)
        data = axes.data if len(axes.data) > 1 else None
        stages = axes.stages if resolved.pp > 1 else None
        size = len(axes.data[0])
        return _Ranks(topology, collectives, data, size, resolved, samplers, tensor_group, stages, stage_group)
    groups = data_groups(mesh, collectives)
    return _Ranks(topology, collectives, groups, len(groups[0]), resolved, Fact(len(groups[0]), "initialize(mesh)"))


def _observe_axes(collectives: Collectives, ranks: _Ranks, sequences: SequenceGroup) -> None:
    """Has what the axes other than ZeRO's send counted with the rest, where anything is counted."""
    layers = None if ranks.tensor_group is None else ranks.topology.tracked.get(ranks.tensor_group.ranks)
    cut = sequences.collectives if sequences.size > 1 else None
    for axis, source in (("tp", collectives.tensor), ("tp", layers), ("sp", cut), ("pp", ranks.pipeline)):
        if source is not None:
            collectives.observe(axis, source)


def _launched_mesh() -> ParallelConfig | None:
    """The mesh of the launch, for a caller that says nothing of one.

    Raises:
        UsageError: ranks are to share sequences, which a script has to cut, and so has to know of. What reads whole
            batches by mistake where layers are split, or stages have other batches, is named at the first batch.
    """
    settings, sources = from_environment(os.environ)
    parallel = settings.parallel
    if parallel is not None and parallel.sp > 1:
        raise UsageError(
            f"initialize(parallel): the launch asks for sp={parallel.sp} ({sources.get('sp_size', 'its environment')})",
            expected=f"parallel=ParallelConfig(sp={parallel.sp}), with batches by data-parallel rank",
            got=None,
            fix="pass it, prepare model and loaders by an Accelerator, or launch without",
        )
    return parallel


def _as_written(config: ConfigSource | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    return config.raw if isinstance(config, Config) else read_document(config).tree


def _check_same_mesh(parallel: ParallelConfig, collectives: Collectives) -> None:
    """Other axes on one rank would be other groups, and a hang. (all ranks)"""
    own: dict[str, Any] = {axis: getattr(parallel, axis) for axis in AXES}
    own["tp_plan"] = dict(parallel.tp_plan) if isinstance(parallel.tp_plan, Mapping) else parallel.tp_plan
    of_ranks: list[dict[str, Any]] = collectives.gather_objects(own, "initialize: mesh of the job")
    for rank, other in enumerate(of_ranks):
        for key, value in other.items():
            if value != of_ranks[0][key]:
                raise UsageError(
                    f"initialize(parallel): {key} on rank {rank}",
                    expected=f"{of_ranks[0][key]!r} as on rank 0",
                    got=value,
                    fix="pass the same ParallelConfig on every rank",
                )


def _divide_cores(topology: Topology, collectives: Collectives) -> None:
    """Sets the kernels' threads to this rank's part of the machine's cores, unless the environment does. (all ranks)"""
    own = core_set()
    cores_of = collectives.gather_objects(own, "cores")
    if omp_threads_chosen() or collectives.world_size != topology.world_size:
        return
    node = next(node for node in topology.nodes if topology.rank in node)
    use_threads(fair_threads(usable_cores(), own, [cores_of[rank] for rank in node]))


# -- 2. plan


@dataclass(frozen=True)
class _TrainingPlan:
    """What is trained, with what, and sharded how.

    Attributes:
        settings: the resolved config.
        plan: what is sharded.
        kinds: how the optimizer may be sharded; None for inference.
        declared_kind: by an argument or the config.
        names: id(parameter) -> fqn.
        groups: id(parameter) -> index of its param group.
        specs: the units to build.
        unoptimized: trainable parameters in no param group.
    """

    settings: Config
    plan: ShardPlan
    batch: BatchSizes
    optimizer: Optimizer | None
    scheduler: Any
    kinds: OptimizerKinds | None
    declared_kind: OptimizerKind | str | None
    names: Mapping[int, str]
    groups: Mapping[int, int]
    specs: list[UnitSpec]
    unoptimized: list[nn.Parameter]


def _plan(
    model: nn.Module,
    optimizer: OptimizerSource | None,
    params: Iterable[Any] | None,
    lr_scheduler: SchedulerSource | None,
    settings: Config,
    world_size: int,
    kind: OptimizerKind | str | None,
) -> _TrainingPlan:
    """Builds optimizer and scheduler, and decides what is sharded how. Nothing is allocated."""
    # The optimizer first, as the roles of parameters follow from its groups; sharding it is decided with its kind.
    plan = shard_plan(settings)
    built = _optimizer(model, optimizer, params, settings)
    batch = _batch(settings, world_size, training=built is not None)
    check_dtypes(model, DTYPES[settings.precision])
    names = {id(param): fqn for fqn, param in model.named_parameters()}
    groups = group_index(built, names) if built is not None else {}
    if kind is None and settings.optimizer is not None:
        kind = settings.optimizer.kind
    kinds = None if built is None else _kinds(built, kind, settings, plan)
    return _TrainingPlan(
        settings,
        plan,
        batch,
        built,
        _scheduler(lr_scheduler, settings, built),
        kinds,
        kind,
        names,
        groups,
        unit_specs_of(model, settings, plan),
        [param for param in model.parameters() if param.requires_grad and id(param) not in groups],
    )


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError("initialize(model)", expected="a torch.nn.Module", got=type(model).__name__)
    check_parameters(model)


def _apply_process_settings(settings: Config) -> None:
    if settings.log_level is not None:
        set_log_level(settings.log_level)
        for note in settings.notes:
            log_once(logging.INFO, note)  # again: some were below the level when the config was loaded


def _optimizer(
    model: nn.Module, source: OptimizerSource | None, params: Iterable[Any] | None, settings: Config
) -> Optimizer | None:
    """The optimizer of the argument or of the config's section; None for inference."""
    section = settings.optimizer
    named = section is not None and section.type is not None
    if settings.bf16.bf16_optimizer_states and (source is not None or not named):
        raise ConfigError(
            settings.where("bf16.bf16_optimizer_states"),
            expected="an optimizer section with Adam, AdamW, Lion or Adagrad, whose states it is about",
            got="an optimizer passed to initialize()" if source is not None else "none",
            fix="name the optimizer in the config, or remove the key",
        )
    if source is not None:
        if named:
            raise ConfigError(
                settings.where("optimizer"),
                expected="one optimizer",
                got="one in the config and one passed to initialize()",
                fix="remove the section or the argument",
            )
        if not isinstance(source, Optimizer):
            source = source([p for p in model.parameters() if p.requires_grad])
        if not isinstance(source, Optimizer):
            raise UsageError("initialize(optimizer)", expected="a torch.optim.Optimizer", got=type(source).__name__)
        return source
    if section is None or section.type is None:
        return None
    groups = list(params) if params is not None else [p for p in model.parameters() if p.requires_grad]
    _check_param_groups(model, groups)
    params_of = dict(section.params)
    if settings.bf16.bf16_optimizer_states:
        params_of.setdefault("moments_dtype", "bf16")
    with addressed(settings):
        return build_optimizer(section.type, params_of, groups, model)


def _check_param_groups(model: nn.Module, groups: list[Any]) -> None:
    """Refuses a parameter in two groups, by its name; torch's own error names none."""
    names = {id(param): fqn for fqn, param in model.named_parameters()}
    seen: dict[int, int] = {}
    for index, group in enumerate(item for item in groups if isinstance(item, dict)):
        members = group["params"]
        if not isinstance(members, torch.Tensor):  # an iterator could be read only once
            members = group["params"] = list(members)
        for param in [members] if isinstance(members, torch.Tensor) else members:
            if seen.setdefault(id(param), index) != index:
                raise ConfigError(
                    f"parameter {names.get(id(param), '(not of this model)')}",
                    expected="to be in one param group",
                    got=f"groups {seen[id(param)]} and {index}",
                    fix="remove it from one of them",
                )


def _kinds(
    optimizer: Optimizer, declared: OptimizerKind | str | None, settings: Config, plan: ShardPlan
) -> OptimizerKinds:
    """How the optimizer may be sharded, and whether this config allows it."""
    check_steppable(optimizer)
    kinds = classify(optimizer, declared)
    name, zero = type(optimizer).__name__, settings.zero_optimization
    # int8 codes are for equal shards, while the owner layout of full tensors has shards of different sizes.
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
    # A coupled rule reads all its states at once, so none may be swapped out or split into residuals.
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
    """Makes the sums of a coupled optimizer all-reduces over the shards."""
    assert isinstance(optimizer, CoupledOptimizer), "a coupled optimizer on shards without use_reductions()"
    label = f"sums of {type(optimizer).__name__}"
    optimizer.use_reductions(
        Reductions(lambda tensor, op: collectives.all_reduce(tensor, op, label), counts=collectives.replica == 0)
    )


def _shard_size(ranks: _Ranks, mesh: DeviceMesh | None, settings: Config) -> int | None:
    """Ranks of a shard group, where an argument says so; else the config does."""
    if mesh is not None:
        return shard_size_of(mesh, settings)
    if ranks.parallel.dp_replicate == 1:
        return None
    size = ranks.world_size // ranks.parallel.dp_replicate
    check_shard_size(size, settings, "dp_shard x sp of ParallelConfig", "leave dp_replicate at 1")
    return size


def _stage(
    model: nn.Module, group: PipelineGroup | None, pipeline: PipelineConfig | None, layers: SplitLayers | None
) -> Stage | None:
    """Reduces the model, and the layers that ranks share, to this rank's stage; None where models are not cut."""
    if group is None:
        return None
    stage = cut(model, group.rank, group.size, pipeline or PipelineConfig())
    if layers is not None:
        layers.keep(stage.modules())
        stage.split_copies(layers.splits_of)
    return stage


def _split_layers(model: nn.Module, ranks: _Ranks) -> SplitLayers | None:
    """The layers that ranks share; None where every rank has all of them. Changes nothing of the model.

    Raises:
        UsageError: the model cannot be split by the plan, or is compiled.
    """
    if ranks.tensor_group is None:
        return None
    check_not_compiled(model)
    mesh = mesh_of(ranks.topology, ranks.tensor_group)
    return SplitLayers.of(model, mesh, ranks.tensor_group.rank, ranks.parallel.tp_plan)


def _check_tensor_parallel(layers: SplitLayers | None, job: _TrainingPlan) -> None:
    """Refuses what cannot be done with parts of layers.

    Raises:
        ConfigError: a setting is not for split layers.
        UsageError: the optimizer needs tensors that are whole.
    """
    if layers is None:
        return
    zero = job.settings.zero_optimization
    for key in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if getattr(zero, key):
            raise ConfigError(
                job.settings.where(f"zero_optimization.{key}"),
                expected="false with tensor parallelism",
                got=True,
                fix="remove the key, or leave tp at 1",
            )
    kinds = () if job.kinds is None else job.kinds.groups
    if job.optimizer is not None and OptimizerKind.COUPLED in kinds:
        raise UsageError(
            f"optimizer {type(job.optimizer).__name__}",
            expected="one that updates elements or tensors by themselves, with tensor parallelism",
            got="one whose rule sums over several parameters",
            fix="use AdamW, SGD or the like, or leave tp at 1",
        )
    for param, index in job.groups.items():
        if param in layers.splits and kinds[index] is OptimizerKind.PER_TENSOR:
            refuse_split(job.names[param])


def _sequence_attention(model: nn.Module, sequences: SequenceGroup, tp: int) -> UlyssesAttention | None:
    """The exchange of heads in the model's attention, unless it has one; None where sequences are not cut.

    Args:
        tp: ranks that share the heads already.
    """
    if sequences.size == 1 or UlyssesAttention.of(model) is not None:
        return None
    return UlyssesAttention(model, sequences, head_parts=tp)


def _batch(settings: Config, world_size: int, *, training: bool) -> BatchSizes:
    is_configured = settings.train_batch_size or settings.train_micro_batch_size_per_gpu
    if not training and not is_configured:
        return BatchSizes(train=world_size, micro=1, accumulation=1)
    return solve_batch(settings, world_size)


def _scheduler(source: SchedulerSource | None, settings: Config, optimizer: Optimizer | None) -> Any:
    section = settings.scheduler
    if source is not None and section is not None:
        raise ConfigError(
            settings.where("scheduler"),
            expected="one scheduler",
            got="one in the config and one passed to initialize()",
            fix="remove the section or the argument",
        )
    if optimizer is None:
        if source is not None:
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
    is_scheduler = hasattr(source, "step") and not isinstance(source, type)
    scheduler = source if source is None or is_scheduler else source(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "initialize(lr_scheduler)",
            expected="a schedule that the engine can move on by itself",
            got="ReduceLROnPlateau, which needs a metric at each step",
            fix="leave it out, and step it in the training loop with a metric that is the same on every rank",
        )
    return scheduler


def _recomputation(model: nn.Module, settings: Config) -> Recomputation | None:
    section = settings.activation_checkpointing
    return None if section == type(section)() else Recomputation(model, section)


# -- 4. units


def _plan_tiers(
    settings: Config,
    residences: TierPlan,
    plans: Sequence[Sequence[BufferPlan]],
    optimizer: Optimizer | None,
    collectives: Collectives,
    device: torch.device,
) -> TierSet:
    rules = OffloadRules.of(settings, residences.param, residences.optimizer)
    tiers = TierSet(rules, list(chain(*plans)), optimizer, collectives.shard_rank, device)
    if optimizer is not None and residences.optimizer != "device":
        section = f"{rules.where}.offload_optimizer"
        share_updates(optimizer, rules.optimizer_section.ratio, device, section)
        check_update_time(optimizer, rules.optimizer_section.update_during, section)
    if tiers.pins_states and tiers.swapper is None and isinstance(optimizer, ShardOptimizer):
        optimizer.host_memory = partial(empty_on_host, pinned=True)
    return tiers


def _open_tiers(tiers: TierSet, collectives: Collectives) -> None:
    """Opens the tiers of all ranks, or of none. (all ranks)"""
    # Each rank reserves its file now, and the ranks of a node check together that the disk has room for all of them.
    needs = collectives.gather_objects(tiers.needs(), "space for offload") if tiers.can_fail else []
    try:
        with agreed(collectives, "initialize: open the tiers"):
            tiers.open(list(chain(*needs)))
    except Exception:
        tiers.close()
        raise


_DEVICE_SUB_GROUP_NUMEL = 50_000_000


def _sub_group_numel(settings: Config, device: torch.device) -> int:
    """Elements that are stepped at a time by optimizers that need their gradients in fp32."""
    zero = settings.zero_optimization
    # The format's default, 10^9, is 4 GB of fp32 gradients, for which a GPU seldom has room; a config's value counts.
    if device.type == "cuda" and "sub_group_size" not in zero.model_fields_set:
        return min(zero.sub_group_size, _DEVICE_SUB_GROUP_NUMEL)
    return zero.sub_group_size


def _shard_optimizer(job: _TrainingPlan, units: Sequence[ParamUnit], tiers: TierSet) -> ShardedOptimizer | None:
    if job.optimizer is None or job.kinds is None:
        return None
    warn_unoptimized([job.names[id(param)] for param in job.unoptimized])
    buffers = [buffer for unit in units for buffer in unit.buffers if buffer.trainable]
    return ShardedOptimizer(
        job.optimizer,
        job.kinds,
        job.groups,
        buffers,
        sub_group_numel=_sub_group_numel(job.settings, tiers.device),
        copies=tiers.copies,
    )


def _loader(
    data: Any,
    settings: Config,
    batch: BatchSizes,
    rank: int,
    ranks: _Ranks,
    collate_fn: Callable[..., Any] | None,
) -> DataLoader[Any] | None:
    if data is None:
        return None
    return build_dataloader(
        data,
        batch.micro,
        rank // ranks.parallel.sp,
        ranks.samplers.value,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
    )


# -- 5. engine


def _report(
    request: Verification | None, settings: Config, device: torch.device, rank: int, monitors: EventSink
) -> StepReport:
    options: dict[str, Any] = {
        "device": device,
        "rank": rank,
        "steps_per_print": settings.steps_per_print,
        "wall_clock_breakdown": settings.wall_clock_breakdown,
        "memory_breakdown": settings.memory_breakdown,
        "monitors": monitors,
    }
    if request is None:
        return StepReport(**options)
    return RecordingReport(request, stage=settings.zero_optimization.stage, **options)


def _checkpoint_settings(settings: Config) -> CheckpointSettings:
    section = settings.checkpoint
    return CheckpointSettings(
        background=section.async_save,
        staging_nbytes=section.staging_nbytes,
        keep_last=section.keep_last,
        random_state=section.save_random_state,
    )


def _engine_type(asked: type[Engine], stage: Stage | None) -> type[Engine]:
    if stage is None or asked is not Engine:
        return asked
    from zeroaccel.pipeline.pipeline_engine import PipelineEngine  # here, as torch's schedules are slow to import

    return PipelineEngine


def _attach(
    engine: Engine, stage: Stage | None, ranks: _Ranks, pipeline: PipelineConfig | None, loader: DataLoader[Any] | None
) -> None:
    """Connects an engine with the other stages, where there are any. (all ranks)"""
    if stage is None:
        return
    from zeroaccel.pipeline.pipeline_engine import PipelineEngine

    assert isinstance(engine, PipelineEngine) and ranks.pipeline is not None, "a stage of an engine that has none"
    engine.attach(stage, ranks.pipeline, pipeline or PipelineConfig(), loader)


def _let_modes_change_weights(optimizer: Optimizer, engine: Engine) -> None:
    """Routes `optimizer.train()` and `.eval()`, by which schedule-free classes change weights, through the engine."""
    for mode in ("train", "eval"):
        own = getattr(type(optimizer), mode, None)
        if callable(own):
            setattr(optimizer, mode, partial(engine.change_masters, partial(own, optimizer)))
            engine.at_destroy(partial(vars(optimizer).pop, mode, None))
