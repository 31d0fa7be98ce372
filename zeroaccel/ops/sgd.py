"""SGD, with momentum or without.

The formula is that of `updates.sgd`; how a step runs is `shard_step`'s matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroaccel.ops import updates
from zeroaccel.ops.shard_step import Hyperparameters, ShardOptimizer, require

__all__ = ["CPUSGD", "SGD"]


class SGD(ShardOptimizer):
    """Stochastic gradient descent, with the arguments of torch.optim.SGD (momentum after Sutskever et al. 2013).

    ``state[param] = {"momentum_buffer": Tensor}``, float32 and shaped like the parameter; empty without momentum.

    Args:
        params: float32 by the time they are stepped; parameters or groups, as for any torch optimizer.
        lr: learning rate, at least 0.
        momentum: at least 0.
        dampening: the gradient joins the momentum times 1 - dampening, except at a parameter's first step.
        weight_decay: at least 0; weight_decay * weights joins the gradient (L2).
        nesterov: step along gradient + momentum * buffer; needs momentum and no dampening.

    Raises:
        UsageError: for a hyperparameter out of its range.
    """

    kernel = staticmethod(updates.sgd)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            require(value >= 0, f"SGD, {name}", "a number of at least 0", value)
        require(
            not nesterov or (momentum > 0 and dampening == 0),
            "SGD, nesterov",
            "momentum above 0 and dampening 0",
            {"momentum": momentum, "dampening": dampening},
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    def _advance(self, group: Hyperparameters, param: Tensor) -> tuple[list[Tensor | None], list[float | np.uint32]]:
        momentum, weight, buffer = float(group["momentum"]), 1.0, None
        if momentum:
            state = self.state[param]
            buffer = state.get("momentum_buffer")
            if buffer is None:  # torch's own SGD may have saved None
                buffer = state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
            else:
                weight = 1 - group["dampening"]
        direction = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
        return [buffer], [float(group["weight_decay"]), momentum, weight, *direction, -float(group["lr"])]

    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        l2, momentum, weight, grad_weight, buffer_weight, negative_lr = coefficients
        d += x * l2
        for b in buffers:  # one or none
            b.mul_(momentum).add_(d * weight)
            d.mul_(grad_weight).add_(b * buffer_weight)
        x += d.mul_(negative_lr)


CPUSGD = SGD
"""The same class, under the pattern of its siblings' names."""
