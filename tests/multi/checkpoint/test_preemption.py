"""Runs that get a stop signal: all ranks save after the same step, and resuming gives the bits of a whole run."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.conftest import Ranks
from tests.support.training import SGD, Toy, batches, config, offloaded, recording, train_step
from zeroaccel.comm.stop_notice import stop_notice
from zeroaccel.errors import Preempted
from zeroaccel.zero.step_boundary import StepBoundary

STEPS = 7
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0, "optimizer": SGD},
    "stage 1, fp16, accumulation": {"stage": 1, "precision": "fp16", "accumulation": 2},
    "stage 2, bf16, clipping": {"stage": 2, "precision": "bf16", "gradient_clipping": 0.5},
    "stage 3, SGD": {"stage": 3, "precision": "bf16", "optimizer": SGD},
    "stage 3, offload": {"stage": 3, "precision": "bf16", **offloaded(Path(), "cpu", "cpu")},
}


def attempt(case: str, root: Path | None, signals: dict[int, tuple[int, signal.Signals]]) -> tuple[int, dict[str, Any]]:
    """Runs one process: resumes, then trains to the end or until a stop signal; returns (step, results)."""
    settings = config(**CASES[case])
    if root is not None:
        settings["checkpoint"] = {"save_on_preemption": str(root)}
    torch.manual_seed(0)
    engine, *_ = zeroaccel.initialize(model=Toy(), config=settings, collectives=recording())
    rank, per_step = engine.collectives.rank, settings["gradient_accumulation_steps"]
    tokens = batches(rank, STEPS * per_step)
    losses: dict[int, float] = {}
    try:
        if root is not None and root.exists():
            engine.load_checkpoint(root)
        for micro in range(engine.global_steps * per_step, STEPS * per_step):
            who, number = signals.get(micro // per_step, (-1, signal.SIGTERM))
            if who == rank and micro % per_step == 0:
                os.kill(os.getpid(), number)
            loss = engine(tokens[micro])
            losses[micro] = loss.item()
            train_step(engine, loss)
        weights = {name: weight.clone() for name, weight in engine.iter_named_full_params()}
        return engine.global_steps, {"losses": losses, "weights": weights}
    except Preempted as left:
        return engine.global_steps, {"losses": losses, "end": (left.code, left.headline)}
    finally:
        engine.destroy()
        assert not stop_notice.received
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def preempted(case: str, root: Path, seed: int) -> tuple[list[int], dict[int, float], dict[str, Tensor]]:
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(STEPS - 1), 2))
    signals = {step: (draw.randrange(2), draw.choice([signal.SIGTERM, signal.SIGUSR1])) for step in steps}
    losses: dict[int, float] = {}
    reached = []
    while True:
        step, part = attempt(case, root, signals)
        losses |= part["losses"]
        if "weights" in part:
            assert reached == [step + 1 for step in steps]
            return reached, losses, part["weights"]
        assert part["end"] == (85, f"saved checkpoint {root} at step {step}")
        reached.append(step)
        signals.pop(step - 1)


@pytest.mark.parametrize(("seed", "case"), list(enumerate(CASES)))
def test_a_preempted_run_has_the_bits_of_an_uninterrupted_one(
    ranks: Ranks, tmp_path: Path, seed: int, case: str
) -> None:
    whole = ranks(2).run(attempt, case, None, {})
    resumed = ranks(2).run(preempted, case, tmp_path / "saved", seed)
    assert resumed[0][0] == resumed[1][0]
    for (_, expected), (_, losses, weights) in zip(whole, resumed, strict=True):
        assert losses == expected["losses"]
        assert weights.keys() == expected["weights"].keys()
        assert all(torch.equal(weight, expected["weights"][name]) for name, weight in weights.items())


def calls_of_a_run(root: Path, *, listens: bool) -> list[tuple[str, str]]:
    collectives = recording()
    changes = {"checkpoint": {"save_on_preemption": str(root)}} if listens else {}
    engine, *_ = zeroaccel.initialize(model=Toy(), config=config(2) | changes, collectives=collectives)
    for tokens in batches(engine.collectives.rank, 2):
        train_step(engine, engine(tokens))
    calls = [(call.op, call.label) for call in collectives.calls]
    engine.destroy()
    return calls


def test_listening_adds_no_collective(ranks: Ranks, tmp_path: Path) -> None:
    with_it = ranks(2).run(calls_of_a_run, tmp_path, listens=True)
    assert with_it == ranks(2).run(calls_of_a_run, tmp_path, listens=False)


def steps_until_stop(asked: int) -> tuple[int, list[str]]:
    """Trains with statistics that stay on the device, which this CPU run simulates; returns the steps and saves."""
    engine, *_ = zeroaccel.initialize(model=Toy(), config=config(2))
    boundary = engine._require_boundary("test")
    assert isinstance(boundary, StepBoundary)
    boundary._checks_on_device = True
    found: list[str] = []
    engine.when_preempted(lambda: found.append(f"step {engine.global_steps}"))
    for step, tokens in enumerate(batches(engine.collectives.rank, 6)):
        if step == asked and engine.collectives.rank == 1:
            stop_notice.give()
        train_step(engine, engine(tokens))
    engine.destroy()
    return engine.global_steps, found


def test_on_a_device_ranks_stop_one_step_later_and_once(ranks: Ranks) -> None:
    assert ranks(2).run(steps_until_stop, 2) == [(6, ["step 4"])] * 2
