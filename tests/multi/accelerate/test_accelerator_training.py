"""The training loop of an `Accelerator` against a plain loop: sharded loaders, accumulation, clipping, schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.pool import Ranks
from tests.support.training import VOCABULARY, Toy
from zeroaccel import Accelerator, ZeroPlugin

STEPS = 3
MAX_NORM = 0.5
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}
# ranks -> (stage, accumulation): twelve combinations
CASES = {2: [(s, a) for s in (0, 1, 2, 3) for a in (1, 3)], 3: [(s, a) for s in (0, 3) for a in (1, 3)]}


@dataclass
class Trained:
    """Final weights of a run, with the norm and learning rate that the script read at each update."""

    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def _data(world_size: int, accumulation: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCABULARY, (2 * world_size * accumulation * STEPS, 8), generator=generator)


def _schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _seeded() -> Toy:
    torch.manual_seed(7)
    return Toy()


def _run(stage: int, accumulation: int, name: str) -> Trained:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, zero_plugin=ZeroPlugin(zero_stage=stage))
    model: Any = _seeded()
    kind, settings = OPTIMIZERS[name]
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **settings)
    scheduler: Any = _schedule(optimizer)
    loader = DataLoader(_data(accelerator.num_processes, accumulation), batch_size=2)  # type: ignore[arg-type]
    scheduler, loader, model, optimizer = accelerator.prepare(scheduler, loader, model, optimizer)
    seen = Trained()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            assert (norm is None) is not accelerator.sync_gradients
            if norm is not None:
                seen.norms.append(norm.item())
                seen.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert model.global_steps == STEPS
    assert model.micro_steps == STEPS * accumulation
    inner = accelerator.unwrap_model(model)
    accelerator.free_memory()
    seen.weights = {fqn: param.detach().clone() for fqn, param in inner.named_parameters()}
    return seen


def _runs(name: str) -> list[Trained]:
    return [_run(stage, accumulation, name) for stage, accumulation in CASES[torch.distributed.get_world_size()]]


def _plain(world_size: int, accumulation: int, name: str) -> Trained:
    model = _seeded()
    trained = [param for param in model.parameters() if param.requires_grad]
    kind, settings = OPTIMIZERS[name]
    optimizer = kind(trained, **settings)
    scheduler = _schedule(optimizer)
    seen = Trained()
    for big in _data(world_size, accumulation).split(2 * world_size * accumulation):
        for batch in big.split(2):
            (model(batch) / (world_size * accumulation)).backward()
        for param in trained:  # as in the engine, an unused parameter has a gradient of zero
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        seen.norms.append(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM).item())
        seen.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    seen.weights = {fqn: param.detach() for fqn, param in model.named_parameters()}
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", CASES)
def test_every_combination_follows_a_plain_loop(ranks: Ranks, world_size: int, name: str) -> None:
    runs = ranks(world_size).run(_runs, name)
    first: dict[tuple[bool, int], Trained] = {}
    for index, (stage, accumulation) in enumerate(CASES[world_size]):
        expected, run = _plain(world_size, accumulation, name), runs[0][index]
        assert all(math.isfinite(norm) and norm > MAX_NORM for norm in run.norms)  # every update was clipped
        assert run.norms == pytest.approx(expected.norms, rel=1e-4)
        assert run.rates == expected.rates
        for fqn, weight in expected.weights.items():
            torch.testing.assert_close(run.weights[fqn], weight, rtol=2e-4, atol=2e-5, msg=lambda m, n=fqn: f"{n}: {m}")
        # The same bits on every rank, and at every stage with the same order of sums.
        same = first.setdefault((stage >= 2 and accumulation > 1, accumulation), run)
        for other in (same, *(each[index] for each in runs[1:])):
            assert other.norms == run.norms
            assert all(torch.equal(other.weights[fqn], weight) for fqn, weight in run.weights.items()), (stage, fqn)


def _uneven(sync_with_dataloader: bool) -> tuple[int, int]:
    from zeroaccel import GradientAccumulationPlugin

    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(3, sync_with_dataloader=sync_with_dataloader)
    )
    model: Any = _seeded()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(_data(3, 1)[: 2 * 2 * 4], batch_size=2)  # type: ignore[arg-type]  # 4 batches per rank
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
    steps = model.global_steps, accelerator.step
    accelerator.free_memory()
    return steps


def test_the_end_of_a_loader_updates_unless_configured_otherwise(ranks: Ranks) -> None:
    assert ranks(2).run(_uneven, True) == [(2, 0)] * 2
    assert ranks(2).run(_uneven, False) == [(1, 4)] * 2


def _ways(stage: int) -> dict[str, Any]:
    """Sums two micro-steps in four ways: `accumulate`, `no_sync`, a plain loop, and `loss.backward()`."""
    found = {}
    for way in ("accumulate", "no_sync", "own", "plain backward", "sync each batch"):
        from zeroaccel import GradientAccumulationPlugin

        handling = GradientAccumulationPlugin(sync_each_batch=way == "sync each batch")
        accelerator = Accelerator(
            gradient_accumulation_steps=2 if way in ("accumulate", "sync each batch") else None,
            gradient_accumulation_plugin=handling,
            zero_plugin=ZeroPlugin(zero_stage=stage),
        )
        model: Any = _seeded()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        data = _data(3, 2)[accelerator.process_index :: 2].split(2)
        for index, batch in enumerate(data[:4]):
            if way in ("accumulate", "sync each batch"):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch))
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            loss = model(batch) / 2
            if way == "no_sync" and index % 2 == 0:
                with accelerator.no_sync(model):
                    accelerator.backward(loss)
            elif way == "plain backward":
                loss.backward()
            else:
                accelerator.backward(loss)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        assert model.global_steps == 2
        inner = accelerator.unwrap_model(model)
        accelerator.free_memory()
        found[way] = {fqn: param.detach().clone() for fqn, param in inner.named_parameters()}
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_ways_to_accumulate_agree(ranks: Ranks, stage: int) -> None:
    found = ranks(2).run(_ways, stage)[0]
    for way, weights in found.items():
        for fqn, weight in found["accumulate"].items():
            torch.testing.assert_close(weights[fqn], weight, rtol=1e-5, atol=1e-6, msg=lambda m, w=way: f"{w}: {m}")


def _half_precision(precision: str) -> tuple[list[float], list[bool], float, int]:
    """Trains while the first steps overflow: a skipped update changes neither weights nor schedule."""
    tree = {"fp16": {"enabled": True, "initial_scale_power": 26, "hysteresis": 1}, "zero_optimization": {"stage": 2}}
    plugin = ZeroPlugin(tree) if precision == "fp16" else ZeroPlugin(zero_stage=2)
    accelerator = Accelerator(mixed_precision=precision, zero_plugin=plugin)
    model: Any = _seeded()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = _schedule(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batch = _data(2, 1)[:2]
    rates, skipped = [], []
    for _ in range(20):
        with accelerator.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is {"fp16": torch.float16, "bf16": torch.bfloat16}[
                precision
            ]
        accelerator.backward(model(batch))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        assert norm is not None
        assert math.isinf(norm.item()) is skipped[-1]
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
        optimizer.zero_grad()
    expected = 0.1 / (1 + skipped.count(False))
    steps = model.global_steps - model.skipped_steps
    accelerator.free_memory()
    return rates, skipped, expected, steps


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_skipped_update_moves_nothing(ranks: Ranks, precision: str) -> None:
    for rates, skipped, expected, steps in ranks(2).run(_half_precision, precision):
        assert skipped[0] is (precision == "fp16")
        assert skipped[-1] is False
        assert steps == skipped.count(False)
        assert rates[-1] == pytest.approx(expected)
        assert all(rate == 0.1 for rate, skip in zip(rates, skipped, strict=True) if skip)


def _counting_processes() -> list[float]:
    accelerator = Accelerator(scheduler_counts_processes=True)
    model: Any = _seeded()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, _schedule(optimizer))
    rates = []
    for _ in range(2):
        accelerator.backward(model(_data(2, 1)[:2]))
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    accelerator.free_memory()
    return rates


def test_a_schedule_counts_processes_on_request(ranks: Ranks) -> None:
    assert ranks(2).run(_counting_processes) == [[pytest.approx(0.1 / 3), pytest.approx(0.1 / 5)]] * 2


def _clip_values(stage: int) -> tuple[float, float]:
    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=stage))
    model: Any = _seeded()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {fqn: param.detach().clone() for fqn, param in model.named_parameters()}
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(_data(2, 1)[:2]))
    accelerator.clip_grad_value_(model.parameters(), 0.001)
    optimizer.step()
    inner = accelerator.unwrap_model(model)
    accelerator.free_memory()
    moved = {fqn: (param.detach() - before[fqn]).abs() for fqn, param in inner.named_parameters() if param.numel()}
    return max(float(change.max()) for change in moved.values()), float(moved["embed.weight"].sum())


def test_clipping_by_value(ranks: Ranks) -> None:
    (moved, total), *_ = ranks(2).run(_clip_values, 3)
    assert 0.00099 < moved <= 0.001001
    assert ranks(2).run(_clip_values, 0)[0] == (moved, total)
