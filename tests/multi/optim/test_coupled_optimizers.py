"""Optimizers whose rules couple parameters: as in torch at stage 0; summed over all shards, or refused.

Also optimizers that train and evaluate with different weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import (
    Run,
    Toy,
    batches,
    config,
    differences,
    finished,
    offloaded,
    plain_step,
    train,
    train_step,
)
from tests.unit.optim.written_optimizers import ScheduleFree
from zeroaccel.errors import ConfigError
from zeroaccel.ops.coupled import Reductions
from zeroaccel.zero.access.safe_get_set import safe_get_full_grad


class ClipsAll(torch.optim.Optimizer):
    """SGD with momentum that clips by the norm over all its parameters, in their order."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    momentum.mul_(0.9).add_(param.grad / (norm + 1e-6).clamp(min=0.1))
                    param.sub_(group["lr"] * momentum)


class EstimatesStepSize(torch.optim.Optimizer):
    """Computes a step size from all parameters, like D-Adaptation (Defazio, Mishchenko 2023, arXiv:2301.07733)."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "k": 0})
        self.use_reductions(Reductions())

    def use_reductions(self, reductions: Reductions) -> None:
        self.reductions = reductions

    def _sums(self, values: Sequence[Tensor]) -> float:
        return self.reductions.sum(values)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group, param in held:
            state = self.state[param]
            state.setdefault("start", param.clone())
            state.setdefault("sum", torch.zeros_like(param)).add_(param.grad * group["d"])
        numerator = self._sums([p.grad * (self.state[p]["start"] - p) for _, p in held])
        size = self._sums([self.state[p]["sum"].abs() for _, p in held])
        for group in self.param_groups:
            # The step size grows after the first step, so that every sum affects the weights.
            group["d"], group["k"] = group["d"] * (1 + max(numerator, 0.0) / (size + 1e-12)), group["k"] + 1
        for group, param in held:
            param.sub_(group["lr"] * group["d"] * param.grad.sign())


class WithoutProtocol(EstimatesStepSize):
    """The same rule, with another name for the method that the engine looks for."""

    use_reductions = None  # type: ignore[assignment]

    def __init__(self, params: Iterable[Any], lr: float = 1.0) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "d": 1e-3, "k": 0})

    def _sums(self, values: Sequence[Tensor]) -> float:
        return float(sum(value.double().sum() for value in values))


RULES = {rule.__name__: rule for rule in (ClipsAll, EstimatesStepSize, WithoutProtocol)}


def _settings(stage: int, precision: str, **changes: Any) -> dict[str, Any]:
    return config(stage, precision, optimizer=None, **changes)


def against_torch(
    rule: Callable[..., torch.optim.Optimizer],
    settings: dict[str, Any],
    steps: int,
    left_out: Sequence[str] = ("frozen",),
    **arguments: Any,
) -> tuple[Run, Run]:
    """Runs the engine, and the optimizer itself on the unsharded model with the gradients of that run."""
    torch.manual_seed(7)
    masters = {name: nn.Parameter(param.detach().clone()) for name, param in Toy().named_parameters()}
    trained = {name: master for name, master in masters.items() if name not in left_out}
    reference = rule(list(trained.values()))
    torch.manual_seed(7)
    model = Toy()
    engine, *_ = zeroaccel.initialize(model, optimizer=rule, config=settings, **arguments)
    for batch in batches(engine.collectives.rank, steps):
        engine.backward(engine(batch))
        for name, master in trained.items():
            grad = safe_get_full_grad(model.get_parameter(name))
            master.grad = None if grad is None else grad.float()
        engine.step()
        reference.step()
    ours = finished(engine, Run())
    return ours, Run(weights={name: masters[name].detach().to(w.dtype) for name, w in ours.weights.items()})


def _against_torch(rule: str, stage: int) -> tuple[Run, Run]:
    return against_torch(RULES[rule], _settings(stage, "bf16"), 6)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_stage_0_gives_the_bits_of_torch(ranks: Ranks, rule: str) -> None:
    for ours, theirs in ranks(2).run(_against_torch, rule, 0):
        assert differences(ours, theirs) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sums_over_the_shards_give_the_bits_of_one_process(ranks: Ranks, stage: int) -> None:
    for ours, theirs in ranks(3).run(_against_torch, "EstimatesStepSize", stage):
        assert differences(ours, theirs) == []


def _run(stage: int, changes: dict[str, Any]) -> Run:
    return train(_settings(stage, "bf16", **changes), 4, optimizer=EstimatesStepSize)


def test_replicas_add_each_shard_once(ranks: Ranks) -> None:
    plain = ranks(4).run(_run, 3, {})
    for ours, theirs in zip(ranks(4).run(_run, 3, {"mics_shard_size": 2}), plain, strict=True):
        assert differences(ours, theirs) == []


def _refused(rule: str, settings: dict[str, Any]) -> str:
    return message(ConfigError, zeroaccel.initialize, Toy(), optimizer=RULES[rule], config=settings)


def test_without_the_protocol_shards_are_refused(ranks: Ranks) -> None:
    for stage in (1, 2, 3):
        one, other = ranks(2).run(_refused, "WithoutProtocol", _settings(stage, "bf16"))
        assert one == other
        for words in ("WithoutProtocol", f"stage {stage}", "use stage 0", "use_reductions()"):
            assert words in one


def test_states_in_files_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    settings = _settings(2, "bf16", **offloaded(tmp_path, "nvme"))
    for said in ranks(2).run(_refused, "EstimatesStepSize", settings):
        assert "zero_optimization.offload_optimizer.device" in said
        assert "EstimatesStepSize" in said


@pytest.mark.parametrize(("key", "value"), [("ratio", 0.5), ("device_budget", "1MB")])
def test_a_share_on_the_device_is_refused(ranks: Ranks, tmp_path: Path, key: str, value: object) -> None:
    settings = _settings(2, "bf16", **offloaded(tmp_path, "cpu", **{key: value}))
    for said in ranks(2).run(_refused, "EstimatesStepSize", settings):
        assert f"zero_optimization.offload_optimizer.{key}: optimizer" in said
        assert "expected all masters in one memory" in said


def _evaluated(stage: int, precision: str, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Returns (losses of training, losses of evaluation), alternating `train()` and `eval()`."""
    torch.manual_seed(7)
    settings = _settings(stage, precision, **changes)
    engine, optimizer, *_ = zeroaccel.initialize(Toy(), optimizer=ScheduleFree, config=settings)
    trained, evaluated = [], []
    for batch in batches(engine.collectives.rank, 5):
        optimizer.train()
        engine.train()
        trained.append(train_step(engine, engine(batch)))
        optimizer.eval()
        engine.eval()
        with torch.no_grad():
            evaluated.append(engine(batch).item())
    engine.destroy()
    assert "eval" not in vars(optimizer)
    return trained, evaluated


def _evaluated_plainly() -> tuple[list[float], list[float]]:
    torch.manual_seed(7)
    model = Toy()
    optimizer = ScheduleFree([p for name, p in model.named_parameters() if name not in ("frozen", "unused")])
    trained, evaluated = [], []
    for batch in batches(0, 5):
        optimizer.train()
        trained.append(plain_step(optimizer, model(batch)))
        optimizer.eval()
        with torch.no_grad():
            evaluated.append(model(batch).item())
    return trained, evaluated


def test_weights_to_evaluate_with_are_those_of_torch(ranks: Ranks) -> None:
    assert ranks(1).run(_evaluated, 1, "fp32", {}) == ranks(1).run(_evaluated_plainly)


def test_weights_to_evaluate_with_are_the_same_at_every_stage_and_tier(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks(2).run(_evaluated, 0, "bf16", {})
    assert plain[0][0] != plain[0][1]
    for stage in (1, 2, 3):
        assert ranks(2).run(_evaluated, stage, "bf16", {}) == plain
    assert ranks(2).run(_evaluated, 2, "bf16", offloaded(tmp_path, "nvme")) == plain
    assert ranks(2).run(_evaluated, 3, "bf16", offloaded(tmp_path, "nvme", "nvme")) == plain
