"""`PyNcclCommunicator`, over gloo."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllm.distributed.stateless_group import StatelessProcessGroup


class PyNcclCommunicator:
    """Broadcasts between the ranks of a `StatelessProcessGroup`."""

    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        self.group = group
        self.device = device

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcasts from rank `src` to all."""
        self.group.broadcast(tensor.contiguous() if self.group.rank == src else tensor, src)
