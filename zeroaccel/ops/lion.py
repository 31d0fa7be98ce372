"""Lion: every element moves by the sign of an interpolated momentum.

The formula is that of `updates.lion`; how a step runs is `shard_step`'s matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroaccel.ops import updates
from zeroaccel.ops.shard_step import Hyperparameters, ShardOptimizer, require, require_unit_interval

__all__ = ["CPULion", "Lion"]


class Lion(ShardOptimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2); weight decay is decoupled.

    ``state[param] = {"step": int, "exp_avg": Tensor}``, shaped like the parameter; float32, or as `moments_dtype` says.

    Args:
        params: float32 by the time they are stepped; parameters or groups, as for any torch optimizer.
        lr: learning rate, at least 0: the size of every element's step.
        betas: weights of the momentum in the sign and in the momentum's own update, in [0, 1).
        weight_decay: at least 0; the weights shrink by lr * weight_decay.
        moments_dtype: "fp32" (4 bytes per parameter) or "bf16" (2), rounded at random; see the notes in `updates`.

    Raises:
        UsageError: for a hyperparameter out of its range.
    """

    kernel = staticmethod(updates.lion)
    moments: ClassVar[Mapping[str, bool]] = {"exp_avg": True}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        moments_dtype: str = "fp32",
    ) -> None:
        require(lr >= 0, "Lion, lr", "a number of at least 0", lr)
        require_unit_interval("Lion, betas", betas)
        require(weight_decay >= 0, "Lion, weight_decay", "a number of at least 0", weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}, moments_dtype)

    def _advance(self, group: Hyperparameters, param: Tensor) -> tuple[list[Tensor | None], list[float | np.uint32]]:
        self._make_moments(param)
        state = self.state[param]
        state["step"] = step = int(state.get("step", 0)) + 1  # the formula has no use for it; the rounding has
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        decay = 1 - lr * float(group["weight_decay"])
        return self._moments_of(param), [self._key(step), decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr]

    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        (m,) = buffers
        decay, beta1, weight1, beta2, weight2, negative_lr = coefficients
        c = (m * beta1).add_(d * weight1)
        direction = torch.where(
            c.abs() > 0, c.sign(), c
        )  # zero stays itself, and so does NaN, whose sign torch has as 0
        x.mul_(decay).add_(direction.mul_(negative_lr))
        m.mul_(beta2).add_(d.mul_(weight2))


CPULion = Lion
"""DeepSpeed's scripts know the class by what it is there; here it serves every device."""
