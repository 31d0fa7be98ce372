"""The promise: residency never changes arithmetic. Losses, norms and weights have the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Run, config, differences, train

SETTINGS: dict[str, dict[str, Any]] = {
    "small reduce bucket": {"reduce_bucket_size": 300},
    "overlap": {"overlap_comm": True},
    "no overlap": {"overlap_comm": False},
    "small gather bucket": {"allgather_bucket_size": 200},
    "no prefetch": {"stage3_prefetch_bucket_size": 0},
    "short prefetch": {"stage3_prefetch_bucket_size": 2500},
    "few live": {"stage3_max_live_parameters": 3000},
    "no reuse": {"stage3_max_reuse_distance": 0},
    "persistent vectors": {"stage3_param_persistence_threshold": 30},
    "persistent up to a sum": {"stage3_param_persistence_threshold": 30, "stage3_model_persistence_threshold": 60},
    "all persistent": {"stage3_param_persistence_threshold": 10**6},
}


STEPS = 4
FP16_STEPS = 8  # more than the window of the loss scale


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_stages_give_the_same_bits(ranks: Ranks, world_size: int, precision: str, accumulation: int) -> None:
    steps = FP16_STEPS if precision == "fp16" else STEPS
    for clipping in (0.0, 0.5):
        runs = [
            ranks(world_size).run(train, config(stage, precision, accumulation, gradient_clipping=clipping), steps)
            for stage in range(4)
        ]
        # With accumulation, stages 0 and 1 sum over micro-steps and then over ranks, stages 2 and 3 in the reverse
        # order.
        pairs = [(0, 1), (2, 3)] + ([(0, 2)] if accumulation == 1 else [])
        for one, other in pairs:
            for rank in range(world_size):
                assert differences(runs[one][rank], runs[other][rank]) == [], (one, other, rank, clipping)
        final = runs[3][0]
        assert all(torch.isfinite(weight).all() for weight in final.weights.values())
        assert final.losses[-1] < final.losses[0]
        for run in runs:
            assert all(torch.equal(run[0].weights[name], run[1].weights[name]) for name in run[0].weights)


@pytest.fixture(scope="module")
def at_stage_0(ranks: Ranks) -> list[Run]:
    return ranks(2).run(train, config(0, "bf16", gradient_clipping=0.5), STEPS)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_data_movement_change_no_bit(ranks: Ranks, at_stage_0: list[Run], setting: str) -> None:
    for stage in (3,) if "persist" in setting else (1, 2) if setting == "overlap" else (2, 3):
        changed = ranks(2).run(train, config(stage, "bf16", gradient_clipping=0.5, **SETTINGS[setting]), STEPS)
        assert [differences(a, b) for a, b in zip(at_stage_0, changed, strict=True)] == [[], []], stage


OURS = ("SGD", "Adagrad", "Lion", "RMSprop", "bf16", "int8")
TORCHS = ("torch AdamW", "NAdam", "torch.optim.Adagrad", "Adamax", "RAdam", "Rprop", "Adadelta", "ASGD")


@pytest.mark.parametrize("kind", [*OURS, *TORCHS])
def test_every_optimizer_keeps_the_promise(ranks: Ranks, kind: str) -> None:
    section = {
        "SGD": SGD,
        "torch AdamW": {**ADAMW, "params": {**ADAMW["params"], "torch_adam": True}},
        **{kept: {**ADAMW, "params": {**ADAMW["params"], "moments_dtype": kept}} for kept in ("bf16", "int8")},
    }.get(kind, {"type": kind, "params": {"lr": 1e-3}})
    runs = [ranks(2).run(train, config(stage, "bf16", optimizer=section), STEPS) for stage in (0, 1, 3)]
    for other in runs[1:]:
        assert [differences(a, b) for a, b in zip(runs[0], other, strict=True)] == [[], []]


def test_a_difference_would_be_seen(ranks: Ranks) -> None:
    one, other = (ranks(2).run(train, config(1, gradient_clipping=clip), STEPS) for clip in (0.5, 0.500001))
    assert differences(one[0], other[0]) != []
