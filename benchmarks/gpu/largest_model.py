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


@dataclass(frozen=True)
class Model:
    """A model, and the form of its optimizer's states on the host.

    Attributes:
        moments: dtype of the moments.
        residuals: True for masters as residuals of the bf16 weights.
    """

    shape: Shape
    moments: str = "fp32"
    residuals: bool = False


def _shape(hidden: int, layers: int, batch: int = 8) -> Shape:
    return Shape(hidden=hidden, layers=layers, heads=hidden // 128, vocabulary=32000, sequence=1024, batch=batch)


MODELS = {
    "13B, residual masters, int8 moments": Model(_shape(5120, 31), "int8", residuals=True),
    "11B, int8 moments": Model(_shape(5120, 26), "int8"),
    "7B, int8 moments": Model(_shape(4096, 25), "int8"),
    "7B, float32 states": Model(_shape(4096, 25)),
    "1B, int8 moments": Model(_shape(2048, 14, 16), "int8"),
    "1B, float32 states": Model(_shape(2048, 14, 16)),
    "13B, residual masters, bf16 moments": Model(_shape(5120, 31), "bf16", residuals=True),
    "7B, residual masters, bf16 moments": Model(_shape(4096, 25), "bf16", residuals=True),
    "3B, residual masters, bf16 moments": Model(_shape(2560, 28, 16), "bf16", residuals=True),
    "1B, residual masters, bf16 moments": Model(_shape(2048, 14, 16), "bf16", residuals=True),
}
"""By name; those of one form of states largest first."""

_NBYTES_OF_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0625}


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


def host_nbytes(model: Model) -> float:
    """Returns the bytes that a rank's host memory holds: bf16 weights and gradients, masters, moments."""
    masters = 2.125 if model.residuals else 4.0
    return numel(model.shape) * (2 + 2 + masters + _NBYTES_OF_MOMENTS[model.moments])


def config(model: Model) -> dict[str, Any]:
    """Returns a config with parameters, optimizer and block inputs on the host."""
    shape = model.shape
    return {
        "train_micro_batch_size_per_gpu": shape.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "moments_dtype": model.moments}},
        **({"data_types": {"master_weights": "residual"}} if model.residuals else {}),
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
            "stage3_max_reuse_distance": 0,
        },
        "activation_checkpointing": {"wrap_blocks": True, "cpu_checkpointing": True},
    }


def train(chosen: Model, deadline: float) -> Trained:
    """Trains a model that is built shard by shard for a few steps.

    Args:
        deadline: value of time.monotonic after which no further step begins.
    """
    import zeroaccel

    shape = chosen.shape
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, DEVICE_NBYTES / total))
    torch.manual_seed(0)
    # The device draws random numbers faster.
    with zeroaccel.zero.Init(config_dict_or_path=config(chosen)), torch.device("cuda"):
        model = Decoder(shape)
    engine, *_ = zeroaccel.initialize(model, config=config(chosen))
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
