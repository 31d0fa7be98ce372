"""Ranks whose tensor-parallel sums belong to different layers, a script: ``parting_layers.py SCENARIO``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

import zeroaccel

RANK = int(os.environ["RANK"])
PLAN = {"first.0": "colwise", "first.2": "rowwise", "second.0": "colwise", "second.2": "rowwise"}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


class Branches(nn.Module):
    """Adds the outputs of two layers, of which a rank may leave out some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, width))
        self.free = nn.Linear(4, width)
        self.left_out: tuple[str, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        y = x if "first" in self.left_out else x + self.first(x)
        return self.free(y) if "second" in self.left_out else self.free(y) + self.second(y)


def main(scenario: str) -> None:
    # As many elements in both sums, or more in the second.
    model = Branches(6 if scenario == "other_sizes" else 4)
    mesh = zeroaccel.ParallelConfig(tp=2, tp_plan=PLAN)
    engine, *_ = zeroaccel.initialize(model, config=CONFIG, parallel=mesh)
    for step in range(3):
        if RANK == 1 and step == 1:
            model.left_out = ("first", "second") if scenario == "no_sums" else ("first",)
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()


if __name__ == "__main__":
    main(sys.argv[1])
