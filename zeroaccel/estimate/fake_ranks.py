"""Collectives of a job whose other ranks are not there: nothing moves, but memory is taken as it would be.

Stands in for `comm.collectives` in a simulated step; what a backend allocates inside itself is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from zeroaccel.comm.collective_tracker import DONE
from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.comm.hangs.flight_recorder import FlightRecorder

__all__ = ["FakeRanks"]

_POOL_CAPACITY = 2  # blocks that a `BufferPool` of `comm.transport` keeps


class FakeRanks(Collectives):
    """Rank 0 of `world_size`.

    Args:
        receives_in_host_memory: reductions bring the parts of all ranks into a buffer and add them up there, as on
            gloo; an accelerator's backend needs none of ours.
    """

    def __init__(self, world_size: int, *, receives_in_host_memory: bool) -> None:
        # No super().__init__: there is no topology.
        self.rank = self.shard_rank = self.secondary_rank = 0
        self.world_size = self.shard_world_size = self.secondary_world_size = world_size
        self.replica = 0
        self.quantized_weights = False
        self.job, self.is_first_data_group = self, True
        self.nodes = [list(range(world_size))]
        self.meter = None
        self.flight_recorder = FlightRecorder()
        self._receives = receives_in_host_memory and world_size > 1
        self._free: list[Tensor] = []

    def all_gather(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        out.detach_()  # an operation without effect, so that a ledger looks at what is whole now
        return DONE

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        return _Loan(self._free, self.world_size * out.nbytes) if self._receives and flat.numel() else DONE

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"], label: str) -> None:
        pass

    def broadcast(self, tensor: Tensor, src: int, label: str) -> None:
        pass

    def gather_objects(self, obj: Any, label: str) -> list[Any]:
        return [obj] * self.world_size

    def barrier(self, label: str) -> None:
        pass


class _Loan:
    """A reduction under way and its receive buffer, which goes back as in a `BufferPool` of `comm.transport`."""

    def __init__(self, free: list[Tensor], nbytes: int) -> None:
        self._free = free
        large_enough = [index for index, block in enumerate(free) if block.numel() >= nbytes]
        block = free.pop(large_enough[0]) if large_enough else torch.empty(nbytes, dtype=torch.uint8)
        self._block: Tensor | None = block

    def wait(self) -> None:
        if self._block is not None:
            self._free.append(self._block)
            self._free.sort(key=Tensor.numel)
            del self._free[:-_POOL_CAPACITY]
            self._block = None

    def is_completed(self) -> bool:
        return self._block is None
