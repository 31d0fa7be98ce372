"""Ranks of a mesh that diverge on purpose, a script for `test_mesh_hangs.py`: ``diverging_meshes.py SCENARIO``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.environment import begin

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
calls = 0


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def _shared_layers(interrupt: Callable[[], None]) -> None:
    """Interrupts the second of two tensor-parallel ranks in its second step, before the all-reduce of a layer."""
    model = _layers()
    plan = {"0": "colwise", "2": "rowwise"}
    engine, *_ = zeroaccel.initialize(model, config=CONFIG, parallel=zeroaccel.ParallelConfig(tp=2, tp_plan=plan))
    for step in range(3):
        if step == 1:
            begin()
        if RANK == 1 and step == 1:
            model[1].register_forward_hook(lambda *_: interrupt())
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()


def _stages(interrupt: Callable[[], None], loss_calls: int) -> None:
    """Interrupts the last rank, in the second of two stages, in a loss of its second step."""

    def loss_of(output: Tensor, targets: Tensor) -> Tensor:
        global calls
        calls += 1
        if RANK == WORLD_SIZE - 1 and calls == loss_calls:
            interrupt()
        return nn.functional.mse_loss(output, targets)

    engine, *_ = zeroaccel.initialize(
        _layers(),
        config=CONFIG | {"gradient_accumulation_steps": 4},
        parallel=zeroaccel.ParallelConfig(pp=2),
        pipeline=zeroaccel.PipelineConfig(loss=loss_of),
    )
    data = ((torch.ones(2, 4), torch.ones(2, 2)) for _ in range(16))
    engine.train_batch(data)
    begin()
    for _ in range(3):
        engine.train_batch(data)


def sleep() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("a layer that cannot be")


def layer_sleeps() -> None:
    _shared_layers(sleep)


def layer_fails() -> None:
    _shared_layers(fail)


def stage_sleeps() -> None:
    _stages(sleep, 6)  # the second micro-batch: the first step used four


def stage_fails() -> None:
    _stages(fail, 7)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
