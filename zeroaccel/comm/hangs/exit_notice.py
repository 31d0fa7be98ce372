"""The end of this process, told to the ranks that may be waiting for it.

An ordinary end and an uncaught exception are both announced. After a verdict, which has been logged once for all, the
process ends quietly and with the verdict's exit code: one hang, one message. A process that is killed says nothing;
the others learn of it from the closed connection. Patches `sys.excepthook`, once, and leaves it so until the end.
"""

from __future__ import annotations

import os
import sys
import weakref
from multiprocessing.util import Finalize
from types import TracebackType

from zeroaccel.comm.hangs.watchdog import Watchdog

__all__ = ["announce_end_through"]

_FIRST = 100  # among the finalizers: before those that wait for child processes


class _ProcessEnd:
    """What is to happen when this process ends, however it does."""

    def __init__(self) -> None:
        self.watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
        self._process = os.getpid()
        self._report = sys.excepthook
        sys.excepthook = self._on_exception
        # Rather than `atexit`, which processes started by multiprocessing never run.
        Finalize(None, self._on_exit, exitpriority=_FIRST)

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # After a verdict, a RuntimeError is that verdict, or what the backend makes of connections that are closed.
        struck = [watchdog for watchdog in self.watchdogs if watchdog.error and isinstance(error, RuntimeError)]
        if not any(watchdog.reported for watchdog in struck):
            self._report(kind, error, traceback)
        self._leave(error)
        for watchdog in struck:
            # The interpreter honours this, and would end with code 1 otherwise.
            raise SystemExit(watchdog.exit_code)

    def _on_exit(self) -> None:
        # A child process of multiprocessing gets here with the exception that ends it still in flight.
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if os.getpid() != self._process:
            return  # a fork of it, which is not a rank
        if error is None:
            how = "finished and left"
        else:
            first_line = next(iter(str(error).splitlines()), "")
            how = f"left with {type(error).__name__}" + (f": {first_line}" if first_line else "")
        for watchdog in tuple(self.watchdogs):
            watchdog.leave(how, failed=error is not None)


_process_end: _ProcessEnd | None = None


def announce_end_through(watchdog: Watchdog) -> None:
    """From now on the end of this process is announced through `watchdog`, as long as that exists."""
    global _process_end
    if _process_end is None:
        _process_end = _ProcessEnd()
    _process_end.watchdogs.add(watchdog)
