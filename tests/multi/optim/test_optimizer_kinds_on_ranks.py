"""Kinds of optimizers on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import Run, Toy, batches, config, differences, offloaded, train, train_step
from tests.unit.optim.written_optimizers import MakesStates
from zeroaccel.optim.optimizer_kinds import classify


class _Averages(torch.optim.SGD):
    """Sums its gradients over the ranks itself, from its second step on."""

    def step(self, closure: Any = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        for param in self.param_groups[0]["params"] if self.calls > 1 else ():
            torch.distributed.all_reduce(param.grad)
        return super().step(closure)


def _classified(seed: int) -> tuple[str, str]:
    torch.manual_seed(seed + torch.distributed.get_rank())
    found = classify(_Averages([nn.Parameter(torch.ones(4, 4))], lr=0.1))
    return found.groups[0].value, found.reason


def test_an_optimizer_that_communicates_is_coupled(ranks: Ranks) -> None:
    assert ranks(2).run(_classified, 0) == [("coupled", "its step communicates between ranks by itself")] * 2


def _flagged() -> nn.Module:
    model = Toy()
    for name, param in model.named_parameters():
        param.use_muon = param.dim() == 2 and name.startswith("layers")  # type: ignore[attr-defined]
    return model


def _by_name(stage: int, name: str, precision: str, tiers: dict[str, Any]) -> Run:
    section = {"type": name, "params": {"lr": 0.02, "weight_decay": 0.1}}
    return train(config(stage, precision, optimizer=section, gradient_clipping=0.5, **tiers), 6, make=_flagged)


@pytest.mark.parametrize(("name", "precision"), [("Lamb", "fp32"), ("Muon", "bf16")])
def test_lamb_and_muon_by_name_give_the_same_bits_at_every_stage(
    ranks: Ranks, name: str, precision: str, tmp_path: Path
) -> None:
    plain = ranks(2).run(_by_name, 0, name, precision, {})
    for stage, tiers in [(1, {}), (2, {}), (3, {}), (3, offloaded(tmp_path, "nvme", "cpu"))]:
        for ours, theirs in zip(ranks(2).run(_by_name, stage, name, precision, tiers), plain, strict=True):
            assert differences(ours, theirs) == [], (stage, tiers)
    assert plain[0].losses[-1] < plain[0].losses[0]


class _CountsLater(torch.optim.Optimizer):
    """Adds its count to its groups in its first step, which does nothing else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None and group["count"] > 1:
                    param.sub_(param.grad, alpha=group["lr"] / group["count"])


def _losses(folder: str, resumes: bool) -> list[float]:
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(), _CountsLater, config=config(2, optimizer=None))
    if resumes:
        engine.load_checkpoint(folder, tag="half")
    losses = []
    for index, batch in enumerate(batches(engine.collectives.rank, 8)):
        if index < 4 and resumes:
            continue
        if index == 4 and not resumes:
            engine.save_checkpoint(folder, tag="half")
        losses.append(train_step(engine, engine(batch)))
    engine.destroy()
    return losses[-4:]


def test_counts_that_groups_get_at_the_first_step_are_resumed(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(2).run(_losses, str(tmp_path / "saved"), False)
    assert ranks(2).run(_losses, str(tmp_path / "saved"), True) == whole


class _Numbered(torch.optim.Optimizer):
    """Numbers the parameters in its constructor, as APOLLO does for its seeds; a step writes the number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                self.state[param]["seed"] = number + 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.fill_(self.state[param]["seed"])


def _numbers(stage: int, tiers: dict[str, Any]) -> list[list[float]]:
    weights = train(config(stage, optimizer=None, **tiers), 2, optimizer=_Numbered).weights
    trained = [name for name, param in Toy().named_parameters() if param.requires_grad]
    return [sorted(set(weights[name].flatten().tolist())) for name in trained]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_by_the_place_of_a_parameter_stay_with_it(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    trained = [param for param in Toy().parameters() if param.requires_grad]
    expected = [[float(number)] if param.numel() else [] for number, param in enumerate(trained, 1)]
    for tiers in [{}, offloaded(tmp_path, "cpu")] if stage else [{}]:
        assert ranks(2).run(_numbers, stage, tiers) == [expected] * 2, tiers


def _with_states_of_the_constructor(stage: int) -> Run:
    return train(config(stage, "bf16", optimizer=None), 4, optimizer=MakesStates)


def test_states_that_a_constructor_makes_are_made_of_the_masters(ranks: Ranks) -> None:
    plain = ranks(2).run(_with_states_of_the_constructor, 0)
    for stage in (2, 3):
        for ours, theirs in zip(ranks(2).run(_with_states_of_the_constructor, stage), plain, strict=True):
            assert differences(ours, theirs) == [], stage
