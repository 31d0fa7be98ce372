"""The device's lane of the hybrid step: Adam on host-resident state, in tiles, with the device's kernel on two streams.

The kernel is the one for masters on the device (`ops/device_kernels.py`), so its results have the same bits as the
CPU's. It runs on the stream of a tile's copies, which needs no events; the tiles of the two streams overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from zeroaccel.offload.page_locked import copying_stream
from zeroaccel.ops.device_kernels import DeviceKernels

_TILE_NUMEL = 1 << 22  # elements: 16 MiB per float32 tensor
_NUM_STATES = 3  # master and two moments


class AdamLane:
    """See `hybrid_update.DeviceLane`. For Adam with float32 moments.

    Args:
        device: a device with kernels.
        kernels: the kernels of that device.
    """

    def __init__(self, device: torch.device, kernels: DeviceKernels) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._kernels = kernels
        self._streams = [copying_stream(device) for _ in range(2)]

    def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> Callable[[], float]:
        """Queues all tiles, without blocking the host."""
        begin = self._mark(self._streams[0])
        # Tiles alternate between two streams, so that the copies of one overlap with the kernel of the other.
        for index, start in enumerate(range(0, grad.numel(), _TILE_NUMEL)):
            span = slice(start, min(start + _TILE_NUMEL, grad.numel()))
            self._tile([tensor[span] for tensor in written], grad[span], scalars, self._streams[index % 2])
        # The first stream waits for the second, so that the host waits once for both.
        self._streams[0].wait_stream(self._streams[1])
        end = self._mark(self._streams[0])

        def wait() -> float:
            # The host calls this after updating its own part. The events give the lane's own time; by the host's clock
            # a fast lane would seem as slow as the host, and its part of the update would never grow.
            end.synchronize()
            milliseconds: float = begin.elapsed_time(end)
            return milliseconds / 1e3

        return wait

    def _mark(self, stream: torch.Stream) -> torch.Event:
        event: torch.Event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event

    def _tile(
        self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic], stream: torch.Stream
    ) -> None:
        # Copies in, kernel and copies out run in stream order, without events. The allocator reuses a tile's memory for
        # the next tile of its stream: the device holds a few tiles at a time.
        with self._module.stream(stream):
            states = [tensor.to(self._device, non_blocking=True) for tensor in written[:_NUM_STATES]]
            source = grad.to(self._device, non_blocking=True)
            outs = [torch.empty_like(tensor, device=self._device) for tensor in written[_NUM_STATES:]]  # one or none
            self._kernels.update("adam", states, source, outs[0] if outs else None, None, scalars)
            # Back into the host's own tensors; the events of `start` mark the end of these copies.
            for host, tensor in zip(written, [*states, *outs], strict=True):
                host.copy_(tensor, non_blocking=True)
