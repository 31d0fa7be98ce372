"""One contender of `offload.py adam` in a separate process: runs steps on request and prints their seconds.

    python benchmarks/host_adam.py CONTENDER NUMEL THREADS

Reads a number of steps per line from standard input and prints a JSON list of their seconds. A step takes a bf16
gradient, multiplies it by a factor, updates float32 masters and two moments, and writes bf16 weights. If an optimizer
does not upcast, scale and downcast itself, the contender does so around it: in plain torch code, or, in the contenders
called "kept buffers", into a float32 gradient that stays allocated. Only zeroaccel's own contenders import the project,
because DeepSpeed's contender runs in another environment.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], Any]

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SCALE = 0.5
BYTES_PER_ELEMENT = {"adam": 28, "triad": 12}
"""Bytes per element. Adam reads gradient 2, writes weight 2, and reads and writes master and two moments, 4 each.
Triad: two read, one written."""
FETCHED_BYTES_PER_ELEMENT = {"adam": 30, "triad": 16}
"""The same, plus the cache lines that a processor reads before it overwrites them."""


def own(numel: int, **options: Any) -> Step:
    from zeroaccel.ops.elementwise import CPUAdam

    master, grad, weight = _tensors(numel)
    optimizer = CPUAdam([master], **SETTINGS, **options)
    group = optimizer.param_groups[0]
    return lambda: optimizer.step_shard(group, master, grad, grad_scale=SCALE, out=weight)


def residual(numel: int, *, tiles: bool, **options: Any) -> Step:
    """Returns a step of residual masters: join, update and split by tiles in one pass, or by 2^20 masters in three."""
    from zeroaccel.ops.elementwise import CPUAdam
    from zeroaccel.ops.residual import SplitMasters, join, split, ties_nbytes

    master, grad, weight = _tensors(numel)
    weight.copy_(master)
    residuals, ties = torch.empty(numel, dtype=torch.int16), torch.zeros(ties_nbytes(numel), dtype=torch.uint8)
    split(master, residuals, ties)
    limit = numel if tiles else 1 << 20
    parts = [slice(start, min(start + limit, numel)) for start in range(0, numel, limit)]
    scratch = torch.empty(0 if tiles else limit)
    values = [torch.zeros(()).expand(numel)] if tiles else [scratch[: span.stop - span.start] for span in parts]
    params = [torch.nn.Parameter(value) for value in values]
    optimizer = CPUAdam(params, **SETTINGS, **options)
    group = optimizer.param_groups[0]

    def step() -> None:
        for span, param in zip(parts, params, strict=True):
            new, rest, bits = weight[span], residuals[span], ties[span.start // 8 : -(-span.stop // 8)]
            if tiles:
                cut = SplitMasters(new, rest, bits)
                optimizer.step_shard(group, param, grad[span], grad_scale=SCALE, out=new, parts=cut)
                continue
            join(new, rest, bits, param.detach())
            optimizer.step_shard(group, param, grad[span], grad_scale=SCALE, out=new)
            split(param.detach(), rest, bits)

    return step


def around(numel: int, make: Callable[[list[Tensor]], torch.optim.Optimizer], *, keep: bool) -> Step:
    """Returns a step: upcast and scale, `make`'s optimizer, downcast."""
    master, grad, weight = _tensors(numel)
    master = torch.nn.Parameter(master)
    kept = torch.empty_like(master)
    optimizer = make([master])

    def step() -> None:
        master.grad = (kept.copy_(grad) if keep else grad.float()).mul_(SCALE)
        optimizer.step()
        weight.copy_(master.detach())
        master.grad = None

    return step


def alone(numel: int, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Step:
    """Returns a step of `make`'s optimizer alone, on a float32 gradient."""
    master, grad, _ = _tensors(numel)
    master = torch.nn.Parameter(master)
    master.grad = grad.float()
    return make([master]).step


def deepspeed(params: list[Tensor]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **SETTINGS)


def fused(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **SETTINGS)


def unfused(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, foreach=False, **SETTINGS)


def triad(numel: int) -> Step:
    """Returns a = b + s * c over float32, compiled like the optimizer's kernel, on the same threads."""
    import numba
    import numpy as np

    from zeroaccel.ops.dispatch import in_spans

    @numba.njit(nogil=True)
    def kernel(a: Any, b: Any, c: Any, s: Any) -> None:
        for i in range(a.size):
            a[i] = b[i] + s * c[i]

    a, b, c = (np.ones(numel, np.float32) for _ in range(3))
    factor = np.float32(3.0)
    return lambda: in_spans(numel, lambda start, end: kernel(a[start:end], b[start:end], c[start:end], factor))


def _tensors(numel: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(numel, generator=generator).mul_(0.02)
    grad = torch.randn(numel, generator=generator).mul_(1e-3).bfloat16()
    return master, grad, torch.zeros(numel, dtype=torch.bfloat16)


CONTENDERS: dict[str, Callable[[int], Step]] = {
    "zeroaccel": own,
    "zeroaccel, bf16 moments": lambda numel: own(numel, moments_dtype="bf16"),
    "zeroaccel, 8-bit moments": lambda numel: own(numel, moments_dtype="int8"),
    "zeroaccel, residual masters, one pass": lambda numel: residual(numel, tiles=True),
    "zeroaccel, residual masters, three passes": lambda numel: residual(numel, tiles=False),
    "zeroaccel, residual masters and 8-bit moments, one pass": lambda numel: residual(
        numel, tiles=True, moments_dtype="int8"
    ),
    "zeroaccel, residual masters and 8-bit moments, three passes": lambda numel: residual(
        numel, tiles=False, moments_dtype="int8"
    ),
    "deepspeed": lambda numel: around(numel, deepspeed, keep=False),
    "deepspeed, kept buffers": lambda numel: around(numel, deepspeed, keep=True),
    "torch fused": lambda numel: around(numel, fused, keep=False),
    "torch fused, kept buffers": lambda numel: around(numel, fused, keep=True),
    "torch unfused": lambda numel: around(numel, unfused, keep=True),
    "torch unfused, update only": lambda numel: alone(numel, unfused),
    "triad": triad,
}


def main(name: str, numel: int, threads: int) -> None:
    torch.set_num_threads(threads)
    with torch.no_grad():
        step = CONTENDERS[name](numel)
        for _ in range(2):
            step()
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            seconds = []
            for _ in range(int(line)):
                start = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
            print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
