"""Host memory for offload: page-aligned, page-locked with the exact size, and pooled within a budget of bytes.

Files are read into and written from `HostBuffers`, which keeps freed buffers for requests of similar size, since fresh
pages cost more than a fast disk. This module never blocks: `nvme.py` waits for room.

`aligned_bytes` makes all slabs of host memory; `page_locked.py` maps and locks their pages.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroaccel.offload.page_locked import mapped_bytes

ALIGN_NBYTES = 4096
"""Direct I/O needs addresses, offsets and lengths in multiples of the device's logical block: 512 bytes, or 4096."""


def aligned_nbytes(nbytes: int) -> int:
    """Rounds up to a multiple of `ALIGN_NBYTES`."""
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def aligned_bytes(nbytes: int, *, pinned: bool = False, populated: bool = False, file: int = -1) -> Tensor:
    """Returns (nbytes,) uint8, zeros, in page-aligned host memory; freed with the last view of it.

    Args:
        nbytes: a multiple of `ALIGN_NBYTES`, above 0.
        pinned: page-locked, so that copies of a CUDA device overlap with its kernels; pageable, with one warning, if
            the memory cannot be locked.
        populated, file: see `page_locked.mapped_bytes`.
    """
    return mapped_bytes(nbytes, pinned=pinned, populated=populated, file=file)


def empty_on_host(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Returns a tensor of this shape and dtype in host memory, zeros if page-locked; freed with its last view.

    Args:
        pinned: page-locked, in separate pages; otherwise from torch's allocator.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if not pinned or not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    return aligned_bytes(aligned_nbytes(nbytes), pinned=True)[:nbytes].view(dtype).view(tuple(shape))


def zeros_on_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns zeros of this shape and dtype in host memory that no device copies; freed with its last view.

    They are the zeros of new pages, which all threads allocate: nothing writes them again.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    return aligned_bytes(aligned_nbytes(nbytes), populated=True)[:nbytes].view(dtype).view(tuple(shape))


def return_freed_memory() -> None:
    """Returns freed pages in the C library's cache to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc; other libraries cache less
    if trim is not None:
        trim(0)


class HostBuffers:
    """A pool of buffers. Invariant: used and free bytes exceed the budget only through `acquire_over_budget`.

    Args:
        budget_nbytes: maximum number of bytes in use at a time.
        pinned: see `aligned_bytes`.
        ahead_nbytes: bytes to allocate now and to cut buffers from. In a step the host would wait for page-locking. If
            no gap between the buffers in use is large enough, there is no room.

    Attributes:
        in_use_nbytes: bytes acquired and not released.
        peak_nbytes: maximum of the allocated bytes, in use or free.

    Example:
        >>> buffers = HostBuffers(budget_nbytes=8192)
        >>> first = buffers.acquire(8000)
        >>> buffers.acquire(8000) is None
        True
        >>> buffers.release(first)
        >>> buffers.acquire(8000).data_ptr() == first.data_ptr()
        True
    """

    def __init__(self, budget_nbytes: int, *, pinned: bool = False, ahead_nbytes: int = 0) -> None:
        self.budget_nbytes = budget_nbytes
        self.in_use_nbytes = self.peak_nbytes = 0
        self._pinned = pinned
        self._in_use: dict[tuple[int, int], Tensor] = {}
        self._free: list[Tensor] = []
        self._ahead = aligned_bytes(ahead_nbytes, pinned=pinned) if ahead_nbytes else None
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> Tensor | None:
        """Returns (nbytes,) uint8, uninitialized, or None if the budget has no room for it now.

        A request beyond the budget succeeds if nothing else is in use, so that it cannot wait without end.
        """
        # With nothing in use, no release could make more room.
        with self._lock:
            size = aligned_nbytes(nbytes)
            lacks_gap = self._ahead is not None and self._gap(size) is None
            needed = (self._allocated_nbytes() if lacks_gap else self.in_use_nbytes) + size
            return None if self._in_use and needed > self.budget_nbytes else self._allocate(nbytes)

    def acquire_over_budget(self, nbytes: int) -> Tensor:
        """Acquires a buffer beyond the budget: for a thread that would otherwise wait for its own buffers."""
        with self._lock:
            return self._allocate(nbytes)

    def release(self, buffer: Tensor) -> None:
        """Takes a buffer back; `buffer` is any view of it."""
        with self._lock:
            base = self._in_use.pop(self._key(buffer))
            self.in_use_nbytes -= base.numel()
            if self._ahead is None or _storage_id(base) != _storage_id(self._ahead):
                self._free.append(base)
                self._trim(self.budget_nbytes)

    def owns(self, tensor: Tensor) -> bool:
        """True if `tensor` is a view of a buffer of this pool that is in use."""
        with self._lock:  # threads of files acquire and release meanwhile
            return self._key(tensor) in self._in_use

    def clear(self) -> None:
        """Frees the buffers that are not in use, and the memory allocated ahead with the last buffer in it."""
        with self._lock:
            self._free.clear()
            self._ahead = None

    def _key(self, buffer: Tensor) -> tuple[int, int]:
        """Returns the storage and the place in it of the buffer with this view; of no buffer if none is in use."""
        storage, place = _storage_id(buffer), buffer.storage_offset() * buffer.itemsize
        found = ((num, begin) for (num, begin), base in self._in_use.items() if begin <= place < begin + base.numel())
        return next((key for key in found if key[0] == storage), (storage, -1))

    def _gap(self, size: int) -> Tensor | None:
        """Returns the first `size` bytes in the memory allocated ahead that are not in use; None without such."""
        if self._ahead is None:
            return None
        storage, begin = _storage_id(self._ahead), 0
        for key, place in sorted(self._in_use):
            if key == storage:
                if place - begin >= size:
                    break
                begin = place + self._in_use[key, place].numel()
        return self._ahead[begin : begin + size] if begin + size <= self._ahead.numel() else None

    def _allocate(self, nbytes: int) -> Tensor:
        size = max(aligned_nbytes(nbytes), ALIGN_NBYTES)
        # A much larger free buffer is not reused: all of its size would count in the budget.
        base = self._gap(size)
        if base is None and (base := _taken(self._free, size)) is None:
            # Trimmed before the allocation, to limit the peak.
            self._trim(self.budget_nbytes - size)
            base = aligned_bytes(size, pinned=self._pinned)
        self._in_use[_storage_id(base), int(base.storage_offset())] = base
        self.in_use_nbytes += base.numel()
        self.peak_nbytes = max(self.peak_nbytes, self._allocated_nbytes())
        return base[:nbytes]

    def _trim(self, limit_nbytes: int) -> None:
        """Frees unused buffers, the oldest first, until the allocated bytes are within the limit."""
        while self._free and self._allocated_nbytes() > limit_nbytes:
            self._free.pop(0)

    def _allocated_nbytes(self) -> int:
        ahead = 0 if self._ahead is None else self._ahead.numel()
        storage = None if self._ahead is None else _storage_id(self._ahead)
        in_use = sum(base.numel() for (key, _), base in self._in_use.items() if key != storage)
        return ahead + in_use + sum(free.numel() for free in self._free)


def _taken(free: list[Tensor], size: int) -> Tensor | None:
    """Removes and returns the smallest block with `size` bytes or at most a quarter more; None if there is none."""
    fitting = [index for index, block in enumerate(free) if size <= block.numel() <= size + size // 4]
    return free.pop(min(fitting, key=lambda index: free[index].numel())) if fitting else None


def _storage_id(tensor: Tensor) -> int:
    """Identifies the memory of a view by its storage, because an empty view has no address."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


class HostArena:
    """Host memory for tensors that come and go in every step. The memory of a tensor returns with its last view.

    Invariant: free memory was in use at some time, so the arena is never larger than the maximum in use, plus the
    quarter by which a reused block may be too large.

    For targets of copies on one stream: memory that returns during a copy into it is next used behind that copy. The
    caller must keep a reference to the source of a copy until the copy is complete.

    Args:
        pinned: see `aligned_bytes`.

    Example:
        >>> arena = HostArena(pinned=False)
        >>> first = arena.empty((3, 2), torch.bfloat16)
        >>> place = first.data_ptr()
        >>> del first
        >>> arena.empty((6,), torch.bfloat16).data_ptr() == place
        True
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        # Finalizers append to it without the lock, because they may run anywhere, even inside `empty`.
        self._returned: deque[Tensor] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor of this shape and dtype."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(tuple(shape), dtype=dtype)
        with self._lock:
            base = self._take(max(aligned_nbytes(nbytes), ALIGN_NBYTES))
        # The tensor refers to this array instead of the block, so the array is freed with the last view.
        view = base.numpy()[:nbytes]
        weakref.finalize(view, self._returned.append, base).atexit = False
        return torch.from_numpy(view).view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Frees the memory that is not in use."""
        with self._lock:
            self._collect()
            self._free.clear()

    def _take(self, size: int) -> Tensor:
        self._collect()
        base = _taken(self._free, size)
        return aligned_bytes(size, pinned=self._pinned) if base is None else base

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
