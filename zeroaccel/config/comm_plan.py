"""Who holds which shard, and in how many bits it travels: what the config says of it, for a number of ranks.

Reads a `Config`; `comm/hierarchical.py` makes collectives of the plan, and `traffic.py` its formulas. Contradictions
that do not depend on the number of ranks are in `checks`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from zeroaccel.config.schema import Config
from zeroaccel.config.shard_plan import shard_plan
from zeroaccel.errors import ConfigError
from zeroaccel.logs import log_once

__all__ = ["CommPlan", "comm_plan"]

_ZERO = "zero_optimization"


@dataclass(frozen=True)
class CommPlan:
    """How shards are spread over the W ranks that see different samples.

    Attributes:
        world_size: W.
        shard_size: ranks that hold one model among them; W / shard_size replicas.
        secondary_size: ranks that hold a second copy of it while a step lasts; shard_size where there is none.
        quantized_weights: weights travel as int8.
        quantized_frozen_weights: frozen weights are stored as int8.
        quantized_gradients: gradients travel as int4.
        forced: even where that saves nothing across nodes.
        node_size: consecutive ranks to take for one machine; None asks the launcher.
        watch_interval: steps between two looks at the error of codes; 0 is never.
    """

    world_size: int
    shard_size: int
    secondary_size: int
    quantized_weights: bool = False
    quantized_frozen_weights: bool = False
    quantized_gradients: bool = False
    forced: bool = False
    node_size: int | None = None
    watch_interval: int = 0

    @property
    def plain(self) -> bool:
        """Whether shards are spread over all ranks and travel as they are, on the machines that the launcher knows."""
        spread = self.secondary_size == self.shard_size == self.world_size and self.node_size is None
        return spread and not (self.quantized_weights or self.quantized_frozen_weights or self.quantized_gradients)


def comm_plan(config: Config, world_size: int, shard_size: int | None = None) -> CommPlan:
    """The plan for this many ranks.

    Args:
        world_size: ranks that see different samples.
        shard_size: ranks that hold one model among them, where a mesh says so; else the config says.

    Raises:
        ConfigError: a size does not divide what it is a part of.
    """
    zero = config.zero_optimization
    if shard_size is None:
        shard_size = world_size if zero.mics_shard_size == -1 else zero.mics_shard_size
    if world_size % shard_size:
        raise ConfigError(
            config.where(f"{_ZERO}.mics_shard_size"),
            expected=f"a divisor of the {world_size} ranks: {_divisors(world_size)}",
            got=shard_size,
        )
    shards_params = shard_plan(config).params
    with_second = shards_params and zero.zero_hpz_partition_size != 1
    secondary_size = zero.zero_hpz_partition_size if with_second else shard_size
    if secondary_size > shard_size:
        key = f"{_ZERO}.zero_hpz_partition_size"
        log_once(
            logging.WARNING, f"{key}: no second copy is kept: {secondary_size} ranks are more than the {shard_size}"
        )
        secondary_size = shard_size
    if shard_size % secondary_size:
        among = f"the {world_size} ranks" if shard_size == world_size else f"mics_shard_size {shard_size}"
        raise ConfigError(
            config.where(f"{_ZERO}.zero_hpz_partition_size"),
            expected=f"a divisor of {among}: {_divisors(shard_size)}",
            got=secondary_size,
        )
    node_size = zero.zeropp.node_size
    if node_size is not None and world_size % node_size:
        raise ConfigError(
            config.where(f"{_ZERO}.zeropp.node_size"),
            expected=f"a divisor of the {world_size} ranks: {_divisors(world_size)}",
            got=node_size,
        )
    return CommPlan(
        world_size=world_size,
        shard_size=shard_size,
        secondary_size=secondary_size,
        quantized_weights=shards_params and zero.zero_quantized_weights,
        quantized_frozen_weights=shards_params and zero.zero_quantized_nontrainable_weights,
        quantized_gradients=shards_params and zero.zero_quantized_gradients,
        forced=zero.zeropp.quantize_gradients_on_one_node,
        node_size=node_size,
        watch_interval=zero.zeropp.watch_interval,
    )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
