"""`Engine`: the calls of a training loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeroaccel.zero.engine_base import EngineBase


class Engine(EngineBase):
    """Trains (or runs) one model; `zeroaccel.initialize` builds it.

    Call `loss = engine(batch)`, `engine.backward(loss)` and `engine.step()` once per micro-batch. `EngineBase` has the
    attributes and the calls outside the loop.

    Example:
        >>> import torch, zeroaccel
        >>> model = torch.nn.Linear(4, 2)
        >>> config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        >>> engine, optimizer, _, _ = zeroaccel.initialize(model=model, config=config)
        >>> loss = engine(torch.ones(8, 4)).square().mean()
        >>> _ = engine.backward(loss)
        >>> engine.step()
        >>> engine.global_steps, engine.was_step_applied()
        (1, True)
        >>> engine.destroy()
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward; the engine gathers sharded parameters as their modules run."""
        return self.run_forward(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Computes the gradients of this micro-batch; reduces them at the boundary, or always if they are sharded.

        Args:
            loss: a scalar that depends on this engine's forward; the mean over the rank's micro-batch.
            scale_wrt_gas: divide by the accumulation steps, so that a step averages over its micro-batches.

        Returns:
            `loss`, unchanged.

        Raises:
            UsageError: `loss` is not a scalar with a gradient.
            EngineStateError: the engine has no optimizer.
        """
        self._check_loss(loss)
        self._require_optimizer("backward")
        # Loss scale and mean over micro-batches in one factor: it multiplies one scalar instead of all gradients.
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
        """Unscales, clips, updates, gathers and steps the scheduler at the boundary; elsewhere only counts.

        Raises:
            EngineStateError: there was no backward before this call.
            CollectiveError: the ranks issued different collectives since the last step.
            UsageError: the ranks' param groups differ; no weight has changed, and the engine drops the gradients.
            CheckpointError: a save in the background failed; on every rank.
        """
        self.run_step()
