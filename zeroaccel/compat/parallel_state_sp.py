"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: the groups of sequence parallelism, by `SequenceGroup`.

The module itself is what DeepSpeed calls an mpu: `deepspeed.initialize(mpu=)` takes it.
"""

from __future__ import annotations

import torch.distributed as dist

from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.parallel.sequence import SequenceGroup

__all__ = [
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]

_group: SequenceGroup | None = None


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Makes the groups of this many consecutive ranks. (all ranks) Again with the same number it does nothing.

    Raises:
        UsageError: the number does not divide the ranks, or is another than before.
    """
    global _group
    topology = init_process_group()
    if sequence_parallel_size < 1 or topology.world_size % sequence_parallel_size:
        raise UsageError(
            "initialize_sequence_parallel(sequence_parallel_size)",
            expected=f"a divisor of the job's {topology.world_size} ranks",
            got=sequence_parallel_size,
        )
    if _group is not None and _group.collectives.topology is topology:
        if _group.size != sequence_parallel_size:
            raise UsageError(
                "initialize_sequence_parallel(sequence_parallel_size)",
                expected=f"{_group.size}, as before",
                got=sequence_parallel_size,
                fix="use one size in a job",
            )
        return
    _group = SequenceGroup.of(topology, sequence_parallel_size)
    if _group.size > 1 and dist.get_backend(_group.process_group) == dist.Backend.GLOO:
        ranks = dist.distributed_c10d._world.pg_group_ranks
        ranks[_group.process_group] = _RanksOrPlaces(ranks[_group.process_group])


class _RanksOrPlaces(dict[int, int]):
    """Global rank -> place in the group, of a gloo group; a place that is no rank of the group leads to itself.

    The backward of `torch.distributed.nn.functional.all_gather`, by which trainers bring losses together, names the
    source of its scatters by the place, where torch wants the global rank. Groups are consecutive ranks of one size, so
    a place that is a rank of the group is the same as its place.
    """

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, int) and 0 <= key < len(self))

    def __missing__(self, key: int) -> int:
        if 0 <= key < len(self):
            return key
        raise KeyError(key)


def sequence_group() -> SequenceGroup:
    """What `initialize_sequence_parallel` has made.

    Raises:
        EngineStateError: it has not been called.
    """
    if _group is None:
        raise EngineStateError(
            "sequence parallel group",
            expected="initialize_sequence_parallel(), or UlyssesSPAttentionHF.register_with_transformers(), before",
            got="neither",
        )
    return _group


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """The ranks of this one's sequences."""
    return sequence_group().process_group


def get_sequence_parallel_world_size() -> int:
    return sequence_group().size


def get_sequence_parallel_rank() -> int:
    return sequence_group().rank


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """The ranks over which ZeRO shards: all of them."""
    world = dist.group.WORLD
    assert world is not None, "sequence_group() has joined the ranks"
    return world


def get_sequence_data_parallel_world_size() -> int:
    return dist.get_world_size()


def get_sequence_data_parallel_rank() -> int:
    return dist.get_rank()
