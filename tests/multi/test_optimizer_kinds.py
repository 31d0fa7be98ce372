"""Kinds of optimizers where there are other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.multi.pool import Pool
from zeroaccel.zero.optimizer_kinds import classify


class _Averages(torch.optim.SGD):
    """Sums its gradients over the ranks itself, from its second step on."""

    def step(self, closure: Any = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        for param in self.param_groups[0]["params"] if self.calls > 1 else ():
            torch.distributed.all_reduce(param.grad)
        return super().step(closure)


def _classified(seed: int) -> tuple[str, str]:
    torch.manual_seed(seed + torch.distributed.get_rank())
    found = classify(_Averages([nn.Parameter(torch.ones(4, 4))], lr=0.1))
    return found.groups[0].value, found.reason


def test_an_optimizer_that_communicates_is_coupled(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(_classified, 0) == [("coupled", "its step communicates between ranks by itself")] * 2
