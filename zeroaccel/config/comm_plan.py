"""Communication of ZeRO++ and MiCS: which ranks shard together, what is quantized, and how many bytes a step sends.

`comm_plan` reads a `Config` for a number of ranks; `comm/hierarchical.py` makes collectives of it. `step_traffic` is
the closed form of the same plan, for estimates before anything runs: `comm/recording.py` counts the bytes while it
runs, and a test holds the two together. Contradictions that do not depend on the number of ranks are in `checks`.

Letters: W data-parallel ranks, L of them per node, G ranks per shard group, T ranks per secondary (hpZ) partition, N
elements of the model, padding included. An all-gather of N elements among G ranks sends N / G to each of G - 1 ranks.
(Wang et al., ZeRO++, 2023, arXiv:2306.10209, section 3, counts a node as one sender instead: its 0.25 for gradients in
4 bits is 0.25 / L per rank.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from zeroaccel.config.schema import Config
from zeroaccel.config.shard_plan import shard_plan
from zeroaccel.errors import ConfigError
from zeroaccel.logs import log_once

_ZERO = "zero_optimization"


@dataclass(frozen=True)
class CommPlan:
    """How shards are spread over the W ranks that see different samples.

    Attributes:
        world_size: W.
        shard_size: ranks that hold one model among them; W / shard_size replicas.
        secondary_size: ranks that hold a second copy of it while a step lasts; shard_size where there is none.
        quantized_weights: weights are all-gathered as int8 (qwZ).
        fp8_weights: as e4m3 instead, in as many bytes.
        quantized_gradients: gradients are reduced as int4 (qgZ).
        forced: even where that saves nothing across nodes.
        node_size: consecutive ranks to take for one machine; None asks the launcher.
        watch_interval: steps between two looks at the error of codes; 0 is never.
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
        """Whether one shard group has all ranks and nothing is quantized, on the nodes that the launcher knows."""
        spread = self.secondary_size == self.shard_size == self.world_size and self.node_size is None
        return spread and not (self.quantized_weights or self.quantized_gradients)


def comm_plan(config: Config, world_size: int, shard_size: int | None = None) -> CommPlan:
    """The plan for this many ranks.

    Args:
        world_size: ranks that see different samples.
        shard_size: ranks of a shard group, where a mesh has one; else the config's.

    Raises:
        ConfigError: a size does not divide what it is a part of.

    Example:
        >>> from zeroaccel.config import load_config
        >>> config = load_config({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}})
        >>> plan = comm_plan(config, world_size=16)
        >>> plan.shard_size, plan.secondary_size
        (16, 4)
    """
    zero = config.zero_optimization
    # MiCS (Zhang et al., 2022, arXiv:2205.00119): a model is sharded in a group, and groups are replicas.
    if shard_size is None:
        shard_size = world_size if zero.mics_shard_size == -1 else zero.mics_shard_size
    all_ranks = f"the {world_size} ranks"
    _check_divisor(config, "mics_shard_size", shard_size, world_size, all_ranks)
    shards_params = shard_plan(config).params

    # hpZ (ZeRO++, arXiv:2306.10209, section 3.2): after forward's all-gather, a secondary partition within the node
    # serves the all-gather of backward. A partition larger than the shard group is left out with a warning, so that a
    # config for a larger job still runs.
    with_second = shards_params and zero.zero_hpz_partition_size != 1
    secondary_size = zero.zero_hpz_partition_size if with_second else shard_size
    if secondary_size > shard_size:
        key = f"{_ZERO}.zero_hpz_partition_size"
        log_once(
            logging.WARNING, f"{key}: no second copy is kept: {secondary_size} ranks are more than the {shard_size}"
        )
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
        quantized_weights=shards_params and zero.zero_quantized_weights,
        quantized_gradients=shards_params and zero.zero_quantized_gradients,
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
"""Values that share a scale in int8: 0.8 % of the bytes are scales."""

INT4_BLOCK_NUMEL = 256
"""Values that share a scale in int4: 3.1 % of the bytes are scales."""

_ALIGN_NBYTES = 16
_SCALE_NBYTES = 4
_RUNNING_NBYTES = 4  # of an element of the sum that goes from replica to replica


def code_nbytes(numel: int, bits: int, block_numel: int, scale_nbytes: int = _SCALE_NBYTES) -> int:
    """Bytes of the code of `numel` values: a scale per block, the integers, padding to 16 bytes."""
    used = scale_nbytes * -(-numel // block_numel) + -(-numel * bits // 8)
    return -(-used // _ALIGN_NBYTES) * _ALIGN_NBYTES


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one rank sends in a step, mean over the ranks.

    Attributes:
        inside: to ranks on its own node.
        across: to ranks on other nodes.
    """

    inside: float
    across: float

    def __add__(self, other: StepTraffic) -> StepTraffic:
        return StepTraffic(self.inside + other.inside, self.across + other.across)

    def times(self, count: int) -> StepTraffic:
        """So many of it."""
        return StepTraffic(self.inside * count, self.across * count)


def step_traffic(
    plan: CommPlan,
    unit_numels: Sequence[int],
    ranks_per_node: int,
    *,
    itemsize: int = 2,
    accumulation: int = 1,
) -> StepTraffic:
    """Gathers for forward and backward and the reduction of every unit, at stage 3.

    Args:
        unit_numels: elements of each unit's flat buffer, padded, all trained.
        ranks_per_node: consecutive ranks on a machine; divides the number of ranks.
        itemsize: bytes of a parameter and of its gradient.
        accumulation: micro-steps per step.
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
    """`nbytes` from each rank to each of the others in its run of `group` ranks."""
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
    """From replica to replica, first the running sum, in fp32, and from the last one on the result."""
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
