"""The protocol of a tier, which stores bytes under keys and swaps them in and out, and the tier in host memory.

`nvme.py` has the tier in a file. Callers use keys only; for them, tiers differ only in speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zeroaccel.offload.file_io import Direction, Traffic
from zeroaccel.offload.host_buffers import aligned_bytes, aligned_nbytes


class Fetch(Protocol):
    """A read from a tier in flight."""

    def wait(self) -> Tensor:
        """Returns (nbytes,) uint8 in host memory; the caller owns it until `Tier.store` or `release`.

        Raises:
            OffloadError: the bytes cannot be read, or differ from the stored ones.
        """


class Tier(Protocol):
    """Bytes under keys. The keys and their sizes are fixed when a tier is made.

    Life of a key: `take` a buffer, fill it, `store` it; then any number of times `fetch`, and `store` or `release`.

    Attributes:
        name: name for messages, such as "host memory".
        nbytes: size of all keys together.
    """

    name: str
    nbytes: int

    @property
    def traffic(self) -> Mapping[Direction, Traffic]:
        """Bytes and seconds of each direction."""

    def fetch(self, key: str, nbytes: int | None = None) -> Fetch:
        """Starts to read the first `nbytes` of a key (all by default), after a pending store of it.

        The buffer has room for the entire key.
        """

    def take(self, key: str) -> Tensor:
        """Returns an uninitialized buffer for all of a key's bytes; the caller owns it until `store` or `release`."""

    def store(self, key: str, buffer: Tensor, nbytes: int | None = None) -> None:
        """Starts to write the first `nbytes` of a buffer (all by default). The caller must not use the buffer again.

        The next `settle` raises errors.
        """

    def release(self, buffer: Tensor, *, after: torch.Event | None = None) -> None:
        """Gives back a buffer that was only read.

        Args:
            after: event behind an accelerator's last copy from the buffer, which stays in use until that event.
        """

    def read(self, key: str, start: int, nbytes: int) -> Tensor:
        """Returns a copy of bytes [start, start + nbytes) of a key. Any thread may call it at any time."""

    def settle(self) -> None:
        """Blocks until every store is complete.

        Raises:
            OffloadError: a store has failed.
        """

    def close(self) -> None:
        """Frees all memory and files. Idempotent."""


@dataclass(frozen=True)
class StoredElements:
    """The elements of a tensor in a tier, for a reader that takes one chunk at a time.

    Attributes:
        length: number of elements.
        read: (first, count) -> (count,) of `dtype`, the current elements [first, first + count) in the tier. Any thread
            may call it, such as a checkpoint's staging thread.
    """

    length: int
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    @classmethod
    def under(cls, tier: Tier, key: str, start: int, length: int, dtype: torch.dtype) -> StoredElements:
        """Returns the elements that begin at byte `start` of a key."""
        size = dtype.itemsize
        return cls(length, dtype, lambda first, n: tier.read(key, start + first * size, n * size).view(dtype))

    @classmethod
    def joined(cls, parts: Sequence[StoredElements], dtype: torch.dtype) -> StoredElements:
        """Concatenates the elements of several parts of one dtype."""

        def read(first: int, count: int) -> Tensor:
            rows, begin = [], 0
            for source in parts:
                low, high = max(first - begin, 0), min(first + count - begin, source.length)
                if low < high:
                    rows.append(source.read(low, high - low))
                begin += source.length
            return torch.cat(rows) if len(rows) != 1 else rows[0]

        return cls(sum(source.length for source in parts), dtype, read)

    def numel(self) -> int:
        """Returns the number of elements."""
        return self.length

    def chunks(self, limit_nbytes: int) -> Iterator[Tensor]:
        """Yields their bytes in order, (n,) uint8 with n <= limit_nbytes; reads each chunk on demand."""
        # With chunks, a checkpoint of a model larger than host memory never needs all of it there.
        step = max(limit_nbytes // self.dtype.itemsize, 1)
        for first in range(0, self.length, step):
            yield self.read(first, min(step, self.length - first)).view(torch.uint8)

    def copy(self) -> Tensor:
        """Returns all elements, (length,), in host memory."""
        return self.read(0, self.length) if self.length else torch.empty(0, dtype=self.dtype)


class _Immediate:
    """A fetch of bytes that are already in memory."""

    __slots__ = ("_data",)

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def wait(self) -> Tensor:
        return self._data


class HostTier:
    """A tier in host memory. Its buffers are the stored bytes themselves: no copies, and changes are visible at once.

    See `Tier`.

    Args:
        sizes: size in bytes of each key.
        pinned: use page-locked memory, which a CUDA device copies from and to asynchronously.
        populated: the system allocates unlocked memory at the first use of a key; see `page_locked.mapped_bytes`.

    Example:
        >>> tier = HostTier({"layers.0": 8}, pinned=False)
        >>> buffer = tier.take("layers.0")
        >>> _ = buffer.fill_(7)
        >>> tier.store("layers.0", buffer)
        >>> tier.fetch("layers.0").wait()[:3]
        tensor([7, 7, 7], dtype=torch.uint8)
    """

    name = "host memory"

    def __init__(self, sizes: Mapping[str, int], *, pinned: bool, populated: bool = False) -> None:
        self.nbytes = sum(sizes.values())
        self.traffic: dict[Direction, Traffic] = {"read": Traffic(), "write": Traffic()}
        self._sizes = dict(sizes)
        self._allocate = partial(aligned_bytes, pinned=pinned, populated=populated)
        self._buffers: dict[str, Tensor] = {}

    def fetch(self, key: str, nbytes: int | None = None) -> Fetch:
        return _Immediate(self.take(key))

    def take(self, key: str) -> Tensor:
        # Allocated at the first use of a key, so that a tier uses no memory before it stores anything.
        if key not in self._buffers:
            nbytes = self._sizes[key]
            self._buffers[key] = self._allocate(aligned_nbytes(max(nbytes, 1)))[:nbytes]
        return self._buffers[key]

    def store(self, key: str, buffer: Tensor, nbytes: int | None = None) -> None:
        assert buffer is self._buffers[key], f"{key}: the stored buffer does not belong to this tier"

    def release(self, buffer: Tensor, *, after: torch.Event | None = None) -> None:
        if after is not None:
            after.synchronize()  # the buffer is the stored bytes themselves, which the next `take` may change

    def read(self, key: str, start: int, nbytes: int) -> Tensor:
        return self._buffers[key][start : start + nbytes].clone()

    def settle(self) -> None:
        return None

    def close(self) -> None:
        self._buffers.clear()
