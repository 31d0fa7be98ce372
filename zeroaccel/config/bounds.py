"""Bounds on what is read from outside: how large a file may be, how deep data may be nested, how long a number.

A file is untrusted until it has been checked, so its size is known before it is in memory, and what the parsers
raise on purpose or by accident comes out as one kind of error. Knows no format; callers say where, and what to do.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, TypeGuard

MOST_LEVELS = 100
"""How deep plain data may be nested: each level costs its readers some frames of Python's stack."""

LARGEST_SIZE = (1 << 63) - 1
"""The largest size, offset or number of elements that a file may state: what a C `int64` has room for."""

_CHUNK_NBYTES = 1 << 20


def is_size(number: object) -> TypeGuard[int]:
    """Whether a value from a file is an integer (no bool, no float) of 0 to LARGEST_SIZE."""
    return type(number) is int and 0 <= number <= LARGEST_SIZE


def read_at_most(path: str | os.PathLike[str], most_nbytes: int, *, regular: bool = False) -> bytes:
    """The content of a file, of which no more than `most_nbytes` are read.

    Args:
        regular: refuse pipes, devices and the like, which can block or never end; else they are read as well.

    Raises:
        OSError: it cannot be read, is larger, or is not a regular file though it has to be; `strerror` says which.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK if regular else 0))
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if regular and not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if status.st_size > most_nbytes:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, at most {most_nbytes} are read", os.fspath(path))
        parts, total = [], 0
        while part := os.read(handle, min(_CHUNK_NBYTES, most_nbytes + 1 - total)):
            parts.append(part)
            total += len(part)
            if total > most_nbytes:
                raise OSError(errno.EFBIG, f"more than the {most_nbytes} bytes that are read", os.fspath(path))
        return b"".join(parts)
    finally:
        os.close(handle)


def parse_plain_json(text: str | bytes) -> Any:
    """The value of a JSON text, nested at most MOST_LEVELS deep.

    Raises:
        ValueError: it is not JSON, nested deeper, or has an integer of more digits than Python converts; or not UTF-8.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep") from None
    if levels_of(value, MOST_LEVELS) > MOST_LEVELS:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
    return value


def levels_of(value: Any, most: int) -> int:
    """How deep a tree of dicts and lists is nested: 0 for a single value. It stops counting above `most`."""
    level = 0
    row = [value] if isinstance(value, (dict, list)) else []
    while row and level <= most:
        level += 1
        items = (item for tree in row for item in (tree.values() if isinstance(tree, dict) else tree))
        row = [item for item in items if isinstance(item, (dict, list))]
    return level
