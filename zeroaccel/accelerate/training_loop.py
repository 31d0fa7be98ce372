"""What a training loop calls between two batches: accumulation, backward over several engines, clipping.

Part of an `Accelerator`. The loop is plain PyTorch: `backward` leaves gradients, `optimizer.step()` updates where an
accumulation ends, and everything between the two sees the reduced gradients of that update.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.accelerate.accelerator_state import AcceleratorState
from zeroaccel.accelerate.prepared_optimizer import GradientState
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.logs import log_once
from zeroaccel.zero.engine_base import EngineBase
from zeroaccel.zero.grad_norm import clip_factor


class TrainingLoop:
    """Drives the engines of `state.prepared`; the methods are documented at `Accelerator`.

    Attributes:
        step: micro-steps that `accumulate` has counted since the last end of a loader.
    """

    def __init__(self, state: AcceleratorState, gradient_state: GradientState) -> None:
        self._state = state
        self._gradients = gradient_state
        self.step = 0

    # -- accumulation

    def begin_micro_step(self, models: Iterable[nn.Module]) -> None:
        """Counts a micro-step and decides whether it ends the accumulation."""
        for model in models:
            self._engine_of(model, "accumulate")
        gradients = self._gradients
        if gradients.sync_with_dataloader and gradients.end_of_dataloader:
            self.step, gradients.sync_gradients = 0, True
        else:
            self.step += 1
            gradients.sync_gradients = self.step % gradients.num_steps == 0

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        engine = self._engine_of(model, "no_sync")
        # Stages 2 and 3 have no room for unreduced gradients: they reduce every micro-step and accumulate shards.
        with contextlib.nullcontext() if engine.settings.plan.grads else engine.no_sync():
            yield

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        self._engine_of(model, "trigger_sync_in_backward")
        before, self._gradients.sync_gradients = self._gradients.sync_gradients, True
        try:
            yield
        finally:
            self._gradients.sync_gradients = before

    # -- backward

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        retain_graph = bool(kwargs.pop("retain_graph", False))
        if kwargs:
            raise UsageError(f"accelerator.backward({next(iter(kwargs))}=...)", expected="retain_graph or nothing")
        engines = self._trained()
        if not engines:
            count = len(self._state.prepared)
            raise EngineStateError(
                "accelerator.backward(loss)",
                expected="a model prepared with its optimizer",
                got=f"{count} models prepared, none with one" if count else "nothing prepared",
                fix="call model, optimizer = accelerator.prepare(model, optimizer) first",
            )
        gradients = self._gradients
        for engine in engines:
            engine.decide_boundary(gradients.sync_gradients or gradients.sync_each_batch)
        # Walking the graph costs time, so it is done only where the loss may depend on some of several models.
        reached = engines if len(engines) == 1 else _reached(loss, engines)
        divided = loss / gradients.num_steps if gradients.num_steps > 1 else loss
        # One backward through the whole graph: the hooks of the other engines see their gradients arrive.
        reached[0].backward(divided, retain_graph=retain_graph, scale_wrt_gas=False)
        if not gradients.sync_gradients:
            for engine in reached:
                engine.count_micro_step()

    # -- gradients

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float
    ) -> Tensor | None:
        if float(norm_type) != 2.0:
            raise UsageError("clip_grad_norm_: norm_type", expected="2, the L2 norm", got=norm_type)
        if not max_norm >= 0:
            raise UsageError("clip_grad_norm_: max_norm", expected="a number of at least 0", got=max_norm)
        engines = self._engines_with(parameters, "clip_grad_norm_")
        if not self._gradients.sync_gradients:
            return None
        norms = [engine.gradient_norm() for engine in engines]
        norm = norms[0] if len(norms) == 1 else math.sqrt(sum(each * each for each in norms))
        for engine in engines:
            configured = engine.settings.clipping
            if configured > 0 and configured != max_norm:
                log_once(
                    logging.WARNING,
                    f"gradients are clipped to {min(configured, max_norm)}: gradient_clipping is {configured} in the "
                    f"config, and clip_grad_norm_ asks for {max_norm}; give one of the two",
                )
            # A norm that is not finite makes the engine skip the step, so there is nothing to scale.
            if math.isfinite(norm):
                engine.scale_gradients(clip_factor(norm, max_norm) if max_norm > 0 else 0.0)
        return torch.tensor(norm, dtype=torch.float32, device=self._state.partial.device)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        if not clip_value >= 0:
            raise UsageError("clip_grad_value_: clip_value", expected="a number of at least 0", got=clip_value)
        engines = self._engines_with(parameters, "clip_grad_value_")
        if self._gradients.sync_gradients:
            for engine in engines:
                engine.clip_grad_value_(clip_value)

    # -- engines

    def _trained(self) -> list[EngineBase]:
        return [item.engine for item in self._state.prepared if item.optimizer is not None]

    def _engine_of(self, model: nn.Module, call: str) -> EngineBase:
        for item in self._state.prepared:
            if model is item.engine or model is item.engine.module:
                return item.engine
        raise UsageError(
            f"accelerator.{call}({type(model).__name__})",
            expected="a model that this accelerator prepared",
            got=", ".join(type(item.engine.module).__name__ for item in self._state.prepared) or "none",
            fix="pass what prepare() returned",
        )

    def _engines_with(self, parameters: Iterable[Tensor] | Tensor, call: str) -> list[EngineBase]:
        """The engines whose trained parameters these are: all of each, as the norm over a part is never computed."""
        ids = {id(parameters)} if isinstance(parameters, Tensor) else {id(param) for param in parameters}
        engines = []
        for engine in self._trained():
            trained = _trained_params(engine)
            missing = [fqn for fqn, param in trained.items() if id(param) not in ids]
            if len(missing) == len(trained):
                continue
            if missing:
                raise UsageError(
                    f"accelerator.{call}(parameters)",
                    expected=f"all trained parameters of {type(engine.module).__name__}, whose norm is one number",
                    got=f"{len(trained) - len(missing)} of {len(trained)}, without {missing[0]}",
                    fix="pass model.parameters()",
                )
            engines.append(engine)
        if not engines:
            raise UsageError(
                f"accelerator.{call}(parameters)",
                expected="parameters of a model prepared with its optimizer",
                got=f"{len(ids)} others",
                fix="pass model.parameters() of what prepare() returned",
            )
        return engines


def _trained_params(engine: EngineBase) -> dict[str, Tensor]:
    return {
        slot.fqn: param
        for unit in engine.units
        for buffer in unit.buffers
        if buffer.trainable
        for slot, param in zip(buffer.layout.slots, buffer.params, strict=True)
    }


def _reached(loss: Tensor, engines: list[EngineBase]) -> list[EngineBase]:
    """The engines with parameters that the loss depends on, found by walking the autograd graph back from it."""
    engine_of_param = {
        id(param): index for index, engine in enumerate(engines) for param in _trained_params(engine).values()
    }
    indices: set[int] = set()
    visited: set[Any] = set()
    stack: list[Any] = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    while stack and len(indices) < len(engines):
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)  # of AccumulateGrad nodes: the parameter
        if variable is not None and id(variable) in engine_of_param:
            indices.add(engine_of_param[id(variable)])
        stack.extend([parent for parent, _ in node.next_functions])
    if not indices:
        raise UsageError(
            "accelerator.backward(loss)",
            expected="a loss that depends on a trained model",
            got=f"one that depends on none of {', '.join(type(engine.module).__name__ for engine in engines)}",
            fix="compute it with what prepare() returned, and without torch.no_grad()",
        )
    reached = [engines[index] for index in sorted(indices)]
    if len(reached) > 1 and any(engine.settings.loss_scaled for engine in reached):
        raise UsageError(
            "accelerator.backward(loss) under fp16",
            expected="a loss that depends on one trained model, as each has a loss scale of its own",
            got=", ".join(type(engine.module).__name__ for engine in reached),
            fix='freeze the others for this loss with requires_grad_(False), or use mixed_precision="bf16"',
        )
    return reached
