"""Storage of a flat buffer's weights, in the parameters' dtype, between uses, with one class per tier.

`FlatBuffer` has one `ShardStorage`; all-gathers, the optimizer step, checkpoints and parameter access read and write
through it, independently of the class. A table in `placement.py` chooses the class. `masters.py` stores masters and
optimizer states.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.errors import OffloadError
from zeroaccel.offload.tier import Fetch, StoredElements, Tier
from zeroaccel.zero.layout import FlatLayout, FlatRange, FlatTensor
from zeroaccel.zero.storage.copy_stream import CopyStream

Elements = Tensor | StoredElements
"""(n,) elements: a live view of memory, or a reader that reads them from a tier chunk by chunk."""

FillRange = Callable[[FlatRange, Tensor], None]
"""(range, target): reads the elements of a range into `target`, (range.numel,), at the latest at the next flush."""


def absent_value(dtype: torch.dtype) -> float | bool:
    """Returns NaN, or for integers their lowest value: the values that a sharded parameter shows."""
    if dtype is torch.bool:
        return False
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def in_memory(elements: Elements) -> Tensor:
    """Returns the elements, (n,): the view itself, or a copy in host memory."""
    return elements if isinstance(elements, Tensor) else elements.copy()


@dataclass(frozen=True)
class ShardPlace:
    """The buffer and tier for which a `ShardStorage` is created.

    Attributes:
        key: key of the buffer in tiers.
        full: (N,) the unsharded buffer on the compute device, with its storage allocated.
        tier: tier with space for the shard under `key`; None for a storage outside tiers.
        copies: copies host memory to the compute device; None if both are one memory.
    """

    key: str
    layout: FlatLayout
    rank: int
    full: Tensor
    tier: Tier | None = None
    copies: CopyStream | None = None

    @property
    def shard(self) -> FlatRange:
        """Elements of this rank's shard."""
        return self.layout.shard(self.rank)

    def reserved(self) -> Tier:
        """Returns the tier, for a storage that needs one."""
        assert self.tier is not None, f"{self.key}: no tier was reserved for it"
        return self.tier


class ShardStorage(ABC):
    """This rank's weights of one flat buffer, (S,) in the parameters' dtype.

    A new tier implements `elements`, `write`, `stage` and `gather_input`; if its weights are not in memory, also
    `commit` and `discard`, and `prefetch`, `swap_in`, `release` with `is_swapped`. It also needs an entry in
    `placement.SHARD_STORAGES`.

    A gather calls 1. `prefetch`, if it is known early, 2. `swap_in`, 3. `prepare_gather`, 4. `release` at its end.
    An update calls `stage`, whose tensor the optimizer fills, then `commit`, or `discard` if it fails.

    Attributes:
        range: elements that can be read and written here: this rank's S, or all N of a persistent buffer.
        is_swapped: each gather reads the shard into memory on loan, which can fail on a single rank.
        rounds_writes: values read back may differ from the written ones.
        secondary: the copy from which hpZ gathers in backward.
        copies: stream that copies to and from host memory; None if the shard is on the compute device.
    """

    is_swapped = False
    rounds_writes = False

    def __init__(self, place: ShardPlace, *, persistent: bool = False) -> None:
        self.range = place.layout.range if persistent else place.shard
        self.dtype = place.full.dtype
        self._shard = place.shard
        self._split_sizes = place.layout.uneven_sizes
        self.copies = place.copies
        self._copied: torch.Event | None = None  # event after the copy of the last gather from host memory
        self.secondary = SecondaryShard()

    # -- the interface that subclasses implement

    @abstractmethod
    def elements(self, interval: FlatRange) -> Elements:
        """Returns elements of `range`: a live view, or a reader, which must work in any thread."""

    @abstractmethod
    def write(self, interval: FlatRange, values: Tensor) -> None:
        """Replaces elements of `range` by values of any dtype, and returns when they are stored.

        Raises:
            OffloadError: storing them failed.
        """

    @abstractmethod
    def stage(self) -> FlatTensor:
        """Returns memory for all of `range`, with arbitrary contents; `commit` makes it the weights."""

    @abstractmethod
    def gather_input(self) -> Tensor:
        """Returns the shard, (S,), in memory, as input of a gather; it does not change until `release`."""

    def commit(self) -> None:
        """Replaces the weights by the staged values; the store may complete later."""
        return None

    def discard(self) -> None:
        """Drops staged values, if any: the weights stay unchanged."""
        return None

    def prefetch(self) -> None:
        """Starts to read the shard into memory."""
        return None

    def swap_in(self) -> None:
        """Waits until the shard is in memory for `gather_input`.

        Raises:
            OffloadError: reading the shard failed.
        """
        return None

    def stage_absent(self) -> None:
        """Stages `absent_value` for the next gather, after a `swap_in` that failed."""
        self.stage().values.fill_(absent_value(self.dtype))

    def release(self) -> None:
        """Returns memory on loan after a gather, or instead of one. Idempotent."""
        return None

    def settle(self) -> None:
        """Waits until every store is complete; raises OffloadError if one failed."""
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Yields the memory that the storage occupies permanently."""
        return iter(())

    # -- methods on top of the interface

    def read(self, interval: FlatRange) -> Tensor:
        """Returns elements of `range`, (n,): a live view of memory, or a copy.

        Raises:
            OffloadError: reading them failed.
        """
        return in_memory(self.elements(interval))

    def replace(self, values: Tensor) -> None:
        """Replaces the weights by `values`, (range.numel,); the store may complete later."""
        self.stage().values.copy_(values)
        self.commit()

    def load(self, fill: FillRange, flush: Callable[[], None]) -> None:
        """Registers all elements to be filled, perhaps in part; calls `flush` before it returns memory on loan."""
        try:
            fill(self.range, self.stage_current())
            flush()
        except BaseException:  # a damaged checkpoint: the weights stay unchanged
            self.release()
            self.discard()
            raise
        self.commit()

    def stage_current(self) -> Tensor:
        """Stages the current values, and returns the staged memory."""
        staged = self.stage().values
        staged.copy_(self.read(self.range))
        return staged

    def prepare_gather(self, full: Tensor, collectives: Collectives, label: str, *, exact: bool) -> Callable[[], Work]:
        """Returns the call that starts an all-gather over the shard group, (S,) -> (N,) into `full`.

        Args:
            exact: False for weights of a forward or backward, which the gather may round.
        """
        source = self.gather_input()
        # qwZ rounds the values it sends. Gathers for saving, writing or showing weights to the program are exact.
        rounds = collectives.quantized_weights and not exact
        gather = collectives.gather_weights if rounds else collectives.all_gather
        if source.device == full.device:
            return partial(gather, full, source, label, self._split_sizes)
        # Copy directly into this rank's part of the output, so that the gather is in place; it follows on this stream.
        assert self.copies is not None, f"{label}: a shard on {source.device} and no stream to copy it"
        place = full[self._shard.at(0)]
        self._copied = self.copies.to_device(place, source)
        return partial(_CopiedGather, self._copied, self.copies, partial(gather, full, place, label, self._split_sizes))

    def prepare_secondary_gather(self, full: Tensor, collectives: Collectives, label: str) -> Callable[[], Work]:
        """Returns the call that starts an all-gather of the valid secondary copy into `full`, (N,)."""
        return self.secondary.prepare_gather(full, collectives, label)

    def keep_secondary(self, full: Tensor, collectives: Collectives) -> None:
        """Makes the secondary copy from the gathered values `full`, (N,), if hpZ is on."""
        self.secondary.keep(full, collectives)


class _CopiedGather:
    """A gather after the copy of this rank's shard to the device; a `Work`.

    Args:
        copied: event right after the copy: a unit must not wait for the copies of later units.
        copies: the stream of the copy, on which the gather starts.
        gather: starts the gather.
    """

    def __init__(self, copied: torch.Event, copies: CopyStream, gather: Callable[[], Work]) -> None:
        self._copied = copied
        self._device = copies.device
        with copies.stream():
            self._gather = gather()

    def wait(self) -> None:
        """See `Work`."""
        self._copied.wait(torch.get_device_module(self._device).current_stream(self._device))
        self._gather.wait()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._copied.query() and self._gather.is_completed()


class MemoryShard(ShardStorage):
    """Weights in a permanent tensor, on the compute device or in host memory.

    Args:
        values: (range.numel,) this tensor.
    """

    def __init__(self, place: ShardPlace, values: Tensor, *, persistent: bool = False) -> None:
        super().__init__(place, persistent=persistent)
        self._memory = FlatTensor(self.range, values)

    @classmethod
    def on_device(cls, place: ShardPlace) -> MemoryShard:
        """Creates a shard in new memory on the compute device."""
        return cls(place, place.full.new_empty(place.shard.numel))

    @classmethod
    def on_host(cls, place: ShardPlace) -> MemoryShard:
        """Creates a shard in the memory of a tier on the host."""
        return cls(place, place.reserved().take(place.key).view(place.full.dtype))

    @classmethod
    def persistent(cls, place: ShardPlace) -> MemoryShard:
        """Creates a storage whose memory is the unsharded buffer itself, which is never resharded."""
        return cls(place, place.full, persistent=True)

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self._memory.values.device

    def elements(self, interval: FlatRange) -> Tensor:
        self._await_writes()
        return self._memory[interval]

    def write(self, interval: FlatRange, values: Tensor) -> None:
        self._await_copies()
        self._await_writes()
        self._memory[interval].copy_(values)

    def replace(self, values: Tensor) -> None:
        self._await_writes()
        super().replace(values)

    def stage(self) -> FlatTensor:
        self._await_copies()
        return self._memory

    def gather_input(self) -> Tensor:
        return self._memory[self._shard]

    def _await_copies(self) -> None:
        """Waits before the memory changes: the device may still copy it, for a forward that the host has queued."""
        if self._copied is not None and not self._copied.query():
            assert self.copies is not None, "copied without a stream"
            self.copies.finish_reads()  # for all shards: the first shard to be written waits for the copies of all
        self._copied = None

    def _await_writes(self) -> None:
        """Waits before the host reads or writes: the device may still write, for an update that the host has queued."""
        if self.copies is not None:
            self.copies.finish_writes()

    def tensors(self) -> Iterator[Tensor]:
        yield self._memory.values

    def load(self, fill: FillRange, flush: Callable[[], None]) -> None:
        self._await_writes()
        fill(self.range, self.stage().values)  # this memory stays allocated, so one flush can serve many storages


class NvmeShard(ShardStorage):
    """A shard in a tier of files, under one key: read for each gather, replaced after each step."""

    is_swapped = True

    def __init__(self, place: ShardPlace) -> None:
        super().__init__(place)
        self._tier = place.reserved()
        self._key = place.key
        self._fetch: Fetch | None = None
        self._loan: Tensor | None = None

    def prefetch(self) -> None:
        if self._fetch is None:
            self._fetch = self._tier.fetch(self._key)

    def swap_in(self) -> None:
        # A prefetch serves one gather: the next one reads again, because a step may have replaced the shard.
        self.prefetch()
        fetch, self._fetch = self._fetch, None
        assert fetch is not None and self._loan is None, f"{self._key}: swapped in twice"
        self._loan = fetch.wait()

    def gather_input(self) -> Tensor:
        assert self._loan is not None, f"{self._key}: gathered before it was swapped in"
        return self._loan.view(self.dtype)

    def release(self) -> None:
        if self._fetch is not None:
            fetch, self._fetch = self._fetch, None
            with contextlib.suppress(OffloadError):  # a lasting fault fails the next fetch too
                self._tier.release(fetch.wait())
        if self._copied is not None and self._loan is not None:
            # The host runs ahead of the device: the tier reuses the memory only after the copy has read it.
            loan, self._loan = self._loan, None
            copied, self._copied = self._copied, None
            self._tier.release(loan, after=copied)
        self.discard()

    def stage(self) -> FlatTensor:
        # A new buffer, not the one read for the gather: the staged values replace the whole shard.
        assert self._loan is None, f"{self._key}: staged while it is in use"
        self._loan = self._tier.take(self._key)
        return FlatTensor(self.range, self._loan.view(self.dtype))

    def stage_current(self) -> Tensor:
        self.swap_in()
        return self.gather_input()

    def commit(self) -> None:
        assert self._loan is not None, f"{self._key}: committed before it was staged"
        loan, self._loan = self._loan, None
        self._tier.store(self._key, loan)

    def discard(self) -> None:
        if self._loan is not None:
            loan, self._loan = self._loan, None
            self._tier.release(loan)

    def elements(self, interval: FlatRange) -> StoredElements:
        offset = (interval.start - self.range.start) * self.dtype.itemsize
        return StoredElements.under(self._tier, self._key, offset, interval.numel, self.dtype)

    def write(self, interval: FlatRange, values: Tensor) -> None:
        if not interval:
            return
        # A tier stores a key only as a whole, so this reads the shard, changes it and writes it back.
        self.stage_current()[interval.at(self.range.start)].copy_(values)
        self.commit()
        self._tier.settle()

    def settle(self) -> None:
        self._tier.settle()


class SecondaryShard:
    """ZeRO++'s hpZ (Wang et al. 2023, arXiv:2306.10209): a second sharded copy of one buffer, over fewer ranks than
    the shards, from which backward gathers.

    1. `keep` when a forward reshards, 2. `prepare_gather` while `is_valid`, 3. `drop` when the weights change.
    """

    def __init__(self) -> None:
        self._part: Tensor | None = None

    @property
    def is_valid(self) -> bool:
        """True if there is a copy of the current weights; the same on all ranks."""
        return self._part is not None

    def keep(self, full: Tensor, collectives: Collectives) -> None:
        """Copies this rank's part of `full`, (N / ranks of the copy,), if the copy has fewer ranks than the shards."""
        count = collectives.secondary_world_size
        if self._part is None and count < collectives.shard_world_size:
            # Equal parts, even if the shards are unequal: the ranks of this copy are not those of a shard group.
            numel = full.numel() // count
            place = collectives.secondary_rank
            self._part = full[place * numel : (place + 1) * numel].clone()

    def prepare_gather(self, full: Tensor, collectives: Collectives, label: str) -> Callable[[], Work]:
        """Returns the call that starts an all-gather over the ranks of the copy into `full`, (N,)."""
        assert self._part is not None, f"{label}: no secondary copy"
        return partial(collectives.gather_secondary, full, self._part, label)

    def drop(self) -> None:
        """Drops the copy, because the weights change."""
        self._part = None

    def tensors(self) -> Sequence[Tensor]:
        """Returns the memory of the copy."""
        return () if self._part is None else (self._part,)
