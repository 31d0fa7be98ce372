"""Logging for all of zeroaccel: one logger, one line format, rank 0 unless a message concerns one rank.

Below everything but `errors`; it must not import torch, so that the command line stays quick.
"""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["log_once", "logger", "set_log_level"]

logger = logging.getLogger("zeroaccel")
_seen: set[str] = set()


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
    """Logs `message` the first time it is seen in this process."""
    if message not in _seen:
        _seen.add(message)
        logger.log(level, message)


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
