"""The notice that this process will be stopped: SIGTERM, or SIGUSR1 as SLURM sends it before its time limit.

The handlers only note the signal. The engine sends the note with the exchange of each step (`zero/step_boundary.py`),
so that all ranks stop after the same one, whichever of them was signalled. One notice per process, as signals are.
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
    """Whether the process was asked to stop. Signals count from the first `listen` until the last of its undos.

    Attributes:
        received: it was asked.
        saved: how a program saves itself that goes on to its end, for the launcher; "" where it does not.
    """

    def __init__(self) -> None:
        self.received = False
        self.saved = ""
        self._before: dict[signal.Signals, Any] = {}
        self._listeners = 0

    def give(self) -> None:
        """As if a signal had come."""
        self.received = True

    def listen(self) -> Callable[[], None]:
        """Handles the signals from now on, in place of the handlers that are there; returns what restores these.

        A thread other than the main one cannot set handlers; there only `give` counts, with a warning.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning("initialize: not in the main thread, so SIGTERM and SIGUSR1 are not noticed")
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
            if signal.getsignal(number) == self._on_signal:  # the program may have set its own since
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self.received = False

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.received = True


stop_notice = StopNotice()
"""That of this process."""
