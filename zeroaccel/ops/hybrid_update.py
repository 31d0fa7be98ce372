"""Hybrid CPU/GPU optimizer step: one update of host-resident state, split between the host's cores and a device.

Where the cores are slower than the link (DeepSpeed's TwinFlow), tiles of masters, moments and gradient are copied to
the device, updated there and copied back while the cores update the rest. Both round alike, so where the update is
split shows in no bit. `offload/cupy_adam.py` is the lane over a CUDA device; `zero/hybrid_step.py` connects the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

__all__ = ["DeviceLane", "HybridUpdate", "PendingUpdate"]

_GRAIN_NUMEL = 64  # parts start on cache lines
_LEAST_NUMEL = 1 << 16  # below this a device is not worth the trip
_MEMORY = 0.7  # weight of the rates measured before


class PendingUpdate(Protocol):
    """A part of an update under way."""

    def wait(self) -> float:
        """Returns when it is done: the seconds it took."""


class DeviceLane(Protocol):
    """A way to update host-resident state elsewhere, with the bits of the CPU kernel."""

    def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> PendingUpdate:
        """Starts an update.

        Args:
            written: flat host tensors of L elements, changed in place: master, moments, and the rounded copy, if any.
            grad: (L,) float32, bfloat16 or float16 in host memory.
            scalars: of the kernel, as `ShardOptimizer` makes them.
        """


class HybridUpdate:
    """Cuts updates in two.

    Args:
        lane: where the second part goes.
        ratio: the part that stays on the host, 0 to 1; None to find the one at which both take equally long.

    Attributes:
        host_share: what it is now.
    """

    def __init__(self, lane: DeviceLane, ratio: float | None) -> None:
        self._lane = lane
        self._fixed = ratio is not None
        self.host_share = 0.5 if ratio is None else ratio
        self._host_rate = self._lane_rate = 0.0

    def __deepcopy__(self, memo: dict[int, object]) -> HybridUpdate:
        return self  # streams and rates belong to the machine, not to an optimizer

    def run(
        self,
        written: Sequence[Tensor],
        grad: Tensor,
        scalars: Sequence[np.generic],
        on_host: Callable[[Sequence[Tensor], Tensor], None],
    ) -> None:
        """Updates `written`, of which `on_host` updates the part it is given."""
        numel = grad.numel()
        shared = numel >= _LEAST_NUMEL and self.host_share < 1.0
        cut = min(round(numel * self.host_share / _GRAIN_NUMEL) * _GRAIN_NUMEL, numel) if shared else numel
        pending = None
        if cut < numel:
            pending = self._lane.start([tensor[cut:] for tensor in written], grad[cut:], scalars)
        begun = time.perf_counter()
        try:
            if cut:
                on_host([tensor[:cut] for tensor in written], grad[:cut])
        finally:
            seconds = time.perf_counter() - begun
            lane_seconds = pending.wait() if pending is not None else 0.0  # it writes into memory that is not ours
        if not self._fixed and pending is not None and cut:
            self._learn(cut / max(seconds, 1e-9), (numel - cut) / max(lane_seconds, 1e-9))

    def _learn(self, host_rate: float, lane_rate: float) -> None:
        """Both parts end together when they are as long as the rates stand to each other; neither is ever given up."""
        if self._host_rate:
            host_rate = _MEMORY * self._host_rate + (1 - _MEMORY) * host_rate
            lane_rate = _MEMORY * self._lane_rate + (1 - _MEMORY) * lane_rate
        self._host_rate, self._lane_rate = host_rate, lane_rate
        self.host_share = min(max(host_rate / (host_rate + lane_rate), 0.02), 0.98)
