"""The promise with offload: whichever tier holds masters, states and parameters, the bits are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Run, config, differences, offloaded, train

OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": ADAMW, "SGD": SGD}


def _train_all(settings: list[dict[str, Any]], steps: int) -> list[Run]:
    return [train(each, steps) for each in settings]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_tiers_give_the_same_bits(
    ranks: Ranks, tmp_path: Path, optimizer: str, precision: str, accumulation: int
) -> None:
    tiers = [
        (stage, states, params)
        for stage in (1, 2, 3)
        for states in ("none", "cpu", "nvme")
        for params in (("none", "cpu", "nvme") if stage == 3 else ("none",))
    ]
    settings = [
        config(
            stage,
            precision,
            accumulation,
            optimizer=OPTIMIZERS[optimizer],
            gradient_clipping=0.5,
            **offloaded(tmp_path, states, params, pipeline_read=bool(accumulation > 1), pipeline_write=True),
        )
        for stage, states, params in tiers
    ]
    everyone = ranks(2).run(_train_all, settings, steps=3)
    for runs in everyone:
        reference = {stage: runs[tiers.index((stage, "none", "none"))] for stage in (1, 2, 3)}
        for (stage, states, params), run in zip(tiers, runs, strict=True):
            assert differences(reference[stage], run) == [], (stage, states, params)
