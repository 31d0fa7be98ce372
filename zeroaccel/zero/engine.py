"""The engine: one model, its optimizer and scheduler, and the loop of forward, backward and step over them.

It strings the parts together and counts; each part does its own work: `build` (units), `coordinator` and `hooks` (who
is whole), `reducer` (gradients), `clip` (norm), `sharded_optimizer` (update). Nothing here asks for a stage number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from zeroaccel.comm.collectives import Collectives
from zeroaccel.config.shard_plan import ShardPlan, UpdateTime
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.optim.rank_facts import HyperparameterCheck
from zeroaccel.telemetry.step_report import OffloadReport, StepReport
from zeroaccel.zero.access.full_params import gathered, iter_named_full_params
from zeroaccel.zero.access.param_registry import ParamRegistry, Training
from zeroaccel.zero.coordinator import ParamCoordinator
from zeroaccel.zero.grad_reducer import GradReducer, GradStats, ReduceRules, clip_factor
from zeroaccel.zero.gradient_access import GradientAccess
from zeroaccel.zero.hooks import Hooks, StateDictHooks
from zeroaccel.zero.param_check import ParamIntegrityCheck
from zeroaccel.zero.param_unit import ParamUnit, ShardState
from zeroaccel.zero.precision import LossScale, cast_floats
from zeroaccel.zero.prefetch import PrefetchLimits, PrefetchTrace
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.placement import TierSet
from zeroaccel.zero.storage.state_offload import OffloadedStates, StateOffload
from zeroaccel.zero.weight_update import WeightUpdate

__all__ = ["Engine", "EngineSettings"]


@dataclass(frozen=True)
class EngineSettings:
    """The numbers an engine runs by, all resolved.

    Attributes:
        plan: what is sharded.
        micro_batch_size: samples per rank and forward.
        accumulation: backwards per step.
        managed_accumulation: False makes every `step()` a boundary.
        clipping: maximal global gradient norm; 0 is off.
        compute_norm: whether a norm is computed where clipping does not need it.
        skip_overflow: skip steps whose gradients are not finite.
        loss_scaled: fp16, where a plain `loss.backward()` would miss the scale.
        autocast_dtype: cast floating inputs of forward to this; None leaves them.
        gather_numel: elements of all-gathers in flight after a step (`allgather_bucket_size`).
        sub_group_numel: fp32 gradients made at a time by optimizers without an own kernel, in elements.
        update_during: when masters on the host are updated.
        limits: how much may be whole at a time.
        rules: how gradients are summed.
    """

    plan: ShardPlan
    micro_batch_size: int
    accumulation: int
    managed_accumulation: bool = True
    clipping: float = 0.0
    compute_norm: bool = True
    skip_overflow: bool = True
    loss_scaled: bool = False
    autocast_dtype: torch.dtype | None = None
    gather_numel: int = 500_000_000
    sub_group_numel: int = 1_000_000_000
    update_during: UpdateTime = "step"
    limits: PrefetchLimits = field(default_factory=PrefetchLimits)
    rules: ReduceRules = field(default_factory=ReduceRules)


class Engine(GradientAccess, StateOffload, nn.Module):
    """Trains (or runs) one model; made by `zeroaccel.initialize`.

    A step is: `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`, once per micro-batch. Attributes that
    the engine does not have are the model's.

    Attributes:
        module: the model, the same object that was given.
        optimizer, lr_scheduler: as given or built, or None.
        keeper: finds the model's parameters for `GatheredParameters` and the like.
        global_steps: steps taken, skipped ones included.
        skipped_steps: steps skipped because gradients were not finite.
        micro_steps: `step()` calls.
        global_samples: samples seen by all ranks.
        zero_config: the resolved config it was made from, as a plain dict; `config` is the same.
        divides_direct: a plain `loss.backward()` is divided by the accumulation steps, as `engine.backward` is.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ParamUnit],
        collectives: Collectives,
        settings: EngineSettings,
        *,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any = None,
        loss_scale: LossScale | None = None,
        discarded: Sequence[nn.Parameter] = (),
        report: StepReport | None = None,
        config: Mapping[str, Any] | None = None,
        tiers: TierSet | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.settings = settings
        self.zero_config = self.config = dict(config or {})
        self.lr_scheduler = lr_scheduler
        self.loss_scale = loss_scale or LossScale()
        self.units = tuple(units)
        self.collectives = collectives
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self._shard = optimizer
        self._report = report or StepReport()
        if tiers is not None and tiers.is_used:
            self._report.offload = _offload_report(tiers, optimizer)
        trained = [(unit.name, b) for unit in units for b in unit.buffers if b.trainable]
        self._tiers = tiers
        copies = tiers.copies if tiers is not None and tiers.steps_on_host else None
        self._reducer = GradReducer(trained, collectives, settings.plan, settings.rules, copies)
        self._hyperparameters = None if optimizer is None else HyperparameterCheck(optimizer.optimizer, collectives.job)
        self._weights = (
            None
            if optimizer is None
            else WeightUpdate(
                optimizer,
                self._reducer,
                self.units,
                collectives,
                gather_numel=settings.gather_numel,
                gathers=settings.plan.optimizer,
                during=settings.update_during,
                tiers=tiers,
            )
        )
        self.schedule = PrefetchTrace({unit.name: unit.numel for unit in units}, settings.limits)
        travelling = [unit for unit in units if not unit.resident]
        self._residency = ParamCoordinator(travelling, self.schedule)
        params = [param for _, buffer in trained for param in buffer.params]
        self._hooks = Hooks(
            model, travelling, self._residency, self, optimized=params if optimizer else (), discarded=discarded
        )
        self.keeper = ParamRegistry(
            collectives,
            pin=self._residency.pin,
            unpin=self._residency.unpin,
            training=Training(optimizer, self._reducer, lambda: self.loss_scale, self._weights),
        )
        self.keeper.add(units)
        if optimizer is not None:
            self._hooks.guard_step(optimizer.optimizer, lambda: optimizer.is_stepping)
        self._loading = StateDictHooks(model, self.keeper)
        self._faces = ParamIntegrityCheck(model, units, trained=optimizer is not None)
        self.divides_direct = True
        self._boundary: bool | None = None
        self._syncing = True
        self._in_backward = self._direct = self._collecting = False
        self._backwards = 0
        self._norm: float | None = None
        self._health: GradStats | None = None
        self._asked_factor = 1.0
        self._applied = False
        self._destroyed = False
        self._undo: list[Callable[[], None]] = []
        self._parked: OffloadedStates | None = None

    # -- the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; sharded parameters are gathered as their modules run."""
        self._check_usable()
        self._faces.check()
        self._hooks.attach_outside_graphs()
        self._report.begin("forward")
        self._note("forward" if torch.is_grad_enabled() else "eval")
        dtype = self.settings.autocast_dtype
        if dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        try:
            return self.module(*args, **kwargs)
        finally:
            self._report.end("forward")

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Computes gradients of this micro-batch and, where gradients are sharded or at the boundary, reduces them.

        Args:
            loss: a scalar that depends on this engine's forward; the mean over the rank's micro-batch.
            scale_wrt_gas: divide by the accumulation steps, so that a step averages over its micro-batches.

        Returns:
            `loss`, as given.

        Raises:
            UsageError: `loss` is not a scalar with a gradient.
            EngineStateError: the engine has no optimizer.
        """
        self._check_loss(loss)
        self._require_optimizer("backward")
        factor = self.loss_scale.value / (self.settings.accumulation if scale_wrt_gas else 1)
        self._report.begin("backward")
        self._begin_backward(direct=False)
        scaled = loss * factor if factor != 1.0 else loss
        scaled.backward(retain_graph=retain_graph)
        self._end_backward()
        self._report.end("backward")
        self._report.loss(loss)
        return loss

    def step(self) -> None:
        """At the boundary: unscale, clip, update, gather, step the scheduler. Elsewhere only counts.

        Raises:
            EngineStateError: no backward came before.
            CollectiveError: the ranks went through different collectives since the last step.
            UsageError: the ranks' param groups have different settings; nothing was updated, the gradients are dropped.
        """
        weights = self._require_weights("step")
        self._check_usable()
        self.keeper.require_free("engine.step()")
        self._faces.check_writes()
        if self._backwards == 0:
            raise EngineStateError(
                "engine.step()", expected="a backward before it", fix="call engine.backward(loss) first"
            )
        if not self._syncing:
            raise EngineStateError("engine.step()", expected="to be outside engine.no_sync()")
        boundary = self.is_gradient_accumulation_boundary()
        if not boundary:
            weights.require_own_step("engine.step() that is no boundary")
        self.count_micro_step()
        self._applied = False
        self._backwards = 0
        if boundary:
            self._report.begin("step")
            self._update(weights)
            self._report.end("step")
            self._report.step(self)

    def count_micro_step(self) -> None:
        """What `step()` does where nothing is updated, for loops that call it only where something is."""
        self.micro_steps += 1
        self.global_samples += self.settings.micro_batch_size * self.collectives.world_size

    def _update(self, weights: WeightUpdate) -> None:
        examined_before = self._health is not None
        health = self._finish_gradients(norm=self.settings.compute_norm or self.settings.clipping > 0)
        for unit in self.units:
            unit.drop_second()
        scale = self.loss_scale.value
        self._norm = math.inf if not health.finite else None if math.isnan(health.norm) else health.norm / scale
        overflow = self.settings.skip_overflow and not health.finite
        try:
            if overflow:
                self.skipped_steps += 1
                weights.finish()
            else:
                if examined_before and self._hyperparameters is not None and not weights.is_early:
                    self._hyperparameters.note_update()
                clip = 1.0 if self._norm is None else clip_factor(self._norm, self.settings.clipping)
                weights.apply(min(clip, self._asked_factor) / scale)
                self._applied = True
        finally:
            self._drop_gradients()
            self.global_steps += 1
        self.loss_scale.update(overflow=overflow)
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _drop_gradients(self) -> None:
        self._reducer.clear()
        self._health, self._asked_factor = None, 1.0

    # -- backward events (told by the hooks)

    @property
    def weights_version(self) -> int:
        """Updates of the weights so far."""
        return self.global_steps - self.skipped_steps

    def backward_begins(self, version: int | None = None) -> None:
        """A gradient is on its way through the model, whose forward was with this version of the weights."""
        if version is not None and version != self.weights_version:
            raise EngineStateError(
                "engine: a backward through a forward from before the last update",
                expected="the weights that it computed with",
                got="newer ones",
                fix="compute the loss again after engine.step()",
            )
        if not self._in_backward:
            self._begin_backward(direct=True)
            Variable._execution_engine.queue_callback(self._end_backward)

    def gradient_arrived(self, param: nn.Parameter) -> None:
        """Autograd has accumulated this parameter's gradient."""
        self.backward_begins()
        if self._direct and self.divides_direct and self.settings.accumulation > 1 and param.grad is not None:
            param.grad.div_(self.settings.accumulation)
        self._reducer.receive(param)

    def _begin_backward(self, *, direct: bool) -> None:
        self._check_usable()
        if self._residency.requests is not None:
            raise EngineStateError("backward inside engine.gathered()", fix="train outside of it; it is for inference")
        # Through a frozen model gradients only pass: its parameters are needed, and there is nothing to reduce.
        self._collecting = self._faces.collects_gradients()
        if self._collecting and direct and self.settings.loss_scaled:
            raise EngineStateError(
                "loss.backward() under fp16 misses the loss scale", fix="call engine.backward(loss) instead"
            )
        if self._collecting and self._health is not None:
            raise EngineStateError(
                "engine: a backward after the gradients were clipped", fix="clip after the last backward of a step"
            )
        if self._collecting and self._weights is not None:
            self._weights.require_own_step("engine: another backward")
        self._in_backward, self._direct = True, direct
        self._note("backward")
        self._residency.begin_backward()
        if not self._collecting:
            return
        last = self._syncing and self.is_gradient_accumulation_boundary()
        early = self._weights.begin_backward(self._compare_hyperparameters) if last and self._weights else None
        self._reducer.begin(reduce=self.settings.plan.grads or last, hand_over=early)

    def _end_backward(self) -> None:
        if self._collecting:
            self._report.begin("reduce")
            self._reducer.end()
            self._report.end("reduce")
            self._backwards += 1
        self._residency.end_backward()
        self._in_backward = self._direct = False

    def _note(self, phase: str) -> None:
        """For the message of whoever has to wait for this rank."""
        self.collectives.flight_recorder.phase, self.collectives.flight_recorder.step = phase, self.global_steps

    def _check_usable(self) -> None:
        if self._destroyed:
            raise EngineStateError("engine", expected="an engine in use", got="one after destroy()")
        self._require_states_here()
        if self._weights is not None and self._weights.broken is not None:
            raise EngineStateError(
                f"engine: {self._weights.broken}", fix="resume from the last checkpoint, which is intact"
            )
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            raise EngineStateError(
                "engine: the last backward broke off and left part of its gradients",
                fix="call engine.reset() on every rank to drop them and go on",
            )

    def _check_loss(self, loss: Any) -> None:
        where = "engine.backward(loss)"
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
        if self._shard is None:
            raise EngineStateError(
                f"engine.{call}()",
                expected="an engine with an optimizer",
                got="one made for inference",
                fix="give initialize() an optimizer or the config an optimizer section",
            )
        return self._shard

    def _require_weights(self, call: str) -> WeightUpdate:
        self._require_optimizer(call)
        assert self._weights is not None, "an optimizer and nobody to apply it"
        return self._weights

    def _require_own_gradients(self, call: str) -> None:
        if self._weights is not None:
            self._weights.require_own_step(f"engine.{call}()")

    def finish_update(self) -> None:
        """Puts an update that runs one step late (`update_during`: "next_step") in force now. (all ranks)

        Calls that save or read the whole model do it too. Without such an update it does nothing.
        """
        self._check_usable()
        if self._weights is not None:
            self._weights.finish()

    # -- accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the `step()` after this micro-batch updates the weights."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.managed_accumulation:
            return True
        return (self.micro_steps + 1) % self.settings.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says from now on, until said otherwise, whether `step()` updates the weights; overrides the counting."""
        self._boundary = bool(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up locally where gradients are whole; where they are sharded they reduce as always.

        Both give the right result; only the traffic differs.
        """
        if not self._syncing:
            raise EngineStateError("engine.no_sync()", expected="not to be nested")
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated since the last step."""
        self._require_own_gradients("zero_grad")
        self._drop_gradients()
        self._backwards = 0

    # -- what happened

    @property
    def optimizer(self) -> Any:
        """The optimizer; its `param_groups` hold this rank's shards."""
        return self._shard.optimizer if self._shard is not None else None

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: false between boundaries and after an overflow."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The global L2 norm of the last boundary's gradients, unscaled, before clipping; inf after an overflow.

        None before the first boundary, and with `compute_grad_norm` off.
        """
        return self._norm

    def get_lr(self) -> list[float]:
        """Learning rate of each param group."""
        return [float(group["lr"]) for group in self._require_optimizer("get_lr").optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.settings.accumulation * self.collectives.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and forward."""
        return self.settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.settings.accumulation

    def model_state_nbytes(self) -> dict[str, int]:
        """Bytes this rank holds now: "params", "gradients" and "optimizer" (masters and states).

        Counts allocated storage: a sharded unit counts its shard, a whole one its full buffer as well.
        """
        params = 0
        for buffer in (buffer for unit in self.units for buffer in unit.buffers):
            params += buffer.full.untyped_storage().nbytes()
            away = buffer.resident or buffer.home is not None
            kept = (buffer.packed, buffer.second, None if away else buffer.shard)
            params += sum(tensor.nbytes for tensor in kept if tensor is not None)
        return {
            "params": params,
            "gradients": self._reducer.nbytes(),
            "optimizer": self._shard.nbytes() if self._shard is not None else 0,
        }

    def change_masters(self, call: Callable[[], object]) -> None:
        """Has a method of the optimizer that is no step, such as `eval` of a schedule-free one, change the weights.

        (all ranks, between a step and the next forward)

        Args:
            call: sees a part of this rank's masters at a time in the param groups, as `step` does.
        """
        weights = self._require_weights("change_masters")
        self._check_usable()
        self.keeper.require_free("a change of weights by the optimizer")
        self._note("step")
        self._residency.end_step()
        for unit in self.units:
            unit.drop_second()
        weights.change_masters(call)

    # -- whole parameters

    def gathered(self, budget: int | None = None) -> AbstractContextManager[None]:
        """Keeps parameters whole for generation or evaluation. (all ranks)

        Inside, ranks may do different numbers of forwards: one that leaves the block helps the others until all have
        left it. No training inside.

        Args:
            budget: bytes of whole parameters to keep, in the order of the model; what does not fit is gathered for
                each forward. None keeps all.

        Raises:
            UsageError: `budget` is not a number of bytes, or not the same on all ranks; or there is one already.
        """
        self.finish_update()
        return gathered(self.keeper, self._residency, budget)

    def iter_named_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole values in the dtype of the engine), one unit at a time whole. (all ranks, to the end)

        A tensor is only lent until the next one: copy it to keep it. Tied parameters come once.
        """
        self.finish_update()
        return iter_named_full_params(self.keeper)

    # -- lifecycle

    def reset(self) -> None:
        """After an exception in the middle of a step: all units sharded, no gradients, ready for the next forward."""
        if self._weights is not None:
            self._weights.forget()
        self._hooks.forget()
        self._in_backward = self._direct = False
        self._residency.reset()
        self._reducer.forget()
        self._drop_gradients()
        self._backwards = 0

    def at_destroy(self, undo: Callable[[], None]) -> None:
        """Has `undo` called when the engine goes: whoever patches something for an engine takes it back."""
        self._undo.append(undo)

    def destroy(self) -> None:
        """Takes the engine off the model: hooks removed, weights whole and in storage of their own. (all ranks)"""
        if self._destroyed:
            return
        self.keeper.require_free("engine.destroy()")
        if self._weights is not None:
            self._weights.close()
        self.reset()
        for unit in self.units:
            if unit.state is not ShardState.UNSHARDED:
                unit.unshard()
                unit.wait()
            for buffer in unit.buffers:
                buffer.give_back()
        self.keeper.close()
        while self._undo:
            self._undo.pop()()
        self._hooks.detach()
        self._loading.detach()
        self._report.close()
        if self._tiers is not None:
            self._tiers.close()
        self._destroyed = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def __reduce__(self) -> Any:
        raise EngineStateError(
            "an engine cannot be copied or pickled: it is in touch with the other ranks",
            fix="save a checkpoint; or copy engine.module, inside engine.gathered() where it is sharded",
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state dict; while parameters are sharded this raises instead of returning NaNs."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own: every rank gives the same values, and they reach shards and masters too. (all ranks)"""
        return self.module.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Engine:
        self._faces.check_conversion(fn, self.module)
        return self  # nothing would change


def _offload_report(tiers: TierSet, optimizer: ShardedOptimizer | None) -> OffloadReport:
    def update_times() -> tuple[float, float, float]:
        if optimizer is None:
            return 0.0, 0.0, 0.0
        return optimizer.update_seconds, optimizer.waited_seconds, optimizer.hidden_seconds

    states = tiers.states
    overlaps_io = states is not None and states.pipeline_read and states.pipeline_write
    return OffloadReport(tiers.tiers, update_times, overlaps_io=overlaps_io)
