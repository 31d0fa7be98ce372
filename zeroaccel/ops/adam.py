"""Adam and AdamW, one class: `adamw_mode` tells which.

The formula is that of `updates.adam`; how a step runs is `shard_step`'s matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops import updates
from zeroaccel.ops.shard_step import Hyperparameters, ShardOptimizer, require, require_unit_interval

__all__ = ["Adam", "CPUAdam"]


class Adam(ShardOptimizer):
    """Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019) unless told otherwise.

    ``state[param] = {"step": int, "exp_avg": Tensor, "exp_avg_sq": Tensor}``, shaped like the parameter; float32, or as
    `moments_dtype` says, with ``"exp_avg_exponents"`` and ``"exp_avg_sq_exponents"`` beside 8-bit codes. A state_dict
    of torch.optim.Adam or AdamW loads, and theirs take ours.

    Args:
        params: float32 by the time they are stepped; parameters or groups, as for any torch optimizer.
        lr: learning rate, at least 0.
        bias_correction: divide the moments by 1 - beta**step.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0.
        amsgrad: must be False; the parameter is there because configurations name it.
        adamw_mode: True is AdamW: the weights shrink by lr * weight_decay; False is L2: weight_decay * weights joins
            the gradient.
        moments_dtype: "fp32" (8 bytes per parameter), "bf16" (4) or "int8" (2.06), the last two rounded at random; see
            the notes in `updates`.

    Raises:
        UsageError: for a hyperparameter out of its range, or `amsgrad`.
    """

    kernel = staticmethod(updates.adam)
    block_kernel = staticmethod(updates.adam_blocks)
    moments: ClassVar[Mapping[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        moments_dtype: str = "fp32",
    ) -> None:
        require(lr >= 0, "Adam, lr", "a number of at least 0", lr)
        require_unit_interval("Adam, betas", betas)
        require(eps >= 0, "Adam, eps", "a number of at least 0", eps)
        require(weight_decay >= 0, "Adam, weight_decay", "a number of at least 0", weight_decay)
        if amsgrad:
            raise UsageError("Adam, amsgrad", expected="False", got=amsgrad, fix="use torch's own Adam for AMSGrad")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "adamw_mode": adamw_mode,
        }
        super().__init__(params, defaults, moments_dtype)

    def _advance(self, group: Hyperparameters, param: Tensor) -> tuple[list[Tensor | None], list[float | np.uint32]]:
        self._make_moments(param)
        state = self.state[param]
        state["step"] = step = int(state.get("step", 0)) + 1
        lr, weight_decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), group["betas"]
        corrected, decoupled = group["bias_correction"], group["adamw_mode"]
        coefficients: list[float | np.uint32] = [
            self._key(step),
            1 - lr * weight_decay if decoupled else 1.0,
            0.0 if decoupled else weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            1 / math.sqrt(1 - beta2**step) if corrected else 1.0,
            float(group["eps"]),
            -lr / (1 - beta1**step) if corrected else -lr,
        ]
        return self._moments_of(param), coefficients

    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        m, v = buffers
        decay, l2, weight1, beta2, weight2, inverse_root, eps, negative_step = coefficients
        d += x * l2
        m += (d - m).mul_(weight1)
        v.mul_(beta2).add_((d * weight2).mul_(d))
        x.mul_(decay).add_((m * negative_step).div_(v.sqrt().mul_(inverse_root).add_(eps)))


CPUAdam = Adam
"""DeepSpeed's scripts know the class by what it is there; here it serves every device."""
