"""The config in DeepSpeed's JSON format, with types and checks, and the plans that the engine derives from it.

`load_config` loads a config; `shard_plan`, `tier_plan` and `solve_batch` derive settings for the engine; `resolve`
fills every "auto" from `Facts`. Depends only on `errors` and `logs` and does not import torch, so that any machine can
check a config.
"""

from __future__ import annotations

from zeroaccel.config.auto_values import Fact, Facts, Resolved, resolve
from zeroaccel.config.comm_plan import CommPlan, comm_plan
from zeroaccel.config.load_config_file import load_config
from zeroaccel.config.schema import Config
from zeroaccel.config.shard_plan import (
    BatchSizes,
    Residence,
    ShardPlan,
    TierPlan,
    overlaps_communication,
    shard_plan,
    solve_batch,
    tier_plan,
)

__all__ = [
    "BatchSizes",
    "CommPlan",
    "Config",
    "Fact",
    "Facts",
    "Residence",
    "Resolved",
    "ShardPlan",
    "TierPlan",
    "comm_plan",
    "load_config",
    "overlaps_communication",
    "resolve",
    "shard_plan",
    "solve_batch",
    "tier_plan",
]
