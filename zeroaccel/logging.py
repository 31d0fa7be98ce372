"""Loggers for scripts on several ranks, like `accelerate.logging`: on rank 0, on all ranks, or in order of rank.

`logs.py` logs zeroaccel's own messages.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist

from zeroaccel.comm.environment import rank_and_world_size
from zeroaccel.operations import collectives_of_process

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger whose lines begin with the rank, and that logs on rank 0 by default.

    Each call takes `main_process_only=False` to log on every rank, and `in_order=True` to log on every rank in order
    of rank; all ranks must make that call.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)  # the line of the script, not of this file
        return f"[RANK {_rank()}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Logs on rank 0 by default; see the class."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if in_order:
            collectives = collectives_of_process()
            for rank in range(collectives.world_size):
                if rank == collectives.rank and self.isEnabledFor(level):
                    self._write(level, msg, args, kwargs)
                collectives.barrier("log in order")
        elif self.isEnabledFor(level) and (not main_process_only or _rank() == 0):
            self._write(level, msg, args, kwargs)

    def _write(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        msg, marked = self.process(msg, kwargs)
        marked["stacklevel"] += 1
        self.logger.log(level, msg, *args, **marked)

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Like `warning`, but only on the first call with these arguments."""
        key = (args, tuple(sorted(kwargs.items())))
        if key not in _warned:
            _warned.add(key)
            # Not through `warning`: Python 3.10 counts its frame in `stacklevel`, later versions do not.
            self.log(logging.WARNING, *args, **{"stacklevel": 3, **kwargs})


_warned: set[Any] = set()


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Returns a logger for a script on several ranks. It also works before the script makes an `Accelerator`.

    Args:
        log_level: level for this logger and the root logger. Default: the variable ACCELERATE_LOG_LEVEL, if set.

    Example:
        >>> from zeroaccel.logging import get_logger
        >>> logger = get_logger(__name__)
        >>> logger.info("on rank 0")
        >>> logger.info("on every rank", main_process_only=False)
        >>> logger.warning("rank 0's line is the first", in_order=True)
    """
    level = log_level if log_level is not None else os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else rank_and_world_size()[0]
