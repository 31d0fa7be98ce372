"""Communication plan for ZeRO++ and MiCS: shard groups, quantized collectives, and bytes sent per step.

`comm_plan` derives the plan from a `Config` and a number of ranks; `comm/hierarchical.py` implements its collectives.
`step_traffic` computes the bytes of a plan in closed form, for estimates before a run; `comm/recording.py` counts the
bytes during a run, and a test compares the two. `checks` finds contradictions that do not depend on the number of
ranks.

Letters: W data-parallel ranks, L ranks per node, G ranks per shard group, T ranks per secondary (hpZ) partition, N
elements of the model including padding. An all-gather of N elements among G ranks sends N / G to each of G - 1 ranks.
(Wang et al., ZeRO++, 2023, arXiv:2306.10209, section 3, counts a node as one sender instead: its 0.25 for gradients in
4 bits is 0.25 / L per rank.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from zeroaccel.config.schema import Config
from zeroaccel.config.shard_plan import ShardPlan
from zeroaccel.errors import ConfigError
from zeroaccel.logs import log_once

_ZERO = "zero_optimization"


@dataclass(frozen=True)
class CommPlan:
    """Distribution of shards over the W ranks with different samples.

    Attributes:
        world_size: W.
        shard_size: number of ranks that shard one replica; there are W / shard_size replicas.
        secondary_size: number of ranks that shard a second copy during a step; shard_size for no second copy.
        quantized_weights: True to all-gather weights as int8 (qwZ).
        fp8_weights: True to use e4m3 instead of int8, with the same number of bytes.
        quantized_gradients: True to reduce gradients as int4 (qgZ).
        forced: True to quantize gradients even if that saves no traffic between nodes.
        node_size: number of consecutive ranks to treat as one machine; None for the launcher's machines.
        watch_interval: steps between measurements of the quantization error; 0 for none.
    """

    world_size: int
    shard_size: int
    secondary_size: int
    quantized_weights: bool = False
    quantized_gradients: bool = False
    fp8_weights: bool = False
    forced: bool = False
    node_size: int | None = None
    watch_interval: int = 0

    @property
    def plain(self) -> bool:
        """True if all ranks form one shard group, without quantization and with the launcher's machines."""
        spread = self.secondary_size == self.shard_size == self.world_size and self.node_size is None
        return spread and not (self.quantized_weights or self.quantized_gradients)


def comm_plan(config: Config, shards: ShardPlan, world_size: int, shard_size: int | None = None) -> CommPlan:
    """Returns the plan for a number of ranks.

    Args:
        shards: the sharding of the config.
        world_size: number of ranks with different samples.
        shard_size: number of ranks per shard group, if a mesh sets it; None for the config's.

    Raises:
        ConfigError: a group size does not divide the number of ranks or the larger group.

    Example:
        >>> from zeroaccel.config import load_config, shard_plan
        >>> config = load_config({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}})
        >>> plan = comm_plan(config, shard_plan(config), world_size=16)
        >>> plan.shard_size, plan.secondary_size
        (16, 4)
    """
    zero = config.zero_optimization
    # MiCS (Zhang et al., 2022, arXiv:2205.00119): each group of ranks shards one replica of the model.
    if shard_size is None:
        shard_size = world_size if zero.mics_shard_size == -1 else zero.mics_shard_size
    all_ranks = f"the {world_size} ranks"
    _check_divisor(config, "mics_shard_size", shard_size, world_size, all_ranks)

    # hpZ (ZeRO++, arXiv:2306.10209, section 3.2): after the all-gather of forward, a secondary partition within a node
    # serves the all-gather of backward. If it is larger than the shard group, a warning replaces it, so that a config
    # for a larger job still runs.
    with_second = shards.params and zero.zero_hpz_partition_size != 1
    secondary_size = zero.zero_hpz_partition_size if with_second else shard_size
    if secondary_size > shard_size:
        key = f"{_ZERO}.zero_hpz_partition_size"
        log_once(logging.WARNING, f"{key}: no second copy: {secondary_size} is more than the {shard_size} ranks")
        secondary_size = shard_size
    among = all_ranks if shard_size == world_size else f"mics_shard_size {shard_size}"
    _check_divisor(config, "zero_hpz_partition_size", secondary_size, shard_size, among)
    node_size = zero.zeropp.node_size
    if node_size is not None:
        _check_divisor(config, "zeropp.node_size", node_size, world_size, all_ranks)
    return CommPlan(
        world_size=world_size,
        shard_size=shard_size,
        secondary_size=secondary_size,
        quantized_weights=shards.params and zero.zero_quantized_weights,
        quantized_gradients=shards.params and zero.zero_quantized_gradients,
        fp8_weights=zero.zeropp.weight_format == "fp8",
        forced=zero.zeropp.quantize_gradients_on_one_node,
        node_size=node_size,
        watch_interval=zero.zeropp.watch_interval,
    )


def _check_divisor(config: Config, key: str, size: int, whole: int, among: str) -> None:
    if whole % size:
        where = config.where(f"{_ZERO}.{key}")
        divisors = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)
        raise ConfigError(where, expected=f"a divisor of {among}: {divisors}", got=size)


INT8_BLOCK_NUMEL = 512
"""Number of values that share a scale in int8: 0.8 % of the bytes are scales."""

INT4_BLOCK_NUMEL = 256
"""Number of values that share a scale in int4: 3.1 % of the bytes are scales."""

_ALIGN_NBYTES = 16
_SCALE_NBYTES = 4
_RUNNING_NBYTES = 4  # per element of the running sum that replicas pass on


def code_nbytes(numel: int, bits: int, block_numel: int, scale_nbytes: int = _SCALE_NBYTES) -> int:
    """Returns the bytes of `numel` quantized values: one scale per block, the integers, and padding to 16 bytes."""
    used = scale_nbytes * -(-numel // block_numel) + -(-numel * bits // 8)
    return -(-used // _ALIGN_NBYTES) * _ALIGN_NBYTES


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one rank sends in a step, averaged over the ranks.

    Attributes:
        inside: bytes to ranks on the same node.
        across: bytes to ranks on other nodes.
    """

    inside: float
    across: float

    def __add__(self, other: StepTraffic) -> StepTraffic:
        return StepTraffic(self.inside + other.inside, self.across + other.across)

    def times(self, count: int) -> StepTraffic:
        """Returns the traffic multiplied by `count`."""
        return StepTraffic(self.inside * count, self.across * count)


def step_traffic(
    plan: CommPlan,
    unit_numels: Sequence[int],
    ranks_per_node: int,
    *,
    itemsize: int = 2,
    accumulation: int = 1,
) -> StepTraffic:
    """Computes the traffic of all gathers in forward and backward and of all reductions, at stage 3.

    Args:
        unit_numels: elements in each unit's flat buffer, with padding; all parameters are trained.
        ranks_per_node: number of consecutive ranks per machine; divides the number of ranks.
        itemsize: bytes per element of parameters and gradients.
        accumulation: number of micro-batches per step.
    """
    total = StepTraffic(0.0, 0.0)
    for numel in unit_numels:
        shard = numel // plan.shard_size
        first = code_nbytes(shard, 8, INT8_BLOCK_NUMEL) if plan.quantized_weights else shard * itemsize
        gather = again = _to_others(first, plan.shard_size, plan.world_size, ranks_per_node)
        if plan.secondary_size < plan.shard_size:
            secondary = numel // plan.secondary_size * itemsize
            again = _to_others(secondary, plan.secondary_size, plan.world_size, ranks_per_node)
        reduction = _reduction(plan, shard, ranks_per_node, itemsize)
        total += gather + again.times(2 * accumulation - 1) + reduction.times(accumulation)
    return total


def _to_others(nbytes: int, group: int, world_size: int, ranks_per_node: int) -> StepTraffic:
    """Returns the traffic if each rank sends `nbytes` to every other rank in its group of `group` adjacent ranks."""
    near = sum(
        min((rank // group + 1) * group, (rank // ranks_per_node + 1) * ranks_per_node)
        - max(rank // group * group, rank // ranks_per_node * ranks_per_node)
        - 1
        for rank in range(world_size)
    )
    return StepTraffic(nbytes * near / world_size, nbytes * (group - 1 - near / world_size))


def _reduction(plan: CommPlan, shard: int, ranks_per_node: int, itemsize: int) -> StepTraffic:
    nodes = plan.world_size // ranks_per_node
    if plan.quantized_gradients and (nodes > 1 or plan.forced):
        code = code_nbytes(shard, 4, INT4_BLOCK_NUMEL)
        return StepTraffic(code * (ranks_per_node - 1) * nodes, code * (nodes - 1))
    within = _to_others(shard * itemsize, plan.shard_size, plan.world_size, ranks_per_node)
    return within + _ring(plan, shard, ranks_per_node, itemsize)


def _ring(plan: CommPlan, shard: int, ranks_per_node: int, itemsize: int) -> StepTraffic:
    """Returns the traffic between replicas: they pass on the fp32 running sum, and from the last one the result."""
    size, replicas = plan.shard_size, plan.world_size // plan.shard_size
    last = replicas - 1
    hops = [(place, place + 1, _RUNNING_NBYTES) for place in range(last)]
    hops += [((last + hop) % replicas, hop, itemsize) for hop in range(last)]
    far = sum(
        weight
        for sender, receiver, weight in hops
        for place in range(size)
        if (sender * size + place) // ranks_per_node != (receiver * size + place) // ranks_per_node
    )
    total = size * sum(weight for _, _, weight in hops)
    return StepTraffic(shard * (total - far) / plan.world_size, shard * far / plan.world_size)
