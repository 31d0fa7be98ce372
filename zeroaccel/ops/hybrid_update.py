"""Hybrid CPU/GPU optimizer step: one update of host-resident state, split between the host's cores and a device.

Where the cores are slower than the link (DeepSpeed's TwinFlow), tiles of masters, moments and gradient are copied to
the device, updated there and copied back while the cores update the rest. Both round alike, so where the update is
split shows in no bit. `offload/device_lane.py` is the lane over a CUDA device; `placement.py` connects the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

_ALIGNMENT_NUMEL = 64  # both parts start on cache lines
_MIN_NUMEL = 1 << 16  # below this the transfer costs more than the device saves
_RATE_DECAY = 0.7  # of the moving averages of the rates
_TRIAL_UPDATES = 24  # every second one by the host alone; the first ones also touch new memory


class DeviceLane(Protocol):
    """Updates host-resident state on a device, with the bits of the CPU kernel."""

    def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> Callable[[], float]:
        """Starts an update.

        Args:
            written: (L,) host tensors, changed in place: master, moments, and the rounded copy, if any.
            grad: (L,) float32, bfloat16 or float16 in host memory.
            scalars: of the kernel, as `ShardOptimizer` makes them.

        Returns:
            Blocks until it is done; the seconds from its start to its end, however late this is asked.
        """


class HybridUpdate:
    """Splits each update between the host and a lane, which run at the same time.

    Args:
        lane: updates the second part.
        ratio: of the elements that the host updates, 0 to 1; None to find the one at which both take equally long.
            Both read the same host memory: where the host alone is as fast as the two, which the first updates tell,
            it goes on alone. (An H100 beside 16 cores: 521 ms a step alone, 565 shared.)

    Attributes:
        host_ratio: the ratio of the next update that is shared; 1 once the host goes on alone.
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
        """Updates `written`; `on_host` updates the part that it is called with."""
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
            # Even after an error: the lane still writes into the caller's memory.
            lane_seconds = 0.0 if wait_for_lane is None else wait_for_lane()
        if is_trial:
            self._compare(is_split, (time.perf_counter() - begun) / numel)
        if not self._is_fixed and wait_for_lane is not None and cut:
            self._adapt(cut / max(seconds, 1e-9), (numel - cut) / max(lane_seconds, 1e-9))

    def _compare(self, is_split: bool, seconds: float) -> None:
        """After the last update of the trial the host goes on alone, unless the device made updates faster."""
        self._num_trials += 1
        self._least_seconds[is_split] = min(self._least_seconds[is_split], seconds)
        if self._num_trials == _TRIAL_UPDATES and self._least_seconds[False] <= self._least_seconds[True]:
            self.host_ratio, self._is_fixed = 1.0, True

    def _adapt(self, host_rate: float, lane_rate: float) -> None:
        """Both parts end together when their sizes are as their rates. Neither ever vanishes: it would have no rate."""
        if self._host_rate:
            host_rate = _RATE_DECAY * self._host_rate + (1 - _RATE_DECAY) * host_rate
            lane_rate = _RATE_DECAY * self._lane_rate + (1 - _RATE_DECAY) * lane_rate
        self._host_rate, self._lane_rate = host_rate, lane_rate
        self.host_ratio = min(max(host_rate / (host_rate + lane_rate), 0.02), 0.98)
