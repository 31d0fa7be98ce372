"""Finding a config: tells dicts, paths, JSON text and base64 apart, and reads what it finds into one form.

The first step of `load`. It knows files and encodings and no key of the config. A name that does not exist is said to
be missing, never taken for base64.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroaccel.config.bounds import read_at_most
from zeroaccel.config.json_text import parse_json
from zeroaccel.config.problems import Problem, given_twice
from zeroaccel.config.provenance import Path
from zeroaccel.errors import ConfigError

__all__ = ["Document", "given_paths", "read_document"]

_FORMS = "a dict, the path of a JSON file, JSON text, or urlsafe base64 of JSON"
_NEAR_NAMES = 3
_LONGEST_PATH_SHOWN = 200
_MOST_NBYTES = 4 << 20
_MOST_LEVELS = 32


@dataclass(frozen=True)
class Document:
    """A config as given, before any of its keys is looked at.

    Attributes:
        name: what to call it in messages.
        tree: a copy of its content, so that neither side sees the other's later changes.
        places: path -> "file:line:column" of its key; empty for a dict.
        problems: keys given more than once.
    """

    name: str
    tree: dict[str, Any]
    places: Mapping[Path, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def read_document(source: Mapping[str, Any] | str | os.PathLike[str]) -> Document:
    """Reads a config from wherever it is.

    Raises:
        ConfigError: no such file, not readable, not JSON, or not an object.
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


def given_paths(tree: object, above: Path = ()) -> Iterator[Path]:
    """The path of every key of a tree, as written and in the order written."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            path = (*above, key)
            yield path
            yield from given_paths(value, path)
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from given_paths(item, (*above, index))


def _copy(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """Copies objects and lists; leaves are shared, since a dict built in Python may hold process groups."""
    if levels < 0:
        raise ConfigError(f"config: nested more than {_MOST_LEVELS} levels deep, or contains itself")
    if isinstance(value, Mapping):
        return {key: _copy(item, levels - 1) for key, item in value.items()}
    return [_copy(item, levels - 1) for item in value] if isinstance(value, list) else value


def _from_text(text: str, name: str) -> Document:
    parsed = parse_json(text, name)
    if not isinstance(parsed.value, dict):
        raise ConfigError(name, expected="an object at the top level", got=parsed.value)
    return Document(name, parsed.value, parsed.places, tuple(given_twice(parsed.duplicates)))


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
    """The error about a path that leads nowhere, with the names that may have been meant."""
    folder, name = os.path.split(path)
    if os.path.isdir(folder or "."):
        near = difflib.get_close_matches(name, sorted(os.listdir(folder or ".")), n=_NEAR_NAMES)
        fix = f"did you mean {_quoted(folder, near)}?" if near else _json_files(folder) or f"give {_FORMS}"
    else:
        fix = f"there is no folder {folder!r}"
    return ConfigError(f"config file {_cut(path)} does not exist (working directory {os.getcwd()!r})", fix=fix)


def _json_files(folder: str) -> str:
    """Which JSON files a folder has, or the empty string if none."""
    found = sorted(entry for entry in os.listdir(folder or ".") if entry.endswith(".json"))
    return f"JSON files there: {_quoted(folder, found[:_NEAR_NAMES])}" if found else ""


def _cut(path: str) -> str:
    return repr(path if len(path) <= _LONGEST_PATH_SHOWN else path[:_LONGEST_PATH_SHOWN] + "...")


def _quoted(folder: str, names: list[str]) -> str:
    return ", ".join(repr(os.path.join(folder, name)) for name in names)


def _from_base64(text: str) -> str | None:
    """The JSON behind urlsafe or standard base64, or None if the text is no base64 or decodes to no JSON object."""
    if not re.fullmatch(r"[A-Za-z0-9_+/-]+={0,2}", text):
        return None
    try:
        decoded = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None
