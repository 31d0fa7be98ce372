"""Trains a few steps under each given JSON config, one after the other, and writes the results.

`test_templates.py` starts it: python templates_in_turn.py OUTPUT CONFIG...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from zeroaccel import Accelerator, ZeroPlugin
from zeroaccel.accelerate.prepared_optimizer import DummyOptim, DummyScheduler


class Regression(nn.Module):
    """Blocks in a list, as in real models, so that each is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(32, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = features.to(self.head.weight.dtype)
        for block in self.blocks:
            features = block(features)
        return self.head(features).float()


def _losses(config: str) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(deepspeed_plugin=ZeroPlugin(config))
    model = Regression()
    data = DataLoader(torch.randn(64, 32), batch_size=4)
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=1)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses = []
    for batch in data:
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.free_memory(model, optimizer)
    return losses


def main() -> None:
    output, *configs = sys.argv[1:]
    found = {Path(config).name: _losses(config) for config in configs}
    Path(f"{output}.{torch.distributed.get_rank()}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
