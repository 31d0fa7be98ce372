"""fp16: the effect of an overflow on step, scale, counts and scheduler; the scale never changes other results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import Toy, config, train_step
from zeroaccel.errors import EngineStateError

PLAIN_SGD = {"type": "SGD", "params": {"lr": 1.0}}


class Linear(nn.Module):
    """One weight per input: the gradient is the input, whatever the weight. The loss can be made to overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) * self.weight).float().sum() * self.factor


@dataclass
class History:
    scales: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    counts: tuple[int, ...] = ()


def _run(settings: dict[str, Any], overflows: list[bool], inputs: list[float] | None = None) -> History:
    """Steps once per entry of `overflows`; if it is true, the loss of the last rank alone overflows."""
    model = Linear()
    engine, *_ = zeroaccel.initialize(
        model,
        config=settings,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    )
    history = History()
    last = engine.collectives.rank == engine.collectives.world_size - 1
    for number, overflow in enumerate(overflows):
        for _ in range(engine.gradient_accumulation_steps()):
            model.factor = 1e30 if overflow and last else 1.0
            x = torch.full((40,), inputs[number] if inputs else 1.0)
            train_step(engine, engine(x))
        history.scales.append(engine.loss_scale.value)
        history.applied.append(engine.was_step_applied())
        history.rates.append(engine.get_lr()[0])
        history.norms.append(engine.get_global_grad_norm())
        with torch.no_grad():  # the gradient of the sum of weights
            history.weights.append(torch.tensor(engine(torch.ones(40)).item() / model.factor))
    history.counts = (engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.global_samples)
    engine.destroy()
    return history


def _fp16(stage: int, accumulation: int = 1, **keys: Any) -> dict[str, Any]:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1000, **keys}
    return {**config(stage, "fp32", accumulation, optimizer=PLAIN_SGD), "fp16": fp16}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, stage: int, accumulation: int) -> None:
    histories = ranks(2).run(_run, _fp16(stage, accumulation), [False, True, False, True, False])
    for history in histories:
        assert history.applied == [True, False, True, False, True]
        # The first overflow uses up the tolerance, the second halves the scale.
        assert history.scales == [16, 16, 16, 8, 8]
        # The scheduler moves with applied steps only: 1/2, 1/3, 1/4.
        assert history.rates == pytest.approx([1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 4])
        assert history.norms == pytest.approx([40**0.5, float("inf"), 40**0.5, float("inf"), 40**0.5])
        # Updates of 1, 1/2 and 1/3 on each of 40 weights, and none in between.
        assert [float(w) for w in history.weights] == pytest.approx([-40, -40, -60, -60, -40 - 20 - 40 / 3], rel=2e-3)
        assert history.counts == (5, 2, 5 * accumulation, 5 * accumulation * 4)


def test_hysteresis_of_one_halves_at_once_and_consecutive_hysteresis_forgives(ranks: Ranks) -> None:
    history = ranks(2).run(_run, _fp16(3, hysteresis=1), [True, True, False])[0]
    assert history.scales == [8, 4, 4]
    history = ranks(2).run(_run, _fp16(3, consecutive_hysteresis=True), [True, False, True, False, True, True])[0]
    assert history.scales == [16, 16, 16, 16, 16, 8]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_step_on_which_the_scale_grows_is_a_full_one(ranks: Ranks, stage: int) -> None:
    for history in ranks(2).run(_run, _fp16(stage, loss_scale_window=2), [False] * 5):
        assert history.scales == [16, 16, 32, 32, 64]
        assert history.norms == [pytest.approx(40**0.5)] * 5
        steps = torch.stack(history.weights).diff(prepend=torch.zeros(1))
        assert [float(step) for step in steps] == pytest.approx([-40, -20, -40 / 3, -10, -8], rel=5e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 16.0, 4096.0])
def test_the_scale_does_not_change_the_update(ranks: Ranks, stage: int, scale: float) -> None:
    for history in ranks(2).run(_run, _fp16(stage, loss_scale=scale), [False, True, False]):
        assert history.scales == [scale] * 3
        assert history.applied == [True, False, True]
        assert [float(w) for w in history.weights] == [-40.0, -40.0, -60.0]


def _at_the_smallest_scale(settings: dict[str, Any]) -> str:
    return message(EngineStateError, _run, settings, [True] * 8)


def test_an_overflow_at_the_smallest_scale_ends_the_run(ranks: Ranks) -> None:
    one, other = ranks(2).run(_at_the_smallest_scale, _fp16(2, min_loss_scale=4))
    assert one == other
    assert "fp16.min_loss_scale" in one
    assert "4" in one


def _refused_direct_backward(stage: int) -> list[float]:
    model = Linear()
    engine, *_ = zeroaccel.initialize(model, config=_fp16(stage))
    with pytest.raises(EngineStateError, match=r"engine\.backward\(loss\)"):
        engine(torch.ones(40)).backward()
    engine.reset()
    train_step(engine, engine(torch.ones(40)))
    engine.destroy()
    return list(model.weight.tolist())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_direct_backward_would_miss_the_scale(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_refused_direct_backward, stage) == [[-1.0] * 40] * 2


def _cast_inputs(auto_cast: bool) -> str:
    model = Toy()
    model.seen = []
    model.forward = lambda batch: (
        model.seen.append({key: value.dtype for key, value in batch.items()}) or model.norm(batch["x"]).float().sum()
    )
    settings = {**config(0, "fp32"), "fp16": {"enabled": True, "auto_cast": auto_cast, "initial_scale_power": 4}}
    engine, *_ = zeroaccel.initialize(model, config=settings)
    inputs = {"x": torch.ones(2, 23), "ids": torch.ones(2, dtype=torch.long)}
    try:
        engine(inputs)
    except RuntimeError:
        assert not auto_cast  # fp32 into an fp16 layer
    engine.destroy()
    return str(model.seen[0])


def test_auto_cast_casts_floating_inputs_only(ranks: Ranks) -> None:
    assert ranks(2).run(_cast_inputs, True) == [str({"x": torch.float16, "ids": torch.int64})] * 2
    assert ranks(2).run(_cast_inputs, False) == [str({"x": torch.float32, "ids": torch.int64})] * 2


def _bf16_overflow(check: bool) -> tuple[bool, bool]:
    model = Linear()
    settings = {
        **config(2, "fp32", optimizer=PLAIN_SGD),
        "bf16": {"enabled": True, "check_grad_overflow": check},
    }
    engine, *_ = zeroaccel.initialize(model, config=settings)
    train_step(engine, engine(torch.full((40,), float("inf"))))
    applied = engine.was_step_applied()
    engine.destroy()
    return applied, bool(torch.isfinite(model.weight).all())


def test_bf16_skips_what_is_not_finite_unless_told_otherwise(ranks: Ranks) -> None:
    assert ranks(2).run(_bf16_overflow, True) == [(False, True)] * 2
    assert ranks(2).run(_bf16_overflow, False) == [(True, False)] * 2


# -- parameters of an update


def _take_part(settings: dict[str, Any]) -> list[list[float]]:
    """Trains two weights, the second of which takes part in the first step only."""
    torch.manual_seed(7)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    for block in model.blocks:
        nn.init.zeros_(block.weight)
    model.active = 2
    model.forward = lambda x: sum(block(x).sum() for block in list(model.blocks)[: model.active])
    engine, *_ = zeroaccel.initialize(model, config=settings)
    seen = []
    for step in range(3):
        model.active = 2 if step == 0 else 1
        dtype = next(model.parameters()).dtype
        for _ in range(engine.gradient_accumulation_steps()):
            train_step(engine, engine(torch.ones(1, 4, dtype=dtype)))
        model.active = 2
        with torch.no_grad():
            seen.append([block(torch.ones(1, 4, dtype=dtype)).sum().item() for block in model.blocks])
    engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_parameter_that_takes_no_part_is_not_moved_by_an_old_gradient(
    ranks: Ranks, stage: int, accumulation: int, precision: str
) -> None:
    settings = config(stage, precision, accumulation, optimizer=PLAIN_SGD)
    for seen in ranks(2).run(_take_part, settings):
        assert seen == [[-16.0, -16.0], [-32.0, -16.0], [-48.0, -16.0]]
