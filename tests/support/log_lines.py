"""What zeroaccel's logger says while a block runs, whatever other tests have made of its level and its handlers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from zeroaccel.logs import logger


@contextmanager
def log_lines(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """The lines from that level on; INFO and below are made to be said."""
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
