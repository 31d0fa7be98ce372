"""Hybrid CPU/GPU optimizer step: splits an update of host-resident state between the host's cores and a device.

If the cores are slower than the link (DeepSpeed's TwinFlow), the device copies in tiles of masters, moments and
gradient, updates them and copies them back, while the cores update the rest. Both round in the same way, so the results
do not depend on the split. `offload/device_lane.py` is the lane for a CUDA device; `placement.py` connects the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

_ALIGNMENT_NUMEL = 64  # both parts start on cache lines
_MIN_NUMEL = 1 << 16  # below this, the transfer costs more than the device saves
_RATE_DECAY = 0.7  # decay of the moving averages of the rates
_TRIAL_UPDATES = 24  # every second one runs on the host alone; the first ones also fault in new memory


class DeviceLane(Protocol):
    """Updates host-resident state on a device, with the same bits as the CPU kernel."""

    def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> Callable[[], float]:
        """Starts an update.

        Args:
            written: (L,) host tensors, updated in place: master, moments, and the rounded copy, if any.
            grad: (L,) float32, bfloat16 or float16 in host memory.
            scalars: the kernel's scalars from `ShardOptimizer`.

        Returns:
            A function that blocks until the update is done, and returns the update's own duration in seconds.
        """


class HybridUpdate:
    """Splits each update between the host and a lane, which run at the same time.

    Args:
        lane: updates the second part.
        ratio: the host's share of the elements, 0 to 1; None adapts it until both take equally long. Both read the same
            host memory: if the first updates show that the host alone is as fast, it continues alone. (An H100 with 16
            cores: 521 ms per step alone, 565 shared.)

    Attributes:
        host_ratio: the host's share of the next split update; 1 once the host continues alone.
    """

    def __init__(self, lane: DeviceLane, ratio: float | None) -> None:
        self._lane = lane
        self._is_fixed = ratio is not None
        self.host_ratio = 0.5 if ratio is None else ratio
        self._host_rate = self._lane_rate = 0.0
        self._num_trials = 0
        self._least_seconds = {True: float("inf"), False: float("inf")}  # per element, shared and alone

    def __deepcopy__(self, memo: dict[int, object]) -> HybridUpdate:
        return self  # streams and rates belong to the machine, not to an optimizer

    def run(
        self,
        written: Sequence[Tensor],
        grad: Tensor,
        scalars: Sequence[np.generic],
        on_host: Callable[[Sequence[Tensor], Tensor], None],
    ) -> None:
        """Updates `written`; `on_host` updates the tensors that are its arguments on the host."""
        numel = grad.numel()
        is_trial = not self._is_fixed and numel >= _MIN_NUMEL and self._num_trials < _TRIAL_UPDATES
        is_split = numel >= _MIN_NUMEL and self.host_ratio < 1.0 and not (is_trial and self._num_trials % 2)
        cut = min(round(numel * self.host_ratio / _ALIGNMENT_NUMEL) * _ALIGNMENT_NUMEL, numel) if is_split else numel
        wait_for_lane = None
        begun = time.perf_counter()
        if cut < numel:
            wait_for_lane = self._lane.start([tensor[cut:] for tensor in written], grad[cut:], scalars)
        start = time.perf_counter()
        try:
            if cut:
                on_host([tensor[:cut] for tensor in written], grad[:cut])
        finally:
            seconds = time.perf_counter() - start
            # Wait even after an error, because the lane still writes into the caller's memory.
            lane_seconds = 0.0 if wait_for_lane is None else wait_for_lane()
        if is_trial:
            self._compare(is_split, (time.perf_counter() - begun) / numel)
        if not self._is_fixed and wait_for_lane is not None and cut:
            self._adapt(cut / max(seconds, 1e-9), (numel - cut) / max(lane_seconds, 1e-9))

    def _compare(self, is_split: bool, seconds: float) -> None:
        """Records a trial update; after the last one, the host continues alone unless splitting was faster."""
        self._num_trials += 1
        self._least_seconds[is_split] = min(self._least_seconds[is_split], seconds)
        if self._num_trials == _TRIAL_UPDATES and self._least_seconds[False] <= self._least_seconds[True]:
            self.host_ratio, self._is_fixed = 1.0, True

    def _adapt(self, host_rate: float, lane_rate: float) -> None:
        """Sets sizes proportional to the rates, so that both parts end together; never to 0, to measure both rates."""
        if self._host_rate:
            host_rate = _RATE_DECAY * self._host_rate + (1 - _RATE_DECAY) * host_rate
            lane_rate = _RATE_DECAY * self._lane_rate + (1 - _RATE_DECAY) * lane_rate
        self._host_rate, self._lane_rate = host_rate, lane_rate
        self.host_ratio = min(max(host_rate / (host_rate + lane_rate), 0.02), 0.98)
