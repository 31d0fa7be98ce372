"""Host updates during the last backward, before the norm is known: the bits, and everything that drops them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroaccel
import zeroaccel.zero
from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Run, Toy, batches, config, differences, finished, offloaded
from zeroaccel.engine import Engine

CLIP = 21.0  # bites in some of the steps
FP16 = {"enabled": True, "initial_scale_power": 11, "loss_scale_window": 1, "hysteresis": 1}
BF16 = {"bf16": {"enabled": True}}
LION = {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}
CASES: dict[str, dict[str, Any]] = {
    "bf16 AdamW": {**BF16, "optimizer": ADAMW},
    "fp32 SGD": {"optimizer": SGD, "accumulation": 3},
    "fp16 Lion": {"fp16": FP16, "optimizer": LION},
    "fp16 AdamW": {"fp16": FP16, "optimizer": ADAMW, "accumulation": 3},
    "bf16 SGD without momentum": {**BF16, "optimizer": {"type": "SGD", "params": {"lr": 0.05}}},
    "fp32 RMSprop": {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9, "centered": True}}},
    "bf16 Adagrad": {**BF16, "optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
    "bf16 AdamW int8": {**BF16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "moments_dtype": "int8"}}},
}


def _settings(folder: Path, during: str, stage: int, param: str = "none", **changes: Any) -> dict[str, Any]:
    spare = {"spare_budget": changes.pop("spare_budget")} if "spare_budget" in changes else {}
    keys = offloaded(folder, "cpu", param, update_during=during, **(spare if during == "backward" else {}))
    changes = {"gradient_clipping": CLIP, "stage3_param_persistence_threshold": 30, **keys, **changes}
    return config(stage, accumulation=changes.pop("accumulation", 1), **changes)


def _make(settings: dict[str, Any]) -> Engine:
    torch.manual_seed(7)
    return zeroaccel.initialize(Toy(), config=settings)[0]


Between = Callable[[Engine, int], object]


def _nothing(engine: Engine, step: int) -> None:
    return None


def _train(settings: dict[str, Any], steps: int, between: Between = _nothing) -> tuple[Run, list[float]]:
    """Trains; `between` is called between the last backward of a step and `step()`.

    Returns:
        The run, and the share of the elements that each step's early updates kept.
    """
    engine, run, shares = _make(settings), Run(), []
    optimizer = engine.sharded_optimizer
    assert optimizer is not None
    for number, batch in enumerate(batches(engine.collectives.rank, steps * engine.gradient_accumulation_steps())):
        loss = engine(batch)
        engine.backward(loss)
        run.losses.append(loss.item())
        before, is_boundary = optimizer.kept_numel, engine.is_gradient_accumulation_boundary()
        if is_boundary:
            between(engine, number)
        engine.step()
        if optimizer.early_numel and is_boundary:
            shares.append((optimizer.kept_numel - before) / sum(buffer.own.numel for buffer in optimizer.buffers))
        run.norms.append(engine.get_global_grad_norm())
    run.skipped = engine.skipped_steps
    return finished(engine, run), shares


def _compare(pairs: list[tuple[Any, Any]], steps: int, between: Between = _nothing) -> list[tuple[Any, ...]]:
    found = []
    for expected, got in pairs:
        (one, none), (other, shares) = _train(expected, steps, between), _train(got, steps, between)
        assert none == []
        found.append((differences(one, other), shares, other.skipped))
    return found


def _pairs(folder: Path, tiers: list[tuple[int, str]], **case: Any) -> list[tuple[Any, Any]]:
    return [tuple(_settings(folder, during, *tier, **case) for during in ("step", "backward")) for tier in tiers]


QUICK = [("bf16 AdamW", 1), ("fp32 SGD", 2), ("fp16 Lion", 1), ("fp16 AdamW", 2)]


@pytest.mark.parametrize(
    ("name", "world"),
    [*QUICK, *(pytest.param(n, w, marks=pytest.mark.slow) for n in CASES for w in (1, 2, 3) if (n, w) not in QUICK)],
)
def test_an_update_in_the_backward_gives_the_same_bits(ranks: Ranks, tmp_path: Path, name: str, world: int) -> None:
    tiers = [(1, "none"), (2, "none"), (3, "none"), (3, "cpu")]
    for found in ranks(world).run(_compare, _pairs(tmp_path, tiers, **CASES[name]), 6, timeout=120):
        for tier, (told, shares, skipped) in zip(tiers, found, strict=True):
            assert told == [], tier
            assert (0 < skipped < 6) == ("fp16" in name), skipped
            assert {0.0, 1.0} == set(shares), shares  # some steps clip, others do not
