"""Refusals in one line of a test: the class, address and words of an error.

A table of refusals is text: a line with the input, and below it, indented, the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from zeroaccel.errors import ZeroAccelError


def message(error: type[BaseException], call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Returns the text of the error that ``call(*arguments, **options)`` raises."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    return str(caught.value)


def complaint(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Returns the text of the zeroaccel error that ``call(*arguments, **options)`` raises, or "nothing"."""
    try:
        call(*arguments, **options)
    except ZeroAccelError as error:
        return str(error)
    return "nothing"


@contextmanager
def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], *words: str, lines: int | None = None
) -> Iterator[None]:
    """Asserts that the block raises an error of that class whose message has all the words and that many lines."""
    with pytest.raises(error) as caught:
        yield
    said = str(caught.value)
    assert [part for part in words if part not in said] == [], said
    assert lines is None or said.count("\n") == lines - 1, said


def table(text: str) -> list[tuple[str, str]]:
    """Returns pairs of input and message; several indented lines form one message, joined by spaces."""
    rows: list[tuple[str, str]] = []
    for line in filter(str.strip, text.splitlines()):
        if line.startswith("    "):
            given, said = rows.pop()
            rows.append((given, f"{said} {line.strip()}".strip()))
        else:
            rows.append((line.strip(), ""))
    assert all(said for _, said in rows), "an input without a message"
    return rows
