"""The collectives over real gloo ranks: values to the last bit, traffic, and agreement on errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.multi.pool import Pool, RankFailure
from zeroaccel.comm.agree import agree_or_raise, disagreement_report
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.recording import CollectiveCall, RecordingCollectives
from zeroaccel.comm.topology import current_topology, destroy
from zeroaccel.errors import CheckpointError, ConfigError

Ranks = Callable[[int], Pool]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _collectives() -> RecordingCollectives:
    return RecordingCollectives(Collectives(current_topology()))


def _shard_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _gather(numel: int, dtype: torch.dtype, in_place: bool) -> tuple[bool, bool]:
    """Whether every part is right, and whether the shard was left alone."""
    collectives = _collectives()
    world = range(collectives.world_size)
    own = _shard_of(collectives.rank, numel, dtype)
    out = torch.full((len(world) * numel,), torch.nan, dtype=dtype)
    shard = out[collectives.rank * numel : (collectives.rank + 1) * numel] if in_place else own.clone()
    shard.copy_(own)
    collectives.all_gather(out, shard, "unshard layers.0").wait()
    return torch.equal(out, torch.cat([_shard_of(rank, numel, dtype) for rank in world])), torch.equal(shard, own)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather_puts_every_shard_in_its_place(ranks: Ranks, world_size: int) -> None:
    for dtype in (*DTYPES, torch.uint8, torch.int64):
        for numel in (0, 1, 7, 4096):
            for in_place in (False, True):
                if dtype.is_floating_point or numel > 1:
                    results = ranks(world_size).run(_gather_any, numel, dtype, in_place)
                    assert results == [(True, True)] * world_size, (dtype, numel, in_place)


def _gather_any(numel: int, dtype: torch.dtype, in_place: bool) -> tuple[bool, bool]:
    return _gather(numel, dtype, in_place)
