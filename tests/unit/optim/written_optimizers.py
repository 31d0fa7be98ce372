"""Short optimizers of every kind, as users write them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Written(Optimizer):
    """Steps by `direction`; `settings` become settings of the groups."""

    def __init__(self, params: Any, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    def held(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param, param.grad, self.state[param]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param, grad, state in self.held():
            state["step"] = state.get("step", 0) + 1
            param -= group["lr"] * self.direction(group, param, grad, state)

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad


class ClipsAll(Written):
    """Clips by the norm over all its parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = list(self.held())
        norm = torch.stack([grad.norm() for _, _, grad, _ in held]).norm() if held else torch.zeros(())
        for group, param, grad, _ in held:
            param -= group["lr"] * grad * torch.clamp(1.0 / (norm + 1e-6), max=1.0)


class EstimatesStepSize(Written):
    """Like Prodigy: the step size in the groups grows with the distance that all parameters have moved."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr, d=1e-6)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        numerator = denominator = 0.0
        for group, param, grad, state in self.held():
            state.setdefault("start", param.clone())
            state["s"] = state.get("s", torch.zeros_like(param)) + group["d"] * grad
            numerator += group["d"] * float((grad * (state["start"] - param)).sum())
            denominator += float(state["s"].abs().sum())
        for group in self.param_groups:
            group["d"] = max(group["d"], numerator / (denominator + 1e-12))
        for group, param, grad, _ in self.held():
            param -= group["lr"] * group["d"] * grad.sign()


class BeginsLate(Written):
    """Normalizes gradients from its third step on."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad if state["step"] < 3 else grad / (grad.norm() + 1e-8)


class Lars(Written):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad * (param.norm() / (grad.norm() + 1e-9))


class Sign(Written):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad.sign()


class CountsInGroups(Written):
    """Counts calls in each group and in itself, with a warm-up by the groups' counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1, k=0)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * min(1.0, group["k"] / 5) / self.calls * param.grad


class CountsParameters(CountsInGroups):
    """Increases its count for each parameter, so that a step depends on their number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param, grad, _ in self.held():
            group["k"] += 1
            param -= group["lr"] / group["k"] * grad


class Noisy(Written):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad + torch.randn_like(grad)


class NoisyByItself(Written):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.noise = np.random.default_rng(0)

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad + float(self.noise.standard_normal())


class ScheduleFree(Written):
    """Like the SGD of Defazio et al.: steps in training mode only; `eval` switches to the average weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1, k=0, train_mode=False, weight_sum=0.0)

    def _go(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not training:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.data.lerp_(self.state[param]["z"], weight)
            group["train_mode"] = training

    def train(self) -> None:
        self._go(True, 0.1)

    def eval(self) -> None:
        self._go(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
        for group, param, grad, state in self.held():
            z = state.setdefault("z", param.clone())
            share = group["lr"] ** 2 / group["weight_sum"]
            param.lerp_(z, share).add_(grad, alpha=group["lr"] * (0.9 * (1 - share) - 1))
            z.sub_(grad, alpha=group["lr"])


class Shampoo(Written):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        for dim in range(grad.dim()):
            rows = grad.movedim(dim, 0).reshape(grad.shape[dim], -1)
            factor = state.get(f"factor_{dim}", torch.eye(rows.shape[0])) + rows @ rows.T
            state[f"factor_{dim}"] = factor
            values, vectors = torch.linalg.eigh(factor)
            root = vectors @ torch.diag(values.clamp(min=1e-6) ** (-0.5 / grad.dim())) @ vectors.T
            grad = torch.tensordot(root, grad.movedim(dim, 0), 1).movedim(0, dim)
        return grad


class Lookahead(Optimizer):
    """Wraps another optimizer and shares its groups."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state, self.fast_state = {}, inner.state
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state.setdefault(param, {}).setdefault("slow", param.detach().clone())
                if self.count % 3 == 0:
                    slow.lerp_(param.detach(), 0.5)
                    param.data.copy_(slow)


class NeedsTheFirst(Written):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0].grad.mean()
        for group, param, grad, _ in self.held():
            param -= group["lr"] * (grad - first)


class NeedsTwo(Written):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = list(self.held())
        for group, param, grad, _ in (held[0], held[1]):
            param -= group["lr"] * grad


class StepsItsOwnList(Written):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.list = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.list:
            param -= 0.1


class MadeOfTwo(Written):
    """Wraps two optimizers with their own groups; with `by_itself`, it steps the first group itself."""

    def __init__(self, first: Any, second: Any, *, by_itself: bool = False) -> None:
        super().__init__([{"params": first}, {"params": second}])
        self.inner = [torch.optim.Adam(params, lr=0.1) for params in (first, second)]
        self.by_itself = by_itself

    def step(self, closure: Any = None) -> None:
        if self.by_itself:
            for param in self.param_groups[0]["params"]:
                param.data -= 0.1 * param.grad
        for inner in self.inner[1 if self.by_itself else 0 :]:
            inner.step()


class MatricesOnly(Written):
    """Orthogonalises matrices, like Muon, and accepts nothing else."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if grad.dim() != 2:
            raise ValueError("matrices only")
        u, _, v = torch.linalg.svd(grad, full_matrices=False)
        return u @ v


class MakesStates(Written):
    """Like MADGRAD: creates its states in the constructor, with its count in the groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, k=0)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"sum": torch.zeros_like(param), "start": param.detach().clone()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param, grad, state in self.held():
            state["sum"] += grad * math.sqrt(group["k"] + 1)
            param.copy_(state["start"] - group["lr"] * state["sum"])
        for group in self.param_groups:
            group["k"] += 1
