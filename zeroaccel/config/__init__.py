"""The config in DeepSpeed's JSON format, with types and checks, and the plans that the engine derives from it.

`load_config` loads a config; `shard_plan`, `tier_plan` and `solve_batch` derive settings for the engine; `resolve`
fills every "auto" from `Facts`. Depends only on `errors` and `logs` and does not import torch, so that any machine can
check a config.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Module -> its public names, imported on first use: the models of the schema take a quarter of a second, and the help
# of the command line needs only the table of settings.
_PROVIDES = {
    "auto_values": "Fact Facts Resolved resolve",
    "comm_plan": "CommPlan comm_plan",
    "load_config_file": "load_config",
    "schema": "Config",
    "shard_plan": "BatchSizes Residence ShardPlan TierPlan overlaps_communication shard_plan solve_batch tier_plan",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _PROVIDES.items() for name in names.split()}


class _Package(ModuleType):
    """This package. The import of a module that has the name of its function sets the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_module = isinstance(value, ModuleType) and name in _HOMES
        super().__setattr__(name, getattr(value, name) if is_module else value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value


sys.modules[__name__].__class__ = _Package
