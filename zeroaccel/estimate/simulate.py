"""One optimizer step on tensors without data, with the engine itself, to see how much memory a rank needs.

[Note: fake step] The model is built under `FakeTensorMode`, so that every tensor has a shape, a dtype and no values;
units, residency, reducer and optimizer shard are the engine's own, with ranks that are not there. Two steps are taken
since the first records the order of fetches; the second is the one that repeats. Only two things are replaced: the
gradients' norm, which needs values, and the optimizer's arithmetic.

Seen: every tensor that an operation returns. Not seen: what a kernel allocates inside itself, what allocators round
up or keep, and the backend's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.utils.checkpoint import checkpoint

from zeroaccel.config import BatchSizes, Fact, load_config, shard_plan, tier_plan
from zeroaccel.errors import UsageError
from zeroaccel.estimate.extrapolate import MemoryTrace, Moment, lengthen
from zeroaccel.estimate.fake_ranks import FakeRanks
from zeroaccel.estimate.memory_tracker import MemoryTracker
from zeroaccel.estimate.subject import Step, Subject
from zeroaccel.estimate.workload import MemoryByKind, Workload
from zeroaccel.optim.optimizer_kinds import classify
from zeroaccel.zero.build import build_units, check_dtypes, plan_units
from zeroaccel.zero.engine import Engine
from zeroaccel.zero.from_config import (
    DTYPES,
    buffer_dtypes_of,
    engine_settings_of,
    facts_from_model,
    placement_of,
    unit_specs_of,
)
from zeroaccel.zero.grad_reducer import GradStats
from zeroaccel.zero.precision import cast_buffers
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.placement import OffloadRules, TierSet
from zeroaccel.zero.wrap_policy import group_parameters

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """What a simulated step showed.

    Attributes:
        numel: parameters of the model, without padding.
        peak: bytes at the peak.
        when: "forward", "backward" or "step".
        shards: elements and bytes of each shard of parameters, in order; part of `peak.params`.
        trained: elements of each run of weights that this rank updates, padding included.
    """

    numel: int
    peak: MemoryByKind
    when: str
    shards: tuple[tuple[int, int], ...]
    trained: tuple[int, ...]


def simulate(subject: Subject, workload: Workload, stage: int, *, on_cpu: bool = False) -> Simulated:
    """Takes two optimizer steps on tensors without data.

    A model of many blocks that are all alike is taken with a few of them, of which the whole follows; see `lengthen`.

    Args:
        on_cpu: the ranks compute in host memory and talk through gloo, which needs buffers to receive into.

    Raises:
        UsageError: the model does something that needs values.
    """
    shortest = _EDGES + -(-_WINDOW_NUMEL // max(subject.layer_numel, 1))
    if subject.build_short is not None and shortest + 2 < subject.layers // 2:
        lengths = range(shortest, shortest + 3)
        courses = [
            _course(partial(subject.build_short, layers), subject.name, workload, stage, on_cpu=on_cpu, whole=True)
            for layers in lengths
        ]
        if (course := lengthen(courses, subject.layers - lengths[-1])) is not None:
            return _simulated(course)
    return _simulated(_course(subject.build, subject.name, workload, stage, on_cpu=on_cpu))


_EDGES = 4  # blocks at both ends that may be treated in another way than those between
_WINDOW_NUMEL = 10**9  # elements that the engine looks ahead, or keeps whole, by default


def _simulated(course: MemoryTrace) -> Simulated:
    moment = max(course.moments, key=lambda one: one.total)  # the first of several
    known = moment.params + moment.optimizer + moment.gradients
    peak = MemoryByKind(moment.params, moment.optimizer, moment.gradients, max(0, moment.total - known))
    return Simulated(course.numel, peak, _PHASES[moment.phase % len(_PHASES)], course.shards, course.trained)


def _course(
    build: Callable[[], tuple[nn.Module, Step]],
    name: str,
    workload: Workload,
    stage: int,
    *,
    on_cpu: bool,
    whole: bool = False,
) -> MemoryTrace:
    """What is held in the second of two steps, moment by moment; only up to each new peak unless `whole`."""
    with FakeTensorMode() as fake:
        try:
            return _take_two_steps(build, workload, stage, on_cpu=on_cpu, whole=whole)
        except (UnsupportedFakeTensorException, torch._subclasses.fake_tensor.DataDependentOutputException) as error:
            raise UsageError(
                f"{name}: its forward depends on values, which an estimate does not have: {error}",
                fix="estimate by the number of parameters instead, such as 7b",
            ) from error
        finally:
            fake.fake_tensor_converter.meta_converter.describer.lookup_storage.clear()


def _take_two_steps(
    build: Callable[[], tuple[nn.Module, Step]], workload: Workload, stage: int, *, on_cpu: bool, whole: bool
) -> MemoryTrace:
    watch = _Watch(whole=whole)
    with MemoryTracker(watch.note) as ledger:
        model, step = build()
        numel = sum(param.numel() for param in model.parameters())
        collectives = FakeRanks(workload.ranks, receives_in_host_memory=on_cpu)
        engine = _engine(model, workload, stage, collectives)
        ledger.follow(buffer.full for unit in engine.units for buffer in unit.buffers)
        # The first step records the order of fetches, and leaves receive buffers behind.
        for _ in range(2):
            watch.begin(engine)
            ledger.look()
            _take_step(engine, step, workload, watch)
        moments = watch.moments
        watch.engine = None
        buffers = [buffer for unit in engine.units for buffer in unit.buffers]
        shards = tuple((b.shard.numel(), b.shard.nbytes) for b in buffers if not b.resident)
        trained = tuple(b.master.numel() for b in buffers if b.master is not None)
        engine.destroy()
    return MemoryTrace(numel, tuple(moments), shards, trained)


_PHASES = ("forward", "backward", "step")


class _Watch:
    """Writes down what is held, and for what, at every new peak of a step, or at every moment of it.

    Attributes:
        phase: how many parts of the step are over.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self.engine: _EngineWithoutValues | None = None
        self.phase = 0
        self.moments: list[Moment] = []
        self._highest = 0

    def begin(self, engine: _EngineWithoutValues) -> None:
        self.engine, self.phase, self.moments, self._highest = engine, 0, [], 0

    def note(self, total: int) -> None:
        if self.engine is not None and (self._whole or total > self._highest):
            self._highest = max(self._highest, total)
            self.moments.append(Moment(self.phase, total, *self.engine.held()))


def _take_step(engine: Engine, step: Step, workload: Workload, watch: _Watch) -> None:
    kept: Any = None
    # More micro-steps than two only repeat the second.
    for number in range(engine.gradient_accumulation_steps()):
        watch.phase = len(_PHASES) * number
        kept = step(engine, workload.batch, workload.sequence)
        loss = kept[0] if isinstance(kept, tuple) else kept
        watch.phase += 1
        engine.backward(loss)
        watch.phase += 1
        engine.step()
    del kept


class _StatesOnly(torch.optim.Optimizer):
    """Makes the states an optimizer would keep, and computes nothing."""

    def __init__(self, params: Sequence[nn.Parameter], states_per_element: int) -> None:
        super().__init__(params, {"lr": 0.0})
        self._count = states_per_element

    def step_shard(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, *, grad_scale: float, out: Tensor | None
    ) -> None:
        if not self.state[param]:
            self.state[param] = {str(index): torch.zeros_like(param) for index in range(self._count)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


class _EngineWithoutValues(Engine):
    def held(self) -> tuple[int, int, int]:
        """Bytes of parameters, of the optimizer and of gradients, those on their way among them."""
        states = self.model_state_nbytes()
        return states["params"], states["optimizer"], states["gradients"] + self._reducer.in_flight_nbytes()

    def _finish_gradients(self, *, norm: bool) -> GradStats:
        self._complete_gradients()
        return GradStats(finite=True, norm=1.0, agreed=True, alike=True)


def _engine(model: nn.Module, workload: Workload, stage: int, collectives: FakeRanks) -> _EngineWithoutValues:
    """As `assembly.initialize` does it, up to what needs a process group or values."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": min(workload.accumulation, 2),
        "zero_optimization": {"stage": stage},
    }
    if workload.precision != "fp32":
        config[workload.precision] = {"enabled": True}
    known = replace(facts_from_model(model), world_size=Fact(workload.ranks, "the ranks"), training=True)
    settings = load_config(config, facts=known)
    check_dtypes(model, DTYPES[settings.precision])
    plan = shard_plan(settings)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = _StatesOnly(params, workload.states_per_element)
    groups = {id(param): 0 for param in params}
    specs = unit_specs_of(model, settings, plan)
    if workload.checkpointing:
        _recompute(model)
    device = torch.device("cpu")
    residences = tier_plan(settings)
    placement = placement_of(model, settings, plan, groups, device, residences)
    cast_buffers(model, device, buffer_dtypes_of(model, settings))
    plans = plan_units(specs, placement, workload.ranks)
    rules = OffloadRules.of(settings, residences.param, residences.optimizer)
    tiers = TierSet(rules, list(chain(*plans)), optimizer, 0, device)
    tiers.open([])
    units = build_units(specs, plans, placement, collectives, tiers)
    shard = ShardedOptimizer(
        optimizer,
        classify(optimizer),
        groups,
        [buffer for unit in units for buffer in unit.buffers if buffer.trainable],
        replicated=not plan.optimizer,
    )
    batch = BatchSizes(
        train=workload.batch * workload.ranks * min(workload.accumulation, 2),
        micro=workload.batch,
        accumulation=min(workload.accumulation, 2),
    )
    engine_settings = engine_settings_of(settings, plan, batch, workload.ranks)
    return _EngineWithoutValues(model, units, collectives, engine_settings, optimizer=shard, config=settings.raw)


def _recompute(model: nn.Module) -> None:
    """Makes each block keep its inputs only: the model's own way where it has one, else around the units."""
    how = {"use_reentrant": False, "preserve_rng_state": False}  # a fake random state cannot be set
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # the newer one first
        own: Callable[..., Any] | None = getattr(model, name, None)
        if own is not None:
            own(**{name.replace("enable", "kwargs"): how})
            model.train()
            return
    for spec in group_parameters(model):
        for module in spec.modules:
            if module is not model and next(module.children(), None) is not None:
                module.forward = _checkpointed(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed
