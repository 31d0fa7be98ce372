"""The half of `Accelerator` that a training loop calls: backward, accumulation, clipping.

A mixin over what is prepared. The loop is plain PyTorch: `backward` leaves gradients, `optimizer.step()` updates where
an accumulation ends, and everything between the two sees the gradients of that update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.accelerate.accelerator_state import AcceleratorState, GradientState
from zeroaccel.accelerate.preparation import Prepared
from zeroaccel.errors import ConfigError, EngineStateError, UsageError
from zeroaccel.logs import log_once
from zeroaccel.zero.engine import Engine
from zeroaccel.zero.grad_reducer import clip_factor

__all__ = ["TrainingLoop"]

_AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


class TrainingLoop:
    """Mixed into `Accelerator`, which sets the attributes.

    Attributes:
        state, gradient_state: of the accelerator.
        prepared: every model that went through `prepare`, in order.
        step: micro-steps that `accumulate` has counted since the last update.
    """

    state: AcceleratorState
    gradient_state: GradientState
    prepared: list[Prepared]
    step: int

    # -- accumulation

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-step under way ends with an update."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = bool(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per update."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if type(value) is not int or value < 1:
            raise UsageError("gradient_accumulation_steps", expected="a whole number of at least 1", got=value)
        self.gradient_state.num_steps = value

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-step. The last of `gradient_accumulation_steps`, and the last of a loader, update.

        Args:
            models: what is trained in it; they only have to be prepared.
        """
        for model in models:
            self._engine_of(model, "accumulate")
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step, state.sync_gradients = 0, True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backwards inside only add up, without traffic where gradients are whole (stages 0 and 1).

        Where they are sharded they are reduced as always: a rank has no room for the sum. The result is the same.
        """
        engine = self._engine_of(model, "no_sync")
        with contextlib.nullcontext() if engine.settings.plan.grads else engine.no_sync():
            yield

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """The backward inside counts as the last of its step, although an accumulation goes on."""
        self._engine_of(model, "trigger_sync_in_backward")
        before, self.gradient_state.sync_gradients = self.gradient_state.sync_gradients, True
        try:
            yield
        finally:
            self.gradient_state.sync_gradients = before

    # -- backward

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Computes gradients of `loss / gradient_accumulation_steps`, for every prepared model it depends on.

        Args:
            loss: a scalar; the mean over this process's micro-batch.
            kwargs: `retain_graph`.

        Raises:
            EngineStateError: nothing was prepared to be trained.
            UsageError: the loss is no scalar with a gradient, depends on none of the prepared models, or under fp16 on
                several; or there is another keyword.
        """
        retain_graph = bool(kwargs.pop("retain_graph", False))
        if kwargs:
            raise UsageError(f"accelerator.backward({next(iter(kwargs))}=...)", expected="retain_graph or nothing")
        trained = [item.engine for item in self.prepared if item.optimizer is not None]
        if not trained:
            raise EngineStateError(
                "accelerator.backward(loss)",
                expected="a model prepared with its optimizer",
                got=f"{len(self.prepared)} models prepared, none with one" if self.prepared else "nothing prepared",
                fix="call model, optimizer = accelerator.prepare(model, optimizer) first",
            )
        for engine in trained:
            engine.set_gradient_accumulation_boundary(self.sync_gradients or self.gradient_state.sync_each_batch)
        reached = trained if len(trained) == 1 else _reached(loss, trained)
        divided = loss / self.gradient_accumulation_steps if self.gradient_accumulation_steps > 1 else loss
        # The others that it reaches take note of their gradients by themselves.
        reached[0].backward(divided, retain_graph=retain_graph, scale_wrt_gas=False)
        if not self.sync_gradients:
            for engine in reached:
                engine.count_micro_step()

    # -- gradients

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clips the gradients of the coming update to a global L2 norm of `max_norm`.

        Over parameters of several models, the norm is that of all of them together. Within an accumulation there are
        no complete gradients: nothing happens. Where the config clips too, the smaller of the two norms counts.

        Args:
            parameters: those of one or more prepared models; all that are trained of each.

        Returns:
            The norm before clipping, over all ranks, a 0-dim fp32 tensor; None within an accumulation.

        Raises:
            UsageError: only a part of a model's parameters, parameters of no prepared model, or another norm.
        """
        if float(norm_type) != 2.0:
            raise UsageError("clip_grad_norm_: norm_type", expected="2, the L2 norm", got=norm_type)
        if not max_norm >= 0:
            raise UsageError("clip_grad_norm_: max_norm", expected="a number of at least 0", got=max_norm)
        engines = self._engines_holding(parameters, "clip_grad_norm_")
        if not self.sync_gradients:
            return None
        norms = [engine.gradient_norm() for engine in engines]
        norm = norms[0] if len(norms) == 1 else math.sqrt(sum(part * part for part in norms))
        for engine in engines:
            configured = engine.settings.clipping
            if configured > 0 and configured != max_norm:
                log_once(
                    30,
                    f"gradients are clipped to {min(configured, max_norm)}: gradient_clipping is {configured} in the "
                    f"config, and clip_grad_norm_ asks for {max_norm}; give one of the two",
                )
            if math.isfinite(norm):
                engine.scale_gradients(clip_factor(norm, max_norm) if max_norm > 0 else 0.0)
        return torch.tensor(norm, dtype=torch.float32, device=self.state.partial.device)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cuts every element of the coming update's gradients to [-clip_value, clip_value].

        Raises:
            UsageError: only a part of a model's parameters, or parameters of no prepared model.
        """
        if not clip_value >= 0:
            raise UsageError("clip_grad_value_: clip_value", expected="a number of at least 0", got=clip_value)
        engines = self._engines_holding(parameters, "clip_grad_value_")
        if self.sync_gradients:
            for engine in engines:
                engine.clip_grad_value_(clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Does nothing: the engine unscales as it updates, and norms are given unscaled."""

    @property
    def scaler(self) -> None:
        """None: the loss scale is the engine's (`engine.loss_scale`)."""
        return None

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last update was left out because gradients were not finite."""
        return any(item.optimizer.step_was_skipped for item in self.prepared if item.optimizer is not None)

    # -- around forward

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Mixed precision for computations outside the model; the model itself runs in its precision anyway.

        Args:
            autocast_handler: an object whose `enabled` says whether to, and `cache_enabled` whether weights that were
                cast are kept, as accelerate's AutocastKwargs.
        """
        dtype = _AUTOCAST.get(self.state.mixed_precision)
        enabled = dtype is not None and bool(getattr(autocast_handler, "enabled", True))
        device = self.state.partial.device.type
        cached = getattr(autocast_handler, "cache_enabled", None)
        with torch.autocast(device, dtype=dtype, cache_enabled=cached) if enabled else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Changes nothing: every process must do as many steps as the others, which loaders see to.

        Raises:
            UsageError: `even_batches` is False: processes with fewer batches would leave the others waiting.
        """
        if even_batches is False:
            raise UsageError(
                "join_uneven_inputs(even_batches)",
                expected="True: all processes gather and reduce the parts of a model together, in every step",
                got=False,
                fix="leave it out; loaders repeat samples at the end, which gather_for_metrics leaves out",
            )
        yield

    # -- which engine

    def _engine_of(self, model: nn.Module, call: str) -> Engine:
        for item in self.prepared:
            if model is item.engine or model is item.engine.module:
                return item.engine
        raise UsageError(
            f"accelerator.{call}({type(model).__name__})",
            expected="a model that this accelerator prepared",
            got=", ".join(type(item.engine.module).__name__ for item in self.prepared) or "none",
            fix="pass what prepare() returned",
        )

    def _engines_holding(self, parameters: Iterable[Tensor] | Tensor, call: str) -> list[Engine]:
        held = {id(parameters)} if isinstance(parameters, Tensor) else {id(param) for param in parameters}
        found = []
        for item in self.prepared:
            if item.optimizer is None:
                continue
            trained = {
                slot.fqn: p
                for unit in item.engine.units
                for b in unit.buffers
                if b.trainable
                for slot, p in zip(b.layout.slots, b.params, strict=True)
            }
            missing = [fqn for fqn, param in trained.items() if id(param) not in held]
            if len(missing) == len(trained):
                continue
            if missing:
                raise UsageError(
                    f"accelerator.{call}(parameters)",
                    expected=f"all trained parameters of {type(item.engine.module).__name__}, whose norm is one number",
                    got=f"{len(trained) - len(missing)} of {len(trained)}, without {missing[0]}",
                    fix="pass model.parameters()",
                )
            found.append(item.engine)
        if not found:
            raise UsageError(
                f"accelerator.{call}(parameters)",
                expected="parameters of a model prepared with its optimizer",
                got=f"{len(held)} others",
                fix="pass model.parameters() of what prepare() returned",
            )
        return found

    def _accumulate_as(self, item: Prepared) -> None:
        """Takes over how many micro-steps the config says; all trained models must agree."""
        steps = item.engine.gradient_accumulation_steps()
        others = [other for other in self.prepared if other.optimizer is not None and other is not item]
        if others and steps != self.gradient_accumulation_steps:
            first = others[0]
            raise ConfigError(
                f"gradient_accumulation_steps: {steps} from {_source(item)}, but {self.gradient_accumulation_steps} "
                f"from {_source(first)}",
                fix="give all models of one accelerator the same, or use an accelerator for each",
            )
        self.gradient_state.num_steps = steps


def _source(item: Prepared) -> str:
    return item.config.resolved_sources.get("gradient_accumulation_steps", item.plugin.title)


def _reached(loss: Tensor, engines: list[Engine]) -> list[Engine]:
    """The engines that the loss's gradient flows into."""
    home = {
        id(param): index
        for index, engine in enumerate(engines)
        for unit in engine.units
        for buffer in unit.buffers
        if buffer.trainable
        for param in buffer.params
    }
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    while waiting and len(found) < len(engines):
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in home:
            found.add(home[id(variable)])
        waiting.extend([following for following, _ in node.next_functions])
    if not found:
        raise UsageError(
            "accelerator.backward(loss)",
            expected="a loss that depends on a trained model",
            got=f"one that depends on none of {', '.join(type(engine.module).__name__ for engine in engines)}",
            fix="compute it with what prepare() returned, and without torch.no_grad()",
        )
    reached = [engines[index] for index in sorted(found)]
    if len(reached) > 1 and any(engine.settings.loss_scaled for engine in reached):
        raise UsageError(
            "accelerator.backward(loss) under fp16",
            expected="a loss that depends on one trained model, as each has a loss scale of its own",
            got=", ".join(type(engine.module).__name__ for engine in reached),
            fix='freeze the others for this loss with requires_grad_(False), or use mixed_precision="bf16"',
        )
    return reached
