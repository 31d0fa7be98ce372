"""A progress line on a terminal: a spinner, the current task and its time."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

_PATIENCE_SECONDS = 0.3
_INTERVAL_SECONDS = 0.1
_FRAMES = "|/-\\"


class ProgressLine:
    """The text of the progress line.

    Attributes:
        doing: the current task; the block may change it.
        ended: number of lines that have ended in this program.
    """

    ended: ClassVar[int] = 0

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self._ended = threading.Event()
        self._width = 0

    def show_until_ended(self) -> None:
        """Redraws the line, from 0.3 s on, until the task ends; then erases it."""
        begun = time.monotonic()
        if self._ended.wait(_PATIENCE_SECONDS):
            return
        for frame in itertools.cycle(_FRAMES):
            text = f"{frame} zeroaccel: {self.doing} ({time.monotonic() - begun:.1f} s)"
            text = text[: shutil.get_terminal_size().columns - 1]  # a longer text would wrap
            sys.stderr.write("\r" + text.ljust(self._width))
            sys.stderr.flush()
            self._width = max(self._width, len(text))
            if self._ended.wait(_INTERVAL_SECONDS):
                sys.stderr.write("\r" + " " * self._width + "\r")
                sys.stderr.flush()
                return

    def end(self) -> None:
        """Ends the line."""
        ProgressLine.ended += 1
        self._ended.set()


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Makes Ctrl-C end the program at once, with code 130. The block must neither write files nor start processes.

    Imports of extension modules, and finalizers of objects, lose the exception of Ctrl-C or turn it into another one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        os.write(2, b"\r\n")
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def import_estimates() -> None:
    """Imports `zeroaccel.estimate`, and torch with it; Ctrl-C ends the program meanwhile.

    Excludes the imported objects from garbage collection for good: nearly all of them live until the program ends, and
    collections that visit them took a quarter of the CPU time of an estimate.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with ending_at_once():
            import zeroaccel.estimate  # noqa: F401
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def progress(doing: str) -> Iterator[ProgressLine]:
    """Shows a line on a terminal's stderr while the block runs, if it takes 0.3 s or more. In a pipe it shows nothing.

    Example:
        >>> with progress("adding") as line:
        ...     line.doing = f"adding {1 + 1}"
    """
    line = ProgressLine(doing)
    if not sys.stderr.isatty():
        yield line
        return
    thread = threading.Thread(target=line.show_until_ended, name="progress line", daemon=True)
    thread.start()
    try:
        yield line
    finally:
        line.end()
        thread.join()


@contextmanager
def estimating(model: str) -> Iterator[ProgressLine]:
    """Shows `progress` for an estimate of this model, which Ctrl-C ends at once."""
    with progress(f"estimating {model}") as line, ending_at_once():
        import_estimates()
        yield line
