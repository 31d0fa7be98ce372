"""The protocol of a tier, which stores bytes under keys and swaps them in and out, and the tier in host memory.

`nvme.py` has the tier in a file. Callers use keys only; tiers differ for them in nothing but time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from zeroaccel.offload.file_io import Direction, Traffic
from zeroaccel.offload.host_buffers import aligned_bytes, aligned_nbytes

__all__ = ["ElementRange", "Fetch", "HostTier", "Tier", "TierElements", "TierRange"]


class Fetch(Protocol):
    """A read from a tier in flight."""

    def wait(self) -> Tensor:
        """(nbytes,) uint8 in host memory, the caller's until `Tier.store` or `release`.

        Raises:
            OffloadError: the bytes cannot be read, or are not those that were stored.
        """


class Tier(Protocol):
    """Bytes under keys. The keys and their sizes are fixed when a tier is made.

    Life of a key: `take` a buffer, fill it, `store` it; then any number of times `fetch`, and `store` or `release`.

    Attributes:
        name: for messages: "host memory".
        nbytes: of all keys together.
    """

    name: str
    nbytes: int

    @property
    def traffic(self) -> Mapping[Direction, Traffic]:
        """Bytes and seconds of each direction."""

    def fetch(self, key: str, nbytes: int | None = None) -> Fetch:
        """Starts to read the first `nbytes` of a key (all by default), after a store of it that is in flight.

        The buffer has room for all of the key.
        """

    def take(self, key: str) -> Tensor:
        """An uninitialised buffer for all of a key's bytes, the caller's until `store` or `release`."""

    def store(self, key: str, buffer: Tensor, nbytes: int | None = None) -> None:
        """Starts to write the first `nbytes` of a buffer (all by default), which must not be touched any more.

        Errors come with the next `settle`.
        """

    def release(self, buffer: Tensor) -> None:
        """Gives a buffer back that was only read."""

    def read(self, key: str, start: int, nbytes: int) -> Tensor:
        """A copy of bytes [start, start + nbytes) of a key. May be called at any time, by any thread."""

    def settle(self) -> None:
        """Blocks until every store is complete.

        Raises:
            OffloadError: of one that failed.
        """

    def close(self) -> None:
        """Frees all memory and files. Idempotent."""


@dataclass(frozen=True)
class TierRange:
    """A run of elements under a key, read a piece at a time.

    Attributes:
        start: of the first element, in bytes from the beginning of the key.
        length: elements.
    """

    tier: Tier
    key: str
    start: int
    length: int
    dtype: torch.dtype

    def numel(self) -> int:
        """Elements."""
        return self.length

    def part(self, first: int, length: int) -> TierRange:
        """Elements [first, first + length) of it."""
        return replace(self, start=self.start + first * self.dtype.itemsize, length=length)

    def chunks(self, limit_nbytes: int) -> Iterator[Tensor]:
        """Its bytes in order, (n,) uint8 with n <= limit_nbytes, each read when it is asked for."""
        # Pieces, so that a checkpoint of a model larger than host memory never has all of it there.
        end = self.start + self.length * self.dtype.itemsize
        for first in range(self.start, end, limit_nbytes):
            yield self.tier.read(self.key, first, min(limit_nbytes, end - first))


class ElementRange(Protocol):
    """A run of elements that is read a piece at a time, such as a `TierRange`."""

    @property
    def length(self) -> int:
        """Elements."""

    def chunks(self, limit_nbytes: int) -> Iterator[Tensor]:
        """See `TierRange.chunks`."""


@dataclass(frozen=True)
class TierElements:
    """The elements of a tensor, in ranges one after the other, of one dtype."""

    ranges: tuple[ElementRange, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        """Elements of all ranges."""
        return sum(part.length for part in self.ranges)

    def chunks(self, limit_nbytes: int) -> Iterator[Tensor]:
        """See `TierRange.chunks`."""
        for part in self.ranges:
            yield from part.chunks(limit_nbytes)

    def copy(self) -> Tensor:
        """(n,) all of them."""
        # One chunk per range: its limit is beyond any length.
        chunks = [chunk.view(self.dtype) for chunk in self.chunks(1 << 62)]
        return torch.cat(chunks) if chunks else torch.empty(0, dtype=self.dtype)


class _Immediate:
    """A fetch of what is in memory already."""

    __slots__ = ("_data",)

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def wait(self) -> Tensor:
        return self._data


class HostTier:
    """A tier in host memory. Its buffers are the stored bytes themselves: no copies, and a change shows at once.

    See `Tier`.

    Args:
        sizes: key -> bytes.
        pinned: page-locked memory, for a CUDA device to copy from and to.

    Example:
        >>> tier = HostTier({"layers.0": 8}, pinned=False)
        >>> buffer = tier.take("layers.0")
        >>> _ = buffer.fill_(7)
        >>> tier.store("layers.0", buffer)
        >>> tier.fetch("layers.0").wait()[:3]
        tensor([7, 7, 7], dtype=torch.uint8)
    """

    name = "host memory"

    def __init__(self, sizes: Mapping[str, int], *, pinned: bool) -> None:
        self.nbytes = sum(sizes.values())
        self.traffic: dict[Direction, Traffic] = {"read": Traffic(), "write": Traffic()}
        self._sizes = dict(sizes)
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}

    def fetch(self, key: str, nbytes: int | None = None) -> Fetch:
        return _Immediate(self.take(key))

    def take(self, key: str) -> Tensor:
        # Allocated at the first use of a key, so that a tier costs no memory before there is something to store.
        if key not in self._buffers:
            nbytes = self._sizes[key]
            self._buffers[key] = aligned_bytes(aligned_nbytes(max(nbytes, 1)), pinned=self._pinned)[:nbytes]
        return self._buffers[key]

    def store(self, key: str, buffer: Tensor, nbytes: int | None = None) -> None:
        assert buffer is self._buffers[key], f"{key}: stored a buffer that is not this tier's"

    def release(self, buffer: Tensor) -> None:
        return None

    def read(self, key: str, start: int, nbytes: int) -> Tensor:
        return self._buffers[key][start : start + nbytes].clone()

    def settle(self) -> None:
        return None

    def close(self) -> None:
        self._buffers.clear()
