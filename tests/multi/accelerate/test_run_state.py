"""A run that is interrupted anywhere and resumed has the bits of an uninterrupted run, at every stage."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, config, train_step
from zeroaccel.accelerate.run_state import RunParts, load_run, save_run
from zeroaccel.data import prepare_data_loader
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.seeds import set_seed, synchronize_rng_states

STEPS = 9  # micro-steps; 5 per epoch and rank, so an epoch ends within the run


class Average:
    """A user's object whose state holds plain data, a tensor and an infinite number."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "mean": torch.zeros(3), "best": float("inf"), "pair": (1, "x")}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Model(nn.Module):
    """A model that draws random numbers in training, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 11), nn.Dropout(0.3), nn.Tanh(), nn.Linear(11, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Run:
    """A manual training run: shuffled data, accumulation over two micro-steps, a schedule, two loaders."""

    def __init__(self, stage: int, optimizer: dict[str, Any], seed: int = 3) -> None:
        set_seed(seed, device_specific=False)
        model = Model()
        scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
        settings = config(stage, accumulation=2, optimizer=optimizer, scheduler=scheduler)
        self.engine = zeroaccel.initialize(model, config=settings)[0]
        data = torch.randn(37, 7, generator=torch.Generator().manual_seed(1))
        collectives = self.engine.collectives
        set_seed(seed, device_specific=True)
        self.train = prepare_data_loader(DataLoader(data, 4, shuffle=True), collectives=collectives)
        self.test = prepare_data_loader(DataLoader(data[:6], 3), collectives=collectives)
        self.average = Average()
        self.parts = RunParts([self.engine], [], [self.train, self.test], [self.average], {"micro": 0}, iteration=4)
        self.losses: list[float] = []

    def go(self, until: int, save: tuple[int, Path] | None = None) -> None:
        """Runs micro-steps up to `until`, epoch after epoch, and saves at the given micro-steps."""
        while self.parts.counters["micro"] < until:
            for batch in self.train:
                self.losses.append(
                    train_step(self.engine, self.engine(batch + 0.1 * random.random() + 0.1 * float(np.random.rand())))
                )
                self.average.state["count"] += 1
                self.average.state["mean"] += batch.mean()
                self.parts.counters["micro"] += 1
                if save is not None and self.parts.counters["micro"] == save[0]:
                    save_run(save[1], self.parts, self.engine.collectives, torch.device("cpu"))
                if self.parts.counters["micro"] >= until:
                    break

    def result(self) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
        self.engine.destroy()
        weights = {name: p.detach().clone() for name, p in self.engine.module.named_parameters()}
        return self.losses, weights, self.average.state


def _interrupted(folder: str, stage: int, optimizer: dict[str, Any], at: int) -> dict[str, bool]:
    whole = Run(stage, optimizer)
    whole.go(STEPS, (at, Path(folder)))
    losses, weights, average = whole.result()
    resumed = Run(stage, optimizer, seed=99)  # other weights and random numbers: the state must restore them all
    resumed.go(1)
    resumed.engine.reset()
    resumed.losses.clear()
    iteration = load_run(folder, resumed.parts, resumed.engine.collectives, torch.device("cpu"))
    resumed.go(STEPS)
    again, theirs, other = resumed.result()
    return {
        "iteration": iteration == 4,
        "losses": again == losses[at:],
        "weights": all(torch.equal(weights[name], theirs[name]) for name in weights),
        "objects": other["count"] == average["count"] and torch.equal(other["mean"], average["mean"]),
        "plain": (other["best"], other["pair"]) == (float("inf"), (1, "x")),
    }


@pytest.mark.parametrize(
    ("stage", "optimizer", "at"), [(0, ADAMW, 2), (1, SGD, 4), (2, ADAMW, 6), (3, SGD, 4), (3, ADAMW, 8)]
)
def test_a_resumed_run_is_the_uninterrupted_one(
    ranks: Ranks, tmp_path: Path, stage: int, optimizer: dict[str, Any], at: int
) -> None:
    for rank in ranks(2).run(_interrupted, str(tmp_path / "state"), stage, optimizer, at):
        assert all(rank.values()), rank
    files = {path.name for path in (tmp_path / "state").iterdir()}
    assert {"run_state.json", "run_state_rank00000.safetensors", "run_state_rank00001.safetensors"} <= files
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".bin", ".pt", ".pth")]


def _save(folder: str, at: int) -> None:
    run = Run(1, ADAMW)
    run.go(at, (at, Path(folder)))
    run.engine.destroy()


def _load(folder: str) -> tuple[int, int, int]:
    run = Run(3, ADAMW)
    load_run(folder, run.parts, run.engine.collectives, torch.device("cpu"))
    run.go(6)
    run.engine.destroy()
    return run.engine.global_steps, run.train.epoch, run.train.batches_given


def _refusal(run: Run, call: Callable[..., object], folder: str) -> str:
    try:
        call(folder, run.parts, run.engine.collectives, torch.device("cpu"))
    except (CheckpointError, UsageError) as error:
        return str(error)
    finally:
        run.engine.destroy()
    return "it was taken"


def _refused(folder: str, objects: int = 1) -> str:
    """Returns the error message of loading instead of raising it, because a rank that fails ends the pool."""
    run = Run(3, ADAMW)
    run.parts.objects = [Average() for _ in range(objects)]
    return _refusal(run, load_run, folder)


def test_another_number_of_ranks_takes_over(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_save, str(tmp_path), 2)  # 16 samples, which are 4 batches on one rank
    (alone,) = ranks(1).run(_load, str(tmp_path))
    assert alone == (3, 0, 8)


def test_a_state_that_does_not_fit_or_is_damaged_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    pool = ranks(2)
    folder = tmp_path / "state"
    pool.run(_save, str(folder), 2)
    for spoil, objects, message in (
        (lambda: None, 2, "number of objects registered for checkpointing: expected 2.*got 1"),
        (lambda: _flip(folder / "run_state_rank00001.safetensors"), 1, "run_state_rank00001.safetensors: damaged"),
        (lambda: (folder / "run_state.json").write_text('{"version": 7}'), 1, "version: expected 1, got 7"),
        (lambda: (folder / "run_state.json").unlink(), 1, "no complete state.*save_state writes last"),
    ):
        spoil()
        zero, one = pool.run(_refused, str(folder), objects)
        assert re.search(message, zero, flags=re.DOTALL), zero
        assert re.search(message, one, flags=re.DOTALL), one


def _unsaved(folder: str) -> str:
    run = Run(2, ADAMW)
    run.average.state["made"] = object()
    return _refusal(run, save_run, folder)


def test_values_that_cannot_be_saved_are_named_and_nothing_is_written(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(2).run(_unsaved, str(tmp_path / "state")):
        assert re.search(r"state of object 0 \(Average\)\['made'\].*builtins.object", told), told
    assert not (tmp_path / "state").exists()


def _synchronized() -> tuple[list[float], list[float]]:
    set_seed(5, device_specific=True)
    own = torch.Generator().manual_seed(torch.distributed.get_rank())

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item(), torch.rand((), generator=own).item()]

    before = draw()
    synchronize_rng_states(["python", "numpy", "torch", "generator"], own)
    return before, draw()


def test_random_numbers_differ_by_rank_until_they_are_synchronized(ranks: Ranks) -> None:
    (before_0, after_0), (before_1, after_1) = ranks(2).run(_synchronized)
    assert all(one != other for one, other in zip(before_0, before_1, strict=True))
    assert after_0 == after_1


def test_the_manifest_is_readable(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_save, str(tmp_path), 2)
    manifest = json.loads((tmp_path / "run_state.json").read_text())
    assert (manifest["world_size"], manifest["iteration"], manifest["counts"]["dataloaders"]) == (2, 4, 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
