"""What an optimizer does, found out by trying: copies of it step on small tensors, and it stays as it was.

Whether it can step on flat pieces of parameters, in host memory, and which states it keeps per element.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["check_elementwise", "has_stepped", "renew_state", "state_dtypes"]


def check_elementwise(optimizer: Optimizer) -> str | None:
    """Why this optimizer cannot step on shards, or None when it can.

    Found out by trying: two steps on a small matrix per param group, whole and as two flat halves, must agree.
    """
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(3, 6, 8, generator=generator)
    try:
        whole = _trial(optimizer, [start], [[g] for g in gradients])
        halves = _trial(optimizer, start.flatten().chunk(2), [g.flatten().chunk(2) for g in gradients])
    except Exception as error:
        return f"it cannot step on a flat piece of a parameter ({type(error).__name__}: {error})"
    pairs = zip(whole, halves, strict=True)
    if all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in pairs):
        return None
    return (
        "its update of an element depends on other elements of the parameter, so pieces of it cannot be stepped alone"
    )


def _trial(optimizer: Optimizer, starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Flat weights, per param group, after stepping a copy of `optimizer` on `starts`."""
    twin = _twin(optimizer)
    for group in twin.param_groups:
        group["params"] = [nn.Parameter(start.clone()) for start in starts]
        if "lr" in group:  # at the rate itself, which may be 0 during a warm-up, nothing might be seen to differ
            group["lr"] = torch.full_like(rate, 0.1) if isinstance(rate := group["lr"], Tensor) else 0.1
    if optimizer.state:
        renew_state(twin)
    for step in gradients:
        for group in twin.param_groups:
            for value, grad in zip(group["params"], step, strict=True):
                value.grad = grad.clone()
        twin.step()
    return [torch.cat([value.detach().flatten() for value in group["params"]]) for group in twin.param_groups]


def _twin(optimizer: Optimizer) -> Optimizer:
    """A copy without state, and without copying the model.

    Made by hand: `Optimizer.__getstate__` would drop the attributes of a subclass. A `step` of the instance is a
    scheduler's wrapper, which steps the original.
    """
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    twin = object.__new__(type(optimizer))
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("state", "step")}
    vars(twin).update(copy.deepcopy(kept, params))
    twin.state = defaultdict(dict)
    return twin


def state_dtypes(optimizer: Optimizer) -> list[dict[str, torch.dtype]]:
    """For each param group the states that have one value per element, by name. In host memory.

    Raises:
        Exception: whatever the optimizer raises at a step there.
    """
    numel = 64
    twin = _twin(optimizer)
    for group in twin.param_groups:
        group["params"] = [nn.Parameter(torch.ones(numel))]
    if optimizer.state:
        renew_state(twin)
    found = []
    for group in twin.param_groups:
        group["params"][0].grad = torch.ones(numel)
    twin.step()
    for group in twin.param_groups:
        state = twin.state.get(group["params"][0], {})
        found.append({k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.shape == (numel,)})
    return found


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether its state comes from steps, rather than from its constructor, as that of torch's Adagrad does."""
    return any(bool(state.get("step", 1)) for state in optimizer.state.values())


def renew_state(optimizer: Optimizer) -> None:
    """Makes the state that the constructor makes, for the parameters that are in the groups now, and no other."""
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state = type(optimizer)(groups, **optimizer.defaults).state
