"""Receive buffers that are used again.

A fresh tensor of 32 MiB or more is fresh pages from the kernel, and touching them for the first time takes longer
than the message that fills them: a reduce-scatter of that size ran 1.8-3x as long without this (torch 2.13, gloo).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BufferPool"]

_KEPT = 2  # as many as a schedule has reductions under way


class BufferPool:
    """Lends flat tensors in host memory to one thread. It keeps the `kept` largest that came back."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._free: list[Tensor] = []  # uint8, smallest first

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A (numel,) tensor with any content. Goes back with `give_back`, or to the allocator if it never does."""
        nbytes = numel * dtype.itemsize
        for index, block in enumerate(self._free):
            if block.numel() >= nbytes:
                return self._free.pop(index)[:nbytes].view(dtype)
        return torch.empty(nbytes, dtype=torch.uint8).view(dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Ends a loan. The caller must not touch the tensor again."""
        block = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._free.append(block)
        self._free.sort(key=Tensor.numel)
        del self._free[: -self._kept]
