"""Accumulation, clipping, param groups and averaging of gradients, against a plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import ADAMW, Run, Toy, batches, config, differences, finished, recording, train_step
from zeroaccel.comm.collectives import Work
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError

Weights = dict[str, Tensor]
PLAIN_SGD = {"type": "SGD", "params": {"lr": 1.0}}
MICRO_STEPS = 3


def _seeded(settings: dict[str, Any], **arguments: Any) -> Engine:
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(), config=settings, **arguments)
    return engine


# -- accumulation


def _counted(engine: Engine, data: list[Tensor]) -> None:
    """The standard loop: the engine counts micro-steps."""
    for batch in data:
        train_step(engine, engine(batch))


def _set_boundaries(engine: Engine, data: list[Tensor]) -> None:
    """The caller marks the last micro-step, and calls `step()` after every micro-step."""
    for number, batch in enumerate(data, 1):
        engine.set_gradient_accumulation_boundary(number % MICRO_STEPS == 0)
        train_step(engine, engine(batch))
        assert engine.was_step_applied() is (number % MICRO_STEPS == 0)


def _one_step(engine: Engine, data: list[Tensor]) -> None:
    """The caller marks the last micro-step, and calls `step()` only there."""
    for number, batch in enumerate(data, 1):
        engine.set_gradient_accumulation_boundary(number % MICRO_STEPS == 0)
        engine.backward(engine(batch))
        if number % MICRO_STEPS == 0:
            engine.step()


def _unsynced(engine: Engine, data: list[Tensor]) -> None:
    for number, batch in enumerate(data, 1):
        last = number % MICRO_STEPS == 0
        with contextlib.nullcontext() if last else engine.no_sync():
            engine.backward(engine(batch))
        engine.step()


def _unsynced_to_the_end(engine: Engine, data: list[Tensor]) -> None:
    """Runs every backward under no_sync: the step must do the reductions."""
    for batch in data:
        with engine.no_sync():
            engine.backward(engine(batch))
        engine.step()


LOOPS = {loop.__name__: loop for loop in (_counted, _set_boundaries, _one_step, _unsynced, _unsynced_to_the_end)}


def _accumulate(settings: dict[str, Any], loop: str) -> tuple[Run, tuple[int, int]]:
    engine = _seeded(settings)
    LOOPS[loop](engine, batches(engine.collectives.rank, 2 * MICRO_STEPS))
    run = Run(norms=[engine.get_global_grad_norm()])
    counts = (engine.global_steps, engine.train_batch_size())
    return finished(engine, run), counts


@pytest.mark.parametrize("loop", [name for name in LOOPS if name != "_counted"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ways_to_accumulate(ranks: Ranks, stage: int, loop: str) -> None:
    settings = config(stage, "bf16", MICRO_STEPS)
    expected = ranks(2).run(_accumulate, settings, "_counted")
    for (one, counts), (other, also) in zip(expected, ranks(2).run(_accumulate, settings, loop), strict=True):
        assert differences(one, other) == []
        assert counts == also == (2, 2 * MICRO_STEPS * 2)


def _unmanaged(settings: dict[str, Any]) -> tuple[Run, tuple[int, int]]:
    engine = _seeded({**settings, "managed_gradient_accumulation": False})
    data = batches(engine.collectives.rank, 2 * MICRO_STEPS)
    for start in (0, MICRO_STEPS):
        for batch in data[start : start + MICRO_STEPS]:
            engine.backward(engine(batch))
        engine.step()
        assert engine.was_step_applied()
    assert engine.global_samples == 2 * engine.train_batch_size()
    with pytest.raises(EngineStateError, match=r"_boundary.*every engine.step\(\) is a boundary"):
        engine.set_gradient_accumulation_boundary(True)
    run = Run(norms=[engine.get_global_grad_norm()])
    counts = (engine.global_steps, engine.train_batch_size())
    return finished(engine, run), counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unmanaged_accumulation_makes_every_step_an_update(ranks: Ranks, stage: int) -> None:
    settings = config(stage, "fp32", MICRO_STEPS)
    (expected, counts), _ = ranks(2).run(_accumulate, settings, "_counted")
    (run, also), _ = ranks(2).run(_unmanaged, settings)
    assert counts == also
    for name, weight in expected.weights.items():  # reduced at each backward: another order of sums
        torch.testing.assert_close(run.weights[name], weight, rtol=1e-4, atol=1e-5)


def _drop(stage: int, drops: bool) -> Run:
    engine = _seeded(config(stage, "bf16"))
    one, other = batches(engine.collectives.rank, 2)
    if drops:
        engine.backward(engine(one))
        engine.zero_grad()
        with pytest.raises(EngineStateError, match="backward"):
            engine.step()
    train_step(engine, engine(other))
    return finished(engine, Run(norms=[engine.get_global_grad_norm()]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_drops_what_was_accumulated(ranks: Ranks, stage: int) -> None:
    for one, other in zip(*(ranks(2).run(_drop, stage, drops) for drops in (False, True)), strict=True):
        assert differences(one, other) == []


def _misuse_no_sync(stage: int) -> int:
    counted = recording()
    engine = _seeded(config(stage), collectives=counted)
    batch = batches(0, 1)[0]
    counted.reset()
    with engine.no_sync():
        engine.backward(engine(batch))
        with pytest.raises(EngineStateError, match="no_sync"):
            engine.step()
        with pytest.raises(EngineStateError, match=r"no_sync\(\): expected a call outside another"), engine.no_sync():
            pass
    reductions = counted.count("reduce_scatter")
    engine.step()
    engine.destroy()
    return reductions


def test_no_sync_saves_reductions_where_gradients_are_unsharded(ranks: Ranks) -> None:
    assert ranks(2).run(_misuse_no_sync, 1) == [0, 0]
    assert all(count > 0 for count in ranks(2).run(_misuse_no_sync, 3))


class Sum(nn.Module):
    """A weight whose gradient is its input, wide enough for every rank to own a part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(200))

    def forward(self, x: float) -> Tensor:
        return (self.weight * x).float().sum()


def _sum_small_ones(settings: dict[str, Any], value: float, count: int) -> float:
    """Returns the update of one weight by a gradient of 1 and then many small ones, with bf16 parameters."""
    model = Sum()
    engine, *_ = zeroaccel.initialize(model, config=settings)
    for number in range(count):
        engine.backward(engine(1.0 if number == 0 else value), scale_wrt_gas=False)
        engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert norm is not None
    return norm / 200**0.5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_steps_are_summed_in_the_dtype_asked_for(ranks: Ranks, stage: int) -> None:
    small = 2.0**-9  # half the spacing of bf16 numbers at 1
    narrow = config(stage, "bf16", 9, optimizer=PLAIN_SGD, data_types={"grad_accum_dtype": "bf16"})
    wide = config(stage, "bf16", 9, optimizer=PLAIN_SGD, communication_data_type="fp32")
    assert ranks(2).run(_sum_small_ones, narrow, small, 9) == pytest.approx([1.0, 1.0], abs=1e-6)
    assert ranks(2).run(_sum_small_ones, wide, small, 9) == pytest.approx([1 + 8 * small] * 2, abs=1e-6)


# -- the norm and clipping


def _plain_step(clipping: float, world_size: int) -> tuple[float, Weights, Weights]:
    """Runs one process on all batches: (norm, clipped gradients, weights after a step of SGD with lr 1)."""
    torch.manual_seed(7)
    model = Toy()
    for rank in range(world_size):
        (model(batches(rank, 1)[0]) / world_size).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), clipping or float("inf"))
    grads = {name: param.grad.clone() for name, param in trained.items() if param.grad is not None}
    torch.optim.SGD(trained.values(), lr=1.0).step()
    return float(norm), grads, {name: p.detach() for name, p in model.named_parameters()}


def _clipped_step(settings: dict[str, Any]) -> Run:
    engine = _seeded(settings)
    engine.backward(engine(batches(engine.collectives.rank, 1)[0]))
    assert engine.get_global_grad_norm() is None
    engine.step()
    return finished(engine, Run(norms=[engine.get_global_grad_norm()]))


@pytest.mark.parametrize("clipping", [0.0, 0.5, 1000.0])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_norm_and_clipping_are_torchs(ranks: Ranks, stage: int, clipping: float) -> None:
    norm, grads, weights = _plain_step(clipping, 2)
    before = {name: param.detach() for name, param in _fresh_toy().named_parameters()}
    for run in ranks(2).run(_clipped_step, config(stage, optimizer=PLAIN_SGD, gradient_clipping=clipping)):
        assert run.norms == [pytest.approx(norm, rel=1e-5)]
        for name, weight in weights.items():
            torch.testing.assert_close(run.weights[name], weight, rtol=1e-5, atol=2e-6)
        moved = sum(float((run.weights[name] - before[name]).square().sum()) for name in grads) ** 0.5
        assert moved == pytest.approx(min(norm, clipping or norm), rel=1e-3)


def _fresh_toy() -> Toy:
    torch.manual_seed(7)
    return Toy()


def test_the_norm_can_be_left_out(ranks: Ranks) -> None:
    for run in ranks(2).run(_clipped_step, config(3, compute_grad_norm=False)):
        assert run.norms == [None]


# -- averaging


class Spy(RecordingCollectives):
    """Records the largest gradient that was sent."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.largest = 0.0

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        self.largest = max(self.largest, float(flat.abs().max()))
        return super().reduce_scatter(out, flat, label, scale, split_sizes)


def _average(settings: dict[str, Any]) -> tuple[float, float]:
    """Returns (update, largest element sent) for gradients of 1, 2, ... on the ranks."""
    spy = Spy(recording().inner)
    model = Sum()
    engine, *_ = zeroaccel.initialize(model, config=settings, collectives=spy)
    train_step(engine, engine(1.0 + engine.collectives.rank))
    engine.destroy()
    return -float(model.weight.detach().mean()), spy.largest


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_averaged_or_summed(ranks: Ranks, stage: int) -> None:
    def run(**changes: Any) -> list[tuple[float, float]]:
        return ranks(2).run(_average, config(stage, optimizer=PLAIN_SGD, **changes))

    assert run() == [(1.5, 1.0), (1.5, 2.0)]
    assert run(gradient_allreduce_op="sum") == [(3.0, 1.0), (3.0, 2.0)]
    # Divided before sending: by the number of ranks, or by a factor, with the rest afterwards.
    assert run(prescale_gradients=True) == [(1.5, 0.5), (1.5, 1.0)]
    assert run(gradient_predivide_factor=4.0) == [(1.5, 0.25), (1.5, 0.5)]
    assert run(gradient_predivide_factor=4.0, gradient_allreduce_op="sum") == [(3.0, 0.25), (3.0, 0.5)]


# -- param groups


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    vectors = [p for n, p in named.items() if p.dim() < 2 and p.requires_grad and n not in ("unused", "temperature")]
    matrices = [p for p in named.values() if p.dim() >= 2]
    return [
        {"params": matrices, "lr": 1e-2, "weight_decay": 0.3},
        {"params": vectors, "lr": 3e-3, "weight_decay": 0.0},
    ]


def _grouped(settings: dict[str, Any], given: str) -> tuple[Run, list[float], list[str]]:
    torch.manual_seed(7)
    model = Toy()
    names = {id(param): name for name, param in model.named_parameters()}
    arguments: dict[str, Any] = {}
    if given == "object":
        arguments = {"optimizer": torch.optim.AdamW(_groups(model))}
    elif given == "callable":
        arguments = {"optimizer": lambda params: torch.optim.AdamW(_groups(model))}
    else:
        arguments = {"model_parameters": _groups(model)}
        settings = {**settings, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
    engine, optimizer, *_ = zeroaccel.initialize(model, config=settings, **arguments)
    for batch in batches(engine.collectives.rank, 4):
        train_step(engine, engine(batch))
    left = [names[id(p)] for p in model.parameters() if p.grad is not None]
    rates = engine.get_lr()
    assert rates == [group["lr"] for group in optimizer.param_groups]
    return finished(engine, Run()), rates, left


@pytest.mark.parametrize("given", ["object", "callable", "config"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_param_groups_keep_their_settings(ranks: Ranks, stage: int, given: str) -> None:
    torch.manual_seed(7)
    plain = Toy()
    start = {name: param.detach().clone() for name, param in plain.named_parameters()}
    optimizer = torch.optim.AdamW(_groups(plain))
    data = [batches(rank, 4) for rank in range(2)]
    for step in range(4):
        for rank in range(2):
            (plain(data[rank][step]) / 2).backward()
        optimizer.step()
        plain.zero_grad()
    for run, rates, left in ranks(2).run(_grouped, config(stage, optimizer=None), given):
        assert rates == [1e-2, 3e-3]
        assert left == []
        for name, param in plain.named_parameters():
            torch.testing.assert_close(run.weights[name], param.detach(), rtol=2e-4, atol=2e-5)
        for name in ("frozen", "unused", "temperature"):  # frozen, or in no group
            assert torch.equal(run.weights[name], start[name])


def _schedule_groups(stage: int) -> list[list[float]]:
    model = Toy()
    optimizer = torch.optim.SGD(_groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    settings = config(stage, optimizer=None)
    engine, _, _, returned = zeroaccel.initialize(model, optimizer, lr_scheduler=scheduler, config=settings)
    assert returned is scheduler
    seen = []
    for batch in batches(0, 2):
        train_step(engine, engine(batch))
        seen.append(engine.get_lr())
    engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_a_scheduler_keeps_the_ratio_of_the_groups(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_schedule_groups, stage)[0] == [[5e-3, 1.5e-3], [2.5e-3, 0.75e-3]]


def test_the_default_config_trains_every_parameter(ranks: Ranks) -> None:
    settings = config(3, optimizer=ADAMW)
    (run, counts), _ = ranks(2).run(_accumulate, settings, "_counted")
    start = dict(_fresh_toy().named_parameters())
    moved = {name for name, weight in run.weights.items() if not torch.equal(weight, start[name].detach())}
    assert moved == set(start) - {"frozen", "nothing"}
    assert counts == (6, 4)
