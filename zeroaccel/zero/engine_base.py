"""The parts of an engine and the order in which a training step uses them.

`hooks` and `coordinator` unshard and reshard units, `grad_reducer` reduces gradients to shards, `step_boundary` takes
the norm (`grad_norm`) and compares the ranks, `weight_update` and `sharded_optimizer` update the masters and gather
the weights. No code here branches on a stage number.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from zeroaccel.zero.module_names import for_model, plain_names
from zeroaccel.zero.param_check import ParamIntegrityCheck
from zeroaccel.zero.param_unit import ParamUnit
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
    """The parts that an engine needs besides the model, its units and the settings.

    Attributes:
        optimizer: None for inference.
        lr_scheduler: stepped after each update; None if there is no scheduler.
        loss_scale: loss scale for fp16.
        report: logs steps, phases and monitor events.
        tiers: tiers that hold offloaded shards and states.
        unoptimized: trainable parameters that no optimizer updates; the engine drops their gradients.
        refuses_compiled: reason why a compiled model is refused; "" if it is allowed.
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
    """The position of an engine within an optimizer step, and the outcome of the last step.

    Attributes:
        in_backward: True from the first gradient that reaches the model until autograd is done.
        is_direct: True if the current backward is a plain `loss.backward()`, not `engine.backward(loss)`.
        collects_gradients: True if the backward produces gradients to reduce; False through a frozen model.
        is_last_backward: True if the gradients of this backward complete the step.
        num_backwards: number of backwards since the last `step()`.
        syncs: False inside `no_sync()`.
        boundary: whether `step()` updates, as set by the program; None if the engine counts micro-batches.
        applied: True if the last `step()` changed the weights.
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
    """The checkpointer of an engine; see `checkpoint/checkpointer.py`. `EngineBase` documents the calls."""

    loaded: Any

    def state(self) -> Any:
        """Returns the model, units and optimizer as an `EngineState` for the writers of `checkpoint/`."""

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
        """Returns a `Save` of `checkpoint/`, which a thread of the caller writes. (all ranks)"""

    def load_checkpoint(
        self, load_dir: PathLike, tag: object, *, strict: bool, optimizer: bool, scheduler: bool, progress: bool
    ) -> tuple[str | None, dict[str, Any]]: ...

    def files_to_read(self, root: Path, tag: str) -> set[str]: ...

    def save_16bit_model(self, path: PathLike, *, exclude_frozen: bool) -> None: ...

    def save_model(self, save_dir: PathLike, max_nbytes: int, *, pickled: bool, exclude_frozen: bool) -> list[str]: ...

    def consolidated_state_dict(
        self, *, exclude_frozen: bool, also: Collection[str] = ()
    ) -> dict[str, Tensor] | None: ...

    def wait(self) -> None: ...

    def close(self) -> None:
        """Waits for this rank's part of a save in the background."""

    def require_intact(self, call: str) -> None:
        """Raises EngineStateError after a load that failed half way."""

    def before_update(self) -> None:
        """Waits until a save in the background has copied the weights, before they change. (all ranks)"""


class WeightStreams(Protocol):
    """Sends an engine's weights to other programs; see `rollout/weight_stream.py`. `EngineBase` documents the calls,
    `rollout/receiver.py` the packets.
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
    """Base class of engines: one model, its optimizer and scheduler, and the parts of a training step.

    The engine looks up attributes that it lacks in the model.

    Before a unit's forward the engine all-gathers its parameters and prefetches the next units; afterwards it reshards
    them. Before the unit's backward the engine gathers them again, and once all gradients of the unit are accumulated,
    it reduce-scatters them to fp32 shards. At the accumulation boundary the engine computes the norm and clips the
    gradients, and each rank updates its shard of the masters.

    Attributes:
        module: the model, the same object that was passed in.
        optimizer, lr_scheduler: passed in or built from the config, or None.
        sharded_optimizer: steps `optimizer` on shards; None for inference.
        weight_update: schedules the update of the masters and the gather of the weights; None for inference.
        grad_reducer: reduces gradients to shards.
        tier_set: tiers that hold offloaded shards and states.
        checkpointer: saves and loads the engine.
        weight_sender: streams the weights.
        registry: finds the model's parameters, for example for `GatheredParameters`.
        trace: the recorded order of units, for prefetching.
        global_steps: number of steps, skipped ones included.
        skipped_steps: number of steps skipped because gradients were not finite.
        micro_steps: number of `step()` calls.
        global_samples: number of samples over all ranks.
        zero_config: the resolved config of the engine, as a plain dict.
    """

    # They belong to layers above this one: `setup.build` sets them after it has built the engine.
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
        # Python names a callable by this in errors about a wrong call, such as `engine(**a_list)`; else by its repr.
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

        # Unshard and reshard. Persistent units stay unsharded, so they need no hooks and no prefetching.
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
        """Registers the experts and routers of a mixture with the report, which counts tokens per expert."""
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
        """Runs the model's forward; the engine gathers sharded parameters as their modules run."""
        if torch.compiler.is_compiling():
            refuse_compiled_engine()
        self.checkpointer.require_intact("forward")
        self._check_usable()
        # Before the forward computes with them: the next gather would overwrite such a write, so it must not train.
        self._integrity.check()
        self._hooks.attach_outside_graphs(self._refuses_compiled)
        self._report.begin("forward")
        self._note_phase("forward" if torch.is_grad_enabled() else "eval")
        dtype = self.settings.input_dtype
        if dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        # `finally`: the program may catch an exception of a forward and try the next batch.
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
        """Runs a forward at the start, to observe the model; it is not part of a training step."""
        return self.module(**batch)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model's forward with `torch.compile` and its arguments. The hooks stay out of the graphs.

        Example:
            >>> import torch
            >>> import zeroaccel
            >>> engine, *_ = zeroaccel.initialize(torch.nn.Linear(4, 2), config={"train_micro_batch_size_per_gpu": 8})
            >>> engine.compile(backend="eager")
            >>> engine(torch.ones(8, 4)).shape
            torch.Size([8, 2])

        Raises:
            UsageError: the engine refuses compiled models, because ranks share the layers of the model.
            ConfigError: there is no such backend, or the compiler that it calls is missing.
        """
        if self._refuses_compiled:
            raise UsageError(f"engine.compile(): {self._refuses_compiled}", fix="do not compile the model")
        backend, where = kwargs.get("backend", "inductor"), "engine.compile(backend)"
        with agreed(self.collectives.job, "engine.compile"):
            if isinstance(backend, str):
                kwargs["backend"] = backend = backend_named(backend, where)
            check_toolchain(backend, self.collectives.topology.device, where)
        self.module.compile(*args, **kwargs)
        self._hooks.attach_anew()

    def run_step(self) -> None:
        """Unscales, clips, updates, gathers and steps the scheduler at the boundary; elsewhere only counts.

        Raises:
            EngineStateError, CollectiveError, UsageError, CheckpointError: as `Engine.step`.
        """
        self.require_states_loaded()
        self.checkpointer.require_intact("step")
        if self.is_gradient_accumulation_boundary():
            self.checkpointer.before_update()
        weights = self._require_weight_update("step")
        self._check_usable()
        # Parameters that `GatheredParameters` keeps unsharded would be stale after the update.
        self.registry.require_free("engine.step()")
        self._integrity.check_writes()
        if self._step.num_backwards == 0:
            raise EngineStateError(
                "engine.step()", expected="a backward before this call", fix="call engine.backward(loss) first"
            )
        if not self._step.syncs:
            raise EngineStateError("engine.step()", expected="a call outside engine.no_sync()")
        boundary = self.is_gradient_accumulation_boundary()
        if not boundary:
            weights.require_own_step("engine.step() between boundaries")
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
        """Registers a call that all ranks run once, after the same step, on preemption. (all ranks, before step 1)

        SIGTERM or SIGUSR1 to one process triggers it. The existing exchange of each step informs the other ranks; on a
        GPU they act one step later. `call` may save, and raise `zeroaccel.Preempted`.

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
        """Counts a micro-batch without an update, for loops that call `step()` at boundaries only."""
        self.micro_steps += 1
        is_counted = self.settings.managed_accumulation or self._step.boundary is not None
        batches = 1 if is_counted else self._step.num_backwards
        self.global_samples += batches * self.settings.micro_batch_size * self.settings.data_parallel_size

    def _update(self) -> None:
        """Computes the norm, checks for overflow, clips, and updates the weights."""
        step, boundary, weights = self._step, self._require_boundary("step"), self._require_weight_update("step")
        boundary.verify_earlier_steps()
        late = boundary.settings_may_be_late()
        check = self._check_gradients(norm=self.settings.compute_norm or self.settings.clipping > 0)
        for unit in self.units:
            unit.drop_copies()
        # Unscale by the loss scale of this step's backwards: the scale changes only after the update.
        rule = FactorRule(self.loss_scale.value, self.settings.clipping, boundary.factor, self.settings.skip_overflow)
        try:
            factor = boundary.decide(check, rule, self.global_steps, late=late)
            if factor is None:
                weights.finish()
            else:
                weights.replace_weights(factor)
            step.applied = boundary.conclude(check, rule, self.global_steps, factor)
        except (CollectiveError, UsageError):  # the step is refused
            raise
        except BaseException:  # a tier failed, on all ranks: counters and digests must not diverge
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

    # -- gradients of the next update

    def gradient_norm(self) -> float:
        """Returns the global L2 norm of the gradients for the next `step()`, unscaled and unclipped. (all ranks)

        Call it between the last backward and the `step()` of a boundary. It is inf if a gradient is not finite.

        Raises:
            EngineStateError: there are no gradients yet.
            CollectiveError, UsageError: as `step()`, which compares the ranks with the same collective.
        """
        boundary = self._require_gradients("gradient_norm")
        stats = boundary.read(self._check_gradients(norm=True), self.global_steps)
        return stats.norm / self.loss_scale.value if stats.finite else math.inf

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients for the next `step()` by `factor`; `gradient_clipping` may still clip them."""
        self._require_gradients("scale_gradients", own=factor != 1.0).factor = float(factor)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every element of the reduced gradients to [-clip_value, clip_value]. (all ranks)

        Raises:
            EngineStateError: there are no gradients yet, or the engine has already computed their norm.
        """
        if self._require_gradients("clip_grad_value_", own=True).check is not None:
            raise EngineStateError("engine.clip_grad_value_()", expected="a call before the norm of the gradients")
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
        """Completes reductions, computes the norm, compares the ranks; once, and after each change. (all ranks)"""
        boundary = self._require_boundary("step")
        if boundary.check is not None and boundary.is_examined:
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
        self._drop_gradients()  # a program that catches the error may continue with the next forward
        self._step.num_backwards = 0

    def _compare_settings(self) -> None:
        """Compares the ranks' settings, for updates that begin before `step()`. (all ranks)"""
        self._require_boundary("backward").compare(self.global_steps)

    # -- events of backward, from the hooks

    @property
    def weights_version(self) -> int:
        """Number of weight updates so far."""
        return self.global_steps - self.skipped_steps

    def on_backward(self, version: int | None = None) -> None:
        """Handles the start of a backward; `version` is `weights_version` at its forward."""
        # The engine gathers sharded weights again for backward, so an update in between would silently give the
        # gradient of another function.
        if version is not None and version != self.weights_version:
            raise EngineStateError(
                "engine: a backward through a forward from before the last update",
                expected="the weights of that forward",
                got="updated weights",
                fix="compute the loss again after engine.step()",
            )
        if not self._step.in_backward:
            # A plain loss.backward(): no code of the engine surrounds the call, so autograd itself reports the end.
            self._begin_backward(direct=True)
            Variable._execution_engine.queue_callback(self._end_backward)

    def on_grad_ready(self, param: nn.Parameter) -> None:
        """Handles a gradient that autograd has accumulated for this parameter."""
        if not self._step.in_backward:  # a loss may reach parameters without passing an output of the root
            self.on_backward()
        loop = self.settings.loop
        if self._step.is_direct and loop.divides_direct and self.settings.accumulation > 1 and param.grad is not None:
            param.grad.div_(self.settings.accumulation)
        self.grad_reducer.on_grad_ready(param)

    def _begin_backward(self, *, direct: bool) -> None:
        self._check_usable()
        if self._coordinator.on_demand is not None:
            raise EngineStateError("backward inside engine.gathered()", fix="train outside it; it is for inference")
        # Gradients only pass through a frozen model: its parameters are unsharded, and there is nothing to reduce.
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
            # Pipeline stages end their last backwards one after another, so all ranks exchange facts only in `step`.
            joins = self._boundary if self._step.is_last_backward and self._peers_are_job else None
            self.grad_reducer.end(None if joins is None else joins.join_facts)
            self._report.end("reduce")
            self._step.num_backwards += 1
        try:
            self._coordinator.end_backward()
        except OffloadError:  # unread shards left NaN in the gradients, which include those of earlier micro-steps
            self.reset()
            raise
        self._step.in_backward = self._step.is_direct = False

    # -- gradient accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True if the `step()` after this micro-batch updates the weights."""
        if self._step.boundary is not None:
            return self._step.boundary
        if not self.settings.managed_accumulation:
            return True
        return (self.micro_steps + 1) % self.settings.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether `step()` updates the weights, from now on; the engine stops counting micro-batches for that.

        Raises:
            EngineStateError: `managed_gradient_accumulation` is false, so every `step()` updates the weights.
        """
        if not self.settings.managed_accumulation:
            raise EngineStateError(
                "engine.set_gradient_accumulation_boundary()",
                expected="managed_gradient_accumulation true",
                got="false, so every engine.step() is a boundary",
                fix="call engine.step() only after the last micro-batch of each update",
            )
        self.decide_boundary(is_boundary)

    def decide_boundary(self, is_boundary: bool) -> None:
        """Sets the boundary, for loops of this library, which count micro-batches themselves under any config."""
        self._step.boundary = bool(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients locally inside the block unless they are sharded; sharded ones are still reduced.

        Both give the correct result; only the traffic differs.
        """
        if not self._step.syncs:
            raise EngineStateError("engine.no_sync()", expected="a call outside another engine.no_sync()")
        self._step.syncs = False
        try:
            yield
        finally:
            self._step.syncs = True

    # -- checks

    @property
    def has_gradients(self) -> bool:
        """True if there are gradients of an unfinished accumulation."""
        gradients = self.grad_reducer.gradients
        return bool(self._step.num_backwards) or any(g.flat is not None or g.shard is not None for g in gradients)

    def require_states_loaded(self) -> None:
        """Raises EngineStateError between `offload_states` and `reload_states`."""
        self._state_offload.require_loaded()

    def _note_phase(self, phase: str) -> None:
        """Records phase and step for the messages of ranks that wait for this one."""
        self.collectives.flight_recorder.phase, self.collectives.flight_recorder.step = phase, self.global_steps

    def _check_usable(self) -> None:
        if self._destroyed:
            raise EngineStateError(
                "engine",
                expected="a live engine",
                got="an engine after destroy()",
                fix="end the threads and loaders that use it first, or build another engine with initialize()",
            )
        self.require_states_loaded()
        if self.weight_update is not None and self.weight_update.broken is not None:
            raise EngineStateError(
                f"engine: {self.weight_update.broken}", fix="resume from the last checkpoint, which is intact"
            )
        # No backward can run outside an autograd graph task, so the last one must have raised.
        if self._step.in_backward and torch._C._current_graph_task_id() == -1:
            raise EngineStateError(
                "engine: the last backward failed and left incomplete gradients",
                fix="call engine.reset() on every rank to drop them, then continue",
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
                got="a loss that does not",
                fix="compute it with gradients enabled",
            )

    def _require_optimizer(self, call: str) -> ShardedOptimizer:
        if self.sharded_optimizer is None:
            raise EngineStateError(
                f"engine.{call}()",
                expected="an engine with an optimizer",
                got="an engine for inference",
                fix="pass an optimizer to initialize(), or add an optimizer section to the config",
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
        """Raises EngineStateError if there are no gradients, or, with `own`, if an update with them has begun."""
        weights, boundary = self._require_weight_update(call), self._require_boundary(call)
        self._check_usable()
        if self._step.num_backwards == 0:
            raise EngineStateError(
                f"engine.{call}()", expected="a backward before this call", fix="call it between backward and step()"
            )
        if own:
            weights.require_own_step(f"engine.{call}()")
        return boundary

    def extra_repr(self) -> str:
        """Returns stage, ranks, dtypes, batch size and tiers for the first line of `repr(engine)`."""
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
        """Returns True if the last `step()` changed the weights; False between boundaries and after an overflow."""
        return self._step.applied

    def get_global_grad_norm(self) -> float | None:
        """Returns the last boundary's global L2 gradient norm, unscaled, before clipping; inf after an overflow.

        None before the first boundary, or if `compute_grad_norm` is off.
        """
        return None if self._boundary is None else self._boundary.grad_norm

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each param group; 0 if it has none, as in Adafactor with relative steps."""
        return [float(group.get("lr") or 0.0) for group in self._require_optimizer("get_lr").optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Returns the number of samples per step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.settings.accumulation * self.settings.data_parallel_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the number of samples per rank and forward."""
        return self.settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-batches per step."""
        return self.settings.accumulation

    def model_state_nbytes(self) -> dict[str, int]:
        """Returns the bytes this rank holds now: "params", "gradients" and "optimizer" (masters and states).

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
        """Returns this rank's bytes in other tiers than its device: "params, host", "params, nvme", "optimizer, nvme".

        In a CPU run host memory is the device, so states in it count in `model_state_nbytes` only.
        """
        return {name: tier.nbytes for name, tier in self.tier_set.tiers.items()}

    # -- where time goes

    @contextlib.contextmanager
    def record_trace(self, path: PathLike) -> Iterator[StepTrace]:
        """Records the steps inside the block: units, collectives, updates and copies over time. (all ranks)

        Rank 0 writes one file for all ranks. Perfetto and Chrome open it, and `zeroaccel trace` turns it into a page.
        Recording changes neither computation nor traffic, except for a few small collectives before the first step and
        after the last. The first steps of a run are not typical: record later ones.

        Args:
            path: file on rank 0's machine; an existing file is replaced.

        Yields:
            The recording; after the block its `waits` are the three largest, on every rank.

        Raises:
            EngineStateError: another recording is active, or no step was complete.
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
            >>> recorded.result.num_steps, recorded.waits  # a single rank never waits
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
        """Returns the parts of the engine that a recording observes."""
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

        Calls that save or read the full model call this too. Without such an update it only compares the ranks for the
        steps that have not compared them yet; see [Note: boundary] of `grad_norm.py`.
        """
        self._check_usable()
        self._coordinator.drop_recent()
        if self._boundary is not None:
            self._boundary.verify_earlier_steps(wait=True)
        if self.weight_update is not None:
            self.weight_update.finish()

    def change_masters(self, call: Callable[[], object]) -> None:
        """Runs an optimizer method other than `step` that changes weights, e.g. `eval` of a schedule-free optimizer.

        (all ranks, between a step and the next forward)

        Args:
            call: sees part of this rank's masters at a time in the param groups, as `step` does.
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

        Inside, ranks may run different numbers of forwards: a rank that leaves the block participates in the gathers of
        the others until all have left it. Training inside the block is an error.

        Args:
            budget: bytes of unsharded parameters to keep, in the order of the model; the engine gathers the rest for
                each forward. None keeps all.

        Raises:
            UsageError: `budget` is not a number of bytes, or differs between ranks; or the block is nested.
        """
        self.finish_update()
        return gathered(self.registry, self._coordinator, budget)

    def iter_named_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full values in the engine's dtype), one unsharded unit at a time. (all ranks, to the end)

        A tensor is valid only until the next one: copy it to keep it. Tied parameters come once.
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
        """Yields packets of all weights, gathered unit by unit, each byte once. (all ranks, to the end)

        A packet has a `manifest` of plain data and a `payload`, a tensor of bytes that is valid until the next packet.
        The stream holds one unit and one bucket of `bucket_bytes` at a time. Tied parameters come once; persistent
        buffers are included.

        Args:
            dtype: float32, bfloat16 or float16, for floating-point values; None keeps their own.
            names: names of parameters and buffers to send, or a predicate on names. The engine gathers only these.
            bucket_bytes: a multiple of 16; a larger tensor comes in pieces.
            merge_adapters: merge PEFT's adapters into the weights that they adapt, by the adapter's own rule, and send
                these under the names that they have without adapters. The engine's weights do not change.
            only_rank: rank in the job that gets payloads; packets of other ranks have none. None means all ranks.
            as_saved: use the names and layouts of `save_pretrained`; False uses those of the model's parameters, as
                deltas do.

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
        """Makes each step mark the 16-bit weights that it changes, one bit per weight, for `stream_deltas`.

        It is off by default, and then uses no memory. Weights of other dtypes always count as changed.
        """
        self.weight_sender.mark_changes(enabled=enabled)

    def stream_deltas(self, since: int | None = None) -> Iterator[Any]:
        """Yields packets of changed weights, each rank from its own shard, without a gather. (all ranks, to the end)

        All ranks send their packets; a receiver has the version once the packets of all ranks have arrived. If all
        values of a parameter take fewer bytes than the changed values with positions, the packet has all values.

        Args:
            since: the version that the receivers have (`engine.streamed_version` at that time). If it is not that of
                the last complete stream of weights or deltas, the packets contain all weights.

        Raises:
            EngineStateError: `mark_changes` was not called, or another stream is open.
        """
        return self.weight_sender.stream_deltas(since)

    @property
    def streamed_version(self) -> int:
        """Number of the last stream of weights that began; 0 before the first."""
        return self.weight_sender.version

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states from the device to host memory until `reload_states`; meanwhile the engine cannot be used.

        Args:
            include: a selection of "optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer", as
                strings or as members of an enum with these values; None means all.
            device: "cpu".
            non_blocking: accepted without effect: the call frees the memory, so it always waits for the copies.

        Raises:
            UsageError: a kind or the device is unknown.
            EngineStateError: the states are already offloaded.
        """
        self.finish_update()
        self.registry.before_write()  # a save may be copying them
        kinds = self._state_offload.kinds(include, device)
        self._coordinator.end_step()
        self._state_offload.offload(kinds, pinned=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the states back to the device. Without an earlier `offload_states` it does nothing."""
        self._state_offload.reload()

    # -- checkpoints

    @property
    def loaded(self) -> Any:
        """`LoadReport` with the bytes that the last `load_checkpoint` read; None before the first load."""
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

        With `checkpoint.async_save` it returns at once, and writing overlaps with training; if writing fails, the next
        `step()`, save or load raises the error.

        Args:
            save_dir: a folder that all ranks see.
            tag: name of the checkpoint, the same on all ranks; `global_step<N>` by default. Replaces an existing one.
            client_state: plain data and tensors of the caller, which `load_checkpoint` returns; rank 0's are saved.
            save_latest: write `latest`, so that a load without a tag finds this checkpoint.
            exclude_frozen_parameters: leave out the values of parameters that need no gradient, or save all. By default
                the config's `checkpoint.exclude_frozen_parameters`; without that, the save leaves out the base model
                under PEFT adapters if it has a name.

        Returns:
            True: the save is complete, or continues in the background.

        Raises:
            CheckpointError: writing failed (earlier checkpoints are unchanged), or an earlier save in the background
                failed.
            UsageError: the ranks' tags differ, or `client_state` contains something other than plain data and tensors.
            EngineStateError: gradients of an unfinished accumulation would be lost.
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

        It also reads folders that DeepSpeed wrote, and FSDP2 state dicts that torch.distributed.checkpoint wrote.

        Args:
            tag: name of the checkpoint; by default the one that `latest` names. "auto" takes the newest valid one, of
                any writer, and logs the skipped ones with the reasons.
            load_module_strict: all names must match; False loads the names that match. Shapes must always match.
            load_optimizer_states: load optimizer states, such as moments, and the hyperparameters of the param groups.
            load_lr_scheduler_states: load the state of the scheduler.
            load_module_only: load only weights and buffers; training starts at step 0 with them.

        Returns:
            (the checkpoint's folder, the saved `client_state`); (None, {}) for "auto" if there is no checkpoint.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, incomplete, or does not fit; on every rank. If only
                reading it showed the damage, the engine refuses to run until a load succeeds.
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
        """Writes the parameters, in the dtypes they have in the engine, and the buffers to one file. (all ranks)

        Rank 0 writes, at every stage, with one unit unsharded at a time. It streams a file that ends in .safetensors;
        for .bin, .pt and .pth it calls `torch.save`, with all weights in its memory.

        Returns:
            True: the file is written.

        Raises:
            CheckpointError: the file cannot be written.
        """
        self.checkpointer.save_16bit_model(
            os.path.join(save_dir, save_filename), exclude_frozen=exclude_frozen_parameters
        )
        return True

    def save_model(
        self, save_dir: PathLike, *, max_nbytes: int, pickled: bool = False, exclude_frozen_parameters: bool = False
    ) -> list[str]:
        """Writes the model as files of at most `max_nbytes` with an index, in the Hugging Face layout. (all ranks)

        Returns:
            The names of the files.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        return self.checkpointer.save_model(
            save_dir, max_nbytes, pickled=pickled, exclude_frozen=exclude_frozen_parameters
        )

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Returns the model's full state dict in host memory on rank 0, and None on the others. (all ranks)

        Works at every stage, with one unit unsharded at a time; rank 0 holds a copy of all weights, in the engine's
        dtypes. Tied parameters are one tensor under each of their names.
        """
        return self.checkpointer.consolidated_state_dict(exclude_frozen=exclude_frozen_parameters)

    def wait_for_checkpoint(self) -> None:
        """Waits until no save runs in the background. (all ranks)

        Raises:
            CheckpointError: the save failed; on every rank.
        """
        self.checkpointer.wait()

    # -- life cycle

    def reset(self) -> None:
        """Reshards all units and drops all gradients after an exception within a step, ready for the next forward."""
        if self.weight_update is not None:
            self.weight_update.forget()
        self._hooks.forget()
        self._step.in_backward = self._step.is_direct = False
        self._coordinator.reset()
        self.grad_reducer.reset()
        self._drop_gradients()
        self._step.num_backwards = 0

    def at_destroy(self, undo: Callable[[], None]) -> None:
        """Registers `undo`, which `destroy` calls, to remove a patch that was made for this engine."""
        self._undo.callback(undo)

    def destroy(self) -> None:
        """Detaches the engine: removes its hooks, and frees masters, gradients and optimizer states at once.

        `optimizer.state` is empty afterwards, and the model is an ordinary one. One rank may call it alone: weights
        that are sharded stay so until their values are used, by a forward, a read or a write, `state_dict()` or
        `initialize`; all ranks must do that together, because it unshards them. Only weights that an axis of the mesh
        splits, compiled models, and parameters of other classes are unsharded here. (then all ranks)

        Raises:
            CheckpointError: this rank's part of a save in the background failed.
        """
        try:
            self.checkpointer.close()
        finally:
            self._destroy()

    @property
    def is_destroyed(self) -> bool:
        """True after `destroy`."""
        return self._destroyed

    def _destroy(self) -> None:
        if self._destroyed:
            return
        self.registry.require_free("engine.destroy()")
        if self.weight_update is not None:
            self.weight_update.close()
        self.reset()
        # Unit by unit, in registration order on all ranks: gathers are collectives.
        compiled = is_compiled_within(self.module)  # the compiler does not see the checks of sharded parameters
        for unit in self.units:
            unit.end(self.collectives, moves=self.tier_set.is_used, waits=not compiled)
        self.registry.close()
        self._undo.close()  # last in, first out: a patch may lie on top of an earlier one
        self._hooks.detach()
        self._load_hooks.detach()
        self._report.close()
        self.tier_set.close()
        # The engine, its hooks and its optimizer refer to each other: without this their memory would wait for Python's
        # cycle collector, which does not see device memory.
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.optimizer.state.clear()
        self._note_phase("")
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
                if hasattr(type(module), name):  # a property of the model raised it
                    raise
                kinds = f"{type(self).__name__} nor its model {type(module).__name__}"
                raise AttributeError(f"neither {kinds} has an attribute {name!r}", name=name, obj=self) from None

    def __reduce__(self) -> Any:
        raise EngineStateError(
            "an engine cannot be copied or pickled: it belongs to a job of several processes",
            fix="save a checkpoint; or copy engine.module, inside engine.gathered() if it is sharded",
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's state dict; raises while parameters are sharded, instead of returning NaNs."""
        state, plain = self.module.state_dict(*args, **kwargs), plain_names(self.module)
        for name in list(state):  # in place: a caller may have passed the dict
            state[plain(name)] = state.pop(name)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the model's method; pass the same values on every rank. They reach shards and masters. (all ranks)"""
        return self.module.load_state_dict(for_model(state_dict, self.module), *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EngineBase:
        self._integrity.check_conversion(fn, self.module)
        return self  # nothing would change


def _update_times(optimizer: ShardedOptimizer | None) -> Callable[[], tuple[float, float, float]]:
    return lambda: (0.0, 0.0, 0.0) if optimizer is None else optimizer.times


def _offload_report(tiers: TierSet, optimizer: ShardedOptimizer | None) -> OffloadReport:
    swapper = tiers.swapper
    overlaps_io = swapper is not None and swapper.pipeline_read and swapper.pipeline_write
    return OffloadReport(tiers.tiers, _update_times(optimizer), overlaps_io=overlaps_io)
