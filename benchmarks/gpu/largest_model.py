"""Finds the largest decoder that trains in 32 GB of device memory with weights, masters and states on the host.

The claim is that of Ren et al. 2021, "ZeRO-Offload", section 6: 13e9 parameters on one GPU of 32 GB, at 30 TFLOPS
and more.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
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
        batch: sequences of a step.
        teraflops: rate with 6 operations per parameter and token, without those of recomputation.
        seconds: median time of a step.
        losses: of all steps with this batch.
        peak_nbytes: peak of device memory.
        host_nbytes: peak of the process's host memory, above that before the model.
        locked_nbytes: page-locked host memory.
    """

    numel: int
    batch: int
    teraflops: float
    seconds: float
    losses: list[float]
    peak_nbytes: int
    host_nbytes: int
    locked_nbytes: int


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


def train(chosen: Model, deadline: float, passed: Callable[[str], None]) -> Iterator[Trained]:
    """Trains a model that is built shard by shard for a few steps, then with two and four times its batch.

    A larger batch reads the weights of the host as often, so that the copies and the update cost less per token. The
    series ends when the memory of the device or of the host does.

    Args:
        deadline: value of time.monotonic after which no further step begins.
        passed: gets the name of each part of the start as it ends.
    """
    import zeroaccel
    from zeroaccel.offload import free_nbytes, locked_nbytes

    shape, before = chosen.shape, _host_peak()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, DEVICE_NBYTES / total))
    torch.manual_seed(0)
    # The device draws random numbers faster.
    with zeroaccel.zero.Init(config_dict_or_path=config(chosen)), torch.device("cuda"):
        model = Decoder(shape)
    passed("weights drawn")
    engine, *_ = zeroaccel.initialize(model, config=config(chosen))
    passed("initialize")
    seconds = 0.0
    for batch in (shape.batch, 2 * shape.batch, 4 * shape.batch):
        inputs_nbytes = 2 * shape.layers * shape.hidden * batch * shape.sequence  # of blocks, half of them new
        is_late = time.monotonic() + 4 * seconds > deadline  # two steps, each up to twice as long
        if seconds and (is_late or inputs_nbytes / 2 > 0.8 * free_nbytes()):
            return
        times: list[float] = []
        losses: list[float] = []
        tokens = torch.randint(shape.vocabulary, (batch, shape.sequence + 1), device="cuda")
        try:
            while len(times) < 2 or (len(times) < 5 and time.monotonic() + 1.5 * times[-1] < deadline):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                loss = engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
                engine.backward(loss)
                engine.step()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
                losses.append(loss.item())
                if not seconds and len(times) == 1:
                    passed("first step")
        except torch.OutOfMemoryError:
            if not seconds:
                raise
            return
        seconds = sorted(times[1:])[len(times[1:]) // 2]
        teraflops = 6e-12 * numel(shape) * batch * shape.sequence / seconds
        peaks = torch.cuda.max_memory_allocated(), _host_peak() - before, locked_nbytes()
        yield Trained(numel(shape), batch, teraflops, seconds, losses, *peaks)


def _host_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
