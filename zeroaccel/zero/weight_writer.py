"""Writes the new weights from the masters, which an update has changed, to the parameters' shards.

Masters and shards may be the same memory, in one memory, or one on the host and one on the device; the caller sees only
where to put rounded values. `weight_update.py` has the loop around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.storage.copy_stream import CopyStream
from zeroaccel.zero.storage.masters import MasterPiece
from zeroaccel.zero.storage.shards import MemoryShard


class WeightWriter:
    """Writes the weights of all buffers of one optimizer.

    Args:
        copies: moves weights to the device from masters in host memory; None if both are in the same memory.

    Attributes:
        crosses: masters and parameters are in different memories.
    """

    def __init__(self, copies: CopyStream | None) -> None:
        self.crosses = copies is not None
        self._copies = copies
        self._writes_host = False  # copies of new weights to host memory are in progress

    def await_copies(self) -> None:
        """Waits, before masters change, for copies to the device: masters in host memory may be the copied weights.

        For example, the host may have issued a forward between backward and step that the device has not reached.
        """
        if self._copies is not None:
            self._copies.finish_reads()

    @contextmanager
    def new_weights(self, buffer: FlatBuffer) -> Iterator[FlatTensor | None]:
        """Yields memory for the rounded masters, which the block fills; None if the masters are the weights.

        After the block they are the weights, or on their way there, and marked if the engine marks changes.
        """
        out = buffer.masters.stage_weights()
        if out is None:
            yield None
            return
        shard, before = buffer.own & buffer.masters.range, None
        if buffer.changed is not None and buffer.dtype.itemsize == 2:
            before = buffer.shard.read(shard).clone()  # for a staged tier, its current content
        yield out
        if buffer.changed is not None and before is not None:
            self.finish_host_writes()
            self.order_copies()
            buffer.changed.compare(before.to(out[shard].device), out[shard])
        if buffer.shard.is_swapped:  # they go to a file next
            self.finish_host_writes()
        buffer.shard.commit()

    @contextmanager
    def rounded(self, piece: MasterPiece, out: FlatTensor | None) -> Iterator[Tensor | None]:
        """Yields memory on the masters' device for a piece's part of `out`; copies its values to `out` afterwards."""
        if out is None:
            yield None
            return
        target, device = out[piece.range], piece.param.device
        if target.device == device:
            yield target
        elif target.device.type == "cpu":  # masters on the device, shards on the host
            staged = torch.empty_like(target, device=device)
            yield staged
            self._stream().write_host(target, staged)
            self._writes_host = True
        else:
            # The copy runs on its own stream beside the update of the next piece: each piece needs a separate buffer,
            # and the allocator of pinned memory keeps it until the copy is done.
            staged = torch.empty(target.shape, dtype=target.dtype, pin_memory=self._stream().pinned)
            yield staged
            self._stream().to_device(target, staged)

    def take(self, piece: MasterPiece, out: FlatTensor | None) -> None:
        """Drops the gradient after the optimizer's own `step`, and rounds the masters into `out`."""
        piece.param.grad = None
        with self.rounded(piece, out) as rounded:
            if rounded is not None:
                rounded.copy_(piece.param.detach().flatten())

    def order_copies(self) -> None:
        """Makes the current stream, and the gathers that it starts, wait for the copies of new weights so far."""
        if self._copies is not None:
            self._copies.wait()

    def finish_host_writes(self) -> None:
        """Blocks until new weights are in host memory."""
        if self._writes_host:
            self._stream().finish()
            self._writes_host = False

    def leave_host_writes(self) -> None:
        """Leaves copies to shards in host memory in progress; see `CopyStream.finish_writes`."""
        self._writes_host = False

    # -- new weights while the old ones are in use

    def is_direct(self, buffer: FlatBuffer) -> bool:
        """Returns True if a thread may write new weights where they belong: host memory, without a stream or a file."""
        return isinstance(buffer.shard, MemoryShard) and buffer.shard.device.type == "cpu" and buffer.changed is None

    def memory_aside(self, buffer: FlatBuffer) -> FlatTensor | None:
        """Returns memory for new weights while the old ones are in use; None if the masters themselves serve."""
        if buffer.masters.as_weights(buffer.dtype) is not None:
            return None
        if buffer.masters.is_resident:
            return FlatTensor(buffer.own, torch.empty(buffer.own.numel, dtype=buffer.dtype, device=buffer.full.device))
        pinned = self._copies is not None and self._copies.pinned
        return FlatTensor(buffer.own, torch.empty(buffer.own.numel, dtype=buffer.dtype, pin_memory=pinned))

    def install(self, buffer: FlatBuffer, weights: FlatTensor | None) -> None:
        """Copies weights from `memory_aside`, or from the masters if it returned None, into the shard."""
        new = buffer.masters.as_weights(buffer.dtype) if weights is None else weights.values
        with self.new_weights(buffer) as staged:
            assert new is not None and staged is not None, "masters that are the weights that forward computes with"
            target = staged[buffer.masters.range]
            if target.device == new.device or target.device.type == "cpu":
                target.copy_(new)
            else:
                self._stream().to_device(target, new)

    def _stream(self) -> CopyStream:
        assert self._copies is not None, "masters in another memory than the parameters, but no stream to copy them"
        return self._copies
