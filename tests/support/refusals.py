"""Refusals: an error has a class, an address and words, and a test says them in one line.

A table of refusals is text: a line with the input, and below it, indented, the words of its message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from zeroaccel.errors import ZeroAccelError


def message(error: type[BaseException], call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The text of the error that ``call(*arguments, **options)`` raises."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    return str(caught.value)


def complaint(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The text of the error of zeroaccel that ``call(*arguments, **options)`` raises, or "nothing"."""
    try:
        call(*arguments, **options)
    except ZeroAccelError as error:
        return str(error)
    return "nothing"


@contextmanager
def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], *words: str, lines: int | None = None
) -> Iterator[None]:
    """The block raises an error of that class, whose message has all of the words, on so many lines."""
    with pytest.raises(error) as caught:
        yield
    said = str(caught.value)
    assert [part for part in words if part not in said] == [], said
    assert lines is None or said.count("\n") == lines - 1, said


def table(text: str) -> list[tuple[str, str]]:
    """Pairs of input and message; words on several indented lines are one message, joined by spaces."""
    rows: list[tuple[str, str]] = []
    for line in filter(str.strip, text.splitlines()):
        if line.startswith("    "):
            given, said = rows.pop()
            rows.append((given, f"{said} {line.strip()}".strip()))
        else:
            rows.append((line.strip(), ""))
    assert all(said for _, said in rows), "an input without a message"
    return rows
