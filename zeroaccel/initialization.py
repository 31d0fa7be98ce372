"""`zeroaccel.initialize`: one call from a model and a DeepSpeed-format config to an `Engine`.

`setup/` has the steps: a `JobSpec` holds the caller's arguments, `join_ranks` connects the ranks, a `TrainPlan` decides
everything before a tensor moves, and `build` makes the engine. An error on one rank is raised on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from zeroaccel.comm.agree import agreed, names_ranks
from zeroaccel.comm.collectives import Collectives
from zeroaccel.config.diagnostics import names_meant
from zeroaccel.config.launch.launch_sources import from_environment
from zeroaccel.config.normalize import UnknownKeys
from zeroaccel.config.parallel import ParallelConfig, PipelineConfig
from zeroaccel.engine import EngineBase
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.parallel.axes import AXES
from zeroaccel.setup.build import build
from zeroaccel.setup.job import ConfigSource, JobSpec, OptimizerSource
from zeroaccel.setup.orders import follow_orders
from zeroaccel.setup.plan import TrainPlan
from zeroaccel.setup.ranks import join_ranks
from zeroaccel.zero.from_config import LoopRules
from zeroaccel.zero.model_check import check_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["initialize"]


@names_meant
def initialize(
    model: nn.Module,
    optimizer: OptimizerSource | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    config: ConfigSource | None = None,
    *,
    collate_fn: Callable[..., Any] | None = None,
    collectives: Collectives | None = None,
    mesh: DeviceMesh | None = None,
    parallel: ParallelConfig | None = None,
    pipeline: PipelineConfig | None = None,
    cast_inputs: bool = False,
    optimizer_kind: OptimizerKind | str | None = None,
    unknown_keys: UnknownKeys = "standard",
) -> tuple[EngineBase, Any, DataLoader[Any] | None, Any]:
    """Makes an engine. (all ranks, with the same arguments)

    Args:
        model: the model to train. Its parameters keep their objects, shapes and names; their storage moves into the
            engine.
        optimizer: an optimizer over the model's parameters, or a callable that makes one from them. Default: the
            config's `optimizer` section; without one, the engine is for inference.
        model_parameters: parameters or param groups for the config's optimizer. Default: all trainable parameters.
        training_data: a dataset to make a loader for.
        lr_scheduler: a scheduler, or a callable that makes one from the optimizer. Default: the config's section.
        config: DeepSpeed-format JSON as a dict, path or text. "auto" bucket sizes follow from the model's hidden size.
        collate_fn: collate function for the loader of `training_data`.
        collectives: the communication backend; a `RecordingCollectives` counts the traffic.
        mesh: the ranks that see different samples, as a mesh of one axis, such as `mesh["dp"]` of a mesh whose other
            axis splits the model, or of two, (replicas, shards). Default: all ranks.
        parallel: sizes of the mesh's axes, instead of `mesh`.
        pipeline: how to cut the model into pipeline stages. With this argument, or with stages in `parallel`, the
            engine is a `PipelineEngine`.
        cast_inputs: cast floating-point inputs of forward to the training precision. Without it, the engine casts
            inputs only under fp16 with `auto_cast`.
        optimizer_kind: "elementwise", "per_tensor" or "coupled": the inputs of an element's update. Overrides the kind
            of the class and `optimizer.kind` of the config.
        unknown_keys: treatment of unknown keys in the config, see `load_config`.

    Returns:
        (engine, optimizer, dataloader, lr_scheduler). Items that were not created are None.

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
    job = JobSpec(
        model,
        optimizer,
        model_parameters,
        lr_scheduler,
        training_data,
        collate_fn,
        config,
        unknown_keys=unknown_keys,
        collectives=collectives,
        mesh=mesh,
        parallel=parallel,
        pipeline=pipeline,
        optimizer_kind=optimizer_kind,
        loop=LoopRules(casts_inputs=cast_inputs),
    )
    plan, engine = start(job)
    return engine, engine.optimizer, plan.loader, engine.lr_scheduler


@names_ranks
def start(job: JobSpec) -> tuple[TrainPlan, EngineBase]:
    """Plans a job and builds its engine; for `initialize` and other frontends. (all ranks)

    Raises:
        ConfigError, UsageError: see `initialize`; raised on every rank.
    """
    ranks = join_ranks(job, AXES, _launched_mesh)
    with agreed(ranks.collectives, "initialize: config"):
        check_model(job.model, ranks.topology.device)
        plan = TrainPlan.of(job, ranks)
    plan.compare()
    engine = build(plan)
    follow_orders(engine)
    return plan, engine


def _launched_mesh() -> ParallelConfig | None:
    """Returns the launcher's mesh, for a caller that passes none."""
    settings, sources = from_environment(os.environ)
    if settings.parallel is not None:
        for axis in AXES:
            axis.check_launched(settings.parallel, sources)
    return settings.parallel
