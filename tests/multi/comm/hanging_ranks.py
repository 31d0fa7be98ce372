"""A job whose ranks diverge on purpose, a script for `test_comm_hangs.py`: ``hanging_ranks.py SCENARIO``."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import zeroaccel
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.hierarchical import arrange
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config import comm_plan, load_config, shard_plan
from zeroaccel.errors import CollectiveError
from zeroaccel.zero import GatheredParameters

PART = 1000


class Layers:
    """Communicates as a model does: one gather and one reduction per layer."""

    def __init__(self) -> None:
        self.collectives = Collectives(init_process_group())
        self.rank, self.world_size = self.collectives.rank, self.collectives.world_size

    def unshard(self, name: str, part: int = PART) -> None:
        self.collectives.flight_recorder.phase = "forward"
        self.collectives.all_gather(torch.empty(part * self.world_size), torch.ones(part), f"unshard {name}").wait()

    def reduce(self, name: str) -> None:
        self.collectives.flight_recorder.phase = "backward"
        flat = torch.ones(PART * self.world_size)
        self.collectives.reduce_scatter(torch.empty(PART), flat, f"reduce {name}", 1 / self.world_size).wait()

    def step(self, number: int) -> None:
        self.collectives.flight_recorder.step = number
        self.unshard("layers.0")
        self.unshard("layers.1")
        self.reduce("layers.1")
        self.reduce("layers.0")


def branches(model: Layers) -> None:
    model.step(0)
    model.unshard("layers.0")
    if model.rank == 0:
        model.unshard("vision_tower")
    else:
        model.unshard("layers.1")


def kinds(model: Layers) -> None:
    model.step(0)
    if model.rank == 0:
        model.collectives.barrier("save checkpoint")
    else:
        model.step(1)


def fewer_batches(model: Layers) -> None:
    for number in range(3 if model.rank == model.world_size - 1 else 4):
        model.step(number)


def fewer_batches_on_first(model: Layers) -> None:
    for number in range(3 if model.rank == 0 else 4):
        model.step(number)


def sleeping(model: Layers) -> None:
    model.step(0)
    if model.rank == 1:
        evaluate()
    model.step(1)


def evaluate() -> None:
    time.sleep(600)


def exception(model: Layers) -> None:
    model.step(0)
    if model.rank == 1:
        raise ValueError("batch 7 has no labels")
    model.step(1)


def agreement(model: Layers) -> None:
    model.step(0)
    if model.rank == 0:
        with agreed(model.collectives, "read the labels"):
            raise KeyError("batch 7 has no labels")
    model.step(1)


def gathered_block(model: Layers) -> None:
    """Raises on rank 0 inside `GatheredParameters`, where the other ranks run a forward."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": model.world_size, "zero_optimization": stage}
    engine, *_ = zeroaccel.initialize(net, config=config, collectives=model.collectives)
    weight = engine.module[0].weight
    with torch.no_grad(), GatheredParameters(weight, modifier_rank=0):
        if model.rank == 0:
            weight.copy_(torch.ones(3, 3))
        engine(torch.ones(1, 8))


def killed(model: Layers) -> None:
    model.step(0)
    if model.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model.step(1)


def killed_first(model: Layers) -> None:
    model.step(0)
    if model.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    model.step(1)


def sizes(model: Layers) -> None:
    model.step(0)
    model.unshard("layers.0", part=PART + model.rank)


def foreign_barrier(model: Layers) -> None:
    model.step(0)
    if model.rank == 1:
        torch.distributed.barrier()
    model.step(1)


def broadcast(model: Layers) -> None:
    model.step(0)
    if model.rank == 0:
        time.sleep(600)
    model.collectives.broadcast(torch.ones(PART), 0, "initial weights")


def device(model: Layers) -> None:
    """Starts a gather that never completes and does not block the host, as on an accelerator."""
    model.step(0)
    if model.rank == 0:
        flight_recorder = model.collectives.flight_recorder
        flight_recorder.probe = (
            flight_recorder.issue("gather", "all_gather", "unshard layers.0", PART, "bfloat16"),
            lambda: False,
        )
    time.sleep(600)


def two_hops(model: Layers) -> None:
    """Issues 4-bit reductions, which run on a separate thread."""
    zero = {"stage": 3, "zero_quantized_gradients": True, "zeropp": {"node_size": 1}}
    settings = load_config({"train_batch_size": model.world_size, "zero_optimization": zero})
    model.collectives = arrange(model.collectives, comm_plan(settings, shard_plan(settings), model.world_size))
    model.reduce("layers.1")
    model.reduce("layers.0" if model.rank else "vision_tower")


def stubborn(model: Layers) -> None:
    try:
        branches(model)
    except CollectiveError:
        print(f"rank {model.rank} goes on", flush=True)
        time.sleep(600)


def orderly(model: Layers) -> None:
    model.step(0)
    model.step(1)


def first_leaves_early(model: Layers) -> None:
    model.step(0)
    time.sleep(3.0 * model.rank)


if __name__ == "__main__":
    job = Layers()
    print(f"begins {time.time()}", flush=True)
    try:
        globals()[sys.argv[1]](job)
    finally:
        print(f"rank {job.rank} cleaned up", flush=True)
