"""What the ranks of one process group hold equally, divided among them and put together again.

For groups that somebody else made, such as a tensor-parallel one; the engine's own collectives are `collectives.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zeroaccel.comm.transport import exchange_over
from zeroaccel.errors import UsageError

__all__ = ["PartitionedTensors"]

_FIRST_TAG, _TAGS = 1 << 28, 1 << 20  # apart from those of whoever else sends messages in the group


class PartitionedTensors:
    """Equal shares of tensors that are the same on every rank of a group.

    Args:
        group: a process group that this rank is in. Its ranks must call alike, in the same order.

    Raises:
        UsageError: this rank is not in the group, or there is none.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not dist.is_initialized() or not isinstance(group, dist.ProcessGroup):
            raise UsageError("tensor_parallel_group", expected="a process group with this rank in it", got=group)
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._calls = 0
        if self.rank < 0:
            raise UsageError("tensor_parallel_group", expected="a process group with this rank in it", got=group)

    def share_numel(self, numel: int) -> int:
        """S, elements of a share; the last ranks' may be padding."""
        return -(-numel // self.size)

    def share(self, flat: Tensor) -> Tensor:
        """(S,) a copy of this rank's part of `flat`, (numel,), zeros behind its end."""
        length = self.share_numel(flat.numel())
        out = flat.new_zeros(length)
        own = flat[self.rank * length : (self.rank + 1) * length]
        out[: own.numel()].copy_(own)
        return out

    def whole(self, share: Tensor, numel: int) -> Tensor:
        """(numel,) the tensor whose shares the ranks have. (all ranks of the group)"""
        out = torch.empty(self.size * share.numel(), dtype=share.dtype, device=share.device)
        self._calls += 1
        exchange = exchange_over(self._group, share.device.type)
        for work in exchange.all_gather(out, share, (), _FIRST_TAG + self._calls % _TAGS):
            work.wait()
        return out[:numel]
