"""Steps whose norm, clipping and overflow check stay on the device have the bits of steps that the host decides.

The device is the CPU: the engine's code for accelerators also runs on tensors in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Run, Toy, batches, config, differences, train, train_step
from zeroaccel.engine import Engine
from zeroaccel.errors import UsageError
from zeroaccel.ops.reductions import l2_norm
from zeroaccel.zero import grad_norm

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": ADAMW,
    "SGD": SGD,
    "Lion": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "bf16 moments": {"type": "AdamW", "params": {"lr": 1e-2, "moments_dtype": "bf16"}},
    # A torch class: the host must know the overflow before it steps.
    "torch RMSprop": {"type": "torch.optim.RMSprop", "params": {"lr": 1e-3}},
}


def on_device(engine: Engine) -> None:
    """Makes an engine on the CPU check its gradients as an engine on an accelerator does."""
    assert engine._boundary is not None
    engine._boundary._checks_on_device = True


def _both(settings: Mapping[str, Any], steps: int = 4) -> list[Run]:
    return [train(settings, steps), train(settings, steps, before=on_device)]


def _same_bits(settings: Mapping[str, Any]) -> list[str]:
    return differences(*_both(settings))


def _skips(settings: Mapping[str, Any]) -> tuple[list[str], int]:
    runs = _both(settings, 12)
    return differences(*runs), runs[1].skipped


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("stage", range(4))
def test_a_step_on_the_device_has_the_bits_of_one_on_the_host(own_job: None, stage: int, optimizer: str) -> None:
    section = OPTIMIZERS[optimizer]
    assert _same_bits(config(stage, "bf16", optimizer=section, gradient_clipping=0.5)) == []


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_on_the_device_has_the_same_bits_on_several_ranks(
    ranks: Ranks, world_size: int, accumulation: int
) -> None:
    for stage in (0, 2, 3):
        settings = config(stage, "bf16", accumulation, gradient_clipping=0.5)
        assert ranks(world_size).run(_same_bits, settings) == [[]] * world_size


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (2, 2)])
def test_an_overflow_is_skipped_on_the_device_of_all_ranks(ranks: Ranks, stage: int, world_size: int) -> None:
    # A scale of 2**20 overflows for several steps, the first of them before there are any states.
    settings = config(stage, "fp16", fp16={"enabled": True, "initial_scale_power": 20, "hysteresis": 1})
    for found, skipped in ranks(world_size).run(_skips, settings):
        assert found == []
        assert 0 < skipped < 12


def _reads(settings: Mapping[str, Any]) -> int:
    """Returns how often the host reads statistics in 4 steps that log nothing."""
    count = 0
    read = grad_norm.DeviceStats.read

    def counted(self: grad_norm.DeviceStats) -> grad_norm.GradStats:
        nonlocal count
        count += not self.was_read
        return read(self)

    grad_norm.DeviceStats.read = counted  # type: ignore[method-assign]
    try:
        torch.manual_seed(7)
        engine, *_ = zeroaccel.initialize(Toy(), config=dict(settings))
        on_device(engine)
        for batch in batches(0, 4):
            train_step(engine, engine(batch))
        engine.destroy()
    finally:
        grad_norm.DeviceStats.read = read  # type: ignore[method-assign]
    return count


def test_the_host_reads_once_a_step_where_a_step_may_be_skipped(own_job: None) -> None:
    assert _reads(config(2, "bf16", gradient_clipping=0.5)) == 4


def test_the_host_reads_nothing_where_nothing_depends_on_it(own_job: None) -> None:
    unchecked = {"enabled": True, "check_grad_overflow": False}
    assert _reads(config(2, bf16=unchecked, gradient_clipping=0.5)) == 0


def _different_rates() -> tuple[str, float, int]:
    """Returns the error of a step with two learning rates, the weights after it, and the number of counted steps."""
    torch.manual_seed(7)
    model = Toy()
    engine, optimizer, *_ = zeroaccel.initialize(model, config=config(1, "bf16"))
    on_device(engine)
    before = [param.detach().clone() for param in model.parameters()]
    if engine.collectives.rank:
        optimizer.param_groups[0]["lr"] = 0.5
    engine.backward(engine(batches(engine.collectives.rank, 1)[0]))
    with pytest.raises(UsageError) as raised:
        engine.step()
    changed = _largest_change(before, model)
    steps = engine.global_steps
    engine.destroy()
    return str(raised.value), changed, steps


def _largest_change(before: list[Tensor], model: Toy) -> float:
    now = [param.detach() for param in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(before, now, strict=True) if a.numel())


def _different_rates_unread() -> tuple[str, float, float]:
    """Does the same when no step waits for the device: the step's change, and the error of the next step."""
    torch.manual_seed(7)
    model = Toy()
    settings = config(1, bf16={"enabled": True, "check_grad_overflow": False})
    engine, optimizer, *_ = zeroaccel.initialize(model, config=settings)
    on_device(engine)
    first, second, third = batches(engine.collectives.rank, 3)
    before = [param.detach().clone() for param in model.parameters()]
    if engine.collectives.rank:
        optimizer.param_groups[0]["lr"] = 0.5
    train_step(engine, engine(first))
    changed = _largest_change(before, model)
    engine.backward(engine(second))
    with pytest.raises(UsageError) as raised:
        engine.step()
    optimizer.param_groups[0]["lr"] = 0.5
    train_step(engine, engine(third))
    afterwards = _largest_change(before, model)
    engine.destroy()
    return str(raised.value), changed, afterwards


def test_ranks_with_different_settings_update_nothing(ranks: Ranks) -> None:
    for message, changed, steps in ranks(2).run(_different_rates):
        assert "optimizer.param_groups[0]['lr']" in message
        assert changed == 0.0
        assert steps == 0


def test_different_settings_are_found_a_step_late_where_no_step_waits(ranks: Ranks) -> None:
    for message, changed, afterwards in ranks(2).run(_different_rates_unread):
        assert "optimizer.param_groups[0]['lr']" in message
        assert changed == 0.0
        assert afterwards > 0.0


def test_the_gradient_factor_on_the_device_equals_the_hosts() -> None:
    generator = torch.Generator().manual_seed(0)
    for power in (-140, -60, -20, 0, 3, 40, 127):
        grads: list[Tensor] = [torch.randn(999, generator=generator) * 2.0**power]
        for rule in (
            grad_norm.FactorRule(1.0, 0.7),
            grad_norm.FactorRule(65536.0, 1e-3, 0.5),
            grad_norm.FactorRule(2.0),
        ):
            largest = torch.zeros(1, dtype=torch.int32)
            sums = torch.zeros(2, dtype=torch.int64)
            facts = torch.empty(8, dtype=torch.float64)
            grad_norm.max_abs_into(grads[0], largest)
            grad_norm.write_facts(largest, 1, 2, False, 3, facts)
            grad_norm.square_sums_into(grads[0], largest, sums)
            check = grad_norm.DeviceStats(facts, sums)
            control = check.control(rule)
            factor = rule.factor(check.read())
            if factor is None:
                assert control[1] == 0
            else:
                assert control.tolist() == [float(torch.tensor(factor)), 1.0]
            stats = check.read()
            assert (stats.norm if stats.finite else math.inf) == l2_norm(grads)
