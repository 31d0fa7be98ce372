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
    """The calls of a training loop, which drive the engines of `state.prepared`; a base of `Accelerator`.

    Attributes:
        state: has every prepared model.
        gradient_state: position within an accumulation.
        step: micro-steps that `accumulate` has counted since the last end of a loader.
    """

    state: AcceleratorState
    gradient_state: GradientState
    step: int

    # -- accumulation

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends with an optimizer step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = bool(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if type(value) is not int or value < 1:
            raise UsageError("gradient_accumulation_steps", expected="a whole number of at least 1", got=value)
        self.gradient_state.num_steps = value

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-step. The last of `gradient_accumulation_steps`, and the last of a loader, end with an update.

        In the other micro-steps, `optimizer.step`, `zero_grad` and `scheduler.step` do nothing, so the loop is the
        same as without accumulation.

        Args:
            models: prepared models that the block trains.

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
        """Backwards inside accumulate without communication at stages 0 and 1.

        At stages 2 and 3 every backward reduces gradients, because a rank has no room for unreduced ones. The result
        is the same.
        """
        engine = self._engine_of(model, "no_sync")
        # Stages 2 and 3 have no room for unreduced gradients: they reduce every micro-step and accumulate shards.
        with contextlib.nullcontext() if engine.settings.plan.grads else engine.no_sync():
            yield

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """The backward inside reduces gradients as the last of its step, although an accumulation goes on."""
        self._engine_of(model, "trigger_sync_in_backward")
        before, self.gradient_state.sync_gradients = self.gradient_state.sync_gradients, True
        try:
            yield
        finally:
            self.gradient_state.sync_gradients = before

    # -- backward and gradients

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Computes gradients of `loss / gradient_accumulation_steps`, for every prepared model it depends on.

        Args:
            loss: a scalar; the mean over this rank's micro-batch.
            kwargs: `retain_graph`.

        Raises:
            EngineStateError: no model was prepared for training.
            UsageError: the loss is not a scalar with a gradient, depends on no prepared model, or under fp16 on
                several; or there is another keyword.

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
            raise UsageError(f"accelerator.backward({next(iter(kwargs))}=...)", expected="retain_graph or nothing")
        engines = self._trained()
        if not engines:
            count = len(self.state.prepared)
            raise EngineStateError(
                "accelerator.backward(loss)",
                expected="a model prepared with its optimizer",
                got=f"{count} models prepared, none with one" if count else "nothing prepared",
                fix="call model, optimizer = accelerator.prepare(model, optimizer) first",
            )
        gradients = self.gradient_state
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

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clips the gradients of the coming update to a global L2 norm of `max_norm`.

        The norm is taken over all given models together. Within an accumulation gradients are incomplete, so nothing
        happens. Where the config clips too, the smaller of the two norms counts.

        Args:
            parameters: those of one or more prepared models; all that are trained of each.

        Returns:
            The norm before clipping, over all ranks, a 0-dim fp32 tensor; None within an accumulation.

        Raises:
            UsageError: only a part of a model's parameters, parameters of no prepared model, or another norm.

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
                    f"config, and clip_grad_norm_ asks for {max_norm}; give one of the two",
                )
            # A norm that is not finite makes the engine skip the step, so there is nothing to scale.
            if math.isfinite(norm):
                engine.scale_gradients(clip_factor(norm, max_norm) if max_norm > 0 else 0.0)
        return torch.tensor(norm, dtype=torch.float32, device=self.state.partial.device)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamps every element of the coming update's gradients to [-clip_value, clip_value].

        Raises:
            UsageError: only a part of a model's parameters, or parameters of no prepared model.
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
