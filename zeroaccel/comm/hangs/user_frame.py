"""Where the main thread of this process is now, as "file:line in function".

For `watchdog.py`, which asks from its own thread. Looks at frames only, and runs none of their code.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

import torch

__all__ = ["main_thread_place"]

# Code that is not the user's: this package's, torch's, the interpreter's and every installed library's.
_FOREIGN = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        os.path.dirname(torch.__file__),
        *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    )
)


def main_thread_place() -> str:
    """The innermost line of the user's own code, and the function it has called, if that is a library's."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None:
        return ""
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith((*_FOREIGN, "<frozen")):
        frame = frame.f_back
    if frame is None:
        return _place(innermost)
    return _place(frame) if frame is innermost else f"{_place(frame)}, inside {innermost.f_code.co_name}"


def _place(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    here = os.path.join(os.getcwd(), "")
    return f"{path.removeprefix(here)}:{frame.f_lineno} in {frame.f_code.co_name}"
