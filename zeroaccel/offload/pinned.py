"""Page-locked host memory of the exact size.

torch's allocator of pinned memory rounds a request up to a power of two, which for a slab of 33 GiB means 64. CuPy's
pool takes what is asked for (in steps of 512 bytes); the tensors here are views of its memory, and give it back with
the last of them. Without CuPy on a CUDA host it is torch's, and the log says once what that may cost.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zeroaccel.logs import log_once
from zeroaccel.offload.cupy_adam import cupy_is_installed

__all__ = ["PinnedPool", "pinned_bytes"]


class PinnedPool(Protocol):
    """The part of CuPy's pinned memory pool that is used: something with the buffer protocol, of at least a size."""

    def malloc(self, size: int, /) -> Any: ...


def pinned_bytes(nbytes: int, pool: PinnedPool | None = None) -> Tensor:
    """(nbytes,) uint8 of zeros, page-locked.

    A copy that is still under way when the last view goes is not waited for: let it end first.

    Args:
        nbytes: above 0.
        pool: whose memory; by default CuPy's own, or torch's where there is no CuPy.
    """
    if pool is None:
        if not cupy_is_installed():
            log_once(
                logging.WARNING,
                "pinned memory comes from torch, which rounds each slab up to a power of two; "
                "for exact sizes install the extra: pip install zeroaccel[cuda]",
            )
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        import cupy

        pool = _pool(cupy)
    held = np.frombuffer(pool.malloc(nbytes), np.uint8, nbytes)  # keeps the pool's memory as long as it lives
    held[:] = 0
    return torch.from_numpy(held)


_kept_pool: PinnedPool | None = None


def _pool(cupy: Any) -> PinnedPool:
    """One pool for the process, so that what an engine gives back serves the next."""
    global _kept_pool
    if _kept_pool is None:
        _kept_pool = cupy.cuda.PinnedMemoryPool()
    return _kept_pool
