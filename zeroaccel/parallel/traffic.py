"""Bytes that a step sends along each axis of a mesh, in closed form.

`comm/recording.py` counts the same bytes at run time, and tests compare the two exactly. Each function returns
the mean over the ranks of the job, inside and across nodes; a node has consecutive ranks. Bytes are counted per message
between two ranks, as in host memory.

Letters: B samples of a micro-batch, S tokens of a whole sequence, M micro-batches per step; t tensor-parallel ranks,
P ranks that share a sequence.

`shard_traffic` covers ZeRO's own axes; `comm_plan.step_traffic` covers ZeRO++ without other axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from zeroaccel.config.comm_plan import StepTraffic
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.parallel.attention_pattern import Band
from zeroaccel.parallel.dealing import Dealing
from zeroaccel.parallel.ring import ring_tokens

__all__ = [
    "SplitLayerShape",
    "pipeline_traffic",
    "recurrence_traffic",
    "sequence_traffic",
    "shard_traffic",
    "tensor_traffic",
]

_RUNNING_NBYTES = 4  # per element of the running sum that replicas pass on
_POSITION_NBYTES = 8
_LOSS_NBYTES = 16  # a loss and its number of labels, as float64

# Styles that sum or gather outputs in forward, and gradients of inputs in backward.
_SUMS_FORWARD = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise"})
_GATHERS_FORWARD = frozenset({"colwise_gather_output", "colwise_rep", "embedding_colwise"})
_SUMS_BACKWARD = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise_2", "packed_colwise_3"})
_GATHERS_BACKWARD = frozenset({"rowwise_rep", "rowwise_split_input"})
_SUMS_WEIGHTS = frozenset({"replicated_with_grad_allreduce"})


@dataclass(frozen=True)
class SplitLayerShape:
    """A tensor-parallel layer.

    Attributes:
        style: the style in `ParallelConfig.tp_plan`.
        in_features, out_features: of the whole layer; for a norm over heads, both are the width of a head.
    """

    style: str
    in_features: int
    out_features: int


def tensor_traffic(
    mesh: ParallelConfig,
    layers: Iterable[SplitLayerShape],
    tokens: int,
    ranks_per_node: int,
    *,
    itemsize: int = 2,
    accumulation: int = 1,
) -> StepTraffic:
    """Returns the sums and gathers of tensor-parallel layers. (Megatron-LM, arXiv:1909.08053, section 3)

    A sum of N elements counts as a reduce-scatter and an all-gather: 2 ceil(N / t) to each of the t - 1 other ranks.
    Each `colwise` layer sums the gradient of its own input, so q, k and v take three sums where Megatron's fused layer
    takes one. Repeated sums during recomputation are not included.

    Args:
        tokens: number of tokens of a micro-batch on one rank, B S / P.

    Example:
        >>> block = [SplitLayerShape("colwise", 64, 256), SplitLayerShape("rowwise", 256, 64)]
        >>> tensor_traffic(ParallelConfig(dp_shard=1, tp=2), block, tokens=10, ranks_per_node=2)
        StepTraffic(inside=2560.0, across=0.0)
    """
    size = mesh.tp
    to_each = 0
    for layer in layers:
        sent, received = tokens * layer.out_features, tokens * layer.in_features
        if layer.style in _SUMS_FORWARD:
            to_each += 2 * -(-sent // size)
        if layer.style in _GATHERS_FORWARD:
            to_each += sent // size
        if layer.style in _SUMS_BACKWARD:
            to_each += 2 * -(-received // size)
        if layer.style in _GATHERS_BACKWARD:
            to_each += received // size
        if layer.style in _SUMS_WEIGHTS:
            to_each += 2 * -(-layer.out_features // size)
    return _to_peers(to_each * itemsize * accumulation, mesh.groups("tp"), ranks_per_node)


def sequence_traffic(
    mesh: ParallelConfig,
    *,
    layers: int,
    batch: int,
    tokens: int,
    heads: int,
    key_heads: int,
    head_width: int,
    ranks_per_node: int,
    itemsize: int = 2,
    accumulation: int = 1,
    padded: bool = False,
    averages_loss: bool = True,
    window: float = math.inf,
) -> StepTraffic:
    """Returns the exchanges of heads in forward and backward, and of masks and losses. (Ulysses, arXiv:2309.14509)

    With more ranks than heads, keys and values also visit the ranks that share their heads, forward and backward, and
    their gradients return; those that causal attention does not need stay.

    Args:
        layers: number of attention layers.
        batch, tokens: B and S.
        heads, key_heads: heads of the rank's layers, which need not divide; see `dealing.py`.
        padded: batches have a padding mask.
        averages_loss: the loss is averaged by `SequenceGroup.mean_loss`.
        window: number of tokens that a token attends to, itself included.
    """
    run = tokens // mesh.sp
    dealing = Dealing(heads, mesh.sp, in_rings=True)
    head = 2 * layers * batch * head_width * itemsize * accumulation  # of a token, forward and backward
    each = (batch * run * (_POSITION_NBYTES + padded) + averages_loss * _LOSS_NBYTES) * accumulation

    band = Band(window - 1, 0)

    def between(source: int, rank: int) -> int:
        # Queries go there, and outputs come back; keys and values go to all ranks that read them.
        shared = len(dealing.groups(rank, key_heads))
        tokens = dealing.count(source, rank, run)
        in_ring = 2 * ring_tokens(dealing, run, band, source, rank) + ring_tokens(dealing, run, band, rank, source)
        return head * (2 * tokens * (len(dealing.share(rank)) + shared) + shared * in_ring)

    return _to_peers(each, mesh.groups("sp"), ranks_per_node) + _of_pairs(mesh, between, ranks_per_node)


def recurrence_traffic(
    mesh: ParallelConfig,
    *,
    layers: int,
    batch: int,
    tokens: int,
    heads: int,
    head_numel: int,
    ranks_per_node: int,
    groups: int = 1,
    group_numel: int = 0,
    shared_numel: int = 0,
    window_numel: int = 0,
    itemsize: int = 2,
    accumulation: int = 1,
) -> StepTraffic:
    """Returns the exchanges of layers along the sequence, in forward and backward.

    Args:
        heads: heads, or channels, of the operation.
        head_numel: elements of a token and head that go to its rank and come back: 2 D + 1 for Mamba-2 (states,
            step size, outputs).
        groups, group_numel: groups of heads, and elements of a token and group: 2 N for B and C of N states.
        shared_numel: elements of a token that every rank needs.
        window_numel: elements of a sample that a rank passes to the next: C (k - 1) for a convolution of C channels.
    """
    run = tokens // mesh.sp
    dealing = Dealing(heads, mesh.sp)
    twice = 2 * layers * batch * itemsize * accumulation

    def between(source: int, rank: int) -> int:
        of_groups = len(dealing.groups(rank, groups)) * group_numel if group_numel else 0
        token = len(dealing.share(rank)) * head_numel + of_groups + shared_numel
        return twice * (run * token + (window_numel if rank == source + 1 else 0))

    return _of_pairs(mesh, between, ranks_per_node)


def pipeline_traffic(
    mesh: ParallelConfig,
    boundary_numel: int,
    ranks_per_node: int,
    *,
    itemsize: int = 2,
    accumulation: int = 1,
    tied_numel: int = 0,
) -> StepTraffic:
    """Returns the activations and gradients that pairs of consecutive stages send for the micro-batches.

    Args:
        boundary_numel: elements that a stage sends to the next on one rank: B S / P times the hidden size.
        accumulation: M.
        tied_numel: elements of the parameters that the first and the last stage share: the first sends the values once,
            the last returns gradients M times.
    """
    micro_batch = boundary_numel * itemsize * accumulation
    total = StepTraffic(0.0, 0.0)
    for ranks in mesh.groups("pp"):
        for earlier, later in itertools.pairwise(ranks):
            total += _between(earlier, later, 2 * micro_batch, ranks_per_node)
        if len(ranks) > 1:
            total += _between(ranks[0], ranks[-1], tied_numel * itemsize * (accumulation + 1), ranks_per_node)
    return _mean(total, mesh)


def shard_traffic(
    mesh: ParallelConfig,
    unit_numels: Sequence[int],
    ranks_per_node: int,
    *,
    gathers: int,
    reductions: int,
    itemsize: int = 2,
) -> dict[str, StepTraffic]:
    """Returns ZeRO's gathers and reductions by axis: "dp_shard", over dp_shard x sp ranks, and "dp_replicate".

    Args:
        unit_numels: elements of each unit's flat buffer on one rank, padded, all trained. With a pipeline, pass the
            units of one stage; the result is then for its ranks.
        gathers: number of gathers of a unit per step: 2 M at stage 3 if units are released between forward and
            backward, 1 at stages 1 and 2.
        reductions: number of reductions of a unit's gradients per step: M at stages 2 and 3, else 1.
    """
    parts = mesh.dp_shard * mesh.sp
    shard = sum(numel // parts for numel in unit_numels)
    each = shard * itemsize * (gathers + reductions)
    within = _to_peers(each, mesh.groups("dp_shard", "sp"), ranks_per_node)
    # Replicas pass a running sum from one to the next in fp32, and then the result in the same way.
    across = StepTraffic(0.0, 0.0)
    for ranks in mesh.groups("dp_replicate"):
        for place in range(len(ranks) - 1):
            across += _between(ranks[place], ranks[place + 1], shard * _RUNNING_NBYTES * reductions, ranks_per_node)
            before = ranks[place - 1]  # the first replica receives the result from the last one
            across += _between(before, ranks[place], shard * itemsize * reductions, ranks_per_node)
    return {"dp_shard": within, "dp_replicate": _mean(across, mesh)}


def _to_peers(nbytes: int, groups: Sequence[Sequence[int]], ranks_per_node: int) -> StepTraffic:
    """Returns the traffic of `nbytes` from each rank to each of the others in its group."""
    near = far = 0
    for ranks in groups:
        on_node: dict[int, int] = {}
        for rank in ranks:
            on_node[rank // ranks_per_node] = on_node.get(rank // ranks_per_node, 0) + 1
        pairs = sum(count * (count - 1) for count in on_node.values())
        near, far = near + pairs, far + len(ranks) * (len(ranks) - 1) - pairs
    world_size = sum(map(len, groups))
    return StepTraffic(nbytes * near / world_size, nbytes * far / world_size)


def _of_pairs(mesh: ParallelConfig, nbytes: Callable[[int, int], int], ranks_per_node: int) -> StepTraffic:
    """Returns the traffic of `nbytes(i, j)` for the i-th and the j-th of the ranks that share a sequence."""
    total = StepTraffic(0.0, 0.0)
    for ranks in mesh.groups("sp"):
        for (i, source), (j, rank) in itertools.permutations(enumerate(ranks), 2):
            total += _between(source, rank, nbytes(i, j), ranks_per_node)
    return _mean(total, mesh)


def _between(first: int, second: int, nbytes: int, ranks_per_node: int) -> StepTraffic:
    """Returns the traffic of `nbytes` between two ranks, in either direction."""
    is_near = first // ranks_per_node == second // ranks_per_node
    return StepTraffic(float(nbytes), 0.0) if is_near else StepTraffic(0.0, float(nbytes))


def _mean(total: StepTraffic, mesh: ParallelConfig) -> StepTraffic:
    world_size = _world_size(mesh)
    return StepTraffic(total.inside / world_size, total.across / world_size)


def _world_size(mesh: ParallelConfig) -> int:
    return mesh.pp * mesh.data_parallel_size * mesh.sp * mesh.tp
