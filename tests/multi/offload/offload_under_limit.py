"""A program that trains with a quarter of its optimizer states as its memory limit: python -m ... FOLDER 0|1 (offload).

The limit is RLIMIT_DATA (all private memory that a process may allocate), set before the model is made; memory that
Python, torch and the compiled kernels hold by then is not counted. MALLOC_MMAP_THRESHOLD_=131072 makes the C library
return freed blocks instead of keeping them in a fragmented heap.
"""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor, nn

import zeroaccel

WIDTH, LAYERS = 1024, 36


class Stack(nn.Module):
    """Square layers; `forward` returns a loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x.float().square().mean()


def train(folder: str, width: int, layers: int, steps: int, *, offload: bool) -> list[float]:
    """Trains a few steps; returns the losses."""
    nvme = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {"queue_depth": 2, "block_size": 262144},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * width * width,
            "stage3_max_reuse_distance": 0,
            "reduce_bucket_size": 2 * width * width,
            "sub_group_size": 1 << 17,
        },
    }
    if offload:
        config["zero_optimization"] |= {  # type: ignore[operator]
            "offload_optimizer": {**nvme, "pipeline_read": True, "pipeline_write": True},
            "offload_param": {**nvme, "buffer_count": 3, "buffer_size": width * width, "max_in_cpu": 0},
        }
    torch.manual_seed(0)
    engine, *_ = zeroaccel.initialize(Stack(width, layers), config=config)
    losses = []
    for _ in range(steps):
        loss = engine(torch.ones(2, width, dtype=torch.bfloat16))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if offload:
        numel = sum(unit.numel for unit in engine.units)
        assert engine.tier_nbytes()["optimizer, nvme"] == 12 * numel
    engine.destroy()
    return losses


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def main() -> None:
    folder, offload = sys.argv[1], sys.argv[2] == "1"
    torch.set_num_threads(1)
    threading.stack_size(256 * 1024)
    train(folder, 64, 2, 2, offload=offload)  # compiles, imports and starts everything that training needs
    numel = WIDTH * WIDTH * LAYERS
    limit = 12 * numel // 4
    before = _kilobytes("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (before * 1024 + limit, -1))
    Path("/proc/self/clear_refs").write_text("5")
    resident = _kilobytes("VmRSS")
    losses = train(folder, WIDTH, LAYERS, 3, offload=offload)
    assert losses[-1] < losses[0], losses
    grown = (_kilobytes("VmHWM") - resident) * 1024
    assert grown <= limit, f"{grown} bytes of {limit}"
    print(f"states are {12 * numel / limit:.1f} times the limit of {limit / 1e6:.0f} MB; grew by {grown / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
