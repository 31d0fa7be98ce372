"""The native elementwise optimizers: Adam and AdamW, Adagrad, Lion, RMSprop, SGD.

Each class defines its kernel of `updates`, its state, its coefficients, and the kernel's formula in torch operations
for devices other than the CPU; `shard_step.py` runs the steps. An elementwise rule can step any piece of a parameter,
so ZeRO steps it on shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops import updates
from zeroaccel.ops.shard_step import (
    Hyperparameters,
    ShardOptimizer,
    require,
    require_not_negative,
    require_unit_interval,
)


class Adagrad(ShardOptimizer):
    """Adagrad (Duchi et al. 2011), with the arguments of torch.optim.Adagrad.

    ``state[param] = {"step": int, "sum": Tensor}``, shaped like the parameter, in float32 or in `moments_dtype`.

    Args:
        params: parameters or groups, as for any torch optimizer; they must be float32 when they are stepped.
        lr: learning rate, at least 0.
        lr_decay: at least 0; step t uses lr / (1 + (t - 1) * lr_decay).
        weight_decay: at least 0; adds weight_decay * weights to the gradient (L2).
        initial_accumulator_value: initial value of the sums of squares, at least 0.
        eps: added to the denominator, at least 0.
        moments_dtype: "fp32" (4 bytes per parameter) or "bf16" (2), rounded stochastically; see the notes in `updates`.

    Raises:
        UsageError: a hyperparameter is out of range.
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
        require_not_negative("Adagrad", **defaults)
        super().__init__(params, defaults, moments_dtype)

    def _coefficients(self, group: Hyperparameters, step: int) -> list[float]:
        lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return [float(group["weight_decay"]), float(group["eps"]), -lr]

    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        (s,) = buffers
        l2, eps, negative_lr = coefficients
        d += x * l2
        s += d * d
        x += d.mul_(negative_lr).div_(s.sqrt().add_(eps))


CPUAdagrad = Adagrad
"""DeepSpeed's name of the class, which here supports every device."""


class Adam(ShardOptimizer):
    """Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019) by default.

    ``state[param] = {"step": int, "exp_avg": Tensor, "exp_avg_sq": Tensor}``, shaped like the parameter, in float32 or
    in `moments_dtype`, with ``"exp_avg_exponents"`` and ``"exp_avg_sq_exponents"`` for 8-bit codes. State dicts are
    interchangeable with torch.optim.Adam and AdamW.

    Args:
        params: parameters or groups, as for any torch optimizer; they must be float32 when they are stepped.
        lr: learning rate, at least 0.
        bias_correction: divide the moments by 1 - beta**step.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0.
        amsgrad: must be False; accepted because configs may set it.
        adamw_mode: True for AdamW, which shrinks the weights by lr * weight_decay; False for L2, which adds
            weight_decay * weights to the gradient.
        moments_dtype: "fp32" (8 bytes per parameter), "bf16" (4) or "int8" (2.06), the last two rounded stochastically;
            see the notes in `updates`.

    Raises:
        UsageError: a hyperparameter is out of range, or `amsgrad` is set.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = Adam([weights], lr=0.5)
        >>> weights.grad = torch.full((4,), 2.0)
        >>> optimizer.step()
        >>> weights.data
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
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
        require_not_negative("Adam", lr=lr, eps=eps, weight_decay=weight_decay)
        require_unit_interval("Adam, betas", betas)
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

    def _coefficients(self, group: Hyperparameters, step: int) -> list[float]:
        return adam_coefficients(group, step, corrected=group["bias_correction"], decoupled=group["adamw_mode"])

    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        m, v = buffers
        decay, l2, weight1, beta2, weight2, inverse_root, eps, negative_step = coefficients
        # The order of `updates.adam`, one rounding per operation, so that both give the same bits.
        d += x * l2
        m += (d - m).mul_(weight1)
        v.mul_(beta2).add_((d * weight2).mul_(d))
        x.mul_(decay).add_((m * negative_step).div_(v.sqrt().mul_(inverse_root).add_(eps)))


def adam_coefficients(group: Hyperparameters, step: int, *, corrected: bool, decoupled: bool) -> list[float]:
    """Returns the coefficients of Adam's kernels, starting with the decay."""
    lr, weight_decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), group["betas"]
    return [
        1 - lr * weight_decay if decoupled else 1.0,
        0.0 if decoupled else weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        1 / math.sqrt(1 - beta2**step) if corrected else 1.0,
        float(group["eps"]),
        -lr / (1 - beta1**step) if corrected else -lr,
    ]


CPUAdam = Adam
"""DeepSpeed's name of the class, which here supports every device."""


class Lion(ShardOptimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2); weight decay is decoupled.

    ``state[param] = {"step": int, "exp_avg": Tensor}``, shaped like the parameter, in float32 or in `moments_dtype`.

    Args:
        params: parameters or groups, as for any torch optimizer; they must be float32 when they are stepped.
        lr: learning rate, at least 0: the size of every element's step.
        betas: weights of the momentum in the sign and in the momentum's own update, in [0, 1).
        weight_decay: at least 0; shrinks the weights by lr * weight_decay.
        moments_dtype: "fp32" (4 bytes per parameter) or "bf16" (2), rounded stochastically; see the notes in `updates`.

    Raises:
        UsageError: a hyperparameter is out of range.
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
        require_not_negative("Lion", lr=lr, weight_decay=weight_decay)
        require_unit_interval("Lion, betas", betas)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}, moments_dtype)

    def _coefficients(self, group: Hyperparameters, step: int) -> list[float]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]  # only the rounding uses the step
        return [1 - lr * float(group["weight_decay"]), beta1, 1 - beta1, beta2, 1 - beta2, -lr]

    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        (m,) = buffers
        decay, beta1, weight1, beta2, weight2, negative_lr = coefficients
        c = (m * beta1).add_(d * weight1)
        # Keeps zero, and NaN, whose sign is 0 in torch.
        direction = torch.where(c.abs() > 0, c.sign(), c)
        x.mul_(decay).add_(direction.mul_(negative_lr))
        m.mul_(beta2).add_(d.mul_(weight2))


CPULion = Lion
"""DeepSpeed's name of the class, which here supports every device."""


class RMSprop(ShardOptimizer):
    """RMSprop (Hinton 2012), with the arguments of torch.optim.RMSprop.

    ``state[param] = {"step": int, "square_avg": Tensor}``, float32 and shaped like the parameter; also
    ``"momentum_buffer"`` with momentum, and ``"grad_avg"`` if centered.

    Args:
        params: parameters or groups, as for any torch optimizer; they must be float32 when they are stepped.
        lr: learning rate, at least 0.
        alpha: decay rate of the mean of squares, in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0; adds weight_decay * weights to the gradient (L2).
        momentum: at least 0.
        centered: divide by the standard deviation of the gradient instead of its root mean square.

    Raises:
        UsageError: a hyperparameter is out of range.
    """

    kernel = staticmethod(updates.rmsprop)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
    ) -> None:
        require_not_negative("RMSprop", lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
        require(0.0 <= alpha < 1.0, "RMSprop, alpha", "a number in [0, 1)", alpha)
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        super().__init__(params, defaults)

    def _advance(self, group: Hyperparameters, param: Tensor) -> tuple[list[Tensor | None], list[float | np.uint32]]:
        state, momentum, alpha = self.state[param], float(group["momentum"]), float(group["alpha"])
        state["step"] = int(state.get("step", 0)) + 1
        names = {"square_avg": True, "momentum_buffer": bool(momentum), "grad_avg": bool(group["centered"])}
        for name in (name for name, is_used in names.items() if is_used and name not in state):
            state[name] = self._new_state(param, param.shape, param.dtype)
        buffers = [state[name] if is_used else None for name, is_used in names.items()]
        weight_decay, eps, lr = [float(group[name]) for name in ("weight_decay", "eps", "lr")]
        return buffers, [weight_decay, alpha, 1 - alpha, eps, momentum, -lr]

    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        l2, alpha, weight, eps, momentum, negative_lr = coefficients
        s, *others = buffers
        d += x * l2
        s.mul_(alpha).add_((d * weight).mul_(d))
        root = s.sqrt()
        if len(others) > bool(momentum):  # the last one is the mean gradient
            a = others[-1]
            a += (d - a).mul_(weight)
            root = (s - a * a).clamp_(min=0.0).sqrt()
        d.div_(root.add_(eps))
        if momentum:
            d.add_(others[0].mul_(momentum))
            others[0].copy_(d)
        x += d.mul_(negative_lr)


class SGD(ShardOptimizer):
    """Stochastic gradient descent, with the arguments of torch.optim.SGD (momentum after Sutskever et al. 2013).

    ``state[param] = {"momentum_buffer": Tensor}``, float32 and shaped like the parameter; empty without momentum.

    Args:
        params: parameters or groups, as for any torch optimizer; they must be float32 when they are stepped.
        lr: learning rate, at least 0.
        momentum: at least 0.
        dampening: adds (1 - dampening) * gradient to the momentum, except at a parameter's first step.
        weight_decay: at least 0; adds weight_decay * weights to the gradient (L2).
        nesterov: step along gradient + momentum * buffer; requires momentum and no dampening.

    Raises:
        UsageError: a hyperparameter is out of range.
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
        require_not_negative("SGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
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
                buffer = state["momentum_buffer"] = self._new_state(param, param.shape, param.dtype)
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
"""Another name of the class, like `CPUAdam`."""
