"""Storage for checkpointed activations: the inputs of recomputed functions, from forward to backward.

Four options combine: stored unchanged; in host memory (`cpu_checkpointing`); as this rank's shard of a tensor that all
ranks of a group hold (`partition_activations`); in one contiguous buffer (`contiguous_memory_optimization`). Returned
tensors have the same bits and strides. It does not use autograd; `activations.py` calls it.

[Note: activation streams] Copies run on a separate stream. A copy to the host waits for the kernels that made the
tensor, and `record_stream` keeps its memory from being reused during the copy. It overlaps with the function whose
input it is; kernels launched after that call wait for it, because they may change the tensor in place. A copy back is
prefetched: it starts when the backward of the function that ran after it begins, overlaps with that, and the stream
that uses the tensor waits for it. If its graph is dropped instead, nothing waits, and `record_stream` keeps the memory
of its target.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroaccel.comm.collectives import PartitionedTensors
from zeroaccel.errors import UsageError
from zeroaccel.offload.host_buffers import HostArena
from zeroaccel.offload.page_locked import copying_stream


@dataclass(eq=False)
class SavedActivation:
    """One tensor in the store; freed with the last reference.

    Attributes:
        number, call: number of the tensor and of its call, counted by the store.
        order: dims from the slowest to the fastest in memory; `shape` is in that order.
        data: (n,) its elements, or this rank's shard of them, in memory order.
        slot: slot in the contiguous buffer; None outside of it.
        copy: set once its copy to the device starts: makes the current stream wait for it, and returns the tensor.
    """

    store: ActivationStore
    number: int
    call: int
    order: tuple[int, ...]
    shape: tuple[int, ...]
    device: torch.device
    data: Tensor | None = None
    slot: int | None = None
    copy: Callable[[], Tensor] | None = None

    def __del__(self) -> None:
        self.store.free(self)


class ActivationStore:
    """Stores tensors in forward, and returns them in reverse order in backward.

    Args:
        on_host: store tensors of a device in host memory; CPU tensors are already there.
        partition: store only this rank's shard of tensors that all ranks of this group hold.
        slots: store tensors in one buffer with this number of slots, each as large as the first tensor; None to
            allocate each tensor separately.

    Attributes:
        calls: number of functions whose inputs were stored; the tensors of one call are prefetched together.
        stored_nbytes: current bytes in memory that the store allocated.
        peak_nbytes: maximum of `stored_nbytes`.

    Example:
        >>> store = ActivationStore(slots=2)
        >>> activation = torch.arange(6.0).view(2, 3).t()
        >>> saved = store.save(activation)
        >>> store.stored_nbytes
        24
        >>> torch.equal(store.fetch(saved), activation)
        True
    """

    def __init__(
        self, *, on_host: bool = False, partition: PartitionedTensors | None = None, slots: int | None = None
    ) -> None:
        self.stored_nbytes = self.peak_nbytes = self.calls = 0
        self._on_host = on_host
        self._partition = partition
        self._slots = slots
        self._free: list[int] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._slot_nbytes = 0
        self._num_saved = 0
        self._links: set[HostLink] = set()  # with copies to the host since the last `end_call`
        # Weak references: autograd owns the saved tensors, and frees them with the graph, used or not.
        self._live: dict[int, weakref.ref[SavedActivation]] = {}

    @property
    def count(self) -> int:
        """Number of tensors in the store."""
        return len(self._live)

    def save(self, tensor: Tensor) -> SavedActivation | Tensor:
        """Stores a tensor. The caller may change it after `end_call`, unless `save` returns the tensor itself.

        Raises:
            UsageError: the buffer has no free slot, or the tensor is larger than a slot.
        """
        link = link_to(tensor.device) if self._on_host else None
        # Stored flat in memory order, which restores the strides too. A tensor with gaps or overlaps is not stored: a
        # flat copy of it would have another size.
        order = _order_in_memory(tensor)
        if order is None or (link is None and self._partition is None and self._slots is None):
            return tensor
        # `flat` is a view without a copy, because `order` is the memory order; with a partition, this rank's shard.
        shape = tuple(tensor.shape[dim] for dim in order)
        saved = SavedActivation(self, self._num_saved, self.calls, order, shape, tensor.device)
        self._num_saved += 1
        flat = tensor.detach().permute(order).reshape(-1)
        if self._partition is not None:
            flat = self._partition.shard(flat)
        nbytes = flat.numel() * flat.itemsize
        # Into a slot, into host memory, or as a view of the caller's own memory.
        if self._slots is not None:
            saved.slot, place = self._take_slot(nbytes, link, tensor.device)
        elif link is not None:
            place = link.allocate(nbytes)
        else:
            saved.data, place = flat, None
        if place is not None:
            saved.data = place.view(flat.dtype)
            if link is not None:
                link.copy_to_host(saved.data, flat)
                self._links.add(link)
            else:
                saved.data.copy_(flat)
        self._live[saved.number] = weakref.ref(saved)
        self.stored_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.stored_nbytes)
        return saved

    def end_call(self) -> None:
        """Ends the function whose inputs were saved last: later kernels may change them in place."""
        # Not earlier, so that the function hides the copies of its inputs.
        for link in self._links:
            link.protect_sources()
        self._links.clear()

    def fetch(self, saved: SavedActivation | Tensor) -> Tensor:
        """Returns the saved tensor. (with a partition: all ranks of the group, in the same order)"""
        if isinstance(saved, Tensor):
            return saved
        flat = self._on_device(saved)
        if self._partition is not None:
            flat = self._partition.unshard(flat, math.prod(saved.shape))
        elif saved.slot is not None and saved.data is flat:
            flat = flat.clone()  # the slot may be reused while autograd still refers to this tensor
        self._prefetch_next(saved)
        back = [saved.order.index(dim) for dim in range(len(saved.order))]
        return flat.view(saved.shape).permute(back)

    def free(self, saved: SavedActivation) -> None:
        """Frees a tensor; a `SavedActivation` calls this when it is deleted."""
        if self._live.pop(saved.number, None) is None or saved.data is None:
            return
        self.stored_nbytes -= saved.data.numel() * saved.data.itemsize
        if saved.slot is not None:
            self._free.append(saved.slot)

    def _on_device(self, saved: SavedActivation) -> Tensor:
        """Returns its data on its device."""
        assert saved.data is not None, "the tensor was never saved"
        if saved.copy is None:
            self._start_copy(saved)
        copy, saved.copy = saved.copy, None
        return saved.data if copy is None else copy()

    def _start_copy(self, saved: SavedActivation) -> None:
        link = link_to(saved.device) if self._on_host else None
        if link is not None and saved.data is not None and saved.copy is None:
            saved.copy = link.copy_to_device(saved.data, saved.device)

    def _prefetch_next(self, saved: SavedActivation) -> None:
        """Starts the copies that backward will need next: all tensors of the previous call."""
        live = [other for reference in self._live.values() if (other := reference()) is not None]
        # Backward runs the calls in reverse order, so the newest call before this one is next.
        earlier = [other for other in live if other.call < saved.call]
        last = max((other.call for other in earlier), default=0)
        for other in earlier:
            if other.call == last:
                self._start_copy(other)

    def _take_slot(self, nbytes: int, link: HostLink | None, device: torch.device) -> tuple[int, Tensor]:
        assert self._slots is not None, "the store has no buffer"
        # Allocated when the first tensor of a pass is larger than those of earlier passes: only then is its size known.
        if not self._live and nbytes > self._slot_nbytes:
            self._slot_nbytes = -(-nbytes // 64) * 64
            total = self._slots * self._slot_nbytes
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old one before the new one is allocated
            self._buffer = link.allocate(total) if link else torch.empty(total, dtype=torch.uint8, device=device)
            self._free = list(reversed(range(self._slots)))
        where = "activation_checkpointing.contiguous_memory_optimization"
        if nbytes > self._slot_nbytes:
            raise UsageError(
                where,
                expected=f"tensors of at most {self._slot_nbytes} bytes, the size of a slot in this pass",
                got=f"one of {nbytes}",
                fix="turn it off if the sizes differ within a model",
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
    """Returns the copy link of a device; None for the CPU, whose tensors are already in host memory."""
    if device.type == "cpu":
        return None
    # One per device, so that all stores of a process share a copy stream.
    if device not in _LINKS:
        _LINKS[device] = HostLink(device)
    return _LINKS[device]


_LINKS: dict[torch.device, HostLink] = {}


class HostLink:
    """Copies between an accelerator and host memory; see [Note: activation streams]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = copying_stream(device)
        self._sent = self._module.Event()  # follows the last copy to the host
        # Inputs have the same sizes in every step. Copies in both directions use one stream, so a write to reused
        # memory runs after the copy that read it.
        self._arena = HostArena(pinned=True)

    def allocate(self, nbytes: int) -> Tensor:
        """Returns (nbytes,) uint8 of host memory that the link copies from and to asynchronously."""
        return self._arena.empty((nbytes,), torch.uint8)

    def copy_to_host(self, target: Tensor, source: Tensor) -> None:
        """Starts target = source, from the device to the host."""
        # The copy waits for the kernels that write `source`, whose memory must not be reused before the copy ends.
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._sent.record()
        source.record_stream(self._stream)

    def protect_sources(self) -> None:
        """Makes later kernels wait for the copies to the host in flight, because they may change the sources."""
        self._sent.wait(self._module.current_stream(self._device))

    def copy_to_device(self, source: Tensor, device: torch.device) -> Callable[[], Tensor]:
        """Starts a copy of host memory into a new tensor on the device; see `SavedActivation.copy`."""
        # Allocated on the current stream, whose earlier kernels may still use that memory: the copy waits for them.
        target = torch.empty(source.shape, dtype=source.dtype, device=device)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record()
        target.record_stream(self._stream)  # the graph, and the target with it, may be dropped before anything waits

        def wait() -> Tensor:
            event.wait()
            return target

        return wait


def _order_in_memory(tensor: Tensor) -> tuple[int, ...] | None:
    """Returns the dims from the slowest to the fastest; None for a tensor with gaps, overlaps or no elements."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    return order if tensor.numel() and tensor.permute(order).is_contiguous() else None
