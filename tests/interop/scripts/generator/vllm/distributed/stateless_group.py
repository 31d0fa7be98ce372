"""`StatelessProcessGroup`: ranks of different programs, outside of any default group."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

_LIMIT = timedelta(seconds=120)


@dataclass
class StatelessProcessGroup:
    """A gloo group with a store of its own, which rank 0 serves."""

    rank: int
    world_size: int
    gloo: ProcessGroupGloo

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        """Connects; returns when all ranks have called it."""
        store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=_LIMIT, wait_for_workers=False)
        gloo = ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, _LIMIT)
        return StatelessProcessGroup(rank, world_size, gloo)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcasts from rank `src` to all."""
        options = torch._C._distributed_c10d.BroadcastOptions()
        options.rootRank = src
        self.gloo.broadcast([tensor], options).wait()

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.gloo.barrier().wait()
