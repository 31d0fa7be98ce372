"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: the groups of sequence parallelism, from `SequenceGroup`.

The module itself is an mpu in DeepSpeed's sense: pass it to `deepspeed.initialize(mpu=)`.
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
    """Creates groups of this many consecutive ranks; does nothing if they already exist. (all ranks)

    Raises:
        UsageError: the size does not divide the number of ranks, or differs from an earlier call.
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
    """Global rank -> index in a gloo group; an index that is not a rank of the group maps to itself.

    Trainers gather losses with `torch.distributed.nn.functional.all_gather`. Its backward passes the index as the
    source of its scatters, but torch expects the global rank. Groups are consecutive ranks of one size, so an index
    that is also a rank of the group equals that rank's index.
    """

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, int) and 0 <= key < len(self))

    def __missing__(self, key: int) -> int:
        if 0 <= key < len(self):
            return key
        raise KeyError(key)


def sequence_group() -> SequenceGroup:
    """Returns the group that `initialize_sequence_parallel` created.

    Raises:
        EngineStateError: it has not been called.
    """
    if _group is None:
        raise EngineStateError(
            "sequence parallel group",
            expected="a preceding initialize_sequence_parallel() or UlyssesSPAttentionHF.register_with_transformers()",
            got="neither",
        )
    return _group


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """Returns the group of ranks that share this rank's sequences."""
    return sequence_group().process_group


def get_sequence_parallel_world_size() -> int:
    return sequence_group().size


def get_sequence_parallel_rank() -> int:
    return sequence_group().rank


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Returns the group over which ZeRO shards: all ranks."""
    world = dist.group.WORLD
    assert world is not None, "call sequence_group() first"
    return world


def get_sequence_data_parallel_world_size() -> int:
    return dist.get_world_size()


def get_sequence_data_parallel_rank() -> int:
    return dist.get_rank()
