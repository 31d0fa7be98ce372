"""Where a flat buffer's weights in the parameters' dtype live between uses: one class per tier.

`FlatBuffer` has one `ShardStorage`; all-gathers, the optimizer step, checkpoints and parameter access read and write
through it and do not know which. `placement.py` has the table that chooses. Masters and optimizer states are
`masters.py`'s.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.errors import OffloadError
from zeroaccel.offload.tier import Fetch, StoredElements, Tier
from zeroaccel.zero.layout import FlatLayout, FlatRange, FlatTensor
from zeroaccel.zero.storage.copy_stream import CopyStream

Elements = Tensor | StoredElements
"""(n,) a live view of memory, or what reads the elements from a tier a chunk at a time."""

FillRange = Callable[[FlatRange, Tensor], None]
"""(range, target): has the elements of a range read into `target`, (range.numel,), at the latest at the next flush."""


def absent_value(dtype: torch.dtype) -> float | bool:
    """NaN; integers have none and show their lowest value instead."""
    if dtype is torch.bool:
        return False
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def in_memory(elements: Elements) -> Tensor:
    """(n,) the elements: the view itself, or a copy in host memory."""
    return elements if isinstance(elements, Tensor) else elements.copy()


@dataclass(frozen=True)
class ShardPlace:
    """What a storage is made for.

    Attributes:
        key: of the buffer, in tiers.
        full: (N,) the unsharded buffer on the compute device, with its storage allocated.
        tier: that has room for the shard under `key`; None where the storage is not in a tier.
        copies: moves host memory to the compute device, where they are two memories.
    """

    key: str
    layout: FlatLayout
    rank: int
    full: Tensor
    tier: Tier | None = None
    copies: CopyStream | None = None

    @property
    def shard(self) -> FlatRange:
        """The elements of this rank's shard."""
        return self.layout.shard(self.rank)

    def reserved(self) -> Tier:
        """The tier, of a storage that needs one."""
        assert self.tier is not None, f"{self.key}: no tier was reserved for it"
        return self.tier


class ShardStorage(ABC):
    """This rank's weights of one flat buffer, (S,) in the parameters' dtype.

    A new tier implements `elements`, `write`, `stage` and `gather_input`; where the weights are not in memory, also
    `commit` and `discard`, and `prefetch`, `swap_in`, `release` with `is_swapped`. Then it needs a line in
    `placement.SHARD_STORAGES`.

    Life of a gather: 1. `prefetch`, if it is known early, 2. `swap_in`, 3. `all_gather`, 4. `release` when it is
    through. Of an update: `stage`, whose tensor the optimizer fills, then `commit`, or `discard` if it fails.

    Attributes:
        range: the elements that can be read and written here: this rank's S, or all N of a persistent buffer.
        is_swapped: each gather brings the shard into memory on loan, which can fail on one rank alone.
        rounds_writes: what is read back may differ from what was written.
        secondary: the copy that hpZ gathers from in backward.
    """

    is_swapped = False
    rounds_writes = False

    def __init__(self, place: ShardPlace, *, persistent: bool = False) -> None:
        self.range = place.layout.range if persistent else place.shard
        self.dtype = place.full.dtype
        self._shard = place.shard
        self._split_sizes = place.layout.uneven_sizes
        self._copies = place.copies
        self._copied: torch.Event | None = None  # behind the copy of the last gather from host memory
        self.secondary = SecondaryShard()

    # -- what a tier implements

    @abstractmethod
    def elements(self, part: FlatRange) -> Elements:
        """Elements of `range`: a live view, or what reads them. Reading must be possible from any thread."""

    @abstractmethod
    def write(self, part: FlatRange, values: Tensor) -> None:
        """Replaces elements of `range`, by values of any dtype, and returns when they are stored.

        Raises:
            OffloadError: they cannot be stored.
        """

    @abstractmethod
    def stage(self) -> FlatTensor:
        """Memory for all of `range`, of any contents, that becomes the weights by `commit`."""

    @abstractmethod
    def gather_input(self) -> Tensor:
        """(S,) the shard, in memory, to be sent; unchanged until `release`."""

    def commit(self) -> None:
        """Makes what was written to `stage` the weights; a store may still be under way afterwards."""
        return None

    def discard(self) -> None:
        """Drops what was staged, if anything: the weights stay as they were."""
        return None

    def prefetch(self) -> None:
        """Starts to bring the shard into memory."""
        return None

    def swap_in(self) -> None:
        """Returns when the shard is in memory for `gather_input`.

        Raises:
            OffloadError: it cannot be read back.
        """
        return None

    def stage_absent(self) -> None:
        """After a `swap_in` that failed: what is gathered decodes to NaN, or to what integers have for it."""
        self.stage().values.fill_(absent_value(self.dtype))

    def release(self) -> None:
        """The gather is through, or will not be: gives memory on loan back. Idempotent."""
        return None

    def settle(self) -> None:
        """Returns when every store is done; raises OffloadError if one failed."""
        return None

    def tensors(self) -> Iterator[Tensor]:
        """The memory it occupies all the time."""
        return iter(())

    # -- what follows from that

    def read(self, part: FlatRange) -> Tensor:
        """(n,) elements of `range`: a live view of memory, or a copy.

        Raises:
            OffloadError: they cannot be read back.
        """
        return in_memory(self.elements(part))

    def replace(self, values: Tensor) -> None:
        """Makes `values`, (range.numel,), the weights; a store may still be under way afterwards."""
        self.stage().values.copy_(values)
        self.commit()

    def load(self, fill: FillRange, flush: Callable[[], None]) -> None:
        """Has all elements filled, in part perhaps; memory that is only on loan is flushed before it goes back."""
        try:
            fill(self.range, self.stage_current())
            flush()
        except BaseException:  # a damaged checkpoint: the weights stay as they were
            self.release()
            self.discard()
            raise
        self.commit()

    def stage_current(self) -> Tensor:
        """As `stage`, with the present values."""
        staged = self.stage().values
        staged.copy_(self.read(self.range))
        return staged

    def all_gather(self, full: Tensor, collectives: Collectives, label: str, *, exact: bool) -> Work:
        """All-gather over the shard group, (S,) -> (N,) into `full`.

        Args:
            exact: False for weights to compute with, which may be rounded on their way.
        """
        source = self.gather_input()
        if source.device == full.device:
            return self._gather(source, full, collectives, label, exact=exact)
        # Straight into this rank's part of the output, so that the gather is in place; behind the copy, on its stream.
        assert self._copies is not None, f"{label}: a shard on {source.device} and no stream to copy it"
        own = full[self._shard.at(0)]
        self._copied = self._copies.to_device(own, source)
        with self._copies.stream():
            return _CopiedGather(self._copied, self._gather(own, full, collectives, label, exact=exact), full.device)

    def gather_secondary(self, full: Tensor, collectives: Collectives, label: str) -> Work:
        """All-gather of the secondary copy, which is valid, into (N,) `full`."""
        return self.secondary.all_gather(full, collectives, label)

    def keep_secondary(self, full: Tensor, collectives: Collectives) -> None:
        """Has the secondary copy made of values to compute with, (N,) `full`, where there is to be one (hpZ)."""
        self.secondary.keep(full, collectives)

    def copy_own(self, part: FlatRange, full: Tensor) -> None:
        """Copies those elements of `part` that are this rank's into `full`, (N,), for `all_gather_part`.

        Raises:
            OffloadError: they cannot be read back.
        """
        own = part & self.range
        if own:
            full[own.at(0)].copy_(self.read(own))

    def all_gather_part(
        self, part: FlatRange, full: Tensor, collectives: Collectives, label: str, numels: Sequence[int]
    ) -> Work:
        """All-gather of the elements of `part` only, into `full`, which has this rank's.

        Args:
            numels: elements of `part` in the shard of each rank.
        """
        return collectives.all_gather(full[part.at(0)], full[(part & self._shard).at(0)], label, numels)

    def _gather(self, source: Tensor, full: Tensor, collectives: Collectives, label: str, *, exact: bool) -> Work:
        # qwZ rounds what is sent; weights that are saved, written or shown to the program are gathered exactly.
        if collectives.quantized_weights and not exact:
            return collectives.gather_weights(full, source, label, self._split_sizes)
        return collectives.all_gather(full, source, label, self._split_sizes)


class _CopiedGather:
    """A gather behind the copy of this rank's shard to the device; a `Work`.

    Args:
        copied: behind the copy, and behind no later one: a unit must not wait for the copies of those after it.
    """

    def __init__(self, copied: torch.Event, gather: Work, device: torch.device) -> None:
        self._copied = copied
        self._gather = gather
        self._device = device

    def wait(self) -> None:
        """See `Work`."""
        self._copied.wait(torch.get_device_module(self._device).current_stream(self._device))
        self._gather.wait()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._copied.query() and self._gather.is_completed()


class MemoryShard(ShardStorage):
    """Weights in a tensor that stays where it is: on the compute device, or in host memory.

    Args:
        values: (range.numel,) the memory.
    """

    def __init__(self, place: ShardPlace, values: Tensor, *, persistent: bool = False) -> None:
        super().__init__(place, persistent=persistent)
        self._memory = FlatTensor(self.range, values)

    @classmethod
    def on_device(cls, place: ShardPlace) -> MemoryShard:
        """Memory of its own on the compute device."""
        return cls(place, place.full.new_empty(place.shard.numel))

    @classmethod
    def on_host(cls, place: ShardPlace) -> MemoryShard:
        """The memory of a tier in host memory."""
        return cls(place, place.reserved().take(place.key).view(place.full.dtype))

    @classmethod
    def persistent(cls, place: ShardPlace) -> MemoryShard:
        """The unsharded buffer itself, which is never resharded."""
        return cls(place, place.full, persistent=True)

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._memory.values.device

    def elements(self, part: FlatRange) -> Tensor:
        self._await_writes()
        return self._memory[part]

    def write(self, part: FlatRange, values: Tensor) -> None:
        self._await_copies()
        self._await_writes()
        self._memory[part].copy_(values)

    def replace(self, values: Tensor) -> None:
        self._await_writes()
        super().replace(values)

    def stage(self) -> FlatTensor:
        self._await_copies()
        return self._memory

    def gather_input(self) -> Tensor:
        return self._memory[self._shard]

    def _await_copies(self) -> None:
        """Before the memory changes: the device may still copy it, for a forward that the host has only issued."""
        if self._copied is not None and not self._copied.query():
            assert self._copies is not None, "copied without a stream"
            self._copies.finish_reads()  # of all shards, so that the first one that is written waits for the others
        self._copied = None

    def _await_writes(self) -> None:
        """Before the host reads or writes: the device may still write, in an update that the host has only issued."""
        if self._copies is not None:
            self._copies.finish_writes()

    def tensors(self) -> Iterator[Tensor]:
        yield self._memory.values

    def load(self, fill: FillRange, flush: Callable[[], None]) -> None:
        self._await_writes()
        fill(self.range, self.stage().values)  # what stays in memory can wait for a flush of many


class NvmeShard(ShardStorage):
    """The shard under a key of a tier in files: read for each gather, replaced after each step."""

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
        # A prefetch is used once: the next gather reads again, since a step may have replaced the shard.
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
            with contextlib.suppress(OffloadError):  # if it matters, the next fetch meets it too
                self._tier.release(fetch.wait())
        if self._copied is not None and self._loan is not None:
            # The host runs ahead of the device: the tier takes the memory back once the copy has read it.
            loan, self._loan = self._loan, None
            copied, self._copied = self._copied, None
            self._tier.release(loan, after=copied)
        self.discard()

    def stage(self) -> FlatTensor:
        # A new buffer, not the one read for the gather: what is staged replaces all of the shard.
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

    def elements(self, part: FlatRange) -> StoredElements:
        offset = (part.start - self.range.start) * self.dtype.itemsize
        return StoredElements.under(self._tier, self._key, offset, part.numel, self.dtype)

    def write(self, part: FlatRange, values: Tensor) -> None:
        if not part:
            return
        # A tier stores all of a key at once, so the shard is read, changed and written back.
        self.stage_current()[part.at(self.range.start)].copy_(values)
        self.commit()
        self._tier.settle()

    def settle(self) -> None:
        self._tier.settle()


class SecondaryShard:
    """ZeRO++'s hpZ (Wang et al. 2023, arXiv:2306.10209): a second sharded copy of one buffer, over fewer
    ranks than the shards, that backward gathers from.

    1. `keep` when a forward reshards, 2. `all_gather` while `is_valid`, 3. `drop` when the weights change.
    """

    def __init__(self) -> None:
        self._part: Tensor | None = None

    @property
    def is_valid(self) -> bool:
        """Whether there is a copy of the present weights; the same on all ranks."""
        return self._part is not None

    def keep(self, full: Tensor, collectives: Collectives) -> None:
        """Copies this rank's part of `full`, (N / ranks of the copy,), where the copy has fewer ranks than shards."""
        count = collectives.secondary_world_size
        if self._part is None and count < collectives.shard_world_size:
            # Equal parts whatever the shards are: the ranks of this copy are others than those of a shard group.
            numel = full.numel() // count
            place = collectives.secondary_rank
            self._part = full[place * numel : (place + 1) * numel].clone()

    def all_gather(self, full: Tensor, collectives: Collectives, label: str) -> Work:
        """All-gather over the ranks of the copy, into (N,) `full`."""
        assert self._part is not None, f"{label}: no secondary copy"
        return collectives.gather_secondary(full, self._part, label)

    def drop(self) -> None:
        """The weights are new, or about to be."""
        self._part = None

    def tensors(self) -> Sequence[Tensor]:
        """The memory it occupies."""
        return () if self._part is None else (self._part,)
