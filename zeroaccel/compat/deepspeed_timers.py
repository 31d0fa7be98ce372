"""`deepspeed.utils.timer`: timers of a script's own phases, which wait for the device at both ends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from zeroaccel.compat.deepspeed_calls import log_dist
from zeroaccel.compat.device_accelerator import get_accelerator
from zeroaccel.errors import EngineStateError

_TRIMMED = 0.1  # of the records at each end that a mean leaves out


class PhaseTimer:
    """One timer of a `SynchronizedWallClockTimer`; times are in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._begun = self._sum = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Begins to count; the device has done its work until now.

        Raises:
            EngineStateError: it counts already.
        """
        if self.started_:
            raise EngineStateError(f"timer {self.name_}.start()", expected="a timer that is stopped")
        get_accelerator().synchronize()
        self._begun, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Adds the time since `start`, with the device's work.

        Args:
            reset: forget what was counted before.
            record: note the time for `mean`.

        Raises:
            EngineStateError: it does not count.
        """
        if not self.started_:
            raise EngineStateError(f"timer {self.name_}.stop()", expected="a timer that is started")
        get_accelerator().synchronize()
        milliseconds = (time.perf_counter() - self._begun) * 1000.0
        self._sum = milliseconds if reset else self._sum + milliseconds
        if record:
            self._records.append(milliseconds)
        self.started_ = False

    def reset(self) -> None:
        """Forgets what was counted."""
        self.started_, self._sum = False, 0.0
        self._records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far; a timer that counts goes on."""
        counts = self.started_
        if counts:
            self.stop()
        elapsed = self._sum
        if reset:
            self.reset()
        if counts:
            self.start()
        return elapsed

    def mean(self) -> float:
        """Mean of the recorded times in milliseconds, without the longest and the shortest tenth; 0 without any."""
        return trim_mean(self._records, _TRIMMED)


class SynchronizedWallClockTimer:
    """Timers by name: `timers("load").start()`, `timers("load").stop()`, `timers.log(["load"])`."""

    Timer = PhaseTimer

    def __init__(self) -> None:
        self.timers: dict[str, PhaseTimer] = {}

    def __call__(self, name: str) -> PhaseTimer:
        return self.timers.setdefault(name, PhaseTimer(name))

    def get_timers(self) -> dict[str, PhaseTimer]:
        """All of them, by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Memory on the device in GiB, as a part of a line."""
        device, unit = get_accelerator(), 1 << 30
        return (
            f" | mem_allocated: {device.memory_allocated() / unit:.4f} GB"
            f" | max_mem_allocated: {device.max_memory_allocated() / unit:.4f} GB"
        )

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Logs the milliseconds of these timers, divided by `normalizer`; on rank 0, or on `ranks`."""
        times = [
            f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        memory = self.memory_usage() if memory_breakdown else ""
        log_dist(f"time (ms) | {' | '.join(times)}{memory}", ranks=[0] if ranks is None else ranks)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean of the recorded milliseconds by name."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


class NoopTimer:
    """Has the calls of `SynchronizedWallClockTimer` and does nothing."""

    def __call__(self, name: str) -> NoopTimer:
        return self

    def start(self) -> None: ...

    def stop(self, **_: Any) -> None: ...

    def reset(self) -> None: ...

    def elapsed(self, **_: Any) -> float:
        return 0.0

    def mean(self) -> float:
        return 0.0

    def get_timers(self) -> dict[str, PhaseTimer]:
        return {}

    def log(self, *_: Any, **__: Any) -> None: ...

    def get_mean(self, *_: Any, **__: Any) -> None: ...


class StepThroughput:
    """Samples per second of a script's own loop: `start()` before and `stop(global_step=True)` after each step.

    Args:
        config: of no effect, or a number that stands for `batch_size`, as in older releases.
        batch_size: samples per step over all ranks.
        start_step: the steps before this one are not counted.
        steps_per_output: steps between two log lines; None for none.
        monitor_memory: add the device's memory to the lines.
        logging_fn: takes the lines; by default the logger.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.batch_size = max(1, config if isinstance(config, int) else batch_size)
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._monitor_memory = monitor_memory
        self._log = logging_fn or log_dist
        self._begun: float | None = None

    def update_epoch_count(self) -> None:
        """Counts an epoch; micro-steps count anew."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begins a step."""
        get_accelerator().synchronize()
        self._begun = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Ends a micro-step, with `global_step` a step; without a `start` before it does nothing."""
        if self._begun is None:
            return
        get_accelerator().synchronize()
        seconds, self._begun = time.perf_counter() - self._begun, None
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.global_step_count >= self.start_step:
            self.total_elapsed_time += seconds
        every = self.steps_per_output
        if global_step and report_speed and every and self.global_step_count % every == 0:
            memory = SynchronizedWallClockTimer.memory_usage() if self._monitor_memory else ""
            self._log(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"samples/sec={self.avg_samples_per_sec():.2f}{memory}"
            )

    def avg_samples_per_sec(self) -> float:
        """Since `start_step`; -inf before it."""
        steps = self.global_step_count - self.start_step + 1
        if steps < 1 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time


def trim_mean(data: Iterable[float], trim_percent: float) -> float:
    """Mean of the values without this share of them at each end, 0 <= share < 0.5; 0 without any."""
    values = sorted(data)
    cut = int(len(values) * trim_percent)
    inner = values[cut : len(values) - cut]
    return statistics.fmean(inner) if inner else 0.0
