"""Time limits of tests, in seconds of a quiet machine: on a slower or busier one they last longer.

A factor says how much: how much slower this process computes than on the machine the limits were written on, times how
many processes share its core. It is measured at the session's start, passed to all processes of the tests in a variable
of the environment, and measured anew when a limit is about to strike, so that a load that came later counts too. It is
ten at most: what hangs is red in the end, and a promise in seconds can be broken.
"""

from __future__ import annotations

import os
import time

VARIABLE = "TEST_TIME_FACTOR"
CAP = 10.0

_LOOPS = 20_000
_REFERENCE_SECONDS = 0.00088  # of processor time for that many loops: CPython 3.11, a core of the 2-core machine, quiet
_ENOUGH_SECONDS = 0.06  # of processor time; a scheduler assigns a few milliseconds at a time
_PATIENCE_SECONDS = 0.6
_NOISE = 1.3  # a quiet machine measures up to this
_OWN_LOAD = 1.5  # per core, of the tests themselves
_FRESH_SECONDS = 5.0

_last = (-_FRESH_SECONDS, 1.0)  # when it was measured, and what it was


def measure() -> float:
    """How many times longer things take now than on a quiet machine; 1 ... CAP. Takes 0.06 s, 0.6 s under load."""
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
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1) - _OWN_LOAD  # the last minute's
    slowness = max(speed * share, waiting)
    return 1.0 if slowness < _NOISE else min(slowness, CAP)


def factor() -> float:
    """By how much limits last longer now: as measured at the start of the session or just now, whichever is more."""
    global _last
    if time.monotonic() - _last[0] > _FRESH_SECONDS:
        slowness = measure()
        _last = time.monotonic(), slowness
    return max(_at_start(), _last[1])


def seconds(limit: float) -> float:
    """A limit for something that starts now and cannot ask again."""
    return limit * factor()


class Limit:
    """A limit that asks again before it strikes.

    Args:
        seconds: on a quiet machine.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._factor = _at_start()
        self._began = time.monotonic()

    @property
    def total(self) -> float:
        """Seconds from the beginning to the end, as far as is known now."""
        return self._seconds * self._factor

    def left(self) -> float:
        """Seconds to wait before asking again; 0 when time is over."""
        rest = self.total - self.elapsed
        if rest > 0:
            return rest
        self._factor = max(self._factor, factor())
        return max(0.0, self.total - self.elapsed)

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Whether to give up."""
        return self.left() <= 0


def _at_start() -> float:
    return min(max(float(os.environ.get(VARIABLE, "1")), 1.0), CAP)
