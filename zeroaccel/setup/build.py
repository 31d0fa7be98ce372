"""`build`: makes an engine from a plan that all ranks agree on. No tensor moves earlier."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

from zeroaccel.checkpoint.checkpointer import SavingRules
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.hierarchical import arrange
from zeroaccel.engine import Engine, EngineBase
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.logs import log_always, logger
from zeroaccel.ops.coupled import CoupledOptimizer, Reductions
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.setup.cut_check import verify_cuts
from zeroaccel.setup.plan import TrainPlan
from zeroaccel.telemetry.step_report import StepReport
from zeroaccel.telemetry.trackers import build_monitors
from zeroaccel.zero.build_units import build_units, plan_units
from zeroaccel.zero.compiled import check_backends_within, check_no_recorded_graphs, check_not_compiled, check_toolchain
from zeroaccel.zero.engine_core import EngineParts
from zeroaccel.zero.param_unit import ParamUnit
from zeroaccel.zero.precision import Autocast, broadcast_buffers, cast_buffers
from zeroaccel.zero.quantized_weights import broadcast_state, forbid_packing, release_codes
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.placement import TierSet, plan_tiers


def build(plan: TrainPlan) -> EngineBase:
    """Makes the engine of a plan: groups, tiers, units, optimizer, hooks. (all ranks)

    An error on one rank is raised on all, and leaves neither open files nor a changed forward behind.

    Raises:
        ConfigError, UsageError, OffloadError: a tier cannot be opened, the optimizer does not accept its shards, or an
            axis' cut changes the model's results.
    """
    ranks, model = plan.ranks, plan.job.model
    collectives = arrange(ranks.collectives, plan.comm, ranks.data_groups, ranks.peer_groups)
    for axis in ranks.axes:
        axis.connect(collectives)
    if OptimizerKind.COUPLED in plan.optimizer.group_kinds and plan.shards.optimizer:
        _bind_reductions(plan.optimizer.optimizer, collectives)
    job_ranks = collectives.everyone if ranks.peer_groups is None else collectives.job
    with agreed(job_ranks, "initialize: compile"):
        refuses_compiled = _compile(plan)
    cast_buffers(model, ranks.topology.device, plan.buffer_dtypes)
    broadcast_buffers(model, collectives.everyone)
    broadcast_state(model, collectives.everyone)
    buffers = plan_units(plan.units, plan.placement, collectives)
    with ExitStack() as undo:
        with agreed(job_ranks, "initialize: offload"):
            monitors = build_monitors(plan.config, ranks.collectives.rank, _run_facts(plan))
            tiers = plan_tiers(plan.offload, list(chain(*buffers)), plan.optimizer.optimizer, ranks.topology.device)
        undo.callback(tiers.close)
        _open_tiers(tiers, job_ranks)
        with agreed(job_ranks, "initialize: axes"):
            for axis in ranks.axes:
                undo.callback(axis.undo)
                axis.install(model)
        units = build_units(plan.units, buffers, plan.placement, collectives, tiers)
        with agreed(job_ranks, "initialize: optimizer"):
            tiers.settle()
            optimizer = _shard_optimizer(plan, units, tiers)
        undo.pop_all()
    parts = EngineParts(
        optimizer=optimizer,
        lr_scheduler=plan.optimizer.scheduler,
        loss_scale=plan.loss_scale,
        tiers=tiers,
        unoptimized=plan.unoptimized,
        refuses_compiled=refuses_compiled,
    )
    whole = next((axis.whole for axis in ranks.axes if axis.whole is not None), None)
    engine = _engine_type(plan)(
        model,
        units,
        collectives,
        plan.engine,
        parts,
        plan.config.resolved,
        StepReport.of(plan.config, ranks.topology.device, job_ranks.rank, monitors),
        SavingRules(plan.config.checkpoint, whole, ranks.mesh.described),
    )
    _complete(engine, plan)
    cuts = [cut for axis in ranks.axes if (cut := axis.cut) is not None]
    verify_cuts(engine, cuts, enabled=ranks.mesh.verify_cut)
    return engine


def _run_facts(plan: TrainPlan) -> dict[str, object]:
    """Returns what a report says about the run."""
    config = plan.job.config
    return {
        "model": type(plan.job.model).__name__,
        "stage": plan.config.zero_optimization.stage,
        "ranks": plan.ranks.world_size,
        "config": str(config) if isinstance(config, (str, os.PathLike)) else "a dict of the script",
    }


def _complete(engine: EngineBase, plan: TrainPlan) -> None:
    """Adds what ends with the engine: axes, and the config's changes outside of the engine."""
    ranks, model = plan.ranks, plan.job.model
    engine.at_destroy(forbid_packing(model))
    engine.at_destroy(partial(release_codes, model))
    engine.at_destroy(partial(ranks.topology.names.forget, ranks.mesh))
    if plan.autocast is not None:
        engine.at_destroy(Autocast(model, engine.collectives.topology.device, plan.autocast).undo)
    for axis in ranks.axes:
        engine.at_destroy(axis.undo)
        axis.attach(engine, plan.loader)
    if plan.optimizer.optimizer is not None:
        if (folder := plan.config.checkpoint.save_on_preemption) is not None:
            engine.when_preempted(partial(engine.checkpointer.save_and_leave, folder))
        _let_modes_change_weights(plan.optimizer.optimizer, engine)
    elif plan.job.config is None:
        log_always("initialize: no config and no optimizer, so the engine is for inference and holds the whole model")
    if plan.recomputation is not None:
        plan.recomputation.apply()
        engine.at_destroy(plan.recomputation.undo)
    if plan.config.disable_python_gc:
        gc.disable()
        engine.at_destroy(gc.enable)
    if plan.config.dump_state:
        logger.warning("%s", plan.engine)


def _engine_type(plan: TrainPlan) -> type[EngineBase]:
    """Returns the engine class that the caller requests, else the one that an axis needs, else `Engine`."""
    asked = plan.job.engine_type
    for axis in plan.ranks.axes:
        if axis.engine_type is not None and asked is not None and not issubclass(asked, axis.engine_type):
            raise UsageError(
                f"initialize(parallel): {axis.name}",
                expected="1, because this program requests an engine without it",
                got=plan.ranks.mesh.described,
                fix=f"launch without --{axis.name}_size",
            )
    return asked or next((axis.engine_type for axis in plan.ranks.axes if axis.engine_type is not None), Engine)


def _compile(plan: TrainPlan) -> str:
    """Compiles the model if the job or the config requests it; returns why an axis refuses compiled models, or "".

    Runs before the engine adds hooks: they stay out of graphs only if they find the module compiled.
    """
    model, on_device = plan.job.model, plan.ranks.topology.device.type != "cpu"
    refusal = next((axis.refuses_compiled for axis in plan.ranks.axes if axis.refuses_compiled), "")
    moves = on_device and plan.shards.params
    if moves:
        check_no_recorded_graphs(model)
    if (compilation := plan.compilation) is not None:
        if refusal:
            raise ConfigError(f"{compilation.setting}: {refusal}", fix="leave it out")
        check_toolchain(compilation.backend, plan.ranks.topology.device, compilation.setting)
        compilation.apply(model, parameters_move=moves)
    check_not_compiled(model, refusal)
    check_backends_within(model, plan.ranks.topology.device)
    return refusal


def _bind_reductions(optimizer: object, collectives: Collectives) -> None:
    """Makes the sums of a coupled optimizer all-reduces over the shards."""
    assert isinstance(optimizer, CoupledOptimizer), "a coupled optimizer on shards needs use_reductions()"
    label = f"sums of {type(optimizer).__name__}"
    optimizer.use_reductions(
        Reductions(lambda tensor, op: collectives.all_reduce(tensor, op, label), counts=collectives.replica == 0)
    )


# -- tiers and optimizer


def _open_tiers(tiers: TierSet, collectives: Collectives) -> None:
    """Opens the tiers of all ranks, or of none. (all ranks)"""
    # Each rank reserves its file now, and the ranks of a node check together that the disk has room for all of them.
    needs = collectives.gather_objects(tiers.needs(), "space for offload") if tiers.has_needs else []
    with agreed(collectives, "initialize: open the tiers"):
        tiers.open(list(chain(*needs)))


def _shard_optimizer(plan: TrainPlan, units: Sequence[ParamUnit], tiers: TierSet) -> ShardedOptimizer | None:
    trained = plan.optimizer
    if trained.optimizer is None or trained.kinds is None:
        return None
    return ShardedOptimizer(
        trained.optimizer,
        trained.kinds,
        trained.groups,
        [buffer for unit in units for buffer in unit.buffers if buffer.trainable],
        sub_group_numel=plan.engine.sub_group_numel,
        copies=tiers.copies,
    )


# -- objects around the engine


def _let_modes_change_weights(optimizer: Any, engine: EngineBase) -> None:
    """Routes `optimizer.train()` and `.eval()`, with which schedule-free classes change weights, through the engine."""
    for mode in ("train", "eval"):
        method = getattr(type(optimizer), mode, None)
        if callable(method):
            setattr(optimizer, mode, partial(engine.change_masters, partial(method, optimizer)))
            engine.at_destroy(partial(vars(optimizer).pop, mode, None))
