"""A training job whose ranks diverge on purpose, a script for `test_engine_hangs.py`: ``... SCENARIO``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.environment import begin
from tests.support.training import Block, Toy, batches, config, train_step
from zeroaccel.engine import Engine


class TwoTowers(Toy):
    """A model in which each rank may take a different path."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"vision": Block(23), "sound": Block(23)})
        self.tower = "vision"

    def run_layers(self, x: Tensor) -> Tensor:
        return self.towers[self.tower](super().run_layers(x))


def train(engine: Engine, data: list[Tensor]) -> None:
    for batch in data:
        train_step(engine, engine(batch))


def branches(engine: Engine, data: list[Tensor]) -> None:
    train(engine, data[:2])
    engine.module.tower = "sound" if engine.collectives.rank == 1 else "vision"
    train(engine, data[2:])


def fewer_batches(engine: Engine, data: list[Tensor]) -> None:
    train(engine, data[:-1] if engine.collectives.rank == 1 else data)
    engine.collectives.barrier("end of epoch")


def eval_on_rank_0(engine: Engine, data: list[Tensor]) -> None:
    train(engine, data[:2])
    if engine.collectives.rank == 0:
        engine.eval()
        with torch.no_grad():
            engine(data[0])
        engine.train()
    train(engine, data[2:])


def wrong_loss_on_one(engine: Engine, data: list[Tensor]) -> None:
    train(engine, data[:2])
    loss = engine(data[2])
    train_step(engine, loss.detach() if engine.collectives.rank == 1 else loss)


SCENARIOS: dict[str, Callable[[Engine, list[Tensor]], None]] = {
    function.__name__: function for function in (branches, fewer_batches, eval_on_rank_0, wrong_loss_on_one)
}


if __name__ == "__main__":
    torch.manual_seed(7)
    job, *_ = zeroaccel.initialize(TwoTowers(), config=config(int(sys.argv[2]), "bf16"))
    first, *others = batches(job.collectives.rank, 5)
    train(job, [first])
    begin()
    try:
        SCENARIOS[sys.argv[1]](job, others)
    finally:
        print(f"rank {job.collectives.rank} cleaned up", flush=True)
