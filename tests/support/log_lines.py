"""Captures lines of zeroaccel's logger during a block, independently of the level and handlers that other tests set."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from zeroaccel.logs import logger


@contextmanager
def log_lines(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Yields the list of lines of that level and above; the logger is set to emit them, also at INFO and below."""
    lines: list[str] = []
    handler, before = logging.Handler(level), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    if level and level < logger.getEffectiveLevel():
        logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
