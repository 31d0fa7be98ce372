"""From a model and what trains it to an engine: the config's share and the code's are told apart, and facts collected.

One `PrepareGroup` in, one `Prepared` out. The four cases of optimizer and schedule, in the config or in code, are
judged here, each refusal with both places and both ways out; every "auto" is filled by `config.resolve` from the facts
gathered here. The engine itself is made by `zeroaccel.initialize`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from zeroaccel.accelerate.accelerator_state import ConfigView, GradientState
from zeroaccel.accelerate.compilation import Compilation
from zeroaccel.accelerate.dummies import DummyOptim, DummyScheduler
from zeroaccel.accelerate.matching import PrepareGroup
from zeroaccel.accelerate.nested import batch_size_of
from zeroaccel.accelerate.prepared_optimizer import PreparedOptimizer
from zeroaccel.accelerate.prepared_scheduler import PreparedScheduler
from zeroaccel.accelerate.zero_plugin import ZeroPlugin, gather_facts
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.config import Config, Fact, Facts, load_config
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.initialization import initialize
from zeroaccel.optim.rank_facts import SAME_OPTIMIZER, difference, scheduler_facts
from zeroaccel.zero.engine import Engine
from zeroaccel.zero.from_config import facts_from_model

__all__ = ["PrepareRules", "Prepared", "batch_size_fact", "check_same_objects", "prepare_job", "schedule_facts"]

_OPTIMIZER, _SCHEDULER = "optimizer", "scheduler"


@dataclass(frozen=True)
class PrepareRules:
    """What an accelerator says of all its models.

    Attributes:
        facts: its own arguments.
        split_batches: a loader's batch is divided among the processes.
        scheduler_follows: schedules move with updates of the weights; False: with every call.
        per_update: how often a schedule moves per update.
        compilation: None to compile nothing.
    """

    facts: Facts = field(default_factory=Facts)
    split_batches: bool = False
    scheduler_follows: bool = True
    per_update: int = 1
    compilation: Compilation | None = None


@dataclass
class Prepared:
    """One model that is prepared.

    Attributes:
        optimizer: None for inference.
        schedulers: those of the job, in its order.
        config: resolved, with the source of every value.
    """

    engine: Engine
    plugin: ZeroPlugin
    config: Config
    optimizer: PreparedOptimizer | None = None
    schedulers: list[PreparedScheduler] = field(default_factory=list)

    def view(self) -> ConfigView:
        """The resolved config as it is shown."""
        role = "trained" if self.optimizer is not None else "inference"
        name = f"{type(self.engine.module).__name__} ({role})"
        return ConfigView(name, self.config.resolved, self.config.resolved_sources, self.config.raw)


def check_same_objects(
    jobs: Iterable[PrepareGroup], others: Sequence[Any], schedules: Mapping[str, str], collectives: Collectives
) -> None:
    """All ranks prepare the same things, or none does: one with a model more would wait for the others. (all ranks)

    Args:
        others: schedules of earlier optimizers, and loaders.
        schedules: by `schedule_facts`.

    Raises:
        UsageError: they do not; on every rank.
    """
    held = [*map(_described, jobs), *(type(other).__name__ for other in others)]
    everyone: list[tuple[list[str], Mapping[str, str]]] = collectives.gather_objects(
        (held, schedules), "prepare: objects of each rank"
    )
    if any(theirs != held for theirs, _ in everyone):
        got = "; ".join(f"rank {rank}: {', '.join(theirs) or 'nothing'}" for rank, (theirs, _) in enumerate(everyone))
        raise UsageError("prepare", expected="the same objects on every rank, in the same order", got=got)
    if (found := difference([theirs for _, theirs in everyone])) is not None:
        raise UsageError(f"prepare: {found}", expected="one value on all ranks", fix=SAME_OPTIMIZER)


def schedule_facts(jobs: Iterable[PrepareGroup], late: Iterable[tuple[int, Any]]) -> dict[str, str]:
    """What the schedules of a `prepare` go by, for ranks to compare.

    Args:
        late: schedules of earlier optimizers, each with its position.
    """
    schedules = [scheduler for job in jobs for _, scheduler in job.schedulers] + [scheduler for _, scheduler in late]
    found: dict[str, str] = {}
    for number, scheduler in enumerate(schedules):
        name = type(scheduler).__name__
        found |= scheduler_facts(scheduler, name if len(schedules) == 1 else f"schedule {number}, {name}")
    return found


def _described(job: PrepareGroup) -> str:
    parts = [job.optimizer, *(scheduler for _, scheduler in job.schedulers)] if job.optimizer is not None else []
    return " with ".join([type(job.model).__name__, *(type(part).__name__ for part in parts)])


def prepare_job(
    job: PrepareGroup,
    loaders: Sequence[Any],
    plugin: ZeroPlugin,
    rules: PrepareRules,
    gradient_state: GradientState,
    collectives: Collectives,
    optimizer_kind: str | None = None,
) -> Prepared:
    """Makes the engine of a job, and the wrappers that a script goes on calling. (all ranks)

    Args:
        loaders: those given in the same call, as the user made them.
        optimizer_kind: see `initialize`.

    Raises:
        ConfigError: config, plugin, launcher and code say different things, or too little; on every rank.
        UsageError: an object cannot be prepared; on every rank.
    """
    with agreed(collectives, "prepare: config"):
        _check_model(job.model)
        tree, sources = plugin.document(), plugin.sources()
        _check_cases(job, tree, sources, plugin)
        if job.optimizer is None:
            tree.pop(_OPTIMIZER, None)
            tree.pop(_SCHEDULER, None)
        facts = _facts(job, loaders, plugin, rules, tree, collectives.world_size)
        config = load_config(tree, sources=sources, facts=facts)
    optimizer, params, scheduler = _arguments(job)
    if rules.compilation is not None:
        rules.compilation.apply(job.model)
    engine, *_ = initialize(
        model=job.model,
        optimizer=optimizer,
        model_parameters=params,
        lr_scheduler=scheduler,
        config=config,
        collectives=collectives,
        cast_inputs=True,
        optimizer_kind=optimizer_kind,
    )
    engine.divides_direct = False  # the accelerator divides, or nobody, as with a plain loop
    engine.set_gradient_accumulation_boundary(True)
    del engine.config  # `model.config` is the model's own; the engine's is `zero_config`
    done = Prepared(engine, plugin, config)
    if job.optimizer is not None:
        done.optimizer = PreparedOptimizer(engine, gradient_state)
        done.schedulers = [_scheduler(value, done.optimizer, gradient_state, rules) for _, value in job.schedulers]
    return done


# -- who makes the optimizer and the schedule


def _check_cases(job: PrepareGroup, tree: Mapping[str, Any], sources: Mapping[str, str], plugin: ZeroPlugin) -> None:
    def section(name: str) -> str:
        return f"{sources.get(name, plugin.title)}: {name}"

    named = tree.get(_OPTIMIZER)
    configured = named is not None and not (isinstance(named, Mapping) and set(named) == {"kind"})
    scheduled = tree.get(_SCHEDULER) is not None
    optimizer = job.optimizer
    if isinstance(optimizer, DummyOptim) and not configured:
        raise ConfigError(
            "prepare: a DummyOptim stands for the config's optimizer, and the config has none",
            fix=f'add an "optimizer" section to {plugin.title}, or pass a torch optimizer instead of the DummyOptim',
        )
    if optimizer is not None and not isinstance(optimizer, DummyOptim) and configured:
        raise ConfigError(
            f"{section(_OPTIMIZER)} {_type_of(tree[_OPTIMIZER])}, and {type(optimizer).__name__} in code",
            fix="remove the section, or pass DummyOptim(params) instead of the optimizer",
        )
    if len(job.schedulers) > 1 and any(isinstance(value, DummyScheduler) for _, value in job.schedulers):
        raise UsageError("prepare", expected="one schedule where there is a DummyScheduler", got=len(job.schedulers))
    for _, scheduler in job.schedulers:
        _check_scheduler(scheduler, isinstance(optimizer, DummyOptim), scheduled, tree, section, plugin)


def _check_scheduler(
    scheduler: Any, dummy_optimizer: bool, scheduled: bool, tree: Mapping[str, Any], section: Any, plugin: ZeroPlugin
) -> None:
    if not isinstance(scheduler, DummyScheduler):
        if scheduled:
            raise ConfigError(
                f"{section(_SCHEDULER)} {_type_of(tree[_SCHEDULER])}, and {type(scheduler).__name__} in code",
                fix="remove the section, or pass DummyScheduler(optimizer) instead of the schedule",
            )
        if dummy_optimizer:
            raise ConfigError(
                f"prepare: {type(scheduler).__name__} in code, but {section(_OPTIMIZER)} "
                f"{_type_of(tree[_OPTIMIZER])} is made by prepare(), so the schedule cannot hold it",
                fix="pass DummyScheduler(optimizer, lr_scheduler_callable=function_of_the_optimizer), "
                'or add a "scheduler" section',
            )
    elif scheduler.lr_scheduler_callable is not None and scheduled:
        raise ConfigError(
            f"{section(_SCHEDULER)} {_type_of(tree[_SCHEDULER])}, and lr_scheduler_callable in code",
            fix="remove the section, or the argument",
        )
    elif scheduler.lr_scheduler_callable is None and not scheduled:
        raise ConfigError(
            "prepare: a DummyScheduler stands for the config's scheduler, and the config has none",
            fix=f'add a "scheduler" section to {plugin.title}, or pass lr_scheduler_callable to the DummyScheduler',
        )


def _type_of(section: Any) -> str:
    return str(section.get("type", "")) if isinstance(section, Mapping) else ""


def _arguments(job: PrepareGroup) -> tuple[Any, Any, Any]:
    """The optimizer, the params and the schedule that `initialize` is called with."""
    dummy = next((value for _, value in job.schedulers if isinstance(value, DummyScheduler)), None)
    scheduler = dummy.lr_scheduler_callable if dummy is not None else None
    if isinstance(job.optimizer, DummyOptim):
        return None, job.optimizer.params, scheduler
    return job.optimizer, None, scheduler


def _scheduler(
    value: Any, optimizer: PreparedOptimizer, state: GradientState, rules: PrepareRules
) -> PreparedScheduler:
    if isinstance(value, DummyScheduler):
        return PreparedScheduler(optimizer.engine.lr_scheduler, optimizer, state, engine_driven=True)
    return PreparedScheduler(
        value, optimizer, state, with_optimizer=rules.scheduler_follows, per_update=rules.per_update
    )


# -- what is known beside the config


def _facts(
    job: PrepareGroup,
    loaders: Sequence[Any],
    plugin: ZeroPlugin,
    rules: PrepareRules,
    tree: Mapping[str, Any],
    world_size: int,
) -> Facts:
    held = [rules.facts, plugin.facts()]
    if isinstance(job.optimizer, DummyOptim):
        held.append(job.optimizer.facts())
    elif job.optimizer is not None and isinstance(lr := job.optimizer.defaults.get("lr"), float):
        held.append(Facts(lr=Fact(lr, f"{type(job.optimizer).__name__}(lr={lr})", explicit=False)))
    for _, scheduler in job.schedulers:
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
            held.append(scheduler.facts(rules.per_update))
    known = gather_facts(*held)
    if known.micro_batch_size is None and job.optimizer is not None:
        share = world_size if rules.split_batches else 1
        size = batch_size_fact(loaders, smallest=plugin.is_train_batch_min, share=share, probe=_needs_size(tree))
        known = replace(known, micro_batch_size=size)
    return replace(
        known,
        hidden_size=facts_from_model(job.model).hidden_size,
        world_size=Fact(world_size, "the process group"),
        training=job.optimizer is not None,
    )


def _needs_size(tree: Mapping[str, Any]) -> bool:
    return tree.get("train_micro_batch_size_per_gpu") == "auto" and tree.get("train_batch_size") == "auto"


def batch_size_fact(loaders: Iterable[Any], *, smallest: bool = True, share: int = 1, probe: bool = True) -> Fact[int]:
    """Samples per rank and micro-step, from the loaders as the user made them.

    Args:
        smallest: of several sizes; else the largest.
        share: ranks that divide a loader's batch among them.
        probe: read a batch of a loader that does not say how large its batches are.

    Returns:
        Binding where all loaders agree; 1 that is not where nothing is known, as only reports use it.
    """
    found: list[tuple[int, str]] = []
    for loader in loaders:
        size, how = _batch_size(loader, probe=probe)
        if size:
            found.append((size // share or 1, how if share == 1 else f"{how} / {share} processes"))
    if not found:
        return Fact(1, "no loader that tells a batch size was prepared with the model", explicit=False)
    sizes = {size for size, _ in found}
    size, how = min(found) if smallest else max(found)
    if len(sizes) > 1:
        return Fact(size, f"the {'smallest' if smallest else 'largest'} of {sorted(sizes)}, {how}", explicit=False)
    return Fact(size, how)


def _batch_size(loader: Any, *, probe: bool) -> tuple[int | None, str]:
    size = getattr(loader, "batch_size", None)
    if isinstance(size, int):
        return size, f"DataLoader(batch_size={size})"
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(size, int):
        return size, f"the loader's {type(loader.batch_sampler).__name__} of batch_size {size}"
    return (_probed(loader), "the first batch of the loader") if probe else (None, "")


def _probed(loader: Any) -> int | None:
    """The size of a loader's first batch; the random numbers it takes are given back."""
    batches = getattr(loader, "batch_sampler", None)
    generators = {
        id(source): source
        for holder in (loader, batches, getattr(loader, "sampler", None), getattr(batches, "sampler", None))
        if isinstance(source := getattr(holder, "generator", None), torch.Generator)
    }
    before = {key: source.get_state() for key, source in generators.items()}
    again = loader
    if isinstance(loader, DataLoader) and loader.num_workers:
        again = copy.copy(loader)
        again.__dict__["num_workers"] = 0  # one batch is not worth starting processes for
        again.__dict__["prefetch_factor"] = None
        again.__dict__["persistent_workers"] = False
    with torch.random.fork_rng(devices=[]):
        batch = next(iter(again), None)
    for key, source in generators.items():
        source.set_state(before[key])
    return batch_size_of(batch)


def _check_model(model: nn.Module) -> None:
    placed = getattr(model, "hf_device_map", None)
    if isinstance(placed, Mapping) and len(set(placed.values())) > 1:
        raise UsageError(
            f"prepare: {type(model).__name__}.hf_device_map",
            expected="a model on one device, which the engine shards itself",
            got=dict(placed),
            fix="load it without device_map",
        )
