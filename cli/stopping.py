"""What a signal to the launcher does to its job: the first stops it in an orderly way, the next kills it.

Used by `agent`. Torch's elastic agent has handlers of its own, by which a second Ctrl-C only starts the wait anew; in
releases that cannot be told to leave these signals alone, they replace the ones installed here.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

from torch.distributed.elastic.multiprocessing import SignalException

__all__ = ["STOP_SIGNALS", "Stopping"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """The handlers of the stop signals while a job runs; the ones found before come back at the end.

    1. Until there are processes, a signal ends the launcher as it would without handlers; at once where
       `may_wait_in_native_code`, since no Python handler runs there.
    2. After `processes_exist`, the first signal raises SignalException, upon which the elastic agent passes the signal
       on and waits; a second one calls `kill`.
    3. After `processes_ended`, signals are ignored until the end: what is left to do takes seconds.
    """

    def __init__(
        self, kill: Callable[[], object], say: Callable[[str], None], *, may_wait_in_native_code: bool
    ) -> None:
        self._kill = kill
        self._say = say
        self._may_wait = may_wait_in_native_code
        self._stopping = False
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def __enter__(self) -> Stopping:
        if self._may_wait:
            self._handle(signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def processes_exist(self) -> None:
        self._handle(self._on_signal)

    def processes_ended(self) -> None:
        self._handle(signal.SIG_IGN)

    def _handle(self, handler: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        if self._stopping:
            self._kill()
            return
        self._stopping = True
        self._say(f"{name.name}: stopping the processes; once more kills them")
        raise SignalException(f"the launcher received {name.name}", sigval=name)
