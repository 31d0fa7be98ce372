"""Time limits of tests, in seconds of a quiet machine; on a slower or busier machine the limits are longer.

The factor is the slowdown of this process relative to the machine on which the limits were written, times the number of
processes that share its core. The tests measure it at the start of the session and pass it to all their processes in an
environment variable. They measure it again just before a limit expires, so that load that arrived later counts as well.
The factor is at most ten: a test that hangs fails in the end, and a test that promises a time in seconds can fail.
"""

from __future__ import annotations

import os
import time

VARIABLE = "TEST_TIME_FACTOR"
CAP = 10.0

_LOOPS = 20_000
_REFERENCE_SECONDS = 0.00088  # processor time of that many loops: CPython 3.11, one core of the quiet 2-core machine
_ENOUGH_SECONDS = 0.06  # seconds of processor time; a scheduler assigns time slices of a few milliseconds
_PATIENCE_SECONDS = 0.6
_NOISE = 1.3  # greatest value measured on a quiet machine
_OWN_LOAD = 1.5  # processes per core that the tests themselves start
_FRESH_SECONDS = 5.0

_last = (-_FRESH_SECONDS, 1.0)  # time of the last measurement, and its result


def measure() -> float:
    """Measures the current slowdown relative to a quiet machine, 1 ... CAP. Takes 0.06 s, or 0.6 s under load."""
    began, busy = time.perf_counter(), time.thread_time()
    batches = 0
    while time.thread_time() - busy < _ENOUGH_SECONDS and time.perf_counter() - began < _PATIENCE_SECONDS:
        total = 0
        for number in range(_LOOPS):
            total += number * number % 7
        batches += 1
    wall, cpu = time.perf_counter() - began, time.thread_time() - busy
    speed = cpu / batches / _REFERENCE_SECONDS
    share = wall / cpu if cpu else CAP
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1) - _OWN_LOAD  # average over the last minute
    slowness = max(speed * share, waiting)
    return 1.0 if slowness < _NOISE else min(slowness, CAP)


def factor() -> float:
    """Returns the current factor for limits: the maximum of the value at the session's start and the latest one."""
    global _last
    if time.monotonic() - _last[0] > _FRESH_SECONDS:
        slowness = measure()
        _last = time.monotonic(), slowness
    return max(_at_start(), _last[1])


def seconds(limit: float) -> float:
    """Returns a limit for an operation that starts now and cannot check the load again."""
    return limit * factor()


class Limit:
    """A limit that measures the load again before it expires.

    Args:
        seconds: limit on a quiet machine.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._factor = _at_start()
        self._began = time.monotonic()

    @property
    def total(self) -> float:
        """Limit in seconds from the start, according to the latest measurement."""
        return self._seconds * self._factor

    def left(self) -> float:
        """Returns the seconds to wait before the next check; 0 when the time is over."""
        rest = self.total - self.elapsed
        if rest > 0:
            return rest
        self._factor = max(self._factor, factor())
        return max(0.0, self.total - self.elapsed)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Returns True if the time is over."""
        return self.left() <= 0


def _at_start() -> float:
    return min(max(float(os.environ.get(VARIABLE, "1")), 1.0), CAP)
