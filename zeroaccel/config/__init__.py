"""The config: DeepSpeed's JSON format, typed and checked, and what the engine derives from it.

`load_config` is the way in; `shard_plan`, `tier_plan` and `solve_batch` answer what the engine asks; `resolve`
fills every "auto" from `Facts`. Stands above `errors` and `logs` only, and does not import torch, so that a config can
be checked anywhere.
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
