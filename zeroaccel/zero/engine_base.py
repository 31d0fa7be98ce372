"""The parts of an engine and the order in which a training step uses them.

`hooks` and `coordinator` unshard and reshard units, `grad_reducer` reduces gradients to shards, `step_boundary` takes
the norm (`grad_norm`) and compares the ranks, `weight_update` and `sharded_optimizer` update the masters and gather
the weights. Nothing here asks for a stage number.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.stop_notice import stop_notice
from zeroaccel.errors import CollectiveError, EngineStateError, OffloadError, UsageError
from zeroaccel.optim.rank_facts import HyperparameterCheck
from zeroaccel.telemetry.step_report import OffloadReport, StepReport
from zeroaccel.zero.access.full_params import gathered, iter_named_full_params
from zeroaccel.zero.access.param_registry import ParamRegistry, Training
from zeroaccel.zero.compiled import (
    backend_named,
    check_toolchain,
    compiler_failure,
    is_compiled_within,
    refuse_compiled_engine,
)
from zeroaccel.zero.coordinator import ParamCoordinator
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.grad_norm import FactorRule, GradCheck
from zeroaccel.zero.grad_reducer import GradReducer
from zeroaccel.zero.hooks import Hooks, StateDictHooks, freed_view
from zeroaccel.zero.model_check import misplaced_inputs
from zeroaccel.zero.param_check import ParamIntegrityCheck
from zeroaccel.zero.param_unit import ParamUnit, ShardState
from zeroaccel.zero.precision import LossScale, cast_floats
from zeroaccel.zero.prefetch import PrefetchTrace
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.step_boundary import StepBoundary
from zeroaccel.zero.step_trace import StepTrace, TracedParts
from zeroaccel.zero.storage.placement import TierSet
from zeroaccel.zero.storage.state_offload import StateOffload
from zeroaccel.zero.weight_update import WeightUpdate
from zeroaccel.zero.wrap_policy import has_expert_interface, scored_experts

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class EngineParts:
    """What an engine trains with, besides the model, its units and the settings.

    Attributes:
        optimizer: None for inference.
        lr_scheduler: stepped after each update; None for none.
        loss_scale: of fp16.
        report: logs steps, phases and monitor events.
        tiers: of offloaded shards and states.
        unoptimized: trainable parameters that no optimizer updates; their gradients are dropped.
        refuses_compiled: why a compiled model cannot be used; "" where it can.
    """

    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    loss_scale: LossScale
    report: StepReport
    tiers: TierSet
    unoptimized: Sequence[nn.Parameter]
    refuses_compiled: str


@dataclass
class StepState:
    """Where an engine is within an optimizer step, and the outcome of the last one.

    Attributes:
        in_backward: from the first gradient that reaches the model until autograd is done.
        is_direct: that backward is a plain `loss.backward()`, not `engine.backward(loss)`.
        collects_gradients: it leaves gradients to reduce; False through a frozen model, where they only pass.
        is_last_backward: its gradients complete the step.
        num_backwards: backwards since the last `step()`, whose gradients wait for it.
        syncs: False inside `no_sync()`.
        boundary: set by the program instead of counted; None where it is counted.
        applied: the last `step()` changed the weights.
    """

    in_backward: bool = False
    is_direct: bool = False
    collects_gradients: bool = False
    is_last_backward: bool = False
    num_backwards: int = 0
    syncs: bool = True
    boundary: bool | None = None
    applied: bool = False


class Checkpoints(Protocol):
    """The checkpointer of an engine; see `checkpoint/checkpointer.py`. The calls are documented at `Engine`."""

    loaded: Any

    def state(self) -> Any:
        """The model, units and optimizer, as the writers of `checkpoint/` take them (an `EngineState`)."""

    def prepare_to_save(self, call: str) -> None: ...

    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: object,
        client_state: dict[str, Any] | None,
        save_latest: bool,
        *,
        exclude_frozen: bool | None,
    ) -> None: ...

    def begin_save(self, folder: PathLike, tag: str) -> Any:
        """A save that a thread of the caller writes (a `Save` of `checkpoint/`). (all ranks)"""

    def load_checkpoint(
        self, load_dir: PathLike, tag: object, *, strict: bool, optimizer: bool, scheduler: bool, progress: bool
    ) -> tuple[str | None, dict[str, Any]]: ...

    def files_to_read(self, root: Path, tag: str) -> set[str]: ...

    def save_16bit_model(self, path: PathLike, *, exclude_frozen: bool) -> None: ...

    def save_model(self, save_dir: PathLike, max_nbytes: int, *, pickled: bool, exclude_frozen: bool) -> list[str]: ...

    def consolidated_state_dict(self, *, exclude_frozen: bool) -> dict[str, Tensor] | None: ...

    def wait(self) -> None: ...

    def require_intact(self, call: str) -> None:
        """Raises EngineStateError after a load that failed half way."""

    def before_update(self) -> None:
        """Before weights change: a save in the background must have copied them. (all ranks)"""


class WeightStreams(Protocol):
    """Sends an engine's weights to other programs; see `rollout/weight_stream.py`. The calls are documented at
    `Engine`, the packets in `rollout/receiver.py`.
    """

    version: int

    def stream_weights(
        self,
        *,
        dtype: torch.dtype | None,
        names: Any,
        bucket_bytes: int,
        merge_adapters: bool,
        only_rank: int | None,
        as_saved: bool,
    ) -> Iterator[Any]: ...

    def stream_deltas(self, since: int | None) -> Iterator[Any]: ...

    def mark_changes(self, *, enabled: bool) -> None: ...


class EngineBase(nn.Module):
    """What engines have in common: one model, its optimizer and scheduler, and the parts of a training step.

    Attributes that the engine does not have are the model's.

    Before a unit's forward its parameters are all-gathered, and the next units are prefetched; after it they are
    resharded. Before its backward they are gathered again, and as soon as all of its gradients are accumulated they
    are reduce-scattered to fp32 shards. At the accumulation boundary the norm is taken, the gradients are clipped, and
    each rank updates its shard of the masters.

    Attributes:
        module: the model, the same object that was passed in.
        optimizer, lr_scheduler: passed in or built from the config, or None.
        sharded_optimizer: steps `optimizer` on shards; None for inference.
        weight_update: when masters are updated and weights gathered; None for inference.
        grad_reducer: reduces gradients to shards.
        tier_set: tiers of offloaded shards and states.
        checkpointer: saves and loads it.
        weight_sender: streams its weights.
        registry: finds the model's parameters for `GatheredParameters` and the like.
        trace: the recorded order of units, for prefetching.
        global_steps: steps taken, skipped ones included.
        skipped_steps: steps skipped because gradients were not finite.
        micro_steps: `step()` calls.
        global_samples: samples seen by all ranks.
        zero_config: the resolved config it was made from, as a plain dict.
    """

    # Of layers above this one: `setup.build` sets them once the engine is made.
    checkpointer: Checkpoints
    weight_sender: WeightStreams

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ParamUnit],
        collectives: Collectives,
        settings: EngineSettings,
        parts: EngineParts,
        config: Mapping[str, Any],
    ) -> None:
        super().__init__()
        optimizer, tiers = parts.optimizer, parts.tiers
        self.module = model
        # Python names a callable by this where a call is wrong, as `engine(**a_list)` is; else by its repr.
        self.__qualname__ = type(self).__name__
        self.settings = settings
        self.zero_config = dict(config)
        self.lr_scheduler = parts.lr_scheduler
        self.loss_scale = parts.loss_scale
        self.units = tuple(units)
        self.collectives = collectives
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self._step = StepState(boundary=None if settings.loop.counts_micro_steps else True)
        self.sharded_optimizer = optimizer
        self.tier_set = tiers
        self._report = parts.report
        if tiers.is_used:
            self._report.offload = _offload_report(tiers, optimizer)
        if self._report.performance is not None:
            watched = tiers.tiers if tiers.is_used else {}
            self._report.performance.watch(collectives, watched, _update_times(optimizer))
        if not is_compiled_within(model):
            self._watch_routers(collectives)

        # Gradients to shards, shards to masters, masters to weights.
        trained = [(unit.name, b) for unit in units for b in unit.buffers if b.trainable]
        copies = tiers.copies if tiers.steps_on_host else None
        self.grad_reducer = GradReducer(trained, collectives, settings.plan, settings.rules, copies)
        self.weight_update = None if optimizer is None else self._build_weight_update(optimizer)
        self._boundary = None if self.weight_update is None else self._build_boundary(self.weight_update)

        # Unshard and reshard. Persistent units stay unsharded, so nothing has to be hooked or prefetched for them.
        sharded_units = [unit for unit in units if not unit.persistent]
        self._peers_are_job = collectives.peers is collectives.job
        self.trace = PrefetchTrace({unit.name: unit.numel for unit in units}, settings.limits)
        self._coordinator = ParamCoordinator(sharded_units, self.trace, collectives, self.grad_reducer.on_unit_over)
        optimized = [param for _, buffer in trained for param in buffer.params] if optimizer else []
        self._hooks = Hooks(
            model, sharded_units, self._coordinator, self, optimized=optimized, unoptimized=parts.unoptimized
        )
        if optimizer is not None:
            self._hooks.guard_step(optimizer.optimizer, lambda: optimizer.is_stepping)

        # Access from outside the training step.
        self.registry = ParamRegistry(
            collectives,
            pin=self._coordinator.pin,
            unpin=self._coordinator.unpin,
            training=Training(optimizer, self.grad_reducer, lambda: self.loss_scale, self.weight_update),
        )
        self.registry.add(units)
        self._load_hooks = StateDictHooks(model, self.registry, empty_when_sharded=settings.loop.empty_when_sharded)
        self._integrity = ParamIntegrityCheck(model, units, trained=optimizer is not None)
        self._state_offload = StateOffload(self.units, self.grad_reducer, optimizer)
        self._refuses_compiled = parts.refuses_compiled
        self._undo = contextlib.ExitStack()
        self._at_stop: list[Callable[[], object]] = []
        self._destroyed = False

    def _build_boundary(self, weights: WeightUpdate) -> StepBoundary:
        settings = HyperparameterCheck(self._require_optimizer("step").optimizer, self.collectives.job)
        return StepBoundary(self.grad_reducer, weights, settings, self.collectives, self._refuse_step)

    def _watch_routers(self, collectives: Collectives) -> None:
        """Has the report count the tokens of a mixture's experts."""
        experts: Iterable[Any] = filter(has_expert_interface, self.module.modules())
        routers: Iterable[Any] = filter(None, map(scored_experts, self.module.modules()))
        self._report.watch_routers(
            [(one, one.num_experts) for one in experts],
            [(router, nested[-1].num_experts) for router, nested in routers],
            partial(collectives.all_reduce, op="sum", label="tokens of experts"),
        )

    def _build_weight_update(self, optimizer: ShardedOptimizer) -> WeightUpdate:
        return WeightUpdate(
            optimizer,
            self.grad_reducer,
            self.units,
            self.collectives,
            gather_numel=self.settings.gather_numel,
            gathers=self.settings.plan.optimizer,
            during=self.settings.update_during,
            tiers=self.tier_set,
        )

    # -- one micro-batch, and one step

    def run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; sharded parameters are gathered as their modules run."""
        if torch.compiler.is_compiling():
            refuse_compiled_engine()
        self.checkpointer.require_intact("forward")
        self._check_usable()
        # Before anything is computed with them: a write that the next gather would overwrite must not train first.
        self._integrity.check()
        self._hooks.attach_outside_graphs(self._refuses_compiled)
        self._report.begin("forward")
        self._note_phase("forward" if torch.is_grad_enabled() else "eval")
        dtype = self.settings.input_dtype
        if dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        # `finally`, as an exception in a forward may be caught and the next batch tried.
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            mistake = compiler_failure(error, self.module) or freed_view(error)
            mistake = mistake or misplaced_inputs(error, args, kwargs, self.collectives.topology.device)
            if mistake is None:
                raise
            raise mistake from error
        finally:
            self._report.end("forward")

    def run_trial(self, batch: Mapping[str, Any]) -> Any:
        """A forward at the start, to see what the model computes: it is no step of a training."""
        return self.module(**batch)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model's forward by `torch.compile`, with its arguments. The hooks stay out of the graphs.

        Example:
            >>> import torch
            >>> import zeroaccel
            >>> engine, *_ = zeroaccel.initialize(torch.nn.Linear(4, 2), config={"train_micro_batch_size_per_gpu": 8})
            >>> engine.compile(backend="eager")
            >>> engine(torch.ones(8, 4)).shape
            torch.Size([8, 2])

        Raises:
            UsageError: ranks share the layers of the model.
            ConfigError: there is no such backend, or its own compiler is missing.
        """
        if self._refuses_compiled:
            raise UsageError(f"engine.compile(): {self._refuses_compiled}", fix="leave the model as it is")
        backend, where = kwargs.get("backend", "inductor"), "engine.compile(backend)"
        with agreed(self.collectives.job, "engine.compile"):
            if isinstance(backend, str):
                kwargs["backend"] = backend = backend_named(backend, where)
            check_toolchain(backend, self.collectives.topology.device, where)
        self.module.compile(*args, **kwargs)
        self._hooks.attach_anew()

    def run_step(self) -> None:
        """At the boundary: unscale, clip, update, gather, step the scheduler. Elsewhere only counts.

        Raises:
            EngineStateError, CollectiveError, UsageError, CheckpointError: as `Engine.step`.
        """
        self.require_states_loaded()
        self.checkpointer.require_intact("step")
        if self.is_gradient_accumulation_boundary():
            self.checkpointer.before_update()
        weights = self._require_weight_update("step")
        self._check_usable()
        # Parameters that `GatheredParameters` has unsharded would be stale after the update.
        self.registry.require_free("engine.step()")
        self._integrity.check_writes()
        if self._step.num_backwards == 0:
            raise EngineStateError(
                "engine.step()", expected="a backward before it", fix="call engine.backward(loss) first"
            )
        if not self._step.syncs:
            raise EngineStateError("engine.step()", expected="to be outside engine.no_sync()")
        boundary = self.is_gradient_accumulation_boundary()
        if not boundary:
            weights.require_own_step("engine.step() that is no boundary")
        self.count_micro_step()
        self._step.applied = False
        self._step.num_backwards = 0
        if boundary:
            self._report.begin("step")
            self._update()
            self._report.end("step")
            self._report.step(self)
            self._stop_if_asked()

    def when_preempted(self, call: Callable[[], object]) -> None:
        """Calls `call` once on all ranks, after the same step, when one was asked to stop. (all ranks, before step 1)

        SIGTERM and SIGUSR1 ask a process. The ranks learn of it by the exchange that each step has anyway; on a GPU one
        step later. `call` may save, and raise `zeroaccel.Preempted`.

        Example:
            >>> import torch, zeroaccel
            >>> from zeroaccel.errors import Preempted
            >>> model = torch.nn.Linear(4, 2)
            >>> config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            >>> engine, *_ = zeroaccel.initialize(model=model, config=config)
            >>> def leave():
            ...     raise Preempted(f"saved nothing at step {engine.global_steps}")
            >>> engine.when_preempted(leave)
            >>> engine.destroy()
        """
        boundary = self._require_boundary("when_preempted")
        if not boundary.sends_stop:
            boundary.sends_stop = True
            self.at_destroy(stop_notice.listen())
        self._at_stop.append(call)

    def _stop_if_asked(self) -> None:
        if not self._at_stop or not self._require_boundary("step").stops(self.global_steps - 1):
            return
        calls, self._at_stop = self._at_stop, []
        for call in calls:
            call()

    def count_micro_step(self) -> None:
        """Counts a micro-batch as `step()` does where nothing is updated, for loops that call it at boundaries only."""
        self.micro_steps += 1
        is_counted = self.settings.managed_accumulation or self._step.boundary is not None
        batches = 1 if is_counted else self._step.num_backwards
        self.global_samples += batches * self.settings.micro_batch_size * self.settings.data_parallel_size

    def _update(self) -> None:
        """Norm, overflow check, clipping and update."""
        step, boundary = self._step, self._require_boundary("step")
        boundary.verify_earlier_steps()
        late = boundary.settings_may_be_late()
        check = self._check_gradients(norm=self.settings.compute_norm or self.settings.clipping > 0)
        for unit in self.units:
            unit.drop_copies()
        # The scale that unscales is the one of this step's backwards; it moves only after the update.
        rule = FactorRule(self.loss_scale.value, self.settings.clipping, boundary.factor, self.settings.skip_overflow)
        try:
            step.applied = boundary.update(check, rule, self.global_steps, late=late)
        except (CollectiveError, UsageError):  # the step is refused
            raise
        except BaseException:  # a failed tier, on all ranks alike: counters and digests must not diverge
            self._close_step()
            raise
        self._close_step()
        self.skipped_steps += not step.applied
        self.loss_scale.update(overflow=not step.applied)
        if step.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _close_step(self) -> None:
        self._drop_gradients()
        self.global_steps += 1

    # -- gradients of the coming update

    def gradient_norm(self) -> float:
        """The global L2 norm of the gradients that the coming `step()` will use, unscaled and unclipped. (all ranks)

        Between the last backward and the `step()` of a boundary; inf where they are not finite.

        Raises:
            EngineStateError: there are no gradients yet.
            CollectiveError, UsageError: as `step()`, which compares the ranks by the same collective.
        """
        boundary = self._require_gradients("gradient_norm")
        stats = boundary.read(self._check_gradients(norm=True), self.global_steps)
        return stats.norm / self.loss_scale.value if stats.finite else math.inf

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients of the coming `step()` by this; `gradient_clipping` may still clip more."""
        self._require_gradients("scale_gradients", own=factor != 1.0).factor = float(factor)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every element of the reduced gradients to [-clip_value, clip_value]. (all ranks)

        Raises:
            EngineStateError: there are no gradients yet, or their norm was taken before.
        """
        if self._require_gradients("clip_grad_value_", own=True).check is not None:
            raise EngineStateError("engine.clip_grad_value_()", expected="to come before the norm is taken")
        self._finish_reductions()
        self.grad_reducer.changed()
        limit = float(clip_value) * self.loss_scale.value
        for gradients in self.grad_reducer.gradients:
            grad = gradients.shard if gradients.full is None else gradients.full
            if grad is not None:
                grad.clamp_(-limit, limit)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated since the last step."""
        if self.weight_update is not None:
            self.weight_update.require_own_step("engine.zero_grad()")
        self._drop_gradients()
        self._step.num_backwards = 0

    def _check_gradients(self, *, norm: bool) -> GradCheck:
        """Completes the reductions of this step, takes the norm, and compares the ranks; once a step. (all ranks)"""
        boundary = self._require_boundary("step")
        if boundary.check is not None:
            return boundary.check
        self._finish_reductions()
        return boundary.take_stats(norm=norm)

    def _finish_reductions(self) -> None:
        self._note_phase("step")
        self._coordinator.end_step()
        self.grad_reducer.finish()

    def _drop_gradients(self) -> None:
        self.grad_reducer.clear()
        if self._boundary is not None:
            self._boundary.clear()

    def _refuse_step(self) -> None:
        self._drop_gradients()  # a program that catches the error goes on with the next forward
        self._step.num_backwards = 0

    def _compare_settings(self) -> None:
        """Before updates that begin earlier than `step()`. (all ranks)"""
        self._require_boundary("backward").compare(self.global_steps)

    # -- events of backward, from the hooks

    @property
    def weights_version(self) -> int:
        """Updates of the weights so far."""
        return self.global_steps - self.skipped_steps

    def on_backward(self, version: int | None = None) -> None:
        """A backward reached the model, whose forward was with this version of the weights."""
        # Sharded weights are gathered again for backward, so an update in between would silently give the gradient of
        # another function.
        if version is not None and version != self.weights_version:
            raise EngineStateError(
                "engine: a backward through a forward from before the last update",
                expected="the weights that it computed with",
                got="newer ones",
                fix="compute the loss again after engine.step()",
            )
        if not self._step.in_backward:
            # A plain loss.backward(): autograd itself reports the end, since nothing of ours surrounds the call.
            self._begin_backward(direct=True)
            Variable._execution_engine.queue_callback(self._end_backward)

    def on_grad_ready(self, param: nn.Parameter) -> None:
        """Autograd has accumulated this parameter's gradient."""
        if not self._step.in_backward:  # a loss may reach parameters without passing an output of the root
            self.on_backward()
        loop = self.settings.loop
        if self._step.is_direct and loop.divides_direct and self.settings.accumulation > 1 and param.grad is not None:
            param.grad.div_(self.settings.accumulation)
        self.grad_reducer.on_grad_ready(param)

    def _begin_backward(self, *, direct: bool) -> None:
        self._check_usable()
        if self._coordinator.on_demand is not None:
            raise EngineStateError("backward inside engine.gathered()", fix="train outside of it; it is for inference")
        # Through a frozen model gradients only pass: its parameters are unsharded, and there is nothing to reduce.
        collects = self._integrity.collects_gradients()
        if collects and direct and self.settings.loss_scaled:
            raise EngineStateError(
                "loss.backward() under fp16 misses the loss scale", fix="call engine.backward(loss) instead"
            )
        if collects and self._boundary is not None and self._boundary.check is not None:
            raise EngineStateError(
                "engine: a backward after the gradients were clipped", fix="clip after the last backward of a step"
            )
        if collects and self.weight_update is not None:
            self.weight_update.require_own_step("engine: another backward")
        self._step.in_backward, self._step.is_direct, self._step.collects_gradients = True, direct, collects
        self._note_phase("backward")
        self._coordinator.begin_backward()
        if not collects:
            return
        # ZeRO-2 and 3 reduce each micro-step and keep a shard; 0 and 1 accumulate unreduced gradients (1/accumulation
        # of the traffic, for N instead of S elements) and reduce in the last backward.
        is_last = self._step.is_last_backward = self._step.syncs and self.is_gradient_accumulation_boundary()
        weights = self.weight_update
        early = weights.begin_backward(self._compare_settings) if is_last and weights else None
        self._coordinator.agrees_at_end = early is None
        self.grad_reducer.begin(reduce=self.settings.plan.grads or is_last, on_shard_ready=early)

    def _end_backward(self) -> None:
        self._coordinator.pass_rest()
        if self._step.collects_gradients:
            self._report.begin("reduce")
            # The stages of a pipeline end their last backwards one after the other: all ranks join only in `step`.
            joins = self._boundary if self._step.is_last_backward and self._peers_are_job else None
            self.grad_reducer.end(None if joins is None else joins.join_facts)
            self._report.end("reduce")
            self._step.num_backwards += 1
        try:
            self._coordinator.end_backward()
        except OffloadError:  # the gradients, those of earlier micro-steps too, have NaN for what was not read
            self.reset()
            raise
        self._step.in_backward = self._step.is_direct = False

    # -- gradient accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the `step()` after this micro-batch updates the weights."""
        if self._step.boundary is not None:
            return self._step.boundary
        if not self.settings.managed_accumulation:
            return True
        return (self.micro_steps + 1) % self.settings.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether `step()` updates the weights, from now on and instead of counting micro-batches.

        Raises:
            EngineStateError: with `managed_gradient_accumulation` false, where every `step()` updates them.
        """
        if not self.settings.managed_accumulation:
            raise EngineStateError(
                "engine.set_gradient_accumulation_boundary()",
                expected="managed_gradient_accumulation true",
                got="false, with which every engine.step() is a boundary",
                fix="call engine.step() where the weights are to be updated, and only there",
            )
        self.decide_boundary(is_boundary)

    def decide_boundary(self, is_boundary: bool) -> None:
        """As `set_gradient_accumulation_boundary`, for loops of this library, which count whatever the config says."""
        self._step.boundary = bool(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up locally where gradients are not sharded; sharded ones are reduced as always.

        Both give the right result; only the traffic differs.
        """
        if not self._step.syncs:
            raise EngineStateError("engine.no_sync()", expected="not to be nested")
        self._step.syncs = False
        try:
            yield
        finally:
            self._step.syncs = True

    # -- checks

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for the end of their accumulation."""
        gradients = self.grad_reducer.gradients
        return bool(self._step.num_backwards) or any(g.flat is not None or g.shard is not None for g in gradients)

    def require_states_loaded(self) -> None:
        """Raises EngineStateError between `offload_states` and `reload_states`."""
        self._state_offload.require_loaded()

    def _note_phase(self, phase: str) -> None:
        """For the message of a rank that waits for this one."""
        self.collectives.flight_recorder.phase, self.collectives.flight_recorder.step = phase, self.global_steps

    def _check_usable(self) -> None:
        if self._destroyed:
            raise EngineStateError(
                "engine",
                expected="an engine in use",
                got="one after destroy()",
                fix="end threads and loaders that use it before, or make another one by initialize()",
            )
        self.require_states_loaded()
        if self.weight_update is not None and self.weight_update.broken is not None:
            raise EngineStateError(
                f"engine: {self.weight_update.broken}", fix="resume from the last checkpoint, which is intact"
            )
        # Outside of any graph task a backward cannot be running, so it must have raised.
        if self._step.in_backward and torch._C._current_graph_task_id() == -1:
            raise EngineStateError(
                "engine: the last backward broke off and left part of its gradients",
                fix="call engine.reset() on every rank to drop them and go on",
            )

    def _check_loss(self, loss: Any, where: str = "engine.backward(loss)") -> None:
        if not isinstance(loss, Tensor):
            raise UsageError(where, expected="a tensor", got=type(loss).__name__, fix="pass the loss itself")
        if loss.numel() != 1:
            raise UsageError(
                where, expected="a scalar", got=f"shape {tuple(loss.shape)}", fix="reduce it, e.g. loss.mean()"
            )
        if not loss.requires_grad:
            raise UsageError(
                where,
                expected="a loss that requires a gradient",
                got="one that does not",
                fix="compute it with gradients on",
            )

    def _require_optimizer(self, call: str) -> ShardedOptimizer:
        if self.sharded_optimizer is None:
            raise EngineStateError(
                f"engine.{call}()",
                expected="an engine with an optimizer",
                got="one made for inference",
                fix="give initialize() an optimizer or the config an optimizer section",
            )
        return self.sharded_optimizer

    def _require_weight_update(self, call: str) -> WeightUpdate:
        self._require_optimizer(call)
        assert self.weight_update is not None, "an optimizer without a WeightUpdate"
        return self.weight_update

    def _require_boundary(self, call: str) -> StepBoundary:
        self._require_optimizer(call)
        assert self._boundary is not None, "an optimizer without a StepBoundary"
        return self._boundary

    def _require_gradients(self, call: str, *, own: bool = False) -> StepBoundary:
        """Raises EngineStateError where there are none; `own`: or where an update with them has begun."""
        weights, boundary = self._require_weight_update(call), self._require_boundary(call)
        self._check_usable()
        if self._step.num_backwards == 0:
            raise EngineStateError(
                f"engine.{call}()", expected="a backward before it", fix="call it between backward and step()"
            )
        if own:
            weights.require_own_step(f"engine.{call}()")
        return boundary

    def extra_repr(self) -> str:
        """Stage, ranks, precision, batch and tiers, in the first line of `repr(engine)`."""
        settings = self.settings
        dtypes = sorted({str(b.dtype).removeprefix("torch.") for unit in self.units for b in unit.buffers})
        batch = f"batch {settings.micro_batch_size} x {settings.accumulation} x {settings.data_parallel_size}"
        tiers = ", ".join(sorted(self.tier_nbytes())) or "none"
        kind = "" if self.sharded_optimizer is not None else ", inference"
        stage = sum((settings.plan.optimizer, settings.plan.grads, settings.plan.params))
        return (
            f"stage {stage}, {self.collectives.world_size} ranks, {' and '.join(dtypes)}, "
            f"{batch} = {self.train_batch_size()}, tiers: {tiers}{kind}"
        )

    # -- numbers of the run

    @property
    def optimizer(self) -> Any:
        """The optimizer; its `param_groups` hold this rank's shards."""
        return self.sharded_optimizer.optimizer if self.sharded_optimizer is not None else None

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: false between boundaries and after an overflow."""
        return self._step.applied

    def get_global_grad_norm(self) -> float | None:
        """The global L2 norm of the last boundary's gradients, unscaled, before clipping; inf after an overflow.

        None before the first boundary, and with `compute_grad_norm` off.
        """
        return None if self._boundary is None else self._boundary.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each param group; 0 of one that has none, as of an Adafactor with relative steps."""
        return [float(group.get("lr") or 0.0) for group in self._require_optimizer("get_lr").optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.settings.accumulation * self.settings.data_parallel_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and forward."""
        return self.settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.settings.accumulation

    def model_state_nbytes(self) -> dict[str, int]:
        """Bytes this rank holds now: "params", "gradients" and "optimizer" (masters and states).

        Counts allocated storage: a sharded unit counts its shard, an unsharded one its full buffer as well.
        """
        params = 0
        for buffer in (buffer for unit in self.units for buffer in unit.buffers):
            params += buffer.full.untyped_storage().nbytes()
            params += sum(tensor.nbytes for tensor in buffer.shard_tensors())
        return {
            "params": params,
            "gradients": self.grad_reducer.nbytes(),
            "optimizer": self.sharded_optimizer.nbytes() if self.sharded_optimizer is not None else 0,
        }

    def tier_nbytes(self) -> dict[str, int]:
        """Bytes of this rank in tiers other than its device: "params, host", "params, nvme", "optimizer, nvme".

        States in the host memory of a CPU run are where they always are, and counted by `model_state_nbytes`.
        """
        return {name: tier.nbytes for name, tier in self.tier_set.tiers.items()}

    # -- where time goes

    @contextlib.contextmanager
    def record_trace(self, path: PathLike) -> Iterator[StepTrace]:
        """Records the steps inside the block: units, collectives, updates and copies over time. (all ranks)

        Rank 0 writes one file for all ranks, which Perfetto and Chrome open, and of which `zeroaccel trace` makes a
        page. Nothing that is computed or sent changes; before the first step and after the last there are a few small
        collectives. The first steps of a run are no typical ones: record later ones.

        Args:
            path: of the file; an existing one is replaced. On rank 0's machine.

        Yields:
            The recording; after the block its `waits` are the three largest, on every rank.

        Raises:
            EngineStateError: another recording is on, or no step was complete.
            UsageError: the file cannot be written; on every rank.

        Example:
            >>> import torch, zeroaccel, tempfile
            >>> model, path = torch.nn.Linear(4, 2), tempfile.mkdtemp() + "/trace.json"
            >>> config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            >>> engine, *_ = zeroaccel.initialize(model, config=config)
            >>> with engine.record_trace(path) as recorded:
            ...     for _ in range(2):
            ...         _ = engine.backward(engine(torch.ones(8, 4)).square().mean())
            ...         engine.step()
            >>> recorded.result.num_steps, recorded.waits  # one rank waits for no other
            (2, [])
            >>> engine.destroy()
        """
        trace = StepTrace(Path(path), self.traced_parts())
        trace.start()
        try:
            yield trace
        except BaseException:  # the other ranks may not be here
            trace.abandon()
            raise
        trace.finish()

    def traced_parts(self) -> TracedParts:
        """What a recording listens to."""
        return TracedParts(
            model=self.module,
            units=self.units,
            collectives=self.collectives,
            report=self._report,
            tiers=self.tier_set,
            in_backward=lambda: self._step.in_backward,
            title=self.extra_repr,
            global_steps=lambda: self.global_steps,
        )

    # -- weights and states outside the step

    def finish_update(self) -> None:
        """Installs an update that runs one step late (`update_during`: "next_step") now. (all ranks)

        Calls that save or read the full model do it too. Without such an update it does nothing but compare the ranks
        in the steps that did not wait for that; see [Note: boundary] of `grad_norm.py`.
        """
        self._check_usable()
        self._coordinator.drop_recent()
        if self._boundary is not None:
            self._boundary.verify_earlier_steps(wait=True)
        if self.weight_update is not None:
            self.weight_update.finish()

    def change_masters(self, call: Callable[[], object]) -> None:
        """Lets a method of the optimizer that is no step, such as `eval` of a schedule-free one, change the weights.

        (all ranks, between a step and the next forward)

        Args:
            call: sees a part of this rank's masters at a time in the param groups, as `step` does.
        """
        weights = self._require_weight_update("change_masters")
        self._check_usable()
        self.registry.require_free("a change of weights by the optimizer")
        self._note_phase("step")
        self._coordinator.end_step()
        for unit in self.units:
            unit.drop_copies()
        weights.change_masters(call)

    def gathered(self, budget: int | None = None) -> AbstractContextManager[None]:
        """Keeps parameters unsharded for generation or evaluation. (all ranks)

        Inside, ranks may do different numbers of forwards: one that leaves the block participates in the gathers of
        the others until all have left it. No training inside.

        Args:
            budget: bytes of unsharded parameters to keep, in the order of the model; what does not fit is gathered for
                each forward. None keeps all.

        Raises:
            UsageError: `budget` is not a number of bytes, or not the same on all ranks; or there is one already.
        """
        self.finish_update()
        return gathered(self.registry, self._coordinator, budget)

    def iter_named_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full values in the dtype of the engine), with one unit at a time unsharded. (all ranks, to the end)

        A tensor is valid until the next one only: copy it to keep it. Tied parameters come once.
        """
        self.finish_update()
        return iter_named_full_params(self.registry)

    def stream_weights(
        self,
        *,
        dtype: torch.dtype | None = None,
        names: Iterable[str] | Callable[[str], bool] | None = None,
        bucket_bytes: int = 1 << 28,
        merge_adapters: bool = False,
        only_rank: int | None = None,
        as_saved: bool = True,
    ) -> Iterator[Any]:
        """Packets of all weights, gathered unit by unit, each byte once. (all ranks, to the end)

        A packet has a `manifest`, plain data, and a `payload`, a tensor of bytes that is valid until the next one. The
        stream holds one unit and one bucket of `bucket_bytes` at a time. Tied parameters come once; persistent buffers
        come too.

        Args:
            dtype: of floating-point values, float32, bfloat16 or float16; None for their own.
            names: of parameters and buffers to send, or whether to send a name. Only these are gathered.
            bucket_bytes: a multiple of 16; a larger tensor comes in pieces.
            merge_adapters: send the weights that PEFT's adapters are on with these merged in, by the adapter's own
                rule, under the names that they have without adapters. The engine's weights stay as they are.
            only_rank: of the job; packets of other ranks have no payload. None gives all ranks the bytes.
            as_saved: with the names and layouts of `save_pretrained`; False for those of the model's parameters, which
                deltas have.

        Raises:
            UsageError: an argument is wrong or differs between ranks; on every rank.
            EngineStateError: another stream is open.
        """
        wanted = names if names is None or callable(names) else tuple(names)
        return self.weight_sender.stream_weights(
            dtype=dtype,
            names=wanted,
            bucket_bytes=bucket_bytes,
            merge_adapters=merge_adapters,
            only_rank=only_rank,
            as_saved=as_saved,
        )

    def mark_changes(self, enabled: bool = True) -> None:
        """Has each step mark the 16-bit weights that it changes, one bit for each, for `stream_deltas`.

        Off at the start, and then nothing is stored. Weights of other dtypes count as changed at all times.
        """
        self.weight_sender.mark_changes(enabled=enabled)

    def stream_deltas(self, since: int | None = None) -> Iterator[Any]:
        """Packets of the weights that have changed, each rank's of its own shard; gathers nothing. (all, to the end)

        All ranks send their packets; a receiver has the version when those of all have come. Where all values of a
        parameter are fewer bytes than the changed values with positions, they come without positions.

        Args:
            since: the version, `engine.streamed_version` of then, that the receivers have. If it is not that of the
                last complete stream of all weights or of deltas, the packets have all weights.

        Raises:
            EngineStateError: `mark_changes` was not called, or another stream is open.
        """
        return self.weight_sender.stream_deltas(since)

    @property
    def streamed_version(self) -> int:
        """The number of the last stream of weights that began; 0 before the first."""
        return self.weight_sender.version

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states from the device to host memory until `reload_states`; the engine cannot be used meanwhile.

        Args:
            include: of "optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer", as texts or
                as members of an enumeration with these values; None is all.
            device: "cpu".
            non_blocking: accepted; the memory is free when the call returns, so it always waits for the copies.

        Raises:
            UsageError: an unknown kind or device.
            EngineStateError: they are offloaded already.
        """
        self.finish_update()
        self.registry.before_write()  # a save may be copying them
        kinds = self._state_offload.kinds(include, device)
        self._coordinator.end_step()
        self._state_offload.offload(kinds, pinned=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the states back. Without `offload_states` before it does nothing."""
        self._state_offload.reload()

    # -- checkpoints

    @property
    def loaded(self) -> Any:
        """The bytes that the last `load_checkpoint` read, as a `LoadReport`; None before."""
        return self.checkpointer.loaded

    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool | None = None,
    ) -> bool:
        """Saves everything a resumed run needs into `save_dir/<tag>`. (all ranks)

        With `checkpoint.async_save` it returns at once and the writing overlaps with training; an error in it is
        raised by the next `step()`, save or load.

        Args:
            save_dir: a folder that all ranks see.
            tag: a name, the same on all ranks; `global_step<N>` by default. One that exists is replaced.
            client_state: plain data and tensors of the caller's, given back by `load_checkpoint`; rank 0's counts.
            save_latest: whether a load without a tag finds this one.
            exclude_frozen_parameters: leave out the values of parameters that need no gradient, or save all. By default
                as the config's `checkpoint.exclude_frozen_parameters`; absent, a base of PEFT's is left out if it has a
                name.

        Returns:
            True: it is saved, or on its way.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints are as they were. Or an earlier save in the
                background failed.
            UsageError: the ranks' tags differ, or something in `client_state` is neither plain data nor a tensor.
            EngineStateError: gradients of unfinished accumulation would be lost.
        """
        self.checkpointer.save_checkpoint(
            save_dir, tag, client_state, save_latest, exclude_frozen=exclude_frozen_parameters
        )
        return True

    def load_checkpoint(
        self,
        load_dir: PathLike,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resumes from a checkpoint that any number of ranks saved, at any stage and precision. (all ranks)

        A folder that DeepSpeed wrote, or torch.distributed.checkpoint with the state dicts of FSDP2, can be resumed
        from as well.

        Args:
            tag: which; by default the one that `latest` names. "auto" takes the newest that is valid, of any
                writer, and logs which it skipped and why.
            load_module_strict: all names must agree; False loads those that do. Shapes must agree anyway.
            load_optimizer_states: moments and the like, and the param groups' hyperparameters.
            load_lr_scheduler_states: the scheduler's.
            load_module_only: nothing but weights and buffers; training starts at step 0 with them.

        Returns:
            (the checkpoint's folder, the `client_state` it was saved with); (None, {}) for "auto" where there is no
            checkpoint at all.

        Raises:
            CheckpointError: there is none, it is damaged or incomplete, or it does not fit; on every rank. If damage
                showed only while reading, the engine refuses to run until a load succeeds.
        """
        return self.checkpointer.load_checkpoint(
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
        )

    def save_16bit_model(
        self,
        save_dir: PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the parameters in the dtypes they have in the engine, and the buffers, to one file. (all ranks)

        Rank 0 writes, at every stage; one unit at a time is unsharded. A name ending in .safetensors is streamed; .bin,
        .pt and .pth are made by `torch.save`, with all weights in rank 0's memory.

        Returns:
            True: it is saved.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.checkpointer.save_16bit_model(
            os.path.join(save_dir, save_filename), exclude_frozen=exclude_frozen_parameters
        )
        return True

    def save_model(
        self, save_dir: PathLike, *, max_nbytes: int, pickled: bool = False, exclude_frozen_parameters: bool = False
    ) -> list[str]:
        """Writes the model as files of at most `max_nbytes` with an index, as libraries of models read it. (all ranks)

        Returns:
            The names of the files.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        return self.checkpointer.save_model(
            save_dir, max_nbytes, pickled=pickled, exclude_frozen=exclude_frozen_parameters
        )

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The full state dict of the model in host memory, on rank 0; None on the others. (all ranks)

        At every stage; one unit at a time is unsharded, and rank 0 holds a copy of all weights, in the engine's dtypes.
        Tied parameters are one tensor under each of their names.
        """
        return self.checkpointer.consolidated_state_dict(exclude_frozen=exclude_frozen_parameters)

    def wait_for_checkpoint(self) -> None:
        """Returns when no save is running in the background. (all ranks)

        Raises:
            CheckpointError: it failed; on every rank.
        """
        self.checkpointer.wait()

    # -- life cycle

    def reset(self) -> None:
        """After an exception in the middle of a step: all units sharded, no gradients, ready for the next forward."""
        if self.weight_update is not None:
            self.weight_update.forget()
        self._hooks.forget()
        self._step.in_backward = self._step.is_direct = False
        self._coordinator.reset()
        self.grad_reducer.reset()
        self._drop_gradients()
        self._step.num_backwards = 0

    def at_destroy(self, undo: Callable[[], None]) -> None:
        """Registers `undo` for `destroy`: patches that are made for an engine end with it."""
        self._undo.callback(undo)

    def destroy(self) -> None:
        """Detaches the engine from the model: hooks removed, weights unsharded, in storage of their own. (all ranks)

        It frees its memory at once: shards, masters, and the optimizer's states, which `optimizer.state` no longer has.

        Raises:
            CheckpointError: a save in the background failed.
        """
        try:
            self.checkpointer.wait()
        finally:
            self._destroy()

    def _destroy(self) -> None:
        if self._destroyed:
            return
        self.registry.require_free("engine.destroy()")
        if self.weight_update is not None:
            self.weight_update.close()
        self.reset()
        # Unit by unit in registration order on all ranks: these gathers are collectives like any other.
        for unit in self.units:
            if unit.state is not ShardState.UNSHARDED:
                unit.unshard()
                unit.wait()
            for buffer in unit.buffers:
                buffer.detach_parameters(self.collectives)
        self.registry.close()
        self._undo.close()  # last in, first out: a patch may lie on top of an earlier one
        self._hooks.detach()
        self._load_hooks.detach()
        self._report.close()
        self.tier_set.close()
        # The engine, its hooks and its optimizer refer to each other: without this their memory would wait for Python's
        # collector of cycles, which knows nothing of the device's memory.
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.optimizer.state.clear()
        for unit in self.units:
            for buffer in unit.buffers:
                buffer.release()
        self._destroyed = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            try:
                return getattr(module, name)
            except AttributeError:
                if hasattr(type(module), name):  # its property raised it
                    raise
                kinds = f"{type(self).__name__} nor its model {type(module).__name__}"
                raise AttributeError(f"neither {kinds} has an attribute {name!r}", name=name, obj=self) from None

    def __reduce__(self) -> Any:
        raise EngineStateError(
            "an engine cannot be copied or pickled: it belongs to a job of several processes",
            fix="save a checkpoint; or copy engine.module, inside engine.gathered() where it is sharded",
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state dict; while parameters are sharded this raises instead of returning NaNs."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own: every rank passes the same values, and they reach shards and masters too. (all ranks)"""
        return self.module.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EngineBase:
        self._integrity.check_conversion(fn, self.module)
        return self  # nothing would change


def _update_times(optimizer: ShardedOptimizer | None) -> Callable[[], tuple[float, float, float]]:
    return lambda: (0.0, 0.0, 0.0) if optimizer is None else optimizer.times


def _offload_report(tiers: TierSet, optimizer: ShardedOptimizer | None) -> OffloadReport:
    swapper = tiers.swapper
    overlaps_io = swapper is not None and swapper.pipeline_read and swapper.pipeline_write
    return OffloadReport(tiers.tiers, _update_times(optimizer), overlaps_io=overlaps_io)
