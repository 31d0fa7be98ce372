"""The native optimizers whose rule needs whole tensors, so that they cannot step a shard: LAMB and Muon.

LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2) is an Adam whose step length is proportional to the norm of each
tensor; settings and arithmetic are those of DeepSpeed's FusedLamb, which applies the bias correction to the step and
clamps the trust ratio. Muon (K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves the singular
values of a hidden matrix's momentum to about 1 by a few Newton-Schulz iterations; AdamW steps all other parameters.

On a CUDA device, one launch steps several tensors: LAMB's of any shapes, Muon's matrices of the same shape in batched
products. Results of Muon may depend on the size of the batch, for which cuBLAS chooses a kernel.

This module does not depend on ranks: the engine keeps such parameters whole in an owner layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops.device_kernels import DeviceKernels, dtype_kind, update_blocks
from zeroaccel.ops.elementwise import adam_coefficients
from zeroaccel.ops.shard_step import (
    Hyperparameters,
    NativeOptimizer,
    TensorStep,
    batches_alike,
    require,
    require_not_negative,
    require_unit_interval,
)

_MOST_NUMEL = 1 << 27  # elements of one launch: limits the temporaries between two launches to 512 MiB


class Lamb(NativeOptimizer):
    """LAMB (You et al. 2019); see the module.

    With the gradient g, the weights x and the step t, for each tensor::

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        u = m / (sqrt(v) + eps) + weight_decay x
        x = x - lr sqrt(1 - beta2^t) / (1 - beta1^t) clamp(|x| / |u|, min_coeff, max_coeff) u

    The ratio is 1 if either norm is 0. State per tensor: `step`, and `exp_avg` and `exp_avg_sq` in its shape.

    Args:
        lr: learning rate, at least 0.
        bias_correction: False omits the fraction in the step.
        betas: decay rates of m and v, in [0, 1).
        eps: added to the square root, at least 0.
        eps_inside_sqrt: use m / sqrt(v + eps) in u instead.
        weight_decay: at least 0.
        max_coeff, min_coeff: bounds of the trust ratio, 0 <= min_coeff <= max_coeff.
        amsgrad: must be False; accepted because configs may set it.

    Raises:
        UsageError: a hyperparameter is out of range, or `amsgrad` is set.
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
        require_not_negative("Lamb", lr=lr, eps=eps, weight_decay=weight_decay)
        require_unit_interval("Lamb, betas", betas)
        require(0 <= min_coeff <= max_coeff, "Lamb, min_coeff", f"a number from 0 to max_coeff, {max_coeff}", min_coeff)
        if amsgrad:
            raise UsageError("Lamb, amsgrad", expected="False", got=amsgrad, fix="LAMB has no AMSGrad variant")
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

    def _step_group(self, group: Hyperparameters, stepped: list[tuple[Tensor, Tensor]]) -> None:
        for param, grad in stepped:
            self._advance(group, param, grad)

    def _counted(self, param: Tensor) -> dict[str, Any]:
        """Returns the state of a parameter, created if necessary, with the step count incremented."""
        state: dict[str, Any] = self.state[param]
        if not state:
            state.update(step=0, exp_avg=_zeros(param), exp_avg_sq=_zeros(param))
        state["step"] += 1
        return state

    def _step_size(self, group: Hyperparameters, step: int) -> float:
        (beta1, beta2), corrected = group["betas"], group["bias_correction"]
        factor = math.sqrt(1 - beta2**step) / (1 - beta1**step) if corrected else 1.0
        return float(group["lr"]) * factor

    @torch.no_grad()
    def step_many(
        self, group: Hyperparameters, steps: Sequence[TensorStep], *, grad_scale: float, kernels: DeviceKernels
    ) -> None:
        """See `ManyStep.step_many`."""
        counts = {id(step.param): self._counted(step.param)["step"] for step in steps}
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        numbers = _floats(grad_scale, beta1, 1 - beta1, beta2, 1 - beta2, eps, decay)
        for batch in batches_alike(steps, lambda step: counts[id(step.param)], _MOST_NUMEL):
            columns = _columns(batch, self.state, "exp_avg", "exp_avg_sq")
            numels = [step.param.numel() for step in batch]
            masters, updates = columns["x"], columns["x"][0].new_empty(sum(numels)).split(numels)
            sums = updates[0].new_empty((2, len(batch), update_blocks(numels)), dtype=torch.float64)
            kernels.update_many(
                "lamb_moments",
                {"x": masters, "m": columns["0"], "v": columns["1"], "g": columns["g"], "u": updates},
                [sums, *numbers, np.int32(group["eps_inside_sqrt"]), dtype_kind(batch[0].grad)],
                reads="xmvg",
                writes="mvu",
                beside=[sums],
            )
            rates = self._step_size(group, counts[id(batch[0].param)]), group["min_coeff"], group["max_coeff"]
            kernels.update_many(
                "lamb_apply",
                {"x": masters, "u": updates, "o": columns["o"]},
                [sums.sum(-1).sqrt_().float(), *_floats(*rates), dtype_kind(batch[0].out)],
                reads="xu",
                writes="xo",
            )
            _note_written(batch)

    def _advance(self, group: Hyperparameters, param: Tensor, grad: Tensor) -> None:
        state = self._counted(param)
        (beta1, beta2), eps, m, v = group["betas"], group["eps"], state["exp_avg"], state["exp_avg_sq"]
        # No fused operations (addcmul, lerp): some backends contract them, so that the bits depend on the device.
        m.mul_(beta1).add_(grad * (1 - beta1))
        v.mul_(beta2).add_(grad.square() * (1 - beta2))
        update = m / ((v + eps).sqrt_() if group["eps_inside_sqrt"] else v.sqrt().add_(eps))
        update.add_(param * group["weight_decay"])
        step_size = self._step_size(group, state["step"])
        weight_norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
        ratio = (weight_norm / update_norm).clamp_(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight_norm == 0) | (update_norm == 0), 1.0, ratio)
        param.sub_(update.mul_(ratio * step_size))


_POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # from the post: steep at 0, and about 1 near 1
_MIN_NORM = 1e-7
_GRAM_RESTART = 2  # iterations before the Gram matrix, which squares the errors, is computed again from the matrix
_MUON = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_method": "standard", "weight_decay": 0.0}
_ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


class Muon(NativeOptimizer):
    """Muon for param groups with ``"use_muon": True``, AdamW for those with False.

    A muon group steps matrices (rows, columns): each matrix of a tensor with three dimensions (experts of a layer), and
    (first, all others) as one matrix if there are more (a convolution). With the gradient g and the weights x::

        b = momentum b + (1 - momentum) g          u = momentum b + (1 - momentum) g with nesterov, else b
        x = x (1 - lr weight_decay) - lr sqrt(max(1, rows / columns)) orthogonalized(u)

    A muon group with ``"heads": N`` orthogonalizes the rows of each of N attention heads by themselves, as N matrices.

    Its state is `momentum_buffer`. An AdamW group computes the same as `torch.optim.AdamW(foreach=False)`.

    Example:
        >>> matrix, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
        >>> groups = [{"params": [matrix], "use_muon": True}, {"params": [bias], "use_muon": False}]
        >>> optimizer = Muon(groups, lr=0.1)
        >>> matrix.grad, bias.grad = torch.eye(2), torch.ones(2)
        >>> optimizer.step()

    Args:
        params: param groups, each with "use_muon". The other arguments are defaults for settings that a group lacks.
        lr: learning rate of both kinds of groups; None is 0.02 for muon groups and 3e-4 for AdamW groups.
        momentum, nesterov, ns_steps, ns_method: for muon groups; see `orthogonalized` for the last two.
        betas, eps: for AdamW groups.
        weight_decay: decoupled weight decay, for both kinds of groups.

    Raises:
        UsageError: a group lacks "use_muon", a parameter in a muon group has fewer than two dimensions, or a
            hyperparameter is out of range.
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
        self.written_lrs: list[bool] = []
        super().__init__(params, arguments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with only the settings of its rule."""
        where = f"Muon, param group {len(self.param_groups)}"
        if not isinstance(use_muon := param_group.get("use_muon"), bool):
            raise UsageError(where, expected='"use_muon": True or False', got=use_muon, fix="set it in each group")
        self.written_lrs.append(param_group.get("lr") is not None)
        defaults = _MUON if use_muon else _ADAMW
        for name, default in defaults.items():
            if param_group.get(name) is None:
                argument = self.defaults[name]
                param_group[name] = default if argument is None else argument
        # torch adds all defaults to a group, so during this call they are only those of the group's own rule.
        others = set(self.defaults) - set(defaults)
        before, self.defaults = self.defaults, {k: v for k, v in self.defaults.items() if k not in others}
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = before
        _check_group(where, self.param_groups[-1])

    def _step_group(self, group: Hyperparameters, stepped: list[tuple[Tensor, Tensor]]) -> None:
        if not group["use_muon"]:
            return self._step_elements(group, stepped)
        for param, grad in stepped:
            self._step_matrices(group, param, grad)

    @torch.no_grad()
    def step_many(
        self, group: Hyperparameters, steps: Sequence[TensorStep], *, grad_scale: float, kernels: DeviceKernels
    ) -> None:
        """See `ManyStep.step_many`."""
        if not group["use_muon"]:
            return self._step_many_elements(group, steps, grad_scale, kernels)
        momentum, lr, method = group["momentum"], float(group["lr"]), group["ns_method"]
        for batch in batches_alike(steps, lambda step: step.param.shape, _MOST_NUMEL):
            for step in batch:
                self._momentum_buffer(step.param)
            columns = _columns(batch, self.state, "momentum_buffer")
            shape = _shape_of_matrices(batch[0].param.shape, group)
            updates = batch[0].param.new_empty((len(batch), *shape), dtype=_dtype_of(method))
            numbers = [*_floats(grad_scale, momentum, 1 - momentum), np.int32(group["nesterov"])]
            kernels.update_many(
                "muon_momentum",
                {"b": columns["0"], "g": columns["g"], "u": updates.unbind()},
                [*numbers, dtype_kind(batch[0].grad), dtype_kind(updates)],
                reads="bg",
                writes="bu",
            )
            directions = _orthogonal(updates.view(-1, *shape[-2:]), group["ns_steps"], method, fused=True).contiguous()
            rates = _floats(1 - lr * group["weight_decay"], lr * _stretch(shape))
            kernels.update_many(
                "muon_apply",
                {"x": columns["x"], "d": directions.view(updates.shape).unbind(), "o": columns["o"]},
                [*rates, dtype_kind(directions), dtype_kind(batch[0].out)],
                reads="xd",
                writes="xo",
            )
            _note_written(batch)

    def _step_many_elements(
        self, group: Hyperparameters, steps: Sequence[TensorStep], grad_scale: float, kernels: DeviceKernels
    ) -> None:
        counts = {}
        for step in steps:
            state = self._adamw_state(step.param)
            state["step"] += 1
            counts[id(step.param)] = int(state["step"])
        for batch in batches_alike(steps, lambda step: counts[id(step.param)], _MOST_NUMEL):
            columns = _columns(batch, self.state, "exp_avg", "exp_avg_sq")
            numbers = adam_coefficients(group, counts[id(batch[0].param)], corrected=True, decoupled=True)
            kernels.update_many(
                "adam_many",
                {"x": columns["x"], "m": columns["0"], "v": columns["1"], "g": columns["g"], "o": columns["o"]},
                [*_floats(grad_scale, *numbers), dtype_kind(batch[0].grad), dtype_kind(batch[0].out)],
                reads="xmvg",
                writes="xmvo",
            )
            _note_written(batch)

    def _momentum_buffer(self, param: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.state[param]
        return (
            state["momentum_buffer"]
            if "momentum_buffer" in state
            else state.setdefault("momentum_buffer", _zeros(param))
        )

    def _adamw_state(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=_zeros(param), exp_avg_sq=_zeros(param))
        return state

    def _step_matrices(self, group: Hyperparameters, param: Tensor, grad: Tensor) -> None:
        buffer, grad_weight, lr = self._momentum_buffer(param), 1 - group["momentum"], float(group["lr"])
        buffer.mul_(group["momentum"]).add_(grad * grad_weight)
        update = buffer * group["momentum"] + grad * grad_weight if group["nesterov"] else buffer
        matrices = update.reshape(_shape_of_matrices(update.shape, group))
        direction = orthogonalized(matrices, group["ns_steps"], group["ns_method"])
        rate = lr * _stretch(matrices.shape)
        param.mul_(1 - lr * group["weight_decay"]).sub_((direction * rate).view(param.shape))

    def _step_elements(self, group: Hyperparameters, stepped: list[tuple[Tensor, Tensor]]) -> None:
        states = [self._adamw_state(param) for param, _ in stepped]
        params, grads = [param for param, _ in stepped], [grad for _, grad in stepped]
        firsts, seconds, steps = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
        (beta1, beta2), settings = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
        settings |= {"foreach": False, "amsgrad": False, "maximize": False}
        adamw(params, grads, firsts, seconds, [], steps, beta1=beta1, beta2=beta2, **settings)


def _shape_of_matrices(shape: torch.Size, group: Hyperparameters) -> tuple[int, ...]:
    heads = group.get("heads", 1)
    if heads > 1:
        return heads, shape[0] // heads, shape[1]
    return tuple(shape) if len(shape) <= 3 else (shape[0], math.prod(shape[1:]))


def orthogonalized(matrices: Tensor, steps: int = 5, method: str = "standard") -> Tensor:
    """Returns about U V^T for each matrix U S V^T: all but tiny singular values become between 0.6 and 1.3.

    Args:
        matrices: (..., rows, columns), floating-point. Not modified.
        steps: number of iterations.
        method: "standard" iterates on the matrix; "gram" on its smaller Gram matrix, which needs fewer operations the
            more rows and columns differ.

    Returns:
        float32, of the same shape. "standard" computes in bfloat16, as in the post, "gram" in float32, because Gram
        matrices square the errors.
    """
    return _orthogonal(matrices.to(_dtype_of(method)), steps, method).to(torch.float32)


def _orthogonal(x: Tensor, steps: int, method: str, *, fused: bool = False) -> Tensor:
    """Computes `orthogonalized` in the dtype of x.

    With `fused`, x is (n, rows, columns), and one launch computes a product and a sum with one rounding.
    """
    # A wide matrix has the smaller Gram matrix x x^T.
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_MIN_NORM)
    x = _by_gram_matrix(x, steps) if method == "gram" else _by_matrix(x, steps, fused=fused)
    return x.mT if is_tall else x


def _dtype_of(method: str) -> torch.dtype:
    return torch.bfloat16 if method == "standard" else torch.float32


def _stretch(shape: Sequence[int]) -> float:
    # The entries of an orthogonal matrix are about 1/sqrt(its longer side); this scales them to 1/sqrt(columns) for a
    # tall matrix too.
    return math.sqrt(max(1.0, shape[-2] / shape[-1]))


def _zeros(param: Tensor) -> Tensor:
    return torch.zeros_like(param, memory_format=torch.preserve_format)


def _floats(*numbers: float) -> list[np.float32]:
    return [np.float32(number) for number in numbers]


def _columns(batch: Sequence[TensorStep], states: Mapping[Tensor, Any], *names: str) -> dict[str, list[Any]]:
    """Returns the tensors of one launch: masters "x", gradients "g", copies "o", and the named states "0", "1"."""
    columns: dict[str, list[Any]] = {
        "x": [step.param for step in batch],
        "g": [step.grad for step in batch],
        "o": [s.out for s in batch],
    }
    return {**columns, **{str(i): [states[s.param][name] for s in batch] for i, name in enumerate(names)}}


def _note_written(batch: Sequence[TensorStep]) -> None:
    """Increments the versions of the written tensors, because autograd does not see a kernel's writes."""
    for tensor in (tensor for step in batch for tensor in (step.param, step.out) if tensor is not None):
        torch.autograd.graph.increment_version(tensor)


def _by_matrix(x: Tensor, steps: int, *, fused: bool) -> Tensor:
    a, b, c = _POLYNOMIAL
    for _ in range(steps):
        if fused:
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            continue
        gram = x @ x.mT
        x = x * a + (gram * b + gram @ gram * c) @ x
    return x


def _by_gram_matrix(x: Tensor, steps: int) -> Tensor:
    """Iterates on the Gram matrix G of x, and multiplies x only at the end.

    With p(G) = a + b G + c G^2, an iteration maps x to p(G) x and G to p(G) G p(G).
    """
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
    require_not_negative(where, lr=group["lr"], weight_decay=group["weight_decay"])
    if not group["use_muon"]:
        require_unit_interval(f"{where}, betas", group["betas"])
        require_not_negative(where, eps=group["eps"])
        return
    require(0 <= group["momentum"] < 1, f"{where}, momentum", "a number in [0, 1)", group["momentum"])
    require(group["ns_steps"] in range(1, 100), f"{where}, ns_steps", "a count from 1 to 99", group["ns_steps"])
    require(
        group["ns_method"] in ("standard", "gram"), f"{where}, ns_method", '"standard" or "gram"', group["ns_method"]
    )
    for index, param in enumerate(group["params"]):
        require(param.dim() >= 2, f"{where}, parameter {index}", "at least two dimensions", tuple(param.shape))
