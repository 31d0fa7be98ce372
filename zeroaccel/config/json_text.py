"""JSON with places: parses a config's text and remembers where each key stands, so that errors can point at it.

Plain JSON first; text with comments, trailing commas or unquoted keys goes through json5. Given text, returns data;
reading files is for `document`. The scan for places trusts that the text has already been parsed.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import json5

from zeroaccel.config.provenance import Path
from zeroaccel.errors import ConfigError

__all__ = ["JsonText", "excerpt", "parse_json"]

_WIDEST_EXCERPT = 100
_MOST_CHARACTERS = 1 << 20
_MOST_JSON5_CHARACTERS = 1 << 14
"""Its parser takes some 30 microseconds per character."""
_MOST_LEVELS = 32
_LONGEST_NUMBER = 100

_TOKEN = re.compile(
    r"""(?P<skip>\s+ | //[^\n]* | /\*.*?(?:\*/|\Z))
    | (?P<string>"(?:\\.|[^"\\])*(?:"|\Z) | '(?:\\.|[^'\\])*(?:'|\Z))
    | (?P<mark>[{}\[\]:,])
    | (?P<word>(?:(?!//|/\*)[^\s{}\[\]:,"'])+)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class JsonText:
    """A parsed text.

    Attributes:
        value: what it says; of a key given twice, the last value.
        places: path -> "name:line:column" of its key, in the order of the text; of a key given twice, the last.
        duplicates: path -> the lines of all its occurrences, for keys given more than once in one object.
    """

    value: Any
    places: dict[Path, str]
    duplicates: dict[Path, list[int]]


def parse_json(text: str, name: str) -> JsonText:
    """Parses JSON, or JSON5 where it is not plain JSON.

    Args:
        text: the whole text.
        name: what to call it in messages, usually the file's path.

    Raises:
        ConfigError: it is neither; the message has name, line and column, the line itself and a caret below it.
    """
    _check_bounds(text, name)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        value = _parse_json5(text, name, error)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from None
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    places: dict[Path, str] = {}
    lines: dict[tuple[int, Path], list[int]] = {}
    for owner, path, offset in _keys(text):
        line = bisect_right(line_starts, offset)
        places[path] = f"{name}:{line}:{offset - line_starts[line - 1] + 1}"
        lines.setdefault((owner, path), []).append(line)
    duplicates = {path: found for (_, path), found in lines.items() if len(found) > 1}
    return JsonText(value, places, duplicates)


def _parse_json5(text: str, name: str, plain: json.JSONDecodeError) -> Any:
    """What the text says as JSON5; `plain` is the error of reading it as JSON."""
    if not text.strip():
        raise ConfigError(f"{name}: not valid JSON: it is empty")
    if len(text) > _MOST_JSON5_CHARACTERS:
        line, column = plain.lineno, plain.colno
        raise ConfigError(
            f"{name}:{line}:{column}: not valid JSON: {plain.msg[0].lower()}{plain.msg[1:]}\n"
            f"{excerpt(text, line, column)}\n"
            f"    (what is not plain JSON, such as comments, is read up to {_MOST_JSON5_CHARACTERS} characters)"
        )
    try:
        value, message, offset = json5.parse(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from None
    if message is None:
        return value
    # The parser that got further has understood more of the text; at a tie, json's sentence says what was expected.
    if plain.pos >= offset:
        offset, what = plain.pos, plain.msg[0].lower() + plain.msg[1:]
    else:
        what = f"unexpected {text[offset]!r}" if offset < len(text) else "unexpected end of text"
    line, column = _line_and_column(text, offset)
    raise ConfigError(f"{name}:{line}:{column}: not valid JSON: {what}\n{excerpt(text, line, column)}")


def _check_bounds(text: str, name: str) -> None:
    """ConfigError for a text that is longer, nested deeper, or has longer numbers than any config."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(name, expected=f"a config of at most {_MOST_CHARACTERS} characters", got=len(text))
    levels = 0
    for token in _TOKEN.finditer(text):
        part = token.group()
        what = ""
        if part in ("{", "["):
            levels += 1
            what = f"nested more than {_MOST_LEVELS} levels deep" if levels > _MOST_LEVELS else ""
        elif part in ("}", "]"):
            levels -= 1
        elif token.lastgroup == "word" and len(part) > _LONGEST_NUMBER and part[0] in "+-.0123456789":
            what = f"a number of {len(part)} characters, at most {_LONGEST_NUMBER} are read"
        if what:
            line, column = _line_and_column(text, token.start())
            raise ConfigError(f"{name}:{line}:{column}: {what}\n{excerpt(text, line, column)}")


def excerpt(text: str, line: int, column: int) -> str:
    """The line of an error, and below it a caret under the column; both counted from 1."""
    shown = text.split("\n")[line - 1].replace("\t", " ").rstrip()
    start = max(0, min(column - 1, len(shown)) - _WIDEST_EXCERPT // 2)
    return f"    {shown[start : start + _WIDEST_EXCERPT]}\n    {' ' * (column - 1 - start)}^"


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    """Both counted from 1; the column in characters."""
    return text.count("\n", 0, offset) + 1, offset - (text.rfind("\n", 0, offset) + 1) + 1


@dataclass
class _Container:
    """An object or a list that is open during the scan."""

    path: Path
    is_object: bool
    number: int
    index: int = 0
    key: str | None = None
    below: Path = field(init=False)

    def __post_init__(self) -> None:
        self.below = self.path if self.is_object else (*self.path, 0)


def _keys(text: str) -> Iterator[tuple[int, Path, int]]:
    """Every key of a valid text: the number of the object it stands in, its path, and the offset of its start."""
    stack: list[_Container] = []
    opened = 0
    for token in _TOKEN.finditer(text):
        kind, part = token.lastgroup, token.group()
        top = stack[-1] if stack else None
        if kind == "skip":
            continue
        if part in ("{", "[") and kind == "mark":
            opened += 1
            stack.append(_Container(top.below if top else (), part == "{", opened))
        elif part in ("}", "]") and kind == "mark":
            stack.pop()
        elif top is not None and part == "," and kind == "mark":
            top.key, top.index = None, top.index + 1
            top.below = top.path if top.is_object else (*top.path, top.index)
        elif top is not None and top.is_object and top.key is None and kind != "mark":
            top.key = _key_name(part)
            top.below = (*top.path, top.key)
            yield top.number, top.below, token.start()


def _key_name(token: str) -> str:
    """The key behind its token, which is a string in either kind of quotes or a bare word."""
    if token[0] not in "\"'":
        return token
    try:
        return str(json.loads(token))
    except json.JSONDecodeError:
        return str(json5.loads(token))
