"""What is sharded and where it lives: the one place that knows what a stage number means.

Reads a `Config`; everything below the config asks these plans and never the stage. Quantised or hierarchical
communication is not a plan: it is another set of collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zeroaccel.config.schema import Config

__all__ = ["Residence", "ShardPlan", "TierPlan", "UpdateTime", "overlaps_communication", "shard_plan", "tier_plan"]

Residence = Literal["device", "host", "nvme"]
"""Where tensors live between uses: with the model, in host memory, in files."""

UpdateTime = Literal["step", "backward", "next_step"]
"""When masters on the host are updated: in `step()`, during backward, or beside the next step's computation."""

_RESIDENCES: dict[Literal["none", "cpu", "nvme"], Residence] = {"none": "device", "cpu": "host", "nvme": "nvme"}


@dataclass(frozen=True)
class ShardPlan:
    """Which model states are divided among the ranks; what is not is replicated on each.

    Attributes:
        optimizer: master weights and optimizer states (stage 1 and up).
        grads: gradients between micro-steps (stage 2 and up): each micro-step is reduced.
        params: parameters between uses (stage 3).
    """

    optimizer: bool
    grads: bool
    params: bool


@dataclass(frozen=True)
class TierPlan:
    """Where this rank's shards live between uses.

    Attributes:
        param: shards of the parameters.
        optimizer: master weights and optimizer states.
    """

    param: Residence
    optimizer: Residence


def shard_plan(config: Config) -> ShardPlan:
    """The sharding that `zero_optimization.stage` asks for (Rajbhandari et al., ZeRO, 2020, section 5)."""
    stage = config.zero_optimization.stage
    return ShardPlan(optimizer=stage >= 1, grads=stage >= 2, params=stage >= 3)


def tier_plan(config: Config) -> TierPlan:
    """The residences that `offload_param` and `offload_optimizer` ask for, of what is sharded."""
    zero, plan = config.zero_optimization, shard_plan(config)
    return TierPlan(
        param=_RESIDENCES[zero.offload_param.device] if zero.offload_param and plan.params else "device",
        optimizer=_RESIDENCES[zero.offload_optimizer.device] if zero.offload_optimizer and plan.optimizer else "device",
    )


def overlaps_communication(config: Config) -> bool:
    """Whether gradients are reduced beside the backward pass; by default, where params are sharded."""
    asked = config.zero_optimization.overlap_comm
    return shard_plan(config).params if asked is None else asked
