"""`EngineCore`: the parts of an engine and the order in which a training step uses them.

`hooks` and `coordinator` unshard and reshard units, `grad_reducer` reduces gradients to shards, `step_boundary` takes
the norm (`grad_norm`) and compares the ranks, `weight_update` and `sharded_optimizer` update the masters and gather
the weights. No code here branches on a stage number. Checkpoints, streams of weights and reports are composed with the
core in `zeroaccel/engine.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import CollectiveError, EngineStateError, OffloadError, UsageError
from zeroaccel.offload import unlock_dropped
from zeroaccel.optim.rank_facts import HyperparameterCheck
from zeroaccel.zero.access.param_registry import ParamRegistry, Training
from zeroaccel.zero.access.state_dicts import StateDictHooks
from zeroaccel.zero.compiled import compiler_failure, is_compiled_within
from zeroaccel.zero.coordinator import ParamCoordinator
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.grad_norm import FactorRule, GradCheck
from zeroaccel.zero.grad_reducer import GradReducer
from zeroaccel.zero.hooks import Hooks, freed_view
from zeroaccel.zero.model_check import misplaced_inputs
from zeroaccel.zero.module_names import for_model, plain_names
from zeroaccel.zero.param_check import ParamIntegrityCheck
from zeroaccel.zero.param_unit import ParamUnit
from zeroaccel.zero.precision import LossScale, cast_floats
from zeroaccel.zero.prefetch import PrefetchTrace
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.step_boundary import StepBoundary
from zeroaccel.zero.storage.placement import TierSet
from zeroaccel.zero.storage.state_offload import StateOffload
from zeroaccel.zero.weight_update import WeightUpdate


@dataclass(frozen=True)
class EngineParts:
    """The parts that an engine needs besides the model, its units and the settings.

    Attributes:
        optimizer: None for inference.
        lr_scheduler: stepped after each update; None if there is no scheduler.
        loss_scale: loss scale for fp16.
        tiers: tiers that hold offloaded shards and states.
        unoptimized: trainable parameters that no optimizer updates; the engine drops their gradients.
        refuses_compiled: reason why a compiled model is refused; "" if it is allowed.
    """

    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    loss_scale: LossScale
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


class ModelWrapper(nn.Module):
    """A module around a model: looks up attributes that it lacks in the model, and has the model's state dict.

    Attributes:
        module: the model, the same object that was passed in.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        # Python names a callable by this in errors about a wrong call, such as `engine(**a_list)`; else by its repr.
        self.__qualname__ = type(self).__name__

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


class EngineCore(ModelWrapper):
    """The parts of a training step around one model, its optimizer and scheduler. `EngineBase` has the calls.

    Before a unit's forward the engine all-gathers its parameters and prefetches the next units; afterwards it reshards
    them. Before the unit's backward the engine gathers them again, and once all gradients of the unit are accumulated,
    it reduce-scatters them to fp32 shards. At the accumulation boundary the engine computes the norm and clips the
    gradients, and each rank updates its shard of the masters.

    Attributes:
        settings: the settings of the engine, all resolved.
        units: the model's parameters, in units that share their collectives.
        collectives: the ranks with which it exchanges parameters and gradients.
        lr_scheduler: passed in or built from the config, or None.
        loss_scale: loss scale for fp16.
        sharded_optimizer: steps the optimizer on shards; None for inference.
        weight_update: schedules the update of the masters and the gather of the weights; None for inference.
        grad_reducer: reduces gradients to shards.
        tier_set: tiers that hold offloaded shards and states.
        registry: finds the model's parameters, for example for `GatheredParameters`.
        trace: the recorded order of units, for prefetching.
        global_steps: number of steps, skipped ones included.
        skipped_steps: number of steps skipped because gradients were not finite.
        micro_steps: number of `step()` calls.
        global_samples: number of samples over all ranks.
        zero_config: the resolved config of the engine, as a plain dict.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ParamUnit],
        collectives: Collectives,
        settings: EngineSettings,
        parts: EngineParts,
        config: Mapping[str, Any],
    ) -> None:
        super().__init__(model)
        optimizer, tiers = parts.optimizer, parts.tiers
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

        # Gradients to shards, shards to masters, masters to weights.
        trained = [(unit.name, b) for unit in units for b in unit.buffers if b.trainable]
        copies = tiers.copies if tiers.steps_on_host else None
        self.grad_reducer = GradReducer(trained, collectives, settings.plan, settings.rules, copies)
        self.weight_update: WeightUpdate | None = None
        self._boundary: StepBoundary | None = None
        if optimizer is not None:
            self.weight_update = weights = self._build_weight_update(optimizer)
            check = HyperparameterCheck(optimizer.optimizer, collectives.job)
            self._boundary = StepBoundary(self.grad_reducer, weights, check, collectives, self._refuse_step)

        # Unshard and reshard. Persistent units stay unsharded, so they need no hooks and no prefetching.
        sharded_units = [unit for unit in units if not unit.persistent]
        self._peers_are_job = collectives.peers is collectives.job
        self.trace = PrefetchTrace({unit.name: unit.numel for unit in units}, settings.limits)
        self._coordinator = ParamCoordinator(sharded_units, self.trace, collectives, self.grad_reducer.on_unit_over)
        optimized = [param for _, buffer in trained for param in buffer.params] if optimizer else []
        self._hooks = Hooks(
            model, sharded_units, self._coordinator, self, optimized=optimized, unoptimized=parts.unoptimized
        )

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
        if optimizer is not None:
            self._undo.callback(optimizer.guard(lambda: self._require_weight_update("state_dict").complete()))
        self._destroyed = False

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
        self._check_usable()
        # Before the forward computes with them: the next gather would overwrite such a write, so it must not train.
        self._integrity.check()
        self._hooks.attach_outside_graphs(self._refuses_compiled)
        if self.weight_update is not None and (self._hooks.is_compiled or torch.compiler.is_compiling()):
            self.weight_update.complete()  # compiled code reads parameters unseen
        self._note_phase("forward" if torch.is_grad_enabled() else "eval")
        dtype = self.settings.input_dtype
        if dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, OffloadError) and self.weight_update is not None:
                self.weight_update.fail_update()
            mistake = compiler_failure(error, self.module) or freed_view(error)
            mistake = mistake or misplaced_inputs(error, args, kwargs, self.collectives.topology.device)
            if mistake is None:
                raise
            raise mistake from error

    def _begin_step(self) -> WeightUpdate:
        """Checks that a step may be taken now, and counts it; returns the update of the weights."""
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
        self.count_micro_step()
        self._step.applied = False
        self._step.num_backwards = 0
        return weights

    def count_micro_step(self) -> None:
        """Counts a micro-batch without an update, for loops that call `step()` at boundaries only."""
        self.micro_steps += 1
        is_counted = self.settings.managed_accumulation or self._step.boundary is not None
        batches = 1 if is_counted else self._step.num_backwards
        self.global_samples += batches * self.settings.micro_batch_size * self.settings.data_parallel_size

    @contextlib.contextmanager
    def _decided_step(self) -> Iterator[float | Tensor | None]:
        """Yields the factor for `WeightUpdate.replace_weights`, which the block calls; None if the step is skipped.

        Before the block it computes the norm, checks for overflow and clips; afterwards it counts the step.
        """
        step, boundary = self._step, self._require_boundary("step")
        boundary.verify_earlier_steps()
        late = boundary.settings_may_be_late()
        check = self._check_gradients(norm=self.settings.compute_norm or self.settings.clipping > 0)
        for unit in self.units:
            unit.drop_copies()
        rule = self._factor_rule()
        try:
            factor = boundary.decide(check, rule, self.global_steps, late=late)
            yield factor
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
        self._require_gradients("scale_gradients").factor = float(factor)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every element of the reduced gradients to [-clip_value, clip_value]. (all ranks)

        Raises:
            EngineStateError: there are no gradients yet, or the engine has already computed their norm.
        """
        if self._require_gradients("clip_grad_value_").check is not None:
            raise EngineStateError("engine.clip_grad_value_()", expected="a call before the norm of the gradients")
        self._finish_reductions()
        self.grad_reducer.changed()
        limit = float(clip_value) * self.loss_scale.value
        for gradients in self.grad_reducer.gradients:
            grad = gradients.shard if gradients.full is None else gradients.full
            if grad is not None:
                grad.clamp_(-limit, limit)

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
        if self.weight_update is not None:
            self.weight_update.drop_early()
        self.grad_reducer.clear()
        if self._boundary is not None:
            self._boundary.clear()

    def _refuse_step(self) -> None:
        self._drop_gradients()  # a program that catches the error may continue with the next forward
        self._step.num_backwards = 0

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
        self._step.in_backward, self._step.is_direct, self._step.collects_gradients = True, direct, collects
        self._note_phase("backward")
        self._coordinator.begin_backward()
        if not collects:
            return
        # ZeRO-2 and 3 reduce each micro-step and keep a shard; 0 and 1 accumulate unreduced gradients (1/accumulation
        # of the traffic, for N instead of S elements) and reduce in the last backward.
        is_last = self._step.is_last_backward = self._step.syncs and self.is_gradient_accumulation_boundary()
        on_final = None
        if is_last and self.weight_update is not None:
            on_final = self.weight_update.begin_early(self._factor_rule().unclipped)
        self.grad_reducer.begin(reduce=self.settings.plan.grads or is_last, is_last=is_last, on_final=on_final)

    def _factor_rule(self) -> FactorRule:
        # Unscale by the loss scale of this step's backwards: the scale changes only after the update.
        most = self._require_boundary("step").factor
        return FactorRule(self.loss_scale.value, self.settings.clipping, most, self.settings.skip_overflow)

    def _end_backward(self) -> None:
        self._coordinator.pass_rest()
        if self._step.collects_gradients:
            self._end_reductions()
            self._step.num_backwards += 1
        try:
            self._coordinator.end_backward()
        except OffloadError:  # unread shards left NaN in the gradients, which include those of earlier micro-steps
            if self.weight_update is not None:
                self.weight_update.fail_update()
            self.reset()
            raise
        self._step.in_backward = self._step.is_direct = False

    def _end_reductions(self) -> None:
        # Pipeline stages end their last backwards one after another, so all ranks exchange facts only in `step`.
        joins = self._boundary if self._step.is_last_backward and self._peers_are_job else None
        self.grad_reducer.end(None if joins is None else joins.join_facts)

    # -- gradient accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True if the `step()` after this micro-batch updates the weights."""
        if self._step.boundary is not None:
            return self._step.boundary
        if not self.settings.managed_accumulation:
            return True
        return (self.micro_steps + 1) % self.settings.accumulation == 0

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

    def _require_gradients(self, call: str) -> StepBoundary:
        """Raises EngineStateError if there are no gradients."""
        boundary = self._require_boundary(call)
        self._check_usable()
        if self._step.num_backwards == 0:
            raise EngineStateError(
                f"engine.{call}()", expected="a backward before this call", fix="call it between backward and step()"
            )
        return boundary

    # -- life cycle

    def finish_update(self) -> None:
        """Completes an update that the forward awaits or that runs one step late (`update_during`) now. (all ranks)

        Calls that save or read the full model call this too. Without such an update it only compares the ranks for the
        steps that have not compared them yet; see [Note: boundary] of `grad_norm.py`.
        """
        self._check_usable()
        self._coordinator.drop_recent()
        if self._boundary is not None:
            self._boundary.verify_earlier_steps(wait=True)
        if self.weight_update is not None:
            self.weight_update.finish()

    def reset(self) -> None:
        """Reshards all units and drops all gradients after an exception within a step, ready for the next forward."""
        self._hooks.forget()
        self._step.in_backward = self._step.is_direct = False
        self._coordinator.reset()
        self.grad_reducer.reset()
        self._drop_gradients()
        self._step.num_backwards = 0

    def at_destroy(self, undo: Callable[[], None]) -> None:
        """Registers `undo`, which `destroy` calls, to remove a patch that was made for this engine."""
        self._undo.callback(undo)

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
        self.tier_set.close()
        # The engine, its hooks and its optimizer refer to each other: without this their memory would wait for Python's
        # cycle collector, which does not see device memory.
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.optimizer.state.clear()
        unlock_dropped(wait=True)
        self._note_phase("")
        self._destroyed = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EngineCore:
        self._integrity.check_conversion(fn, self.module)
        return self  # nothing would change
