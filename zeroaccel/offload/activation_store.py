"""Where the input of a recomputed function is kept from forward to backward.

In one of four ways, which combine: as it is; in host memory; as this rank's share of what a group holds equally; in
one buffer for all of them. What comes back has the same bits and the same strides. Knows nothing of autograd;
`activations.py` asks.

[Note: streams] Copies run on a stream of their own. One to the host waits for the work that made the tensor, and the
allocator is told to keep its memory so long. One back is started when the backward of the function that ran after it
begins, so that it runs beside that, and is waited for by the stream that uses it.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from zeroaccel.comm.collectives import PartitionedTensors
from zeroaccel.errors import UsageError

__all__ = ["ActivationStore", "HostLink", "SavedActivation", "link_to"]


class Incoming(Protocol):
    """A tensor on its way back."""

    def wait(self) -> Tensor:
        """The tensor, for the current stream."""


class HostLink(Protocol):
    """Copies between a device and host memory."""

    def allocate(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 of host memory that the link copies from and to fast."""

    def send(self, target: Tensor, source: Tensor) -> None:
        """Starts target = source, from the device to the host."""

    def bring(self, source: Tensor, device: torch.device) -> Incoming:
        """Starts a copy of host memory into a new tensor on the device."""


class SavedActivation:
    """One tensor in the store; given up with the last reference.

    Attributes:
        number, call: counted by the store.
        data: (n,) its elements, or this rank's share of them, in the order of memory; None while in the shared buffer.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "data",
        "device",
        "dtype",
        "incoming",
        "number",
        "numel",
        "order",
        "shape",
        "slot",
        "store",
    )

    def __init__(self, store: ActivationStore, tensor: Tensor, order: tuple[int, ...], number: int) -> None:
        self.store = store
        self.shape = tuple(tensor.shape[dim] for dim in order)
        self.order = order
        self.numel = tensor.numel()
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.number = number
        self.call = store.calls
        self.data: Tensor | None = None
        self.slot: int | None = None
        self.incoming: Incoming | None = None

    def __del__(self) -> None:
        self.store.forget(self)


class ActivationStore:
    """Keeps tensors, and gives them back in the opposite order.

    Args:
        on_host: keep tensors of a device in host memory; those of the CPU are there already.
        shares: keep only this rank's share of what all ranks of this group hold alike.
        slots: keep them in one buffer for so many, each as large as the first; None for memory of their own.

    Attributes:
        calls: functions whose inputs came so far; what belongs to one call is brought back together.
        kept_nbytes: now, in memory that the store took.
        peak_nbytes: the most of that.
    """

    def __init__(
        self, *, on_host: bool = False, shares: PartitionedTensors | None = None, slots: int | None = None
    ) -> None:
        self.kept_nbytes = self.peak_nbytes = self.calls = 0
        self._on_host = on_host
        self._shares = shares
        self._slots = slots
        self._free: list[int] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._slot_nbytes = 0
        self._count = 0
        self._live: dict[int, weakref.ref[SavedActivation]] = {}

    @property
    def count(self) -> int:
        """Tensors in the store."""
        return len(self._live)

    def keep(self, tensor: Tensor) -> SavedActivation | Tensor:
        """Takes a tensor; it may be changed afterwards, unless it is what was returned.

        Raises:
            UsageError: the buffer has no slot left, or none so large.
        """
        link = link_to(tensor.device) if self._on_host else None
        order = _order_in_memory(tensor)
        if order is None or (link is None and self._shares is None and self._slots is None):
            return tensor
        kept = SavedActivation(self, tensor, order, self._count)
        self._count += 1
        flat = tensor.detach().permute(order).reshape(-1)
        if self._shares is not None:
            flat = self._shares.shard(flat)
        nbytes = flat.numel() * flat.itemsize
        if self._slots is not None:
            kept.slot, place = self._take_slot(nbytes, link, tensor.device)
        elif link is not None:
            place = link.allocate(nbytes)
        else:
            kept.data, place = flat, None
        if place is not None:
            kept.data = place.view(flat.dtype)
            if link is not None:
                link.send(kept.data, flat)
            else:
                kept.data.copy_(flat)
        self._live[kept.number] = weakref.ref(kept)
        self.kept_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.kept_nbytes)
        return kept

    def fetch(self, kept: SavedActivation | Tensor) -> Tensor:
        """The tensor that was taken. (with shares: all ranks of the group, in the same order)"""
        if isinstance(kept, Tensor):
            return kept
        flat = self._here(kept)
        if self._shares is not None:
            flat = self._shares.unshard(flat, kept.numel)
        elif kept.slot is not None and kept.data is flat:
            flat = flat.clone()  # the slot may be given to another while somebody still holds this
        self._begin_next(kept)
        back = [kept.order.index(dim) for dim in range(len(kept.order))]
        return flat.view(kept.shape).permute(back)

    def forget(self, kept: SavedActivation) -> None:
        """Called by what is given up."""
        if self._live.pop(kept.number, None) is None or kept.data is None:
            return
        self.kept_nbytes -= kept.data.numel() * kept.data.itemsize
        if kept.slot is not None:
            self._free.append(kept.slot)

    def _here(self, kept: SavedActivation) -> Tensor:
        """Its data on its device."""
        assert kept.data is not None, "a tensor that was never taken"
        if kept.incoming is None:
            self._begin(kept)
        incoming, kept.incoming = kept.incoming, None
        return kept.data if incoming is None else incoming.wait()

    def _begin(self, kept: SavedActivation) -> None:
        link = link_to(kept.device) if self._on_host else None
        if link is not None and kept.data is not None and kept.incoming is None:
            kept.incoming = link.bring(kept.data, kept.device)

    def _begin_next(self, kept: SavedActivation) -> None:
        """Starts to bring what backward will ask for next: all that the call before this one left."""
        earlier = [other for held in self._live.values() if (other := held()) is not None and other.call < kept.call]
        last = max((other.call for other in earlier), default=0)
        for other in earlier:
            if other.call == last:
                self._begin(other)

    def _take_slot(self, nbytes: int, link: HostLink | None, device: torch.device) -> tuple[int, Tensor]:
        assert self._slots is not None, "there is no buffer"
        if not self._live and nbytes > self._slot_nbytes:
            self._slot_nbytes = -(-nbytes // 64) * 64
            total = self._slots * self._slot_nbytes
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = link.allocate(total) if link else torch.empty(total, dtype=torch.uint8, device=device)
            self._free = list(reversed(range(self._slots)))
        where = "activation_checkpointing.contiguous_memory_optimization"
        if nbytes > self._slot_nbytes:
            raise UsageError(
                where,
                expected=f"tensors of at most {self._slot_nbytes} bytes, as the first of this pass",
                got=f"one of {nbytes}",
                fix="turn it off where the sizes differ within a model",
            )
        if not self._free:
            raise UsageError(
                where,
                expected=f"at most number_checkpoints = {self._slots} tensors at a time",
                got=f"{self._slots + 1}",
                fix="raise activation_checkpointing.number_checkpoints to the number of checkpointed calls in forward",
            )
        slot = self._free.pop()
        return slot, self._buffer[slot * self._slot_nbytes : slot * self._slot_nbytes + nbytes]


def link_to(device: torch.device) -> HostLink | None:
    """The link of a device; None for the CPU, whose memory is the host's."""
    if device.type != "cuda":
        return None
    if device not in _LINKS:
        _LINKS[device] = _CudaLink(device)
    return _LINKS[device]


_LINKS: dict[torch.device, HostLink] = {}


class _CudaLink:
    """[Note: streams]"""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, target: Tensor, source: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def bring(self, source: Tensor, device: torch.device) -> Incoming:
        target = torch.empty(source.shape, dtype=source.dtype, device=device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _CudaIncoming(target, source, event)


class _CudaIncoming:
    def __init__(self, target: Tensor, source: Tensor, event: torch.cuda.Event) -> None:
        self._target = target
        self._source: Tensor | None = source
        self._event = event

    def wait(self) -> Tensor:
        self._event.wait()
        self._source = None
        return self._target


def _order_in_memory(tensor: Tensor) -> tuple[int, ...] | None:
    """The dims from the slowest to the fastest; None for a tensor with gaps, overlaps or no elements."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    return order if tensor.numel() and tensor.permute(order).is_contiguous() else None
