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

ALIGN_NBYTES = 4096
"""Direct I/O needs addresses, offsets and lengths in multiples of the device's logical block: 512, or 4096 of some."""


def aligned_nbytes(nbytes: int) -> int:
    """The next multiple of `ALIGN_NBYTES`."""
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def aligned_bytes(nbytes: int, *, pinned: bool = False) -> Tensor:
    """(nbytes,) uint8 of zeros in host memory that begins a page; freed with the last view of it.

    Args:
        nbytes: a multiple of `ALIGN_NBYTES`, above 0.
        pinned: page-locked, so that a CUDA device copies from and to it concurrently with its kernels.
    """
    if not pinned:
        return torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    # CuPy's pool allocates in steps of 512 bytes: one page more, and the view begins at the first page boundary.
    raw = pinned_bytes(nbytes + ALIGN_NBYTES)
    start = -raw.data_ptr() % ALIGN_NBYTES
    return raw[start : start + nbytes]


def return_freed_memory() -> None:
    """Returns pages that were freed, but are cached by the C library, to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep less
    if trim is not None:
        trim(0)


class HostBuffers:
    """A pool of buffers. Invariant: bytes in use and free exceed the budget only by `acquire_over_budget`.

    Args:
        budget_nbytes: the most that may be in use at a time.
        pinned: see `aligned_bytes`.

    Attributes:
        in_use_nbytes: acquired and not released.
        peak_nbytes: the most that was allocated at a time, in use or free.

    Example:
        >>> buffers = HostBuffers(budget_nbytes=8192)
        >>> first = buffers.acquire(8000)
        >>> buffers.acquire(8000) is None
        True
        >>> buffers.release(first)
        >>> buffers.acquire(8000).data_ptr() == first.data_ptr()
        True
    """

    def __init__(self, budget_nbytes: int, *, pinned: bool = False) -> None:
        self.budget_nbytes = budget_nbytes
        self.in_use_nbytes = self.peak_nbytes = 0
        self._pinned = pinned
        self._in_use: dict[int, Tensor] = {}
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> Tensor | None:
        """(nbytes,) uint8, uninitialised, or None if the budget has no room for it now.

        A request beyond the budget is granted while nothing else is in use, so that it cannot wait for ever.
        """
        # Nothing in use: granted whatever its size, since no release could ever make more room.
        with self._lock:
            if self._in_use and self.in_use_nbytes + aligned_nbytes(nbytes) > self.budget_nbytes:
                return None
            return self._allocate(nbytes)

    def acquire_over_budget(self, nbytes: int) -> Tensor:
        """As `acquire`, whatever the budget: for a thread that would otherwise wait for its own buffers."""
        with self._lock:
            return self._allocate(nbytes)

    def release(self, buffer: Tensor) -> None:
        """Takes a buffer back; `buffer` is any view of it."""
        with self._lock:
            base = self._in_use.pop(_address(buffer))
            self.in_use_nbytes -= base.numel()
            self._free.append(base)
            self._trim(self.budget_nbytes)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of a buffer of this pool that is in use."""
        return _address(tensor) in self._in_use

    def clear(self) -> None:
        """Frees the buffers that are not in use."""
        with self._lock:
            self._free.clear()

    def _allocate(self, nbytes: int) -> Tensor:
        size = max(aligned_nbytes(nbytes), ALIGN_NBYTES)
        # A much larger buffer is not taken: it would count in the budget with all of its size.
        fitting = [free for free in self._free if size <= free.numel() <= size + size // 4]
        if fitting:
            base = min(fitting, key=Tensor.numel)
            self._free = [free for free in self._free if free is not base]
        else:
            # Room is made before the allocation, not after: the peak is what counts.
            self._trim(self.budget_nbytes - size)
            base = aligned_bytes(size, pinned=self._pinned)
        self._in_use[_address(base)] = base
        self.in_use_nbytes += base.numel()
        self.peak_nbytes = max(self.peak_nbytes, self._allocated_nbytes())
        return base[:nbytes]

    def _trim(self, limit_nbytes: int) -> None:
        """Frees unused buffers, the oldest first, until all that is allocated is within the limit."""
        while self._free and self._allocated_nbytes() > limit_nbytes:
            self._free.pop(0)

    def _allocated_nbytes(self) -> int:
        return self.in_use_nbytes + sum(free.numel() for free in self._free)


def _address(tensor: Tensor) -> int:
    """The address of the memory below a view, which has none of its own if it is empty."""
    return tensor.untyped_storage().data_ptr()


class PinnedPool(Protocol):
    """The part of CuPy's pinned memory pool that is used: something with the buffer protocol, of at least a size."""

    def malloc(self, size: int, /) -> Any: ...


def pinned_bytes(nbytes: int, pool: PinnedPool | None = None) -> Tensor:
    """(nbytes,) uint8 of zeros, page-locked.

    A copy that is still under way when the last view goes is not waited for: let it end first.

    Args:
        nbytes: above 0.
        pool: to allocate from; by default CuPy's own, or torch's where there is no CuPy.
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
    # The array refers to the pool's memory, and the tensor to the array: the memory is freed with the last view.
    memory = np.frombuffer(pool.malloc(nbytes), np.uint8, nbytes)
    memory[:] = 0
    return torch.from_numpy(memory)


_cupy_pool: PinnedPool | None = None


def _pool(cupy: Any) -> PinnedPool:
    """One pool for the process, so that the next engine reuses the memory of this one."""
    global _cupy_pool
    if _cupy_pool is None:
        _cupy_pool = cupy.cuda.PinnedMemoryPool()
    return _cupy_pool
