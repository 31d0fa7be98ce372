"""The norm of gradients that are examined when they arrive: no pass at the boundary, unless the exponent changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import zeroaccel
import zeroaccel.zero
from tests.support.pool import Ranks
from tests.support.training import Toy, batches, config
from zeroaccel.ops import reductions
from zeroaccel.ops.reductions import l2_norm
from zeroaccel.zero.grad_reducer import GradientBuffer

FACTORS = (1.0, 1.0, 2.0, 1.0, 2.0**-9, 2.0**-9, 2.0**7, 0.0, 2.0**7, math.inf)
MISSES = (0, 2, 3, 4, 6)  # steps whose exponent is not that of the step before
STILL = {"type": "SGD", "params": {"lr": 0.0}}


def _norms(settings: dict[str, Any], change: str = "", planted: bool = False) -> list[tuple[bool, int]]:
    """Returns for each step whether its norm has the bits of one from scratch, and the host's passes in `step()`."""
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    reducer, found = engine.grad_reducer, []
    launch, sums = reductions.launch, GradientBuffer.square_sums
    passes: list[str] = []

    def counted(kernel: str, *arguments: Any, **how: Any) -> Any:
        passes.append(kernel)
        return launch(kernel, *arguments, **how)

    def of_the_expected_exponent(self: GradientBuffer, exponent: int) -> tuple[int, int]:
        known = self.examined and self.examined.sums
        return next(iter(known.values())) if known else sums(self, exponent)

    reductions.launch = counted
    if planted:
        GradientBuffer.square_sums = of_the_expected_exponent  # type: ignore[method-assign]
    try:
        for number, factor in enumerate(FACTORS):
            for index, batch in enumerate(batches(engine.collectives.rank, engine.gradient_accumulation_steps())):
                if index:
                    engine.step()
                engine.backward(engine(batch) * factor)
            if change == "clamp":
                engine.clip_grad_value_(1e-3 * (number + 1))
            elif change == "write":
                zeroaccel.zero.safe_set_full_grad(engine.module.norm.weight, torch.full((23,), number + 1.0))
            elif change == "in place":
                for each in reducer.gradients:
                    assert each.shard is not None
                    each.shard.mul_(2.0 ** (number + 1))
            shards = [each.shard.float() for each in reducer.gradients if each.shard is not None]
            everyone = engine.collectives.job.gather_objects(shards, "gradients for the test")
            expected = l2_norm([shard for rank in everyone for shard in rank])
            passes.clear()
            engine.step()
            found.append((engine.get_global_grad_norm() == expected, len(passes)))
    finally:
        reductions.launch, GradientBuffer.square_sums = launch, sums  # type: ignore[method-assign]
    engine.destroy()
    return found


@pytest.mark.parametrize("change", ["", "clamp", "write", "in place"])
@pytest.mark.parametrize(
    ("world", "stage", "precision", "accumulation"), [(1, 3, "bf16", 1), (2, 1, "fp32", 3), (2, 2, "bf16", 3)]
)
def test_the_norm_has_the_bits_of_a_norm_from_scratch(
    ranks: Ranks, world: int, stage: int, precision: str, accumulation: int, change: str
) -> None:
    settings = config(stage, precision, accumulation, optimizer=STILL, gradient_clipping=1.0)
    for steps in ranks(world).run(_norms, settings, change, timeout=60):
        assert [same for same, _ in steps] == [True] * len(FACTORS)
        passes = [count for _, count in steps]
        if not change:  # then a pass is needed only for another exponent
            assert [number for number, count in enumerate(passes) if count] == list(MISSES)
        else:
            assert min(passes) > 0


def test_the_sums_of_a_missed_exponent_would_be_seen(own_job: None) -> None:
    steps = _norms(config(3, "bf16", optimizer=STILL, gradient_clipping=1.0), planted=True)
    assert not all(same for same, _ in steps)
