"""`Accelerator.prepare`: sorts the objects, matches them to their models, checks them, and creates the engines.

1. `sort_objects` sorts models, optimizers, schedulers and loaders, in any number and order.
2. `match` assigns each optimizer to the model with its parameters, and each scheduler to its optimizer, by identity.
3. `_check_cases` checks that optimizer and scheduler come from the config or from code, not from both; its errors name
   both places and both remedies.
4. `_facts` collects the facts of model, loaders, plugin and launcher, from which `config.resolve` fills every "auto".
5. `zeroaccel.initialization.start` creates the engine; `Preparation` wraps optimizer and schedulers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from zeroaccel.accelerate import pretrained_saving
from zeroaccel.accelerate.accelerator_state import AcceleratorState, Prepared
from zeroaccel.accelerate.prepared_optimizer import (
    DummyOptim,
    DummyScheduler,
    GradientState,
    PreparedOptimizer,
    PreparedScheduler,
)
from zeroaccel.accelerate.zero_plugin import ZeroPlugin, gather_facts
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.config import Fact, Facts
from zeroaccel.config.parallel import ParallelConfig, PipelineConfig
from zeroaccel.data import PreparedLoader
from zeroaccel.engine import EngineBase
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.initialization import start
from zeroaccel.nested import batch_size_of
from zeroaccel.optim.optimizer_factory import check_optimizer_type
from zeroaccel.optim.rank_facts import require_same, scheduler_facts
from zeroaccel.setup.job import Compilation, JobSpec
from zeroaccel.zero.from_config import LoopRules

_OPTIMIZER, _SCHEDULER = "optimizer", "scheduler"
# `accelerator.backward` divides the loss by the accumulation steps; a plain `loss.backward()` does not, as in a plain
# PyTorch loop. The training loop decides which micro-step is the boundary.
_LOOP = LoopRules(casts_inputs=True, divides_direct=False, counts_micro_steps=False, resumes=True)


@dataclass
class ObjectsByKind:
    """Unprepared objects, each with its position among the arguments."""

    models: list[tuple[int, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[int, Optimizer | DummyOptim]] = field(default_factory=list)
    schedulers: list[tuple[int, Any]] = field(default_factory=list)
    loaders: list[tuple[int, Any]] = field(default_factory=list)


@dataclass
class PrepareGroup:
    """One model with its optimizer and schedulers; a model without an optimizer is for inference.

    Attributes:
        schedulers: the schedulers, each with its position among the arguments.
        model_at, optimizer_at: position of the model or optimizer among the arguments.
    """

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None = None
    schedulers: list[tuple[int, Any]] = field(default_factory=list)
    model_at: int = 0
    optimizer_at: int = 0

    def __str__(self) -> str:
        parts: list[Any] = [self.model]
        if self.optimizer is not None:
            parts += [self.optimizer, *(scheduler for _, scheduler in self.schedulers)]
        return " with ".join(type(item).__name__ for item in parts)


@dataclass(frozen=True)
class PrepareRules:
    """Settings of an accelerator that apply to all its models.

    Attributes:
        facts: facts from the accelerator's arguments.
        split_batches: each batch of a loader is divided among the ranks.
        step_with_optimizer: schedulers count optimizer steps; False counts every call of `step`.
        steps_per_update: scheduler steps per optimizer step.
        compilation: arguments of `torch.compile`; None compiles no model.
        mesh: the resolved mesh of the processes; None is a mesh with one axis.
        pipeline: how models are divided into stages, if the mesh has `pp`.
    """

    facts: Facts = field(default_factory=Facts)
    split_batches: bool = False
    step_with_optimizer: bool = True
    steps_per_update: int = 1
    compilation: Compilation | None = None
    mesh: ParallelConfig | None = None
    pipeline: PipelineConfig | None = None


class Preparation:
    """Creates engines and wrappers for the arguments of `prepare`, and adds them to `state.prepared`."""

    def __init__(
        self, state: AcceleratorState, gradient_state: GradientState, rules: PrepareRules, collectives: Collectives
    ) -> None:
        self._state = state
        self._gradient_state = gradient_state
        self._rules = rules
        self._collectives = collectives

    def prepare(self, objects: ObjectsByKind, optimizer_kind: str | None) -> dict[int, Any]:
        """Returns the prepared objects except loaders, by their positions among the arguments. (all ranks)

        Raises:
            ConfigError, UsageError: as in `Accelerator.prepare`.
        """
        with agreed(self._collectives, "prepare: objects"):
            groups, late = match(objects, [item.engine for item in self._state.prepared])
            facts = _schedule_facts([scheduler for group in groups for _, scheduler in group.schedulers], late)
        others = [value for _, value in (*late, *objects.loaders)]
        _check_same_objects(groups, others, facts, self._collectives)
        result: dict[int, Any] = {}
        loaders = [loader for _, loader in objects.loaders if not isinstance(loader, PreparedLoader)]
        for group in groups:
            item = self._prepare_group(group, loaders, optimizer_kind)
            if item.optimizer is not None:
                self._set_accumulation(item)
                result[group.optimizer_at] = item.optimizer
            self._state.prepared.append(item)
            result[group.model_at] = item.engine
            for (index, _), scheduler in zip(group.schedulers, item.schedulers, strict=True):
                result[index] = scheduler
        for index, scheduler in late:
            result[index] = self._late_scheduler(scheduler)
        return result

    def _prepare_group(self, group: PrepareGroup, loaders: Sequence[Any], optimizer_kind: str | None) -> Prepared:
        rules, plugin = self._rules, self._state.active_plugin
        # An error that only one rank detects raises on all ranks, before the first collective of the engine.
        with agreed(self._collectives, "prepare: config"):
            _check_model(group.model)
            tree, sources = plugin.document(), plugin.sources()
            _check_cases(group, tree, sources, plugin)
            if group.optimizer is None:
                tree.pop(_OPTIMIZER, None)
                tree.pop(_SCHEDULER, None)
            facts = _facts(group, loaders, plugin, rules, tree, self._samplers)
        optimizer, params, scheduler = _arguments(group)
        job = JobSpec(
            group.model,
            optimizer,
            params,
            scheduler,
            config=tree,
            sources=sources,
            facts=facts,
            collectives=self._collectives,
            parallel=rules.mesh,
            pipeline=rules.pipeline,
            optimizer_kind=optimizer_kind,
            loop=_LOOP,
            compilation=rules.compilation,
        )
        plan, engine = start(job)
        pretrained_saving.attach(engine)
        item = Prepared(engine, plugin, plan.config)
        if group.optimizer is not None:
            item.optimizer = PreparedOptimizer(engine, self._gradient_state)
            item.schedulers = [self._wrapped(value, item.optimizer) for _, value in group.schedulers]
        return item

    @property
    def _samplers(self) -> Fact[int]:
        """Number of processes that see different samples, and its source."""
        mesh = self._rules.mesh
        if mesh is None or not mesh.splits_samples:
            return Fact(self._collectives.world_size, "the process group")
        return Fact(mesh.data_parallel_size, "the parallelism_config")

    def _late_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Wraps a scheduler whose optimizer an earlier call has prepared."""
        assert not isinstance(scheduler, DummyScheduler), "match refuses it"
        inner = _unwrapped(scheduler.optimizer)
        for item in self._state.prepared:
            if item.optimizer is not None and item.optimizer.optimizer is inner:
                wrapper = self._wrapped(scheduler, item.optimizer)
                item.schedulers.append(wrapper)
                return wrapper
        raise AssertionError("match finds late schedulers by a prepared optimizer")

    def _wrapped(self, scheduler: Any, optimizer: PreparedOptimizer) -> PreparedScheduler:
        if isinstance(scheduler, DummyScheduler):
            inner = optimizer.engine.lr_scheduler
            return PreparedScheduler(inner, optimizer, self._gradient_state, engine_driven=True)
        return PreparedScheduler(
            scheduler,
            optimizer,
            self._gradient_state,
            with_optimizer=self._rules.step_with_optimizer,
            steps_per_update=self._rules.steps_per_update,
        )

    def _set_accumulation(self, item: Prepared) -> None:
        """Takes the micro-steps per optimizer step from the model's config; all trained models must agree."""
        steps = item.engine.gradient_accumulation_steps()
        first = next((other for other in self._state.prepared if other.optimizer is not None), None)
        if first is not None and steps != self._gradient_state.num_steps:
            raise ConfigError(
                f"gradient_accumulation_steps: {steps} from {_accumulation_source(item)}, but "
                f"{self._gradient_state.num_steps} from {_accumulation_source(first)}",
                fix="use the same value for all models of an accelerator, or one accelerator per model",
            )
        self._gradient_state.num_steps = steps


def _accumulation_source(item: Prepared) -> str:
    return item.config.resolved_sources.get("gradient_accumulation_steps", item.plugin.title)


# -- which objects belong together


def sort_objects(objects: Sequence[Any]) -> ObjectsByKind:
    """Returns the objects by kind, without prepared objects and objects of other kinds."""
    kinds = ObjectsByKind()
    for index, value in enumerate(objects):
        if isinstance(value, (EngineBase, PreparedOptimizer, PreparedScheduler)):
            continue
        if isinstance(value, DataLoader):
            kinds.loaders.append((index, value))
        elif isinstance(value, nn.Module):
            kinds.models.append((index, value))
        elif isinstance(value, (Optimizer, DummyOptim)):
            kinds.optimizers.append((index, value))
        elif isinstance(value, DummyScheduler) or _is_scheduler(value):
            kinds.schedulers.append((index, value))
    return kinds


def _is_scheduler(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("step", "state_dict", "get_last_lr"))


def match(objects: ObjectsByKind, engines: Iterable[EngineBase]) -> tuple[list[PrepareGroup], list[tuple[int, Any]]]:
    """Returns the groups, and the schedulers whose optimizers an earlier call has prepared.

    Args:
        engines: engines of the models that earlier calls have prepared.

    Raises:
        UsageError: an optimizer lacks its model, has several models or is the second one of a model; a scheduler lacks
            its optimizer; or a model is already prepared.
    """
    earlier = {id(engine.module): engine for engine in engines}
    for index, model in objects.models:
        if id(model) in earlier:
            raise UsageError(
                f"prepare: argument {index}, {type(model).__name__}, is already prepared",
                fix="use the object that the first prepare() returned",
            )
    groups = [PrepareGroup(model, model_at=index) for index, model in objects.models]
    for index, optimizer in objects.optimizers:
        group = _group_of_optimizer(index, optimizer, groups, earlier.values())
        if group.optimizer is not None:
            raise UsageError(
                f"prepare: argument {index}, {type(optimizer).__name__}",
                expected=f"one optimizer for {type(group.model).__name__}",
                got=f"a second one besides {type(group.optimizer).__name__}, argument {group.optimizer_at}",
                fix="create one optimizer with a param group for each part of the model",
            )
        group.optimizer, group.optimizer_at = optimizer, index
    late: list[tuple[int, Any]] = []
    for index, scheduler in objects.schedulers:
        owner = _group_of_scheduler(index, scheduler, groups, earlier.values())
        (owner.schedulers if owner is not None else late).append((index, scheduler))
    return groups, late


def _group_of_optimizer(
    index: int, optimizer: Optimizer | DummyOptim, groups: list[PrepareGroup], engines: Iterable[EngineBase]
) -> PrepareGroup:
    if isinstance(optimizer, DummyOptim):
        params = {id(param) for param in optimizer.parameters()}
    else:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    where = f"prepare: argument {index}, {type(optimizer).__name__}"
    owners = [group for group in groups if any(id(param) in params for param in group.model.parameters())]
    if not params and len(groups) == 1:
        return groups[0]  # the plan refuses an optimizer that has nothing to train
    if len(owners) == 1:
        return owners[0]
    if len(owners) > 1:
        raise UsageError(
            where,
            expected="an optimizer of one model",
            got=f"parameters of {', '.join(type(group.model).__name__ for group in owners)}",
            fix="create one optimizer per model",
        )
    if any(id(param) in params for engine in engines for param in engine.module.parameters()):
        fix = "pass both to one prepare(), which shards the parameters of this optimizer"
        raise UsageError(where, expected="its model in the same prepare()", got="a model prepared earlier", fix=fix)
    raise UsageError(
        where,
        expected="its model in the same prepare()",
        got=", ".join(type(group.model).__name__ for group in groups) or "no model",
        fix="pass the model whose parameters the optimizer has",
    )


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _group_of_scheduler(
    index: int, scheduler: Any, groups: list[PrepareGroup], engines: Iterable[EngineBase]
) -> PrepareGroup | None:
    """Returns the group with the scheduler's optimizer; None if an earlier call has prepared that optimizer."""
    inner = _unwrapped(getattr(scheduler, "optimizer", None))
    trained = [group for group in groups if group.optimizer is not None]
    for group in trained:
        if group.optimizer is inner:
            return group
    if any(engine.optimizer is inner for engine in engines if engine.optimizer is not None):
        if not isinstance(scheduler, DummyScheduler):
            return None
        fix = "pass both to one prepare(), which creates the config's scheduler with its optimizer"
        raise UsageError(f"prepare: argument {index}, DummyScheduler of an optimizer prepared earlier", fix=fix)
    if inner is None and len(trained) == 1:
        return trained[0]
    raise UsageError(
        f"prepare: argument {index}, {type(scheduler).__name__}",
        expected="its optimizer in the same prepare() or in an earlier one",
        got=", ".join(type(group.optimizer).__name__ for group in trained) or "no optimizer",
        fix="pass the optimizer with which it was created",
    )


# -- checks


def _check_same_objects(
    groups: Iterable[PrepareGroup], others: Sequence[Any], schedules: Mapping[str, str], collectives: Collectives
) -> None:
    """Checks that all ranks prepare the same objects; with one more, a rank would wait for the others. (all ranks)

    Args:
        others: schedulers of optimizers prepared earlier, and loaders.
        schedules: result of `_schedule_facts`.
    """
    names = [*map(str, groups), *(type(other).__name__ for other in others)]
    by_rank: list[tuple[list[str], Mapping[str, str]]] = collectives.gather_objects(
        (names, schedules), "prepare: objects of each rank"
    )
    if any(theirs != names for theirs, _ in by_rank):
        got = "; ".join(
            f"{collectives.named([rank])}: {', '.join(theirs) or 'nothing'}" for rank, (theirs, _) in enumerate(by_rank)
        )
        raise UsageError("prepare", expected="the same objects on every rank, in the same order", got=got)
    require_same("prepare", [facts for _, facts in by_rank], collectives.named)


def _schedule_facts(schedulers: Sequence[Any], late: Iterable[tuple[int, Any]]) -> dict[str, str]:
    """Returns the settings of all schedulers, which the ranks compare."""
    everything = [*schedulers, *(scheduler for _, scheduler in late)]
    facts: dict[str, str] = {}
    for number, scheduler in enumerate(everything):
        name = type(scheduler).__name__
        facts |= scheduler_facts(scheduler, name if len(everything) == 1 else f"schedule {number}, {name}")
    return facts


def _check_model(model: nn.Module) -> None:
    devices = getattr(model, "hf_device_map", None)
    if isinstance(devices, Mapping) and len(set(devices.values())) > 1:
        raise UsageError(
            f"prepare: {type(model).__name__}.hf_device_map",
            expected="a model on one device, because the engine shards it",
            got=dict(devices),
            fix="load it without device_map",
        )


def _check_cases(group: PrepareGroup, tree: Mapping[str, Any], sources: Mapping[str, str], plugin: ZeroPlugin) -> None:
    def section(name: str) -> str:
        return f"{sources.get(name, plugin.title)}: {name}"

    named = tree.get(_OPTIMIZER)
    # A section with only `kind` describes an optimizer that comes from code.
    configured = named is not None and not (isinstance(named, Mapping) and set(named) == {"kind"})
    scheduled = tree.get(_SCHEDULER) is not None
    optimizer = group.optimizer
    if isinstance(optimizer, DummyOptim) and not configured:
        raise ConfigError(
            "prepare: a DummyOptim needs an optimizer in the config, and the config has none",
            fix=f'add an "optimizer" section to {plugin.title}, or pass a torch optimizer instead of the DummyOptim',
        )
    if optimizer is not None and not isinstance(optimizer, DummyOptim) and configured:
        if kind := _type_of(tree[_OPTIMIZER]):
            check_optimizer_type(kind, f"{sources.get('optimizer.type', plugin.title)}: optimizer.type")
        raise ConfigError(
            f"{section(_OPTIMIZER)} {_type_of(tree[_OPTIMIZER])}, and {type(optimizer).__name__} in code",
            fix="remove the section, or pass DummyOptim(params) instead of the optimizer",
        )
    if len(group.schedulers) > 1 and any(isinstance(value, DummyScheduler) for _, value in group.schedulers):
        raise UsageError("prepare", expected="a DummyScheduler as only scheduler", got=len(group.schedulers))
    for _, scheduler in group.schedulers:
        _check_scheduler(scheduler, isinstance(optimizer, DummyOptim), scheduled, tree, section, plugin)


def _check_scheduler(
    scheduler: Any, dummy_optimizer: bool, scheduled: bool, tree: Mapping[str, Any], section: Any, plugin: ZeroPlugin
) -> None:
    if not isinstance(scheduler, DummyScheduler):
        if scheduled:
            raise ConfigError(
                f"{section(_SCHEDULER)} {_type_of(tree[_SCHEDULER])}, and {type(scheduler).__name__} in code",
                fix="remove the section, or pass DummyScheduler(optimizer) instead of the scheduler",
            )
        if dummy_optimizer:
            raise ConfigError(
                f"prepare: {type(scheduler).__name__} in code, but prepare() creates {section(_OPTIMIZER)} "
                f"{_type_of(tree[_OPTIMIZER])}, so the scheduler cannot refer to it",
                fix="pass DummyScheduler(optimizer, lr_scheduler_callable=function_of_the_optimizer), "
                'or add a "scheduler" section',
            )
    elif scheduler.lr_scheduler_callable is not None and scheduled:
        raise ConfigError(
            f"{section(_SCHEDULER)} {_type_of(tree[_SCHEDULER])}, and lr_scheduler_callable in code",
            fix="remove the section or the argument",
        )
    elif scheduler.lr_scheduler_callable is None and not scheduled:
        raise ConfigError(
            "prepare: a DummyScheduler needs a scheduler in the config, and the config has none",
            fix=f'add a "scheduler" section to {plugin.title}, or pass lr_scheduler_callable to the DummyScheduler',
        )


def _type_of(section: Any) -> str:
    return str(section.get("type", "")) if isinstance(section, Mapping) else ""


# -- arguments and facts for `initialize`


def _arguments(group: PrepareGroup) -> tuple[Any, Any, Any]:
    """Returns optimizer, params and scheduler as arguments of `initialize`."""
    dummy = next((value for _, value in group.schedulers if isinstance(value, DummyScheduler)), None)
    scheduler = dummy.lr_scheduler_callable if dummy is not None else None
    if isinstance(group.optimizer, DummyOptim):
        return None, group.optimizer.params, scheduler
    return group.optimizer, None, scheduler


def _facts(
    group: PrepareGroup,
    loaders: Sequence[Any],
    plugin: ZeroPlugin,
    rules: PrepareRules,
    tree: Mapping[str, Any],
    samplers: Fact[int],
) -> Facts:
    several = [rules.facts, plugin.facts()]
    if isinstance(group.optimizer, DummyOptim):
        several.append(group.optimizer.facts())
    elif group.optimizer is not None and isinstance(lr := group.optimizer.defaults.get("lr"), float):
        several.append(Facts(lr=Fact(lr, f"{type(group.optimizer).__name__}(lr={lr})", explicit=False)))
    for _, scheduler in group.schedulers:
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
            several.append(scheduler.facts(rules.steps_per_update))
    facts = gather_facts(*several)
    if facts.micro_batch_size is None and group.optimizer is not None:
        share = samplers.value if rules.split_batches else 1
        # Reading a first batch may be slow, so a loader is probed only if the config needs its batch size.
        probe = tree.get("train_micro_batch_size_per_gpu") == "auto" and tree.get("train_batch_size") == "auto"
        size = batch_size_fact(loaders, smallest=plugin.is_train_batch_min, share=share, probe=probe)
        facts = replace(facts, micro_batch_size=size)
    return replace(facts, training=group.optimizer is not None)


def batch_size_fact(loaders: Iterable[Any], *, smallest: bool = True, share: int = 1, probe: bool = True) -> Fact[int]:
    """Returns the samples per rank and micro-step, from the unprepared loaders.

    Args:
        smallest: return the smallest of several sizes; otherwise the largest.
        share: number of ranks among which a loader's batch is divided.
        probe: read a batch of a loader without a known batch size.

    Returns:
        An explicit fact if all loaders agree. If no loader has a size, the fact is 1 and fills only "auto"; only
        reports use it.
    """
    sizes_and_sources: list[tuple[int, str]] = []
    for loader in loaders:
        size, source = _batch_size(loader, probe=probe)
        if size:
            per_rank = size // share or 1
            sizes_and_sources.append((per_rank, source if share == 1 else f"{source} / {share} processes"))
    if not sizes_and_sources:
        return Fact(1, "no loader with a known batch size was prepared with the model", explicit=False)
    sizes = {size for size, _ in sizes_and_sources}
    size, source = min(sizes_and_sources) if smallest else max(sizes_and_sources)
    if len(sizes) > 1:
        which = "smallest" if smallest else "largest"
        return Fact(size, f"the {which} of {sorted(sizes)}, {source}", explicit=False)
    return Fact(size, source)


def _batch_size(loader: Any, *, probe: bool) -> tuple[int | None, str]:
    size = getattr(loader, "batch_size", None)
    if isinstance(size, int):
        return size, f"DataLoader(batch_size={size})"
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(size, int):
        return size, f"the loader's {type(loader.batch_sampler).__name__} with batch_size {size}"
    return (_size_of_first_batch(loader), "the first batch of the loader") if probe else (None, "")


def _size_of_first_batch(loader: Any) -> int | None:
    # Generators are restored afterwards, so that reading a batch here does not change the order of training.
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, batches, getattr(loader, "sampler", None), getattr(batches, "sampler", None))
    generators = [
        source for owner in owners if isinstance(source := getattr(owner, "generator", None), torch.Generator)
    ]
    states = [generator.get_state() for generator in generators]
    single = loader
    if isinstance(loader, DataLoader) and loader.num_workers:
        single = copy.copy(loader)
        single.__dict__["num_workers"] = 0  # starting worker processes for one batch would be slower
        single.__dict__["prefetch_factor"] = None
        single.__dict__["persistent_workers"] = False
    with torch.random.fork_rng(devices=[]):
        batch = next(iter(single), None)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    return batch_size_of(batch)
