"""What a tier is: where bytes live under a key between uses, and how they are brought and sent back.

In host memory (`HostTier`) nothing has to move; `nvme.py` has the tier in files. Users speak only of keys; they cannot
tell tiers apart but by time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zeroaccel.offload.file_io import Direction, Traffic
from zeroaccel.offload.host_buffers import aligned_bytes, aligned_nbytes

__all__ = ["Fetch", "HostTier", "MemoryTier", "StoredElements", "Tier"]


class Fetch(Protocol):
    """Bytes on their way from a tier."""

    def wait(self) -> Tensor:
        """(nbytes,) uint8 in host memory, on loan until `Tier.store` or `release`.

        Raises:
            OffloadError: they do not come back as they were stored.
        """


class Tier(Protocol):
    """Bytes under keys. The keys and their sizes are fixed when a tier is made.

    Life of a key: `take` a buffer, fill it, `store` it; then any number of times `fetch`, and `store` or `release`.

    Attributes:
        name: for people: "host memory".
        nbytes: of all keys together, as laid out.
    """

    name: str
    nbytes: int

    @property
    def traffic(self) -> Mapping[Direction, Traffic]:
        """What went to and from it."""

    def fetch(self, key: str, nbytes: int | None = None) -> Fetch:
        """Starts to bring the first `nbytes` of a key (all by default), after a store of it that is on its way.

        The loan has room for all of the key.
        """

    def take(self, key: str) -> Tensor:
        """A buffer for all of a key's bytes, holding anything, on loan until `store` or `release`."""

    def store(self, key: str, loan: Tensor, nbytes: int | None = None) -> None:
        """Starts to put the first `nbytes` of a loan back (all by default); it must not be touched any more.

        Errors come with the next `settle`.
        """

    def release(self, loan: Tensor) -> None:
        """Ends a loan that was only read."""

    def read(self, key: str, start: int, nbytes: int) -> Tensor:
        """A copy of bytes [start, start + nbytes) of a key. May be called beside everything else, by any thread."""

    def settle(self) -> None:
        """Returns when every store is done.

        Raises:
            OffloadError: of one that failed.
        """

    def close(self) -> None:
        """Gives everything back. Idempotent."""


@dataclass(frozen=True)
class StoredElements:
    """Elements outside of memory: what a tensor of them would hold, for a reader that takes a chunk at a time.

    Attributes:
        length: elements.
        read: (first, count) -> (count,) of `dtype`, elements [first, first + count) as they are in the tier now. May be
            called by any thread, as a checkpoint's staging thread does.
    """

    length: int
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    @classmethod
    def under(cls, tier: Tier, key: str, start: int, length: int, dtype: torch.dtype) -> StoredElements:
        """Those that begin at byte `start` of a key."""
        size = dtype.itemsize
        return cls(length, dtype, lambda first, n: tier.read(key, start + first * size, n * size).view(dtype))

    @classmethod
    def joined(cls, parts: Sequence[StoredElements], dtype: torch.dtype) -> StoredElements:
        """Those of several, of one dtype, one after the other."""

        def read(first: int, count: int) -> Tensor:
            rows, begin = [], 0
            for part in parts:
                low, high = max(first - begin, 0), min(first + count - begin, part.length)
                if low < high:
                    rows.append(part.read(low, high - low))
                begin += part.length
            return torch.cat(rows) if len(rows) != 1 else rows[0]

        return cls(sum(part.length for part in parts), dtype, read)

    def numel(self) -> int:
        """Elements."""
        return self.length

    def chunks(self, limit_nbytes: int) -> Iterator[Tensor]:
        """Their bytes in order, (n,) uint8 with n <= limit_nbytes, each chunk read when it is asked for."""
        step = max(limit_nbytes // self.dtype.itemsize, 1)
        for first in range(0, self.length, step):
            yield self.read(first, min(step, self.length - first)).view(torch.uint8)

    def copy(self) -> Tensor:
        """(length,) all of them, in host memory."""
        return self.read(0, self.length) if self.length else torch.empty(0, dtype=self.dtype)


class _Here:
    """A fetch of what is here already."""

    __slots__ = ("_data",)

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def wait(self) -> Tensor:
        return self._data


class MemoryTier:
    """A tier that lends what it holds: no copies, so a change shows at once. See `Tier`.

    Args:
        sizes: key -> bytes.
        allocate: makes the memory of one key.
    """

    name = "memory"

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.nbytes = sum(sizes.values())
        self.traffic: dict[Direction, Traffic] = {"read": Traffic(), "write": Traffic()}
        self._sizes = dict(sizes)
        self._held: dict[str, Tensor] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 for one key."""
        raise NotImplementedError

    def fetch(self, key: str, nbytes: int | None = None) -> Fetch:
        return _Here(self.take(key))

    def take(self, key: str) -> Tensor:
        if key not in self._held:
            self._held[key] = self.allocate(self._sizes[key])
        return self._held[key]

    def store(self, key: str, loan: Tensor, nbytes: int | None = None) -> None:
        assert loan is self._held[key], f"{key}: stored what this tier did not lend"

    def release(self, loan: Tensor) -> None:
        return None

    def read(self, key: str, start: int, nbytes: int) -> Tensor:
        return self._held[key][start : start + nbytes].clone()

    def settle(self) -> None:
        return None

    def close(self) -> None:
        self._held.clear()


class HostTier(MemoryTier):
    """A tier in host memory, page-locked if a CUDA device copies from and to it."""

    name = "host memory"

    def __init__(self, sizes: Mapping[str, int], *, pinned: bool) -> None:
        super().__init__(sizes)
        self._pinned = pinned

    def allocate(self, nbytes: int) -> Tensor:
        return aligned_bytes(aligned_nbytes(max(nbytes, 1)), pinned=self._pinned)[:nbytes]
