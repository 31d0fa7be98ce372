"""Checkpoints of offloaded states: saved and loaded like states in memory, from any tier to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoint_runs import Snapshot, assembled, make_engine, resume, save, train
from tests.support.pool import Ranks
from tests.support.training import batches, offloaded

TIERS = {"none": ("none", "none"), "cpu": ("cpu", "cpu"), "nvme": ("nvme", "nvme"), "mixed": ("none", "nvme")}


def _save_all(root: Path, swap: Path, cases: list[tuple[str, int, str]], **changes: Any) -> list[Snapshot]:
    return [
        save(root / tier, stage, precision, **offloaded(swap, *_tiers(tier, stage)), **changes)
        for tier, stage, precision in cases
    ]


def _resume_all(root: Path, swap: Path, cases: list[tuple[str, str, int, str]]) -> list[Snapshot]:
    return [
        resume(root / saved, f"{stage}-{precision}", stage, precision, **offloaded(swap, *_tiers(tier, stage)))
        for saved, tier, stage, precision in cases
    ]


def _tiers(name: str, stage: int) -> tuple[str, str]:
    states, params = TIERS[name]
    return states, params if stage == 3 else "none"


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 2), (2, 1)])
@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16"), (1, "fp32")])
def test_any_tier_to_any_other(
    ranks: Ranks, tmp_path: Path, saved_by: int, resumed_by: int, stage: int, precision: str
) -> None:
    names = list(TIERS) if stage == 3 else ["none", "nvme"]
    saves = ranks(saved_by).run(_save_all, tmp_path, tmp_path, [(tier, stage, precision) for tier in names])
    pairs = [("none", "nvme"), ("nvme", "none"), ("nvme", "nvme")]
    if stage == 3 and resumed_by == saved_by:
        pairs += [("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "mixed"), ("mixed", "none")]
    cases = [(saved, tier, stage, precision) for saved, tier in pairs]
    found = ranks(resumed_by).run(_resume_all, tmp_path, tmp_path, cases)
    expected = assembled([rank[0] for rank in saves])
    for rank in saves:
        for index, tier in enumerate(names):
            assert rank[index].losses == rank[0].losses, tier
    for index, pair in enumerate(pairs):
        got = assembled([rank[index] for rank in found])
        assert expected.keys() == got.keys(), pair
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == [], pair
        for rank in found:
            assert rank[index].losses == saves[0][0].losses, pair
            weights = rank[index].weights
            assert [n for n, value in weights.items() if not torch.equal(value, saves[0][0].weights[n])] == [], pair


def _during_training(root: Path, swap: Path) -> tuple[list[float], list[float]]:
    """Trains during a background save; returns its losses, and those of a run resumed from the checkpoint."""
    files = offloaded(swap, "nvme", "nvme")
    engine = make_engine(3, "bf16", checkpoint={"async_save": True}, **files)
    train(engine, batches(0, 2))
    engine.save_checkpoint(root, tag="two")
    losses = train(engine, batches(0, 4)[2:])
    engine.wait_for_checkpoint()
    engine.destroy()
    other = make_engine(3, "bf16", seed=5, **files)
    other.load_checkpoint(root, tag="two")
    again = train(other, batches(0, 4)[2:])
    other.destroy()
    return losses, again


def test_a_background_save_reads_the_tier_during_training(ranks: Ranks, tmp_path: Path) -> None:
    for losses, again in ranks(2).run(_during_training, tmp_path / "saved", tmp_path):
        assert losses == again


def _before_the_first_step(root: Path, swap: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loads a checkpoint without states into an engine that has states."""
    files = offloaded(swap, "nvme", "none")
    engine = make_engine(2, "bf16", **files)
    engine.save_checkpoint(root, tag="new")
    train(engine, batches(0, 2))
    first = {name: value.clone() for name, value in engine.iter_named_full_params()}
    engine.load_checkpoint(root, tag="new")
    train(engine, batches(0, 2))
    again = {name: value.clone() for name, value in engine.iter_named_full_params()}
    engine.destroy()
    return first, again


def test_a_checkpoint_without_states_takes_them_away(ranks: Ranks, tmp_path: Path) -> None:
    for first, again in ranks(2).run(_before_the_first_step, tmp_path / "saved", tmp_path):
        assert [name for name in first if not torch.equal(first[name], again[name])] == []
