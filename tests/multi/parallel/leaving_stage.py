"""The last of two stages raises in its second step, in the loss of the second micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zeroaccel

calls = 0


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    global calls
    calls += 1
    if calls == 7:  # the shapes took none, the first step four
        raise RuntimeError("as the disk is full")
    return nn.functional.mse_loss(output, targets)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
engine, *_ = zeroaccel.initialize(
    model,
    config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    },
    parallel=zeroaccel.ParallelConfig(pp=2),
    pipeline=zeroaccel.PipelineConfig(loss=loss_of),
)
data = ((torch.ones(2, 4), torch.ones(2, 2)) for _ in range(16))
for _ in range(4):
    engine.train_batch(data)
