"""Against a plain loop: the same training in one process, with torch's own optimizers and the union of the batches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Toy, batches, config, train

OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": ADAMW, "SGD": SGD}  # SGD with momentum
STEPS = 5
# Only the last case detects a wrong weight of all micro-steps: clipping hides a factor of the whole gradient from SGD.
CASES = ((3, 1, 0.3), (2, 3, 0.3), (2, 3, 0.0))  # ranks, micro-steps, clipping


@cache
def _plain_loop(world_size: int, accumulation: int, kind: str, clipping: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = Toy()
    optimizer = OPTIMIZERS[kind]
    trainable = [param for param in model.parameters() if param.requires_grad]
    stepper: torch.optim.Optimizer = getattr(torch.optim, kind)(trainable, **optimizer["params"])
    data = [batches(rank, STEPS * accumulation) for rank in range(world_size)]
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank in range(world_size):
                (model(data[rank][step * accumulation + micro]) / (world_size * accumulation)).backward()
        for param in trainable:  # as in the engine, an unused parameter has a gradient of zero
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if clipping:
            torch.nn.utils.clip_grad_norm_(trainable, clipping)
        stepper.step()
        stepper.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_follows_a_plain_loop(ranks: Ranks, stage: int, optimizer: str) -> None:
    for world_size, accumulation, clipping in CASES:
        expected = _plain_loop(world_size, accumulation, optimizer, clipping)
        keys = {"optimizer": OPTIMIZERS[optimizer], "gradient_clipping": clipping}
        settings = config(stage, accumulation=accumulation, **keys)
        run = ranks(world_size).run(train, settings, STEPS)[0]
        for name, weight in expected.items():
            torch.testing.assert_close(
                run.weights[name], weight, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_16_bits_stay_near_a_plain_loop(ranks: Ranks, precision: str, optimizer: str) -> None:
    # Detects a wrong gradient scale: a factor of 2 would change SGD's weights by far more than rounding does.
    expected = _plain_loop(2, 1, optimizer, 0.0)
    start = {name: param.detach() for name, param in _seeded().named_parameters()}
    for stage in (0, 3):
        run = ranks(2).run(train, config(stage, precision, optimizer=OPTIMIZERS[optimizer]), STEPS)[0]
        moved = sum((expected[n] - start[n]).square().sum() for n in expected).sqrt()
        error = sum((run.weights[n].float() - expected[n]).square().sum() for n in expected).sqrt()
        assert error < 0.1 * moved, (stage, float(error), float(moved))


def _seeded() -> Toy:
    torch.manual_seed(7)
    return Toy()
