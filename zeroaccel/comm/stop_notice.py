"""The notice that this process will be stopped: SIGTERM, or SIGUSR1, which SLURM sends before its time limit.

The handlers only record the signal. The engine sends the record with the exchange of each step
(`zero/step_boundary.py`), so that all ranks stop after the same step, whichever of them received the signal. There is
one notice per process, because a signal goes to the whole process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from zeroaccel.logs import logger

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopNotice:
    """Records whether the process was asked to stop. Signals count from the first `listen` until its last undo.

    Attributes:
        received: True if the process was asked to stop.
        saved: for the launcher, how a program that continues to its end saves itself; "" if it does not.
    """

    def __init__(self) -> None:
        self.received = False
        self.saved = ""
        self._before: dict[signal.Signals, Any] = {}
        self._listeners = 0

    def give(self) -> None:
        """Acts as if a signal had arrived."""
        self.received = True

    def listen(self) -> Callable[[], None]:
        """Replaces the handlers of the signals; returns a function that restores them.

        Only the main thread can set handlers; in another thread this warns, and only `give` counts.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning("initialize: not called in the main thread, so SIGTERM and SIGUSR1 are ignored here")
            return lambda: None
        if not self._listeners:
            self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        self._listeners += 1
        return self._stop_listening

    def _stop_listening(self) -> None:
        self._listeners -= 1
        if self._listeners:
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:  # the program may have replaced the handler since
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self.received = False

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.received = True


stop_notice = StopNotice()
"""The notice of this process."""
