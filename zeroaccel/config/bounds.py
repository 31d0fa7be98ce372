"""Bounds for untrusted input: the size of files, the depth of nested data, the length of numbers.

Files are untrusted until checked: `read_at_most` checks the size before it reads, and all errors of the parsers become
one kind of error. Nothing here depends on a file format; callers add the place and the remedy to a message.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, TypeGuard

MOST_LEVELS = 100
"""Maximum nesting depth of plain data: each level takes several frames of Python's stack in its readers."""

LARGEST_SIZE = (1 << 63) - 1
"""Largest size, offset or number of elements that a file may state: the maximum of a C `int64`."""

_CHUNK_NBYTES = 1 << 20


def is_size(number: object) -> TypeGuard[int]:
    """Returns True if a value from a file is an integer (no bool, no float) from 0 to LARGEST_SIZE."""
    return type(number) is int and 0 <= number <= LARGEST_SIZE


_STREAMS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # as in the shell's <(command)


def open_regular(path: str | os.PathLike[str]) -> int:
    """Opens a regular file for reading; pipes and devices could block or never end.

    Raises:
        OSError: the file is unreadable, or of another kind; `strerror` has the reason.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_at_most(path: str | os.PathLike[str], most_nbytes: int, *, regular: bool = False) -> bytes:
    """Returns the content of a file with at most `most_nbytes` bytes.

    Args:
        regular: True to reject streams of this process too, which users name on a command line.

    Raises:
        OSError: the file is unreadable, larger, or not a regular file; `strerror` has the reason.
    """
    is_stream = not regular and os.fspath(path).startswith(_STREAMS)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if is_stream else open_regular(path)
    try:
        status = os.fstat(handle)
        if status.st_size > most_nbytes:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, the maximum is {most_nbytes}", os.fspath(path))
        parts, total = [], 0
        while chunk := os.read(handle, min(_CHUNK_NBYTES, most_nbytes + 1 - total)):
            parts.append(chunk)
            total += len(chunk)
            if total > most_nbytes:
                raise OSError(errno.EFBIG, f"more than the maximum of {most_nbytes} bytes", os.fspath(path))
        return b"".join(parts)
    finally:
        os.close(handle)


def parse_plain_json(text: str | bytes) -> Any:
    """Parses a JSON text that is nested at most MOST_LEVELS deep.

    Raises:
        ValueError: the text is not JSON or not UTF-8, nested deeper, or has an integer too long for Python to convert.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep") from None
    if levels_of(value, MOST_LEVELS) > MOST_LEVELS:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
    return value


def levels_of(value: Any, most: int) -> int:
    """Returns the nesting depth of dicts and lists, 0 for a single value; stops counting above `most`."""
    level = 0
    row = [value] if isinstance(value, (dict, list)) else []
    while row and level <= most:
        level += 1
        items = (item for tree in row for item in (tree.values() if isinstance(tree, dict) else tree))
        row = [item for item in items if isinstance(item, (dict, list))]
    return level
