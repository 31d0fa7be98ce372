"""Counts the Python calls of one step at several world sizes, a script for `test_engine_scale.py`.

torch's fake process group replaces the other ranks: it moves no data, so results are meaningless and only the work
around the collectives remains. Prints one JSON object per world size.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroaccel
from zeroaccel.comm.topology import destroy
from zeroaccel.engine import Engine

LAYERS = 6


class Block(nn.Module):
    """Several linear layers in one unit; a ModuleList would make several units."""

    def __init__(self, linears: int) -> None:
        super().__init__()
        for index in range(linears):
            self.add_module(f"linear{index}", nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self._modules.values():
            x = linear(x)  # type: ignore[misc]
        return x


class Stack(nn.Module):
    def __init__(self, linears: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(linears) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def step(engine: Engine, x: Tensor) -> None:
    engine.backward(engine(x))
    engine.step()


def counted_calls(engine: Engine, x: Tensor) -> Counter[str]:
    """Returns the Python and C functions called in one step, by name."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[getattr(argument, "__qualname__", str(argument))] += 1

    gc.disable()
    sys.setprofile(note)
    step(engine, x)
    sys.setprofile(None)
    gc.enable()
    return calls


def measure(world_size: int, stage: int, linears: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
    }
    engine, *_ = zeroaccel.initialize(Stack(linears), config=settings)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    for _ in range(3):
        step(engine, x)
    calls = counted_calls(engine, x)
    result = {
        "stage": stage,
        "world_size": engine.collectives.world_size,
        "units": len(engine.units),
        "parameters": 2 * linears,
        "calls": calls.total(),
        "by_name": dict(calls),
        "shard_numel": engine.units[0].numel // world_size,
    }
    print(json.dumps(result), flush=True)
    engine.destroy()
    destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    for asked in sys.argv[1:]:
        for size in (8, 1024):
            measure(size, int(asked), linears=1)
        measure(8, int(asked), linears=5)
