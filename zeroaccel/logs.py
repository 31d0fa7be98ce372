"""Logging for all of zeroaccel: one logger, one line format, rank 0 unless a message concerns one rank.

It must not import torch, so that the command line starts fast.
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
    """Passes all records on rank 0; on other ranks, those with ``extra={"all_ranks": True}`` or above WARNING."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING or getattr(record, "all_ranks", False):
            return True
        return os.environ.get("RANK", "0") == "0"


def set_log_level(level: str | int) -> None:
    """Sets the level of zeroaccel's logger: a name in either case ("info", "WARNING"), or a number."""
    logger.setLevel(level.upper() if isinstance(level, str) else level)


def log_once(level: int, message: str) -> None:
    """Logs `message` once per process, if the logger is enabled for `level`."""
    if message not in _seen and logger.isEnabledFor(level):
        _seen.add(message)
        logger.log(level, message)


def log_always(message: str) -> None:
    """Logs an INFO line on rank 0 while the logger's level is WARNING (the default) or lower."""
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, (), None)
    if logger.isEnabledFor(logging.WARNING) and _RankZeroFilter().filter(record):
        logger.handle(record)


def log_note(level: int, message: str) -> None:
    """Logs a note about a config once, as `log_once` does; logs nothing inside `without_notes`."""
    if _tells_notes:
        log_once(level, message)


@contextmanager
def without_notes() -> Iterator[None]:
    """Turns `log_note` off inside: a command prints the notes itself, or the ranks that it starts log them."""
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
