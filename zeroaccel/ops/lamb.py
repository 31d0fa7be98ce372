"""LAMB: an Adam whose step is as long, tensor by tensor, as the weights are large.

You et al. 2019, arXiv:1904.00962, algorithm 2, with the settings and the arithmetic of DeepSpeed's FusedLamb, which
applies the bias correction to the step and clamps the trust ratio. Each tensor needs its own norms, so it is stepped
whole; nothing here knows of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops.shard_step import Hyperparameters, require, require_unit_interval

__all__ = ["Lamb"]


class Lamb(torch.optim.Optimizer):
    """LAMB over whole tensors.

    With g the gradient, x the weights and t the step, per tensor::

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        u = m / (sqrt(v) + eps) + weight_decay x
        x = x - lr sqrt(1 - beta2^t) / (1 - beta1^t) clamp(|x| / |u|, min_coeff, max_coeff) u

    The ratio is 1 where either norm is 0. State per tensor: `step`, and `exp_avg` and `exp_avg_sq` of its shape.

    Args:
        lr: at least 0.
        bias_correction: False leaves out the fraction in the step.
        betas: decay rates of m and v, in [0, 1).
        eps: added to the square root, at least 0.
        eps_inside_sqrt: u is m / sqrt(v + eps) instead.
        weight_decay: at least 0.
        max_coeff, min_coeff: bounds of the trust ratio, 0 <= min_coeff <= max_coeff.
        amsgrad: must be False; the parameter is there because configurations name it.

    Raises:
        UsageError: for a hyperparameter out of its range, or `amsgrad`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        require(lr >= 0, "Lamb, lr", "a number of at least 0", lr)
        require_unit_interval("Lamb, betas", betas)
        require(eps >= 0, "Lamb, eps", "a number of at least 0", eps)
        require(weight_decay >= 0, "Lamb, weight_decay", "a number of at least 0", weight_decay)
        require(0 <= min_coeff <= max_coeff, "Lamb, min_coeff", f"a number from 0 to max_coeff, {max_coeff}", min_coeff)
        if amsgrad:
            raise UsageError("Lamb, amsgrad", expected="False", got=amsgrad, fix="LAMB has no such variant")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Advances every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._advance(group, param, param.grad)
        return loss

    def _advance(self, group: Hyperparameters, param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        (beta1, beta2), eps, m, v = group["betas"], group["eps"], state["exp_avg"], state["exp_avg_sq"]
        m.mul_(beta1).add_(grad * (1 - beta1))
        v.mul_(beta2).add_(grad.square() * (1 - beta2))
        update = m / ((v + eps).sqrt_() if group["eps_inside_sqrt"] else v.sqrt().add_(eps))
        update.add_(param * group["weight_decay"])
        step_size = float(group["lr"])
        if group["bias_correction"]:
            step_size *= math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        weight_norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
        ratio = (weight_norm / update_norm).clamp_(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight_norm == 0) | (update_norm == 0), 1.0, ratio)
        param.sub_(update.mul_(ratio * step_size))
