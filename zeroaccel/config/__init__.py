"""The config: DeepSpeed's JSON format, typed and checked, and what the engine derives from it.

`load_config` is the way in; `shard_plan`, `tier_plan` and `solve_batch` answer what the engine asks. Stands above
`errors` and `logs` only, and does not import torch, so that a config can be checked anywhere.
"""

from __future__ import annotations

from zeroaccel.config.batch import BatchSizes, solve_batch
from zeroaccel.config.load import load_config
from zeroaccel.config.plan import Residence, ShardPlan, TierPlan, overlaps_communication, shard_plan, tier_plan
from zeroaccel.config.schema import Config

__all__ = [
    "BatchSizes",
    "Config",
    "Residence",
    "ShardPlan",
    "TierPlan",
    "load_config",
    "overlaps_communication",
    "shard_plan",
    "solve_batch",
    "tier_plan",
]
