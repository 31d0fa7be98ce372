"""Reads a config from a dict, a path, JSON text or base64 into one tree, with the place of every key.

The first step of `load_config`. It parses plain JSON first, and uses json5 for text with comments, trailing commas or
unquoted keys. DeepSpeed's reader also accepts Hjson without commas at ends of lines, with # comments and with unquoted
values: this module converts such text to JSON5 first, and adds a note. It handles files, encodings and JSON
independently of the config's keys. A path that does not exist is an error and never taken for base64.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import json5

from zeroaccel.config.bounds import read_at_most
from zeroaccel.config.diagnostics import KeyPath, Note, Problem, duplicate_key_problems, near_names
from zeroaccel.errors import ConfigError

_WIDEST_EXCERPT = 100
_MOST_CHARACTERS = 1 << 20
_MOST_JSON5_CHARACTERS = 1 << 14
"""The JSON5 parser takes about 30 microseconds per character."""
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
        value: the parsed value; the last occurrence of a repeated key counts.
        places: path -> "name:line:column" of its key, in the order of the text; the last for a repeated key.
        duplicates: path -> line numbers of all occurrences, for keys that an object contains more than once.
        hjson: "name:line:column: reason" of the first part that is neither JSON nor JSON5, or the empty string.
    """

    value: Any
    places: dict[KeyPath, str]
    duplicates: dict[KeyPath, list[int]]
    hjson: str = ""


def parse_json(text: str, name: str) -> JsonText:
    """Parses JSON, else JSON5, else Hjson within braces.

    Args:
        text: content of the file.
        name: name of the text in messages, usually the file's path.

    Raises:
        ConfigError: the text is not valid in any of them; the message has name, line and column, the line and a caret.
    """
    _check_bounds(text, name)
    try:
        return _placed(json.loads(text), text, name)
    except json.JSONDecodeError as error:
        plain = error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from None
    try:
        return _placed(_parse_json5(text, name, plain), text, name)
    except ConfigError:
        as_json5, offset, what = _hjson_as_json5(text) or ("", 0, "")
        value = _read_quietly(as_json5)
        if value is None:
            raise
        line, column = _line_and_column(text, offset)
        return replace(_placed(value, as_json5, name), hjson=f"{name}:{line}:{column}: {what}")


def _placed(value: Any, text: str, name: str) -> JsonText:
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    places: dict[KeyPath, str] = {}
    lines: dict[tuple[int, KeyPath], list[int]] = {}
    for owner, path, offset in _keys(text):
        line = bisect_right(line_starts, offset)
        places[path] = f"{name}:{line}:{offset - line_starts[line - 1] + 1}"
        lines.setdefault((owner, path), []).append(line)
    duplicates = {path: numbers for (_, path), numbers in lines.items() if len(numbers) > 1}
    return JsonText(value, places, duplicates)


_HJSON_TOKEN = re.compile(
    r"""(?P<space>\s+) | (?P<hash>\#[^\n]*) | (?P<comment>//[^\n]* | /\*.*?(?:\*/|\Z))
    | (?P<string>"(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*')
    | (?P<mark>[{}\[\]:,])
    | (?P<literal>(?:true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=\s*(?:[,\]}\#\n]|//|/\*|\Z)))
    | (?P<word>[^\s{}\[\]:,"'][^\s{}\[\]:,]*)""",
    re.VERBOSE | re.DOTALL,
)


def _hjson_as_json5(text: str) -> tuple[str, int, str] | None:
    """Converts Hjson to JSON5: adds commas at ends of lines and quotes around values, and blanks # comments.

    Everything stays in its line, and keys keep their columns. Also returns the offset of the first change, and its
    reason. Returns None if the text is not Hjson.
    """
    if len(text) > _MOST_JSON5_CHARACTERS:
        return None
    parts: list[str] = []
    inside: list[str] = []  # open brackets
    changes: list[tuple[int, str]] = []
    ended: int | None = None  # index after the last member if no comma follows it
    end = 0  # offset of that index
    is_next_line = is_value = False
    position = 0
    while position < len(text):
        token = _HJSON_TOKEN.match(text, position)
        if token is None:
            return None
        kind, lexeme = str(token.lastgroup), token.group()
        position = token.end()
        if kind in ("space", "hash", "comment"):
            is_next_line |= "\n" in lexeme
            parts.append(lexeme if kind != "hash" else " " * len(lexeme))
            if kind == "hash":
                changes.append((token.start(), "a comment starts with #"))
            continue
        if ended is not None and lexeme not in ("}", "]", ","):
            if not is_next_line or not inside:
                return None
            parts.insert(ended, ",")
            changes.append((end, "a comma is missing"))
            ended = None
        is_object = bool(inside) and inside[-1] == "{"
        if kind == "word" and inside and (is_value or not is_object):
            line = text[token.start() :].partition("\n")[0]
            if set(line) & set("\"'{}[]"):
                return None  # more likely a missing comma within the line
            lexeme, position = json.dumps(line.strip()), token.start() + len(line)
            changes.append((token.start(), "a text has no quotes"))
        parts.append(lexeme)
        if kind == "mark":
            _note_bracket(inside, lexeme)
            is_value = lexeme == ":"
            ended, end = (len(parts) if lexeme in "}]" else None), position
        elif is_value or not is_object:
            ended, end, is_value = len(parts), position, False
        is_next_line = False
    return ("".join(parts), *changes[0]) if changes else None


def _note_bracket(inside: list[str], mark: str) -> None:
    if mark in "{[":
        inside.append(mark)
    elif mark in "}]" and inside:
        inside.pop()


def _read_quietly(text: str) -> Any:
    """Returns the value of a JSON5 text, or None if it is invalid."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        value, message, _ = json5.parse(text)
    except (ValueError, RecursionError):
        return None
    return value if message is None else None


def _parse_json5(text: str, name: str, plain: json.JSONDecodeError) -> Any:
    """Returns the value of a JSON5 text; `plain` is the error from parsing it as JSON."""
    if not text.strip():
        raise ConfigError(f"{name}: not valid JSON: it is empty")
    if len(text) > _MOST_JSON5_CHARACTERS:
        line, column = plain.lineno, plain.colno
        raise ConfigError(
            f"{name}:{line}:{column}: not valid JSON: {plain.msg[0].lower()}{plain.msg[1:]}\n"
            f"{excerpt(text, line, column)}\n"
            f"    (a file with comments or other extensions of JSON may have {_MOST_JSON5_CHARACTERS} characters)"
        )
    try:
        value, message, offset = json5.parse(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from None
    if message is None:
        return value
    # Report the error of the parser that got further; in a tie, json's message, which names the expected token.
    if plain.pos >= offset:
        offset, what = plain.pos, plain.msg[0].lower() + plain.msg[1:]
    else:
        what = f"unexpected {text[offset]!r}" if offset < len(text) else "unexpected end of text"
    line, column = _line_and_column(text, offset)
    raise ConfigError(f"{name}:{line}:{column}: not valid JSON: {what}\n{excerpt(text, line, column)}")


def _check_bounds(text: str, name: str) -> None:
    """Raises ConfigError for a text that is longer, nested deeper, or has longer numbers than any config."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(name, expected=f"a config of at most {_MOST_CHARACTERS} characters", got=len(text))
    levels = 0
    for token in _TOKEN.finditer(text):
        lexeme = token.group()
        what = ""
        if lexeme in ("{", "["):
            levels += 1
            what = f"nested more than {_MOST_LEVELS} levels deep" if levels > _MOST_LEVELS else ""
        elif lexeme in ("}", "]"):
            levels -= 1
        elif token.lastgroup == "word" and len(lexeme) > _LONGEST_NUMBER and lexeme[0] in "+-.0123456789":
            what = f"a number of {len(lexeme)} characters, the maximum is {_LONGEST_NUMBER}"
        if what:
            line, column = _line_and_column(text, token.start())
            raise ConfigError(f"{name}:{line}:{column}: {what}\n{excerpt(text, line, column)}")


def excerpt(text: str, line: int, column: int) -> str:
    """Returns the line of an error with a caret below the column; line and column count from 1."""
    shown = text.split("\n")[line - 1].replace("\t", " ").rstrip()
    start = max(0, min(column - 1, len(shown)) - _WIDEST_EXCERPT // 2)
    return f"    {shown[start : start + _WIDEST_EXCERPT]}\n    {' ' * (column - 1 - start)}^"


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    """Returns line and column of an offset, counted from 1; the column in characters."""
    return text.count("\n", 0, offset) + 1, offset - (text.rfind("\n", 0, offset) + 1) + 1


def _keys(text: str) -> Iterator[tuple[int, KeyPath, int]]:
    """Yields, for every key of a valid text, the offset of its object, its path, and its own offset."""
    tokens = (token for token in _TOKEN.finditer(text) if token.lastgroup != "skip")
    yield from _keys_below(next(tokens), tokens, ())


def _keys_below(
    value: re.Match[str], tokens: Iterator[re.Match[str]], path: KeyPath
) -> Iterator[tuple[int, KeyPath, int]]:
    """Yields the keys within the value that starts at `value`, and consumes its tokens."""
    index = 0
    if value.group() not in ("{", "["):
        return
    for token in tokens:
        if token.group() in ("}", "]"):
            return
        if token.group() == ",":
            index += 1
        elif value.group() == "[":
            yield from _keys_below(token, tokens, (*path, index))
        else:
            here = (*path, _key_name(token.group()))
            yield value.start(), here, token.start()
            next(tokens)  # the colon
            yield from _keys_below(next(tokens), tokens, here)


def _key_name(token: str) -> str:
    """Returns the key for a token, which is a string in single or double quotes or a bare word."""
    if token[0] not in "\"'":
        return token
    try:
        return str(json.loads(token))
    except json.JSONDecodeError:
        return str(json5.loads(token))


_IS_HJSON = "Hjson, which zeroaccel and DeepSpeed read, but other programs do not; write JSON"
_FORMS = "a dict, the path of a JSON file, JSON text, or urlsafe base64 of JSON"
_NEAR_NAMES = 3
_LONGEST_PATH_SHOWN = 200
_MOST_NBYTES = 4 << 20


@dataclass(frozen=True)
class Document:
    """A config as given, before any of its keys is read.

    Attributes:
        name: name of the config in messages.
        tree: a copy of the content, independent of the caller's.
        places: path -> "file:line:column" of its key; empty for a dict.
        problems: a problem for each repeated key.
        notes: a note if the text is Hjson, which other JSON readers reject.
    """

    name: str
    tree: dict[str, Any]
    places: Mapping[KeyPath, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()


def read_document(source: Mapping[str, Any] | str | os.PathLike[str]) -> Document:
    """Reads a config from a dict, a path, JSON text or base64.

    Raises:
        ConfigError: the file does not exist or is unreadable, or the content is not JSON or not an object.
    """
    if isinstance(source, Mapping):
        return Document("config", _copy(source))
    if isinstance(source, os.PathLike):
        return _from_file(os.fspath(source))
    if not isinstance(source, str):
        raise ConfigError("config", expected=_FORMS, got=source)
    text = source.strip()
    if text.startswith(("{", "[")) or "\n" in text:
        return _from_text(source, "<json>")
    if not os.path.exists(source):
        decoded = _from_base64(text)
        if decoded is not None:
            return _from_text(decoded, "<base64>")
    return _from_file(source)


def key_paths(tree: object, above: KeyPath = ()) -> Iterator[KeyPath]:
    """Yields the path of every key of a tree, in its order and spelling."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            path = (*above, key)
            yield path
            yield from key_paths(value, path)
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from key_paths(item, (*above, index))


def _copy(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """Copies objects and lists but shares leaves, because a dict built in Python may hold process groups."""
    if levels < 0:
        raise ConfigError(f"config: nested more than {_MOST_LEVELS} levels deep, or contains itself")
    if isinstance(value, Mapping):
        return {key: _copy(item, levels - 1) for key, item in value.items()}
    return [_copy(item, levels - 1) for item in value] if isinstance(value, list) else value


def _from_text(text: str, name: str) -> Document:
    parsed = parse_json(text, name)
    if not isinstance(parsed.value, dict):
        raise ConfigError(name, expected="an object at the top level", got=parsed.value)
    notes = (Note((parsed.hjson,), _IS_HJSON, warns=True),) if parsed.hjson else ()
    return Document(name, parsed.value, parsed.places, tuple(duplicate_key_problems(parsed.duplicates)), notes)


def _from_file(path: str) -> Document:
    try:
        text = read_at_most(path, _MOST_NBYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise _missing(path) from None
    except IsADirectoryError:
        raise ConfigError(f"config file {path!r} is a folder", fix=_json_files(path) or f"give {_FORMS}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path!r}: byte {error.start} is not UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"config file {_cut(path)} cannot be read: {reason}", fix=f"give {_FORMS}") from error
    return _from_text(text, path)


def _missing(path: str) -> ConfigError:
    """Builds the error for a path that does not exist, with similar names."""
    folder, name = os.path.split(path)
    if os.path.isdir(folder or "."):
        near = near_names(name, sorted(os.listdir(folder or ".")), _NEAR_NAMES)
        fix = f"did you mean {_quoted(folder, near)}?" if near else _json_files(folder) or f"give {_FORMS}"
    else:
        fix = f"there is no folder {folder!r}"
    return ConfigError(f"config file {_cut(path)} does not exist (working directory {os.getcwd()!r})", fix=fix)


def _json_files(folder: str) -> str:
    """Returns a sentence with the JSON files of a folder, or the empty string if it has no such file."""
    files = sorted(entry for entry in os.listdir(folder or ".") if entry.endswith(".json"))
    return f"JSON files there: {_quoted(folder, files[:_NEAR_NAMES])}" if files else ""


def _cut(path: str) -> str:
    return repr(path if len(path) <= _LONGEST_PATH_SHOWN else path[:_LONGEST_PATH_SHOWN] + "...")


def _quoted(folder: str, names: list[str]) -> str:
    return ", ".join(repr(os.path.join(folder, name)) for name in names)


def _from_base64(text: str) -> str | None:
    """Decodes urlsafe or standard base64; returns None if the text is not base64 of a JSON object."""
    if not re.fullmatch(r"[A-Za-z0-9_+/-]+={0,2}", text):
        return None
    try:
        decoded = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None
