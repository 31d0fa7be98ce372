"""The calls of a training loop for one batch: accumulation, backward over several engines, clipping.

Part of an `Accelerator`. The loop is plain PyTorch: `backward` accumulates gradients, `optimizer.step()` updates the
weights at the end of an accumulation, and code between the two sees the reduced gradients of that update.
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
from zeroaccel.engine import EngineBase
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.logs import log_once
from zeroaccel.zero.grad_norm import clip_factor


class TrainingLoop:
    """The calls of a training loop, which run the engines of `state.prepared`; a base class of `Accelerator`.

    Attributes:
        state: holds every prepared model.
        gradient_state: position within an accumulation.
        step: number of micro-steps that `accumulate` has counted since a loader last ended.
    """

    state: AcceleratorState
    gradient_state: GradientState
    step: int

    # -- accumulation

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-step ends with an optimizer step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = bool(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-steps per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if type(value) is not int or value < 1:
            raise UsageError("gradient_accumulation_steps", expected="a whole number of at least 1", got=value)
        self.gradient_state.num_steps = value

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Runs one micro-step. Every `gradient_accumulation_steps`-th one and the last of a loader end with an update.

        In the other micro-steps, `optimizer.step`, `zero_grad` and `scheduler.step` do nothing, so the loop is the
        same as without accumulation.

        Args:
            models: prepared models that are trained in the block.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator(gradient_accumulation_steps=2)
            >>> model = torch.nn.Linear(4, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> for batch in torch.randn(4, 8, 4):  # four micro-steps, two updates
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(model(batch).mean())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        for model in models:
            self._engine_of(model, "accumulate")
        gradients = self.gradient_state
        if gradients.sync_with_dataloader and gradients.end_of_dataloader:
            self.step, gradients.sync_gradients = 0, True
        else:
            self.step += 1
            gradients.sync_gradients = self.step % gradients.num_steps == 0
        yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulates gradients without communication in the backward passes inside, at stages 0 and 1.

        At stages 2 and 3 every backward reduces gradients, because a rank has no room for unreduced ones. The result
        is the same.
        """
        engine = self._engine_of(model, "no_sync")
        # Stages 2 and 3 have no room for unreduced gradients: they reduce every micro-step and accumulate shards.
        with contextlib.nullcontext() if engine.settings.plan.grads else engine.no_sync():
            yield

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduces gradients in the backward inside, as in the last micro-step, within a continuing accumulation."""
        self._engine_of(model, "trigger_sync_in_backward")
        before, self.gradient_state.sync_gradients = self.gradient_state.sync_gradients, True
        try:
            yield
        finally:
            self.gradient_state.sync_gradients = before

    # -- backward and gradients

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Computes gradients of `loss / gradient_accumulation_steps` for every prepared model that the loss depends on.

        Args:
            loss: scalar tensor, the mean over this rank's micro-batch.
            kwargs: only `retain_graph`.

        Raises:
            EngineStateError: no model was prepared for training.
            UsageError: the loss is not a scalar with a gradient, depends on no prepared model, or depends on several
                under fp16; or another keyword was passed.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(4, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> accelerator.backward(model(torch.randn(8, 4)).square().mean())
            >>> optimizer.step()
        """
        retain_graph = bool(kwargs.pop("retain_graph", False))
        if kwargs:
            raise UsageError(f"accelerator.backward({next(iter(kwargs))}=...)", expected="no keyword but retain_graph")
        engines = self._trained()
        if not engines:
            count = len(self.state.prepared)
            raise EngineStateError(
                "accelerator.backward(loss)",
                expected="a model prepared with its optimizer",
                got=f"{count} models without an optimizer" if count else "nothing prepared",
                fix="call model, optimizer = accelerator.prepare(model, optimizer) first",
            )
        gradients = self.gradient_state
        for engine in engines:
            engine.decide_boundary(gradients.sync_gradients or gradients.sync_each_batch)
        # Walking the graph costs time; it is needed only if there are several models.
        reached = engines if len(engines) == 1 else _reached(loss, engines)
        divided = loss / gradients.num_steps if gradients.num_steps > 1 else loss
        # One backward runs through the whole graph: the other engines receive their gradients by their hooks.
        reached[0].backward(divided, retain_graph=retain_graph, scale_wrt_gas=False)
        if not gradients.sync_gradients:
            for engine in reached:
                engine.count_micro_step()

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clips the gradients of the coming update to a global L2 norm of `max_norm`.

        The norm is computed over all given models together. Within an accumulation the gradients are incomplete, and
        the call does nothing. If the config clips too, the smaller limit applies.

        Args:
            parameters: all trained parameters of one or more prepared models.

        Returns:
            The norm before clipping, over all ranks, as a 0-dim fp32 tensor; None within an accumulation.

        Raises:
            UsageError: `parameters` has only a part of a model's parameters or no parameter of a prepared model, or
                `norm_type` is not 2.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(4, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> accelerator.backward(model(torch.full((2, 4), 3.0)).mean())
            >>> norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            >>> round(norm.item(), 3)  # before clipping
            6.083
            >>> optimizer.step()
        """
        if float(norm_type) != 2.0:
            raise UsageError("clip_grad_norm_: norm_type", expected="2, the L2 norm", got=norm_type)
        if not max_norm >= 0:
            raise UsageError("clip_grad_norm_: max_norm", expected="a number of at least 0", got=max_norm)
        engines = self._engines_with(parameters, "clip_grad_norm_")
        if not self.gradient_state.sync_gradients:
            return None
        norms = [engine.gradient_norm() for engine in engines]
        norm = norms[0] if len(norms) == 1 else math.sqrt(sum(each * each for each in norms))
        for engine in engines:
            configured = engine.settings.clipping
            if configured > 0 and configured != max_norm:
                log_once(
                    logging.WARNING,
                    f"gradients are clipped to {min(configured, max_norm)}: gradient_clipping is {configured} in the "
                    f"config, and clip_grad_norm_ was called with {max_norm}; set only one of the two",
                )
            # The engine skips a step whose norm is not finite, so its gradients need no scaling.
            if math.isfinite(norm):
                engine.scale_gradients(clip_factor(norm, max_norm) if max_norm > 0 else 0.0)
        return torch.tensor(norm, dtype=torch.float32, device=self.state.partial.device)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamps every element of the coming update's gradients to [-clip_value, clip_value].

        Raises:
            UsageError: `parameters` has only a part of a model's parameters, or no parameter of a prepared model.
        """
        if not clip_value >= 0:
            raise UsageError("clip_grad_value_: clip_value", expected="a number of at least 0", got=clip_value)
        engines = self._engines_with(parameters, "clip_grad_value_")
        if self.gradient_state.sync_gradients:
            for engine in engines:
                engine.clip_grad_value_(clip_value)

    # -- engines

    def _trained(self) -> list[EngineBase]:
        return [item.engine for item in self.state.prepared if item.optimizer is not None]

    def _engine_of(self, model: nn.Module, call: str) -> EngineBase:
        for item in self.state.prepared:
            if model is item.engine or model is item.engine.module:
                return item.engine
        raise UsageError(
            f"accelerator.{call}({type(model).__name__})",
            expected="a model that this accelerator prepared",
            got=", ".join(type(item.engine.module).__name__ for item in self.state.prepared) or "none",
            fix="pass the model that prepare() returned",
        )

    def _engines_with(self, parameters: Iterable[Tensor] | Tensor, call: str) -> list[EngineBase]:
        """Returns the engines that train `parameters`; raises if some parameters of an engine are missing."""
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
                    expected=f"all trained parameters of {type(engine.module).__name__}, which have one common norm",
                    got=f"{len(trained) - len(missing)} of {len(trained)}, without {missing[0]}",
                    fix="pass model.parameters()",
                )
            engines.append(engine)
        if not engines:
            raise UsageError(
                f"accelerator.{call}(parameters)",
                expected="parameters of a model prepared with its optimizer",
                got=f"{len(ids)} others",
                fix="pass model.parameters() of the model that prepare() returned",
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
    """Returns the engines whose parameters the loss depends on, by walking its autograd graph."""
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
        variable = getattr(node, "variable", None)  # the parameter of an AccumulateGrad node
        if variable is not None and id(variable) in engine_of_param:
            indices.add(engine_of_param[id(variable)])
        stack.extend([parent for parent, _ in node.next_functions])
    if not indices:
        raise UsageError(
            "accelerator.backward(loss)",
            expected="a loss that depends on a trained model",
            got=f"a loss without a path to {', '.join(type(engine.module).__name__ for engine in engines)}",
            fix="compute it with the model that prepare() returned, and without torch.no_grad()",
        )
    reached = [engines[index] for index in sorted(indices)]
    if len(reached) > 1 and any(engine.settings.loss_scaled for engine in reached):
        raise UsageError(
            "accelerator.backward(loss) under fp16",
            expected="a loss that depends on one trained model, because each model has its own loss scale",
            got=", ".join(type(engine.module).__name__ for engine in reached),
            fix='freeze the others for this loss with requires_grad_(False), or use mixed_precision="bf16"',
        )
    return reached
