"""What a tier is: where bytes live under a key between uses, and how they are brought and sent back.

`MemoryTier` is the tier of whatever memory its tensors are in: on the device (`DeviceTier`) and on the host
(`HostTier`) nothing has to move. `nvme.py` has the one in files. Users speak only of keys; they cannot tell tiers
apart but by time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from zeroaccel.offload.file_io import Direction, Traffic
from zeroaccel.offload.host_buffers import aligned_bytes, aligned_nbytes

__all__ = ["DeviceTier", "ElementRange", "Fetch", "HostTier", "MemoryTier", "Tier", "TierElements", "TierRange"]


class Fetch(Protocol):
    """Bytes on their way from a tier."""

    def wait(self) -> Tensor:
        """(nbytes,) uint8 in host memory (of a `DeviceTier`: on its device), on loan until `Tier.store` or `release`.

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
class TierRange:
    """A run of elements that lie under a key, for who reads them a piece at a time.

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
    """Elements that lie in ranges, one after the other, of one dtype: what a tensor of them would hold."""

    ranges: tuple[ElementRange, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        """Elements of all ranges."""
        return sum(held.length for held in self.ranges)

    def chunks(self, limit_nbytes: int) -> Iterator[Tensor]:
        """See `TierRange.chunks`."""
        for held in self.ranges:
            yield from held.chunks(limit_nbytes)

    def copy(self) -> Tensor:
        """(n,) all of them."""
        found = [chunk.view(self.dtype) for chunk in self.chunks(1 << 62)]
        return torch.cat(found) if found else torch.empty(0, dtype=self.dtype)


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


class DeviceTier(MemoryTier):
    """A tier in the memory of one device."""

    name = "device memory"

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        super().__init__(sizes)
        self._device = device

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class HostTier(MemoryTier):
    """A tier in host memory, page-locked if a CUDA device copies from and to it."""

    name = "host memory"

    def __init__(self, sizes: Mapping[str, int], *, pinned: bool) -> None:
        super().__init__(sizes)
        self._pinned = pinned

    def allocate(self, nbytes: int) -> Tensor:
        return aligned_bytes(aligned_nbytes(max(nbytes, 1)), pinned=self._pinned)[:nbytes]
