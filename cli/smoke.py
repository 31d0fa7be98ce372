"""A small job for `zeroaccel test` and `doctor`: trains at every stage and compares, or measures the network.

`launch` runs it as a module on every rank; rank 0 prints one JSON line per result. It trains a model of a few thousand
parameters for three steps at each stage and tier; sharding and offload must reproduce stage 0's losses to the bit.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import destroy, init_process_group
from zeroaccel.initialization import initialize

PLANS: tuple[tuple[int, str, str], ...] = (
    (0, "none", "none"),
    (1, "none", "none"),
    (2, "none", "none"),
    (3, "none", "none"),
    (2, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "nvme"),
)
"""(stage, tier of the optimizer states, tier of the parameters' shards)."""

_STEPS, _BATCH, _WIDTH = 3, 4, 64
_MESSAGE_NUMEL = 1 << 23  # 32 MiB in fp32
_ROUNDS = 5


def train(stage: int, optimizer: str, param: str, folder: str) -> list[str]:
    """Returns the losses of a few steps of a fixed training as hexadecimal, to the last bit. (all ranks)"""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)) for _ in range(3)]
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
    for name, tier in (("offload_optimizer", optimizer), ("offload_param", param)):
        if tier != "none":
            zero[name] = {"device": tier, "nvme_path": folder} if tier == "nvme" else {"device": tier}
    config = {
        "train_micro_batch_size_per_gpu": _BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }
    engine, *_ = initialize(model=nn.Sequential(*layers), config=config)
    device = next(engine.parameters()).device
    torch.manual_seed(1 + engine.collectives.rank)
    losses = []
    for _ in range(_STEPS):
        x = torch.randn(_BATCH, _WIDTH).to(device)
        loss = F.mse_loss(engine(x), x.flip(-1))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss).hex())
    engine.destroy()
    return losses


def results() -> Iterator[dict[str, Any]]:
    """Yields one result per plan: its losses, and "same" if they equal those of the first. (all ranks)"""
    reference: list[str] = []
    with tempfile.TemporaryDirectory(prefix="zeroaccel-test-") as folder:
        for stage, optimizer, param in PLANS:
            start = time.perf_counter()
            plan = {"stage": stage, "optimizer": optimizer, "param": param}
            try:
                losses = train(stage, optimizer, param, folder)
            except Exception as error:
                yield {**plan, "error": f"{type(error).__name__}: {error}"}
                return  # the ranks may have diverged
            reference = reference or losses
            yield {**plan, "same": losses == reference, "losses": losses, "seconds": time.perf_counter() - start}


def speeds() -> dict[str, float]:
    """Measures bytes per second of a gather and a reduction of 32 MiB on this rank, the best of a few. (all ranks)"""
    topology = init_process_group()
    collectives = Collectives(topology)
    shard = torch.ones(_MESSAGE_NUMEL // topology.world_size, device=topology.device)
    gathered = torch.ones(shard.numel() * topology.world_size, device=topology.device)
    best: dict[str, float] = {"all_gather": 0.0, "reduce_scatter": 0.0}
    moved = gathered.nbytes - shard.nbytes
    for _ in range(_ROUNDS):
        for name in best:
            collectives.barrier("measure")
            start = time.perf_counter()
            if name == "all_gather":
                collectives.all_gather(gathered, shard, "measure").wait()
            else:
                collectives.reduce_scatter(shard, gathered, "measure").wait()
            if topology.device.type != "cpu":
                torch.get_device_module(topology.device).synchronize()
            best[name] = max(best[name], moved / (time.perf_counter() - start))
    return best


def main() -> None:
    """Measures with `speeds` as the first argument; otherwise tries every plan."""
    topology = init_process_group()
    for result in [speeds()] if sys.argv[1:] == ["speeds"] else results():
        if topology.rank == 0:
            print(json.dumps(result), flush=True)
    destroy()


if __name__ == "__main__":
    main()
