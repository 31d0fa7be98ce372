"""The end of a step on a CUDA device: bits equal to the host's, and one call per step at which the host waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroaccel
from tests.support.training import ADAMW, SGD, Toy, batches, config
from zeroaccel.ops.reductions import l2_norm
from zeroaccel.zero.grad_norm import DeviceStats, FactorRule, max_abs_into, square_sums_into, write_facts
from zeroaccel.zero.grad_norm import GradStats as Stats

pytestmark = pytest.mark.gpu

RULES = (FactorRule(1.0, 0.7), FactorRule(65536.0, 1e-3, 0.5), FactorRule(2.0, skips_overflow=False))


def _special(dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns ordinary, tiny, huge, zero and non-finite gradients."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.randn(100_003, generator=generator)
    powers = (-130, -20, 0, 15) if dtype is not torch.float16 else (-20, 0, 5)
    finite = [(ordinary * 2.0**power).to(dtype) for power in powers]
    broken = finite[-1].clone()
    broken[77] = float("nan")
    return [*finite, torch.zeros(5, dtype=dtype), broken]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_the_factor_equals_that_of_the_host(rule: FactorRule, dtype: torch.dtype) -> None:
    for grads in _special(dtype):
        on_device = grads.cuda()
        largest = torch.zeros(1, dtype=torch.int32, device="cuda")
        sums = torch.zeros(2, dtype=torch.int64, device="cuda")
        facts = torch.empty(8, dtype=torch.float64, device="cuda")
        max_abs_into(on_device, largest)
        write_facts(largest, 1, 2, False, 3, facts)
        square_sums_into(on_device, largest, sums)
        check = DeviceStats(facts, sums)
        control = check.control(rule)
        norm = l2_norm([grads])
        stats = check.read()
        assert (stats.norm if stats.finite else float("inf")) == norm
        factor = rule.factor(Stats(stats.finite, norm, True, True))
        assert control.tolist()[1] == float(factor is not None)
        if factor is not None:
            assert control[0].item() == float(torch.tensor(factor))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
def test_only_the_reading_of_its_outcome_waits_in_a_step(stage: int, optimizer: dict[str, Any]) -> None:
    engine, *_ = zeroaccel.initialize(
        Toy().cuda(), config=config(stage, "bf16", optimizer=optimizer, gradient_clipping=0.5)
    )
    tokens = [batch.cuda() for batch in batches(0, 6)]
    for batch in tokens[:3]:
        engine.backward(engine(batch))
        engine.step()
    torch.cuda.synchronize()
    # The debug mode does not detect waits for events; the engine reads the outcome of a step with an event.
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in tokens[3:]:
            engine.backward(engine(batch))
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.was_step_applied()
    engine.destroy()
