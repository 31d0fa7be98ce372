"""The native optimizers whose rule looks at an entire tensor, so that they are never stepped on a shard: LAMB and Muon.

LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2) is an Adam whose step is as long, tensor by tensor, as the weights
are large; settings and arithmetic are those of DeepSpeed's FusedLamb, which applies the bias correction to the step and
clamps the trust ratio. Muon (K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) pushes the singular
values of a hidden matrix's momentum to about 1 by a few Newton-Schulz iterations, and steps all else by AdamW.

Nothing here knows of ranks: the engine keeps such parameters unsplit in an owner layout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops.shard_step import Hyperparameters, NativeOptimizer, require, require_unit_interval


class Lamb(NativeOptimizer):
    """LAMB (You et al. 2019); see the module.

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

    def _step_group(self, group: Hyperparameters, params: list[Tensor]) -> None:
        for param in params:
            assert param.grad is not None, "only parameters with a gradient are stepped"
            self._advance(group, param, param.grad)

    def _advance(self, group: Hyperparameters, param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        (beta1, beta2), eps, m, v = group["betas"], group["eps"], state["exp_avg"], state["exp_avg_sq"]
        # No fused operations (addcmul, lerp): some backends contract them, and the bits would depend on the device.
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


_POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # of the post: steep at 0, and around 1 near 1
_MIN_NORM = 1e-7
_GRAM_RESTART = 2  # iterations before the Gram matrix, which squares the errors, is computed anew from the matrix
_MUON = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_method": "standard", "weight_decay": 0.0}
_ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


class Muon(NativeOptimizer):
    """Muon in the param groups with ``"use_muon": True``, AdamW in those with False.

    A muon group steps matrices (rows, columns); of a tensor of three dimensions each matrix (experts of a layer); of
    one of more, (first, all others) as one matrix (a convolution). With g the gradient, and x the weights::

        b = momentum b + (1 - momentum) g          u = momentum b + (1 - momentum) g with nesterov, else b
        x = x (1 - lr weight_decay) - lr sqrt(max(1, rows / columns)) orthogonalized(u)

    Its state is `momentum_buffer`. An AdamW group computes what `torch.optim.AdamW(foreach=False)` does.

    Example:
        >>> matrix, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
        >>> groups = [{"params": [matrix], "use_muon": True}, {"params": [bias], "use_muon": False}]
        >>> optimizer = Muon(groups, lr=0.1)
        >>> matrix.grad, bias.grad = torch.eye(2), torch.ones(2)
        >>> optimizer.step()

    Args:
        params: param groups, each with "use_muon". What a group lacks is taken from the other arguments.
        lr: of both kinds of groups; absent, 0.02 of muon groups and 3e-4 of AdamW groups.
        momentum, nesterov, ns_steps, ns_method: of muon groups; see `orthogonalized` for the last two.
        betas, eps: of AdamW groups.
        weight_decay: of both, decoupled.

    Raises:
        UsageError: a group without "use_muon", a parameter of less than two dimensions in a muon group, or a
            hyperparameter out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_method: str = "standard",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        arguments: Hyperparameters = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_method": ns_method,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, arguments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with the settings of its rule and no others."""
        where = f"Muon, param group {len(self.param_groups)}"
        if not isinstance(use_muon := param_group.get("use_muon"), bool):
            raise UsageError(where, expected='"use_muon": True or False', got=use_muon, fix="split the parameters")
        own = _MUON if use_muon else _ADAMW
        for name, default in own.items():
            if param_group.get(name) is None:
                argument = self.defaults[name]
                param_group[name] = default if argument is None else argument
        # torch fills a group up with all defaults: for this call they are only those of the group's own rule.
        others = set(self.defaults) - set(own)
        before, self.defaults = self.defaults, {k: v for k, v in self.defaults.items() if k not in others}
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = before
        _check_group(where, self.param_groups[-1])

    def _step_group(self, group: Hyperparameters, params: list[Tensor]) -> None:
        if not group["use_muon"]:
            return self._step_elements(group, params)
        for param in params:
            assert param.grad is not None, "only parameters with a gradient are stepped"
            self._step_matrices(group, param, param.grad)

    def _step_matrices(self, group: Hyperparameters, param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        buffer, grad_weight, lr = state["momentum_buffer"], 1 - group["momentum"], float(group["lr"])
        buffer.mul_(group["momentum"]).add_(grad * grad_weight)
        update = buffer * group["momentum"] + grad * grad_weight if group["nesterov"] else buffer
        # The entries of an orthogonal matrix are about 1/sqrt(its longer side); scaled, they are 1/sqrt(columns) of a
        # tall one too.
        matrices = update if update.dim() <= 3 else update.flatten(1)
        stretch = math.sqrt(max(1.0, matrices.shape[-2] / matrices.shape[-1]))
        direction = orthogonalized(matrices, group["ns_steps"], group["ns_method"])
        param.mul_(1 - lr * group["weight_decay"]).sub_((direction * (lr * stretch)).view(param.shape))

    def _step_elements(self, group: Hyperparameters, params: list[Tensor]) -> None:
        for param in params:
            if not (state := self.state[param]):
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        adamw(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [self.state[param]["step"] for param in params],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalized(matrices: Tensor, steps: int = 5, method: str = "standard") -> Tensor:
    """About U V^T of each matrix's U S V^T: singular values that are not tiny come to between 0.6 and 1.3.

    Args:
        matrices: (..., rows, columns), floating. Left unchanged.
        steps: of the iteration.
        method: "standard" iterates on the matrix, "gram" on its smaller Gram matrix, which takes fewer operations the
            more oblong it is.

    Returns:
        float32, of the same shape. Computed in bfloat16 by "standard", as in the post, and in float32 by "gram", whose
        Gram matrices square the errors.
    """
    x = matrices.to(torch.bfloat16 if method == "standard" else torch.float32)
    # A wide matrix has the smaller Gram matrix x x^T.
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_MIN_NORM)
    x = _by_gram_matrix(x, steps) if method == "gram" else _by_matrix(x, steps)
    return (x.mT if is_tall else x).to(torch.float32)


def _by_matrix(x: Tensor, steps: int) -> Tensor:
    a, b, c = _POLYNOMIAL
    for _ in range(steps):
        gram = x @ x.mT
        x = x * a + (gram * b + gram @ gram * c) @ x
    return x


def _by_gram_matrix(x: Tensor, steps: int) -> Tensor:
    """With p(G) = a + b G + c G^2, x goes to p(G) x and its Gram matrix G to p(G) G p(G): x is multiplied once."""
    a, b, c = _POLYNOMIAL
    done = 0
    while done < steps:
        gram, factor = x @ x.mT, torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
        until = min(steps, _GRAM_RESTART) if done < _GRAM_RESTART else steps
        for step in range(done, until):
            polynomial = gram * b + gram @ gram * c
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = polynomial @ factor
            if step + 1 < until:
                gram = polynomial @ gram @ polynomial
        x, done = factor @ x, until
    return x


def _check_group(where: str, group: Hyperparameters) -> None:
    require(group["lr"] >= 0, f"{where}, lr", "a number of at least 0", group["lr"])
    require(group["weight_decay"] >= 0, f"{where}, weight_decay", "a number of at least 0", group["weight_decay"])
    if not group["use_muon"]:
        require_unit_interval(f"{where}, betas", group["betas"])
        require(group["eps"] >= 0, f"{where}, eps", "a number of at least 0", group["eps"])
        return
    require(0 <= group["momentum"] < 1, f"{where}, momentum", "a number in [0, 1)", group["momentum"])
    require(group["ns_steps"] in range(1, 100), f"{where}, ns_steps", "a count from 1 to 99", group["ns_steps"])
    require(
        group["ns_method"] in ("standard", "gram"), f"{where}, ns_method", '"standard" or "gram"', group["ns_method"]
    )
    for index, param in enumerate(group["params"]):
        require(param.dim() >= 2, f"{where}, parameter {index}", "at least two dimensions", tuple(param.shape))
