"""Logging for all of zeroaccel: one logger, one line format, rank 0 unless a message concerns one rank.

Below everything but `errors`; it must not import torch, so that the command line stays quick.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["log_always", "log_note", "log_once", "logger", "set_log_level", "without_notes"]

logger = logging.getLogger("zeroaccel")
_seen: set[str] = set()
_tells_notes = True


class _RankZeroFilter(logging.Filter):
    """Lets records through on rank 0, and everywhere those marked ``extra={"all_ranks": True}`` or worse than
    WARNING."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING or getattr(record, "all_ranks", False):
            return True
        return os.environ.get("RANK", "0") == "0"


def set_log_level(level: str | int) -> None:
    """Sets the level of zeroaccel's logger; names as in `logging` ("info", "WARNING") or numbers."""
    logger.setLevel(level.upper() if isinstance(level, str) else level)


def log_once(level: int, message: str) -> None:
    """Logs `message` the first time it is seen in this process, while `level` is one that is logged."""
    if message not in _seen and logger.isEnabledFor(level):
        _seen.add(message)
        logger.log(level, message)


def log_always(message: str) -> None:
    """Logs on rank 0, at INFO, also while the level is WARNING, as it is by default; above that it is silent."""
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, (), None)
    if logger.isEnabledFor(logging.WARNING) and _RankZeroFilter().filter(record):
        logger.handle(record)


def log_note(level: int, message: str) -> None:
    """As `log_once`, of a note on a config; nothing inside `without_notes`."""
    if _tells_notes:
        log_once(level, message)


@contextmanager
def without_notes() -> Iterator[None]:
    """Inside, notes on configs are not logged: a command prints them itself, or leaves them to the ranks it starts."""
    global _tells_notes
    before, _tells_notes = _tells_notes, False
    try:
        yield
    finally:
        _tells_notes = before


def _install() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[zeroaccel %(levelname).1s] %(message)s"))
    handler.addFilter(_RankZeroFilter())
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("ZEROACCEL_LOG_LEVEL", "WARNING").upper())
    logger.propagate = False


_install()
