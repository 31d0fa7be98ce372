"""Hierarchical sharding and quantised communication: what must be equal is, and what rounds stays within its bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.multi.pool import Pool
from tests.multi.training import SGD, Run, config, differences, train

Ranks = Callable[[int], Pool]


def _trained(changes: list[dict[str, Any]], precision: str, **common: Any) -> list[Run]:
    """One run per set of changes, in one call of the pool."""
    return [train(config(3, precision, **common, **change), steps=8) for change in changes]


EXACT: dict[str, dict[str, Any]] = {
    "replicas of 2": {"mics_shard_size": 2},
    "every rank a replica": {"mics_shard_size": 1},
    "one shard group": {"mics_shard_size": 4},
    "second copy in 2": {"zero_hpz_partition_size": 2},
    "second copy in 4": {"zero_hpz_partition_size": 4},
    "second copy, nothing kept": {"zero_hpz_partition_size": 2, "stage3_max_reuse_distance": 0},
    "second copy in a replica": {"mics_shard_size": 4, "zero_hpz_partition_size": 2},
    "second copy and persistent vectors": {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 30},
}


@pytest.mark.parametrize(
    ("precision", "accumulation", "optimizer"), [("bf16", 1, SGD), ("fp32", 2, None), ("fp16", 2, SGD)]
)
def test_where_shards_are_changes_nothing(ranks: Ranks, precision: str, accumulation: int, optimizer: Any) -> None:
    common = {"accumulation": accumulation, "gradient_clipping": 0.5}
    if optimizer is not None:
        common["optimizer"] = optimizer
    runs = ranks(4).run(_trained, [{}, *EXACT.values()], precision, **common)
    for rank, (plain, *others) in enumerate(runs):
        assert plain.losses[-1] < plain.losses[0]
        for name, other in zip(EXACT, others, strict=True):
            assert differences(plain, other) == [], (name, rank)
    assert all(torch.equal(runs[0][0].weights[name], runs[3][1].weights[name]) for name in runs[0][0].weights)
