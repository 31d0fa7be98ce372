"""Optimizers whose rules need full tensors: owner ranks step them, with equal results for every stage, tier and size.

The reference is the optimizer itself on the unsharded model, in a plain loop that gets the same reduced gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
import zeroaccel.zero
from tests.multi.optim.test_coupled_optimizers import against_torch
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import Run, Toy, batches, config, differences, offloaded, recording, train, train_step
from zeroaccel.errors import ConfigError
from zeroaccel.zero.access.safe_get_set import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

STAGES = (0, 1, 2, 3)


class Lars(torch.optim.Optimizer):
    """Momentum SGD with a rate per tensor (You et al. 2017, arXiv:1708.03888), which counts its calls."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "step": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                trust = (param.norm() / (param.grad.norm() + 1e-3)).clamp(0.1, 2.0)
                state["momentum_buffer"].mul_(group["momentum"]).add_(param.grad * trust)
                param.sub_(state["momentum_buffer"] * (group["lr"] / group["step"]))


class Factored(torch.optim.Optimizer):
    """Second moments by rows and columns for matrices of more than 64 elements, and a preconditioner."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group["lr"])

    def _update(self, param: Tensor, grad: Tensor, lr: float) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"] = torch.zeros_like(param)
            if param.dim() == 2 and param.numel() > 64:
                state["rows"], state["columns"] = param.new_zeros(len(param)), param.new_zeros(param.shape[1])
                state["factors"] = [torch.eye(param.shape[1])]
            else:
                state["square"] = torch.zeros_like(param)
        state["step"] += 1
        square = grad.square() + 1e-12
        if "rows" in state:
            state["rows"].mul_(0.9).add_(0.1 * square.mean(1))
            state["columns"].mul_(0.9).add_(0.1 * square.mean(0))
            state["factors"][0].mul_(0.9).add_(grad.T @ grad)
            estimate = torch.outer(state["rows"], state["columns"]) / state["rows"].mean()
            grad = grad @ (state["factors"][0] / state["factors"][0].norm())
        else:
            estimate = state["square"].mul_(0.9).add_(0.1 * square)
        state["mean"].mul_(0.9).add_(0.1 * grad / estimate.sqrt())
        param.sub_(lr * state["mean"])


RULES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "lars": Lars,
    "factored": Factored,
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.02, weight_decay=0.01),
}


def _settings(stage: int, precision: str, accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    return config(stage, precision, accumulation, optimizer=None, **changes)


def _run(stage: int, rule: str, precision: str, accumulation: int, changes: dict[str, Any], steps: int = 5) -> Run:
    settings = _settings(stage, precision, accumulation, gradient_clipping=0.5, **changes)
    return train(settings, steps, optimizer=RULES[rule], optimizer_kind="per_tensor")


def _plain(rule: str) -> tuple[Run, Run]:
    return against_torch(RULES[rule], _settings(1, "fp32"), 5, ("frozen", "nothing"), optimizer_kind="per_tensor")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_bits_are_those_of_torch_on_the_unsharded_model(ranks: Ranks, rule: str, world_size: int) -> None:
    for ours, theirs in ranks(world_size).run(_plain, rule):
        assert differences(ours, theirs) == []


@pytest.mark.parametrize(
    ("precision", "accumulation"),
    [pytest.param("fp32", 1, marks=pytest.mark.slow), ("bf16", 3), ("fp16", 1)],
)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_stages_give_the_same_bits(ranks: Ranks, rule: str, precision: str, accumulation: int) -> None:
    pairs = [(0, 1), (2, 3)] if accumulation > 1 else [(0, 1), (0, 2), (0, 3)]
    runs = {stage: ranks(3).run(_run, stage, rule, precision, accumulation, {}) for stage in STAGES}
    for one, other in pairs:
        for ours, theirs in zip(runs[one], runs[other], strict=True):
            assert differences(ours, theirs) == []


@pytest.mark.parametrize("rule", sorted(RULES))
def test_tiers_give_the_same_bits(ranks: Ranks, rule: str, tmp_path: Path) -> None:
    settled = ranks(2).run(_run, 3, rule, "bf16", 1, {})
    for stage, *tiers, masters in [
        (2, "cpu", "none", "fp32"),
        (1, "nvme", "none", "fp32"),
        (3, "nvme", "nvme", "fp32"),
        (3, "cpu", "cpu", "residual"),
        (2, "nvme", "none", "residual"),
    ]:
        changes = {**offloaded(tmp_path, *tiers), "data_types": {"master_weights": masters}}
        for ours, theirs in zip(ranks(2).run(_run, stage, rule, "bf16", 1, changes), settled, strict=True):
            assert differences(ours, theirs) == [], (stage, tiers, masters)


@pytest.mark.parametrize("changes", [{"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}], ids=["hpz", "mics"])
def test_secondary_copies_and_replicas_give_the_same_bits(ranks: Ranks, changes: dict[str, Any]) -> None:
    plain = ranks(4).run(_run, 3, "factored", "bf16", 1, {})
    for ours, theirs in zip(ranks(4).run(_run, 3, "factored", "bf16", 1, changes), plain, strict=True):
        assert differences(ours, theirs) == []


def _one_matrix(stage: int) -> tuple[list[tuple[int, int]], dict[str, int], list[int]]:
    """Returns (the optimizer's counts, bytes sent by operation, elements of each master); most ranks own nothing."""
    torch.manual_seed(0)
    watched = recording()
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    settings = _settings(stage, "fp32")
    engine, *_ = zeroaccel.initialize(
        model, optimizer=Lars, config=settings, optimizer_kind="per_tensor", collectives=watched
    )
    optimizer, counts = engine.optimizer, []
    for _ in range(3):
        watched.reset()
        train_step(engine, engine(torch.ones(2, 8)).square().mean())
        counts.append((optimizer.param_groups[0]["step"], optimizer.calls))
    sent = watched.nbytes_by_op()
    masters = [param.numel() for group in optimizer.param_groups for param in group["params"]]
    engine.destroy()
    return counts, sent, masters


def test_a_rank_that_owns_nothing_counts_steps_and_sends_only_gradients(ranks: Ranks) -> None:
    found = ranks(3).run(_one_matrix, 2)
    assert [counts for counts, _, _ in found] == [[(1, 1), (2, 2), (3, 3)]] * 3
    assert [masters for _, _, masters in found] == [[64], [], []]
    # 64 fp32 elements; the last rank owns the padding to three equal parts.
    assert [sent["reduce_scatter"] for _, sent, _ in found] == [32 * 4, 96 * 4, 64 * 4]
    assert [sent["all_gather"] for _, sent, _ in found] == [2 * 64 * 4, 0, 2 * 32 * 4]


def _refused(changes: dict[str, Any], kind: str) -> str:
    settings = _settings(3, "bf16", **changes)
    return message(ConfigError, zeroaccel.initialize, Toy(), optimizer=Lars, config=settings, optimizer_kind=kind)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"zero_quantized_gradients": True}, "per_tensor", ("zero_quantized_gradients", "Lars", "whole tensors")),
        ({}, "coupled", ("Lars", "stage 3", "stage 0")),
        ({}, "rowwise", ("optimizer.kind", "'per_tensor'", "rowwise")),
    ],
)
def test_incompatible_settings_are_refused_on_all_ranks(
    ranks: Ranks, changes: dict[str, Any], kind: str, words: tuple[str, ...]
) -> None:
    for said in ranks(2).run(_refused, changes, kind):
        assert all(word in said for word in words), said


def _go_on(
    folder: str, stage: int, rule: str, tiers: tuple[str, str], load: str | None, save: str | None
) -> list[float]:
    """Trains four steps, from the checkpoint `load` if given, and saves `save` before them; returns the losses."""
    torch.manual_seed(7)
    settings = _settings(stage, "bf16", **offloaded(Path(folder).parent, *tiers))
    engine, *_ = zeroaccel.initialize(Toy(), optimizer=RULES[rule], config=settings, optimizer_kind="per_tensor")
    tokens = batches(0, 8)  # the same on all ranks, so means over one and two ranks are exact
    losses = [] if load is not None else [train_step(engine, engine(batch)) for batch in tokens[:4]]
    if load is not None:
        engine.load_checkpoint(folder, tag=load)
    if save is not None:
        engine.save_checkpoint(folder, tag=save)
    losses = [train_step(engine, engine(batch)) for batch in tokens[4:]]
    engine.destroy()
    return losses


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_run_goes_on_with_other_owners(ranks: Ranks, rule: str, tmp_path: Path) -> None:
    folder, memory, files = str(tmp_path / "saved"), ("none", "none"), ("nvme", "none")

    def losses(world_size: int, stage: int, tiers: tuple[str, str], load: str | None, save: str | None) -> list[float]:
        found = ranks(world_size).run(_go_on, folder, stage, rule, tiers, load, save)
        assert all(own == found[0] for own in found)
        return found[0]

    pair = losses(2, 3, files, None, "pair")
    assert losses(2, 0, memory, "pair", None) == pair
    assert losses(1, 1, files, "pair", None) == pair
    # Resuming on two ranks and back changes owners, stages and tiers twice, and no bit.
    three = losses(3, 2, memory, None, "three")
    losses(2, 3, files, "three", "two")
    assert losses(3, 1, memory, "two", None) == three


def _few_matrices(stage: int, changes: dict[str, Any]) -> list[list[float]]:
    """Returns weights, momentum and master of a model with fewer matrices than ranks, built in shards at stage 3."""
    with zeroaccel.zero.Init(enabled=stage == 3):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    torch.manual_seed(0)
    for param in model.parameters():
        with zeroaccel.zero.GatheredParameters([param], modifier_rank=0):
            param.data.copy_(torch.randn(8, 8) / 8)
    engine, *_ = zeroaccel.initialize(
        model, optimizer=Lars, config=_settings(stage, "bf16", **changes), optimizer_kind="per_tensor"
    )
    for _ in range(3):
        train_step(engine, engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean())
    first = model[0].weight
    with zeroaccel.zero.GatheredParameters([first], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            first.data.mul_(2.0)
    momentum = safe_get_full_optimizer_state(first, "momentum_buffer")
    safe_set_full_optimizer_state(first, momentum * 0.5, "momentum_buffer")
    master = safe_get_full_fp32_param(first)
    safe_set_full_fp32_param(model[1].weight, master)
    train_step(engine, engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean())
    engine.destroy()
    found = [param.float().flatten().tolist() for param in model.parameters()]
    return [*found, momentum.flatten().tolist(), master.flatten().tolist()]


def test_ranks_that_own_nothing_work_on_every_tier_and_calls_reach_every_owner(ranks: Ranks, tmp_path: Path) -> None:
    settled = ranks(3).run(_few_matrices, 0, {})
    assert settled[0] == settled[1] == settled[2]
    for stage, tiers in [(1, ("none", "none")), (2, ("nvme", "none")), (3, ("none", "nvme")), (3, ("nvme", "nvme"))]:
        assert ranks(3).run(_few_matrices, stage, offloaded(tmp_path, *tiers)) == settled, (stage, tiers)


def _adamw(folder: str, stage: int, kind: str, files: bool, load: bool) -> list[float]:
    """Trains three steps of AdamW as `kind`, saves, and trains three more; or resumes. Returns the last losses."""
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(
        Toy(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        config=_settings(stage, "bf16", **offloaded(Path(folder), "nvme" if files else "none")),
        optimizer_kind=kind,
    )
    tokens = batches(engine.collectives.rank, 6)
    if load:
        engine.load_checkpoint(folder, tag=None)
    else:
        for batch in tokens[:3]:
            train_step(engine, engine(batch))
        engine.save_checkpoint(folder)
    losses = [train_step(engine, engine(batch)) for batch in tokens[3:]]
    engine.destroy()
    return losses


@pytest.mark.parametrize(("one", "other"), [("per_tensor", "elementwise"), ("elementwise", "per_tensor")])
def test_a_checkpoint_moves_between_owners_and_flat_shards(ranks: Ranks, tmp_path: Path, one: str, other: str) -> None:
    saved = ranks(3).run(_adamw, str(tmp_path), 3, one, True, False)
    assert ranks(3).run(_adamw, str(tmp_path), 1, other, False, True) == saved
    assert ranks(3).run(_adamw, str(tmp_path), 2, other, True, True) == saved
