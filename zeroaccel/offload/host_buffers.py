"""Host memory for offload: page-aligned, page-locked of the exact size, and pooled within a budget of bytes.

Files are read into and written from `HostBuffers`, which keeps freed buffers for the next request of about their size,
since fresh pages cost more than a fast disk. Nothing here blocks: waiting for room is up to `nvme.py`.

torch's allocator of pinned memory rounds a request up to a power of two, which for a state buffer of 33 GiB means 64.
CuPy's pool takes what is asked for (in steps of 512 bytes); the tensors here are views of its memory, and give it back
with the last of them. Without CuPy on a CUDA host it is torch's, and the log says once what that may cost.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zeroaccel.logs import log_once
from zeroaccel.offload.cupy_adam import cupy_is_installed

__all__ = [
    "ALIGN_NBYTES",
    "HostBuffers",
    "PinnedPool",
    "aligned_bytes",
    "aligned_nbytes",
    "pinned_bytes",
    "return_freed_memory",
]

ALIGN_NBYTES = 4096
"""Direct I/O wants addresses, offsets and lengths in multiples of the device's logical block: 512, or 4096 of some."""


def aligned_nbytes(nbytes: int) -> int:
    """The next multiple of `ALIGN_NBYTES`."""
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def aligned_bytes(nbytes: int, *, pinned: bool = False) -> Tensor:
    """(nbytes,) uint8 of zeros in host memory that begins a page; freed with the last view of it.

    Args:
        nbytes: a multiple of `ALIGN_NBYTES`, above 0.
        pinned: page-locked, so that a CUDA device copies from and to it beside its other work.
    """
    if not pinned:
        return torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    raw = pinned_bytes(nbytes + ALIGN_NBYTES)
    start = -raw.data_ptr() % ALIGN_NBYTES
    return raw[start : start + nbytes]


def return_freed_memory() -> None:
    """Gives pages that were freed, but kept for later by the C library, back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep less
    if trim is not None:
        trim(0)


class HostBuffers:
    """A pool of loans. Invariant: kept and lent bytes exceed the budget only by loans of `acquire_over_budget`.

    Args:
        budget_nbytes: what may be lent at a time.
        pinned: see `aligned_bytes`.

    Attributes:
        in_use_nbytes: on loan now.
        peak_nbytes: the most that was held at a time, on loan or kept.
    """

    def __init__(self, budget_nbytes: int, *, pinned: bool = False) -> None:
        self.budget_nbytes = budget_nbytes
        self.in_use_nbytes = self.peak_nbytes = 0
        self._pinned = pinned
        self._lent: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> Tensor | None:
        """(nbytes,) uint8 of anything, or None if the budget has no room for it now.

        A request beyond the budget is granted alone, while nothing else is lent.
        """
        with self._lock:
            if self._lent and self.in_use_nbytes + aligned_nbytes(nbytes) > self.budget_nbytes:
                return None
            return self._lend(nbytes)

    def acquire_over_budget(self, nbytes: int) -> Tensor:
        """The same without asking the budget, for who would otherwise wait for himself."""
        with self._lock:
            return self._lend(nbytes)

    def release(self, loan: Tensor) -> None:
        """Ends a loan; `loan` is any view of it."""
        with self._lock:
            base = self._lent.pop(_memory(loan))
            self.in_use_nbytes -= base.numel()
            self._kept.append(base)
            self._trim(self.budget_nbytes)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of a loan of this pool."""
        return _memory(tensor) in self._lent

    def clear(self) -> None:
        """Frees what is kept."""
        with self._lock:
            self._kept.clear()

    def _lend(self, nbytes: int) -> Tensor:
        size = max(aligned_nbytes(nbytes), ALIGN_NBYTES)
        fitting = [kept for kept in self._kept if size <= kept.numel() <= size + size // 4]
        if fitting:
            base = min(fitting, key=Tensor.numel)
            self._kept = [kept for kept in self._kept if kept is not base]
        else:
            self._trim(self.budget_nbytes - size)
            base = aligned_bytes(size, pinned=self._pinned)
        self._lent[_memory(base)] = base
        self.in_use_nbytes += base.numel()
        self.peak_nbytes = max(self.peak_nbytes, self._held_nbytes())
        return base[:nbytes]

    def _trim(self, limit_nbytes: int) -> None:
        """Frees kept buffers, the oldest first, until all that is held is within the limit."""
        while self._kept and self._held_nbytes() > limit_nbytes:
            self._kept.pop(0)

    def _held_nbytes(self) -> int:
        return self.in_use_nbytes + sum(kept.numel() for kept in self._kept)


def _memory(tensor: Tensor) -> int:
    """What loans are known by; a view of nothing has no address of its own."""
    return tensor.untyped_storage().data_ptr()


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
