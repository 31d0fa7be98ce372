"""The exceptions that zeroaccel raises on purpose, with the exit code and the cause of each.

```text
ZeroAccelError                 exit code 1
 +- ConfigError      (ValueError)    2   a setting is wrong; nothing was started
 +- UsageError       (ValueError)    2   an argument is wrong: a non-scalar loss, an optimizer without its model
 +- EngineStateError (RuntimeError)  1   a call came at the wrong time: step before backward
 +- ShardStateError  (RuntimeError)  1   a call requested an illegal state transition of a unit
 +- CheckpointError  (RuntimeError)  1   a checkpoint is damaged, incomplete or does not fit
 +- OffloadError     (RuntimeError) 74   offloaded data cannot be written or read back
 +- CollectiveError  (RuntimeError) 75   a collective failed, or the ranks called different collectives
     +- CollectiveTimeoutError           ... and one of them waited longer than the limit

Preempted        (SystemExit)      85   not an error: the run saved a checkpoint after a signal
```

Every message states the place (a config key path, a parameter name, file:line), the expected value, the actual value,
and the remedy. This module imports no other module of the package.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "ConfigError",
    "EngineStateError",
    "OffloadError",
    "Preempted",
    "ShardStateError",
    "UsageError",
    "ZeroAccelError",
    "compose",
    "cut_traceback",
    "listed",
]

_ABSENT = object()
_LONGEST = 9000


def compose(where: str, *, expected: str = "", got: object = _ABSENT, fix: str = "") -> str:
    """Returns one sentence, ``where: expected X, got Y; do Z``, without the parts that the caller omits."""
    facts = [fact for fact in (f"expected {expected}" if expected else "", _got(got)) if fact]
    body = ", ".join(facts)
    message = f"{where}: {body}" if body else where
    return f"{message}; {fix}" if fix else message


def listed(names: Sequence[str], separator: str = ", ", most: int = 50) -> str:
    """Joins the first `most` names and counts the rest: ``a, b and 7 more``."""
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _got(value: object) -> str:
    if value is _ABSENT:
        return ""
    try:
        text = repr(value[:300] if isinstance(value, (str, bytes)) else value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a deeply nested container
        text = f"a value of type {type(value).__name__} that is too long to show"
    return f"got {text if len(text) <= 200 else text[:197] + '...'}"


class ZeroAccelError(Exception):
    """Base class of the errors that zeroaccel raises on purpose.

    Args:
        where: place of the error, or a whole sentence if it is the only argument.
        expected: the expected value, as a noun phrase.
        got: the actual value; its ``repr`` appears in the message, cut at 200 characters.
        fix: the remedy, in the imperative.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, where: str, *, expected: str = "", got: object = _ABSENT, fix: str = "") -> None:
        text = compose(where, expected=expected, got=got, fix=fix)
        if len(text) > _LONGEST:  # e.g. a name of a megabyte from a file; keep the remedy at the end
            text = f"{text[: _LONGEST - 500]} ... {text[-500:]}"
        super().__init__(text.encode("utf-8", "backslashreplace").decode())  # half a surrogate pair cannot be printed


class ConfigError(ZeroAccelError, ValueError):
    """A setting is missing, unknown, contradictory or out of range."""

    exit_code: ClassVar[int] = 2


class UsageError(ZeroAccelError, ValueError):
    """A call received an argument that it does not accept."""

    exit_code: ClassVar[int] = 2


class EngineStateError(ZeroAccelError, RuntimeError):
    """The current state of the engine or the job does not allow this call."""


class ShardStateError(ZeroAccelError, RuntimeError):
    """A call requests a state transition that the unit's life cycle does not allow."""


class CheckpointError(ZeroAccelError, RuntimeError):
    """The engine cannot write a checkpoint, or must not load one."""


class OffloadError(ZeroAccelError, RuntimeError):
    """An offload tier cannot write its data, or reads back data that differs from the data it wrote."""

    exit_code: ClassVar[int] = 74


class CollectiveError(ZeroAccelError, RuntimeError):
    """A collective failed, or the ranks called different collectives."""

    exit_code: ClassVar[int] = 75


class CollectiveTimeoutError(CollectiveError):
    """A collective timed out because the ranks did not all call the same one."""


class Preempted(SystemExit):
    """The run saved a checkpoint after a signal to stop: start the job again. Ends the process unless caught.

    Args:
        headline: message that names the checkpoint to resume from.
    """

    exit_code: ClassVar[int] = 85  # the exit code by which HTCondor recognizes a job that saved a checkpoint

    def __init__(self, headline: str) -> None:
        super().__init__(self.exit_code)
        self.headline = headline


_OWN_FOLDERS = (f"{os.path.dirname(os.path.abspath(__file__))}{os.sep}", f"{os.sep}site-packages{os.sep}torch{os.sep}")


def cut_traceback(error: BaseException) -> None:
    """Cuts the traceback of a ConfigError or UsageError after the user's line that made the call.

    Leaves other errors unchanged, and every error while zeroaccel's logger is at DEBUG.
    """
    if not isinstance(error, (ConfigError, UsageError)) or logging.getLogger("zeroaccel").isEnabledFor(logging.DEBUG):
        return
    trace, last = error.__traceback__, None
    while trace is not None:
        if not any(folder in trace.tb_frame.f_code.co_filename for folder in _OWN_FOLDERS):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None
        error.__cause__, error.__suppress_context__ = None, True
