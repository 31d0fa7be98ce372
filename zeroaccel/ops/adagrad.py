"""Adagrad: a step per element that shrinks with its squared gradients.

The formula is that of `updates.adagrad`; how a step runs is `shard_step`'s matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroaccel.ops import updates
from zeroaccel.ops.shard_step import Hyperparameters, ShardOptimizer, require

__all__ = ["Adagrad", "CPUAdagrad"]


class Adagrad(ShardOptimizer):
    """Adagrad (Duchi et al. 2011), with the arguments of torch.optim.Adagrad.

    ``state[param] = {"step": int, "sum": Tensor}``, shaped like the parameter; float32, or as `moments_dtype` says.

    Args:
        params: float32 by the time they are stepped; parameters or groups, as for any torch optimizer.
        lr: learning rate, at least 0.
        lr_decay: at least 0; step t uses lr / (1 + (t - 1) * lr_decay).
        weight_decay: at least 0; weight_decay * weights joins the gradient (L2).
        initial_accumulator_value: what the sums of squares start from, at least 0.
        eps: added to the denominator, at least 0.
        moments_dtype: "fp32" (4 bytes per parameter) or "bf16" (2), rounded at random; see the notes in `updates`.

    Raises:
        UsageError: for a hyperparameter out of its range.
    """

    kernel = staticmethod(updates.adagrad)
    moments: ClassVar[Mapping[str, bool]] = {"sum": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        moments_dtype: str = "fp32",
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        for name, value in defaults.items():
            require(value >= 0, f"Adagrad, {name}", "a number of at least 0", value)
        super().__init__(params, defaults, moments_dtype)

    def _advance(self, group: Hyperparameters, param: Tensor) -> tuple[list[Tensor | None], list[float | np.uint32]]:
        self._make_moments(param, fill=group["initial_accumulator_value"])
        state = self.state[param]
        state["step"] = step = int(state.get("step", 0)) + 1
        lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return self._moments_of(param), [self._key(step), float(group["weight_decay"]), float(group["eps"]), -lr]

    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        (s,) = buffers
        l2, eps, negative_lr = coefficients
        d += x * l2
        s += d * d
        x += d.mul_(negative_lr).div_(s.sqrt().add_(eps))


CPUAdagrad = Adagrad
"""DeepSpeed's scripts know the class by what it is there; here it serves every device."""
