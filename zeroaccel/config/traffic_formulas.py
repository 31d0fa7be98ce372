"""What a step sends, by formula: bytes per rank, inside its node and across nodes.

Pure arithmetic, for estimates before anything runs; `comm/recording.py` counts the same while it runs, and a test
holds them together. Letters: W ranks that see different samples, L of them on each node, G shards, T ranks with a
second copy, N elements of the model, padding included. A rank sends what each of the others needs of it, so of a gather
of N elements among G it sends N / G to each of G - 1. (Wang et al., ZeRO++, 2023, arXiv:2306.10209, section 3, counts a
node as one sender instead: its 0.25 for gradients in 4 bits is 0.25 / L per rank.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroaccel.config.comm_plan import CommPlan

__all__ = ["INT4_BLOCK_NUMEL", "INT8_BLOCK_NUMEL", "StepTraffic", "code_nbytes", "step_traffic"]

INT8_BLOCK_NUMEL = 512
"""Values that share a scale in int8: 0.8 % of the bytes are scales."""

INT4_BLOCK_NUMEL = 256
"""Values that share a scale in int4: 3.1 % of the bytes are scales."""

_ALIGN_NBYTES = 16
_SCALE_NBYTES = 4
_RUNNING_NBYTES = 4  # of an element of the sum that goes from replica to replica


def code_nbytes(numel: int, bits: int, block_numel: int) -> int:
    """Bytes of the code of `numel` values: a scale per block, the integers, padding to 16 bytes."""
    used = _SCALE_NBYTES * -(-numel // block_numel) + -(-numel * bits // 8)
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
    regathers: bool = True,
) -> StepTraffic:
    """Gathers for forward and backward and the reduction of every unit, at stage 3.

    Args:
        unit_numels: elements of each unit's flat buffer, padded, all trained.
        ranks_per_node: consecutive ranks on a machine; divides the number of ranks.
        itemsize: bytes of a parameter and of its gradient.
        accumulation: micro-steps per step.
        regathers: units are given up between forward and backward.
    """
    gathers = accumulation * (2 if regathers else 1)
    total = StepTraffic(0.0, 0.0)
    for numel in unit_numels:
        shard = numel // plan.shard_size
        first = code_nbytes(shard, 8, INT8_BLOCK_NUMEL) if plan.quantized_weights else shard * itemsize
        gather = again = _to_others(first, plan.shard_size, plan.world_size, ranks_per_node)
        if plan.secondary_size < plan.shard_size:
            second = numel // plan.secondary_size * itemsize
            again = _to_others(second, plan.secondary_size, plan.world_size, ranks_per_node)
        reduction = _reduction(plan, shard, ranks_per_node, itemsize)
        total += gather + again.times(gathers - 1) + reduction.times(accumulation)
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
