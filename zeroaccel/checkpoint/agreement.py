"""All ranks or none: a block whose errors every rank raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.comm.collectives import Collectives

__all__ = ["agreed"]


@contextmanager
def agreed(collectives: Collectives, label: str) -> Iterator[None]:
    """If the block raises on any rank, every rank raises what the first of them did. (all ranks)

    The block itself must contain no collective.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    agree_or_raise(collectives, error, label)
