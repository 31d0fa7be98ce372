"""Finds the largest decoder that trains in 32 GB of device memory with weights, masters and states on the host.

The claim is that of Ren et al. 2021, "ZeRO-Offload", section 6: 13e9 parameters on one GPU of 32 GB, at 30 TFLOPS
and more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from models import Decoder, Shape

DEVICE_NBYTES = 32_000_000_000

SIZES = {
    "13B": Shape(hidden=5120, layers=31, heads=40, vocabulary=32000, sequence=1024, batch=8),
    "7B": Shape(hidden=4096, layers=25, heads=32, vocabulary=32000, sequence=1024, batch=8),
    "3B": Shape(hidden=2560, layers=28, heads=20, vocabulary=32000, sequence=1024, batch=16),
    "1B": Shape(hidden=2048, layers=14, heads=16, vocabulary=32000, sequence=1024, batch=16),
}
"""Largest first."""

_NBYTES_PER_PARAMETER = 2 + 2.125 + 4 + 2  # bf16 weights, residuals of the masters, bf16 moments, gradients


@dataclass(frozen=True)
class Trained:
    """Results of a few training steps.

    Attributes:
        teraflops: rate with 8 operations per parameter and token: 2 forward, 4 backward, 2 recomputed.
        seconds: median time of a step.
        peak_nbytes: peak of device memory.
    """

    numel: int
    teraflops: float
    seconds: float
    peak_nbytes: int


def numel(shape: Shape) -> int:
    """Counts the parameters: 16 H^2 per layer (4 of attention, 12 of the MLP), norms, embedding and head."""
    layer = 16 * shape.hidden**2 + 2 * shape.hidden
    return shape.layers * layer + shape.hidden * (2 * shape.vocabulary + 1)


def host_nbytes(shape: Shape) -> float:
    """Returns the bytes that a rank's host memory holds."""
    return numel(shape) * _NBYTES_PER_PARAMETER


def config(shape: Shape) -> dict[str, Any]:
    """Returns a config with parameters, optimizer (residual masters, bf16 moments) and block inputs on the host."""
    return {
        "train_micro_batch_size_per_gpu": shape.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "moments_dtype": "bf16"}},
        "data_types": {"master_weights": "residual"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
            "stage3_max_reuse_distance": 0,
        },
        "activation_checkpointing": {"wrap_blocks": True, "cpu_checkpointing": True},
    }


def train(shape: Shape, deadline: float) -> Trained:
    """Trains a model that is built shard by shard for a few steps.

    Args:
        deadline: value of time.monotonic after which no further step begins.
    """
    import zeroaccel

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, DEVICE_NBYTES / total))
    torch.manual_seed(0)
    # The device draws random numbers faster.
    with zeroaccel.zero.Init(config_dict_or_path=config(shape)), torch.device("cuda"):
        model = Decoder(shape)
    engine, *_ = zeroaccel.initialize(model, config=config(shape))
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.sequence + 1), device="cuda")
    times = []
    while len(times) < 2 or (len(times) < 5 and time.monotonic() + times[-1] < deadline):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        engine.backward(engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    seconds = sorted(times[1:])[len(times[1:]) // 2]
    operations = 8.0 * numel(shape) * shape.batch * shape.sequence
    return Trained(numel(shape), operations / seconds / 1e12, seconds, torch.cuda.max_memory_allocated())
