"""Data types for the source of each config value and for the problems with it.

A `KeyPath` is a tuple of keys in the schema's names; messages show it with dots, in the spelling of the file, after its
place ("ds_config.json:3:5"). The steps of loading collect `Problem`s and `Note`s instead of raising the first error, so
that one `ConfigError` lists every mistake of a file. Only this module translates pydantic's errors.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pydantic_core import ErrorDetails

from zeroaccel.errors import ConfigError, compose, listed

KeyPath = tuple[str | int, ...]
_Call = TypeVar("_Call", bound=Callable[..., Any])


def dotted(path: KeyPath) -> str:
    """Formats a path for messages: keys joined by dots, list indices in brackets."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def at(tree: Any, path: str | KeyPath) -> Any:
    """Returns the value at a path through dictionaries, lists and sections, or None if there is no value."""
    for key in path.split(".") if isinstance(path, str) else path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, list):
            tree = tree[key] if isinstance(key, int) and key < len(tree) else None
        else:
            tree = getattr(tree, str(key), None)
    return tree


def put(tree: dict[Any, Any], path: Sequence[str | int], value: object) -> bool:
    """Sets the value at a path, creating missing dictionaries; returns False if another value is in the way."""
    section: Any = tree
    for key in path[:-1]:
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            return False
    section[path[-1]] = value
    return True


@dataclass(frozen=True)
class Provenance:
    """Origin of a config. Comparisons ignore it: configs with equal values are equal.

    Attributes:
        name: name of the source in messages: a file's path, or "config" for a dict.
        raw: copy of the tree as given, with its spellings and "auto" values.
        places: path as written -> its place, such as "ds_config.json:3:5"; empty for a dict without sources.
        written: path in the schema's names -> path as written, for every given key.
        unresolved: dotted paths, in the schema's names, whose value is "auto".
        notes: one line for each key that the engine accepts but does not follow exactly.
        resolved: the tree in the given spelling, with every "auto" filled, or omitted if its default applies.
        resolved_sources: dotted path in `resolved` -> source of the value, or the formula that filled it.
    """

    name: str = field(default="config", compare=False)
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)
    places: Mapping[KeyPath, str] = field(default_factory=dict, compare=False)
    written: Mapping[KeyPath, KeyPath] = field(default_factory=dict, compare=False)
    unresolved: tuple[str, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    resolved: Mapping[str, Any] = field(default_factory=dict, compare=False)
    resolved_sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def spelling(self, path: KeyPath) -> KeyPath:
        """Returns the path in the user's spelling; keys that the user did not write keep the schema's names."""
        for end in range(len(path), 0, -1):
            written = self.written.get(path[:end])
            if written is not None:
                return written + path[end:]
        return path

    def where(self, path: KeyPath) -> str:
        """Returns the address of a key for a message: its path, after its place or that of its section."""
        return self.where_written(self.spelling(path))

    def where_written(self, written: KeyPath) -> str:
        """Returns the address of a key whose path is in the user's spelling."""
        for end in range(len(written), 0, -1):
            place = self.places.get(written[:end])
            if place is not None:
                return f"{place}: {dotted(written)}"
        return dotted(written)

    def sources(self) -> dict[str, str]:
        """Returns dotted path in the schema's names -> source, for every given key."""
        return {dotted(path): self.places.get(written, self.name) for path, written in self.written.items()}


_MOST_LINES = 50

NOTHING: object = object()
"""Marks a missing value where None may be a value."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a config.

    Attributes:
        path: path of the key, in the schema's names unless `as_written`.
        text: description of the mistake, unless `expected` describes it.
        expected: the correct value, as a noun phrase.
        got: the given value, or NOTHING.
        fix: the remedy, in the imperative.
        as_written: True if the path is in the user's spelling: an unknown key, or one of two for the same setting.
    """

    path: KeyPath
    text: str = ""
    expected: str = ""
    got: object = NOTHING
    fix: str = ""
    as_written: bool = False

    def written(self, origin: Provenance) -> KeyPath:
        """Returns the path of the key in the user's spelling."""
        return self.path if self.as_written else origin.spelling(self.path)

    def line(self, origin: Provenance) -> str:
        """Formats the problem as one line with an address."""
        where = origin.where_written(self.written(origin))
        if self.text:
            where = f"{where}: {self.text}"
        if self.got is NOTHING:
            return compose(where, expected=self.expected, fix=self.fix)
        return compose(where, expected=self.expected, got=self.got, fix=self.fix)


@dataclass(frozen=True)
class Note:
    """A note about a key that the engine accepts but does not follow exactly.

    Attributes:
        path: path of the key, in the user's spelling unless `in_schema`.
        text: the reason, or the actual behaviour.
        warns: True for a warning: the user may rely on an effect that the key does not have.
        in_schema: True if the path is in the schema's names.
    """

    path: KeyPath
    text: str
    warns: bool = False
    in_schema: bool = False

    def line(self, origin: Provenance) -> str:
        """Formats the note as one line with an address."""
        return f"{origin.where_written(origin.spelling(self.path) if self.in_schema else self.path)}: {self.text}"


def report(problems: Sequence[Problem], origin: Provenance, order: Iterable[KeyPath]) -> ConfigError:
    """Builds one error that lists all problems in the order of their keys in the file.

    Args:
        problems: the problems, at least one.
        origin: origin of the config, for the place and spelling of each key.
        order: paths in the user's spelling, in the order of the file.
    """
    rank = {path: index for index, path in enumerate(order)}

    def position(problem: Problem) -> int:
        written = problem.written(origin)
        return max((rank[written[:end]] for end in range(1, len(written) + 1) if written[:end] in rank), default=-1)

    lines = [problem.line(origin) for problem in sorted(problems, key=position)]
    if len(lines) == 1:
        return ConfigError(lines[0])
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return ConfigError("\n  ".join([f"{origin.name}: {len(lines)} settings are wrong", *lines[:_MOST_LINES], *more]))


def duplicate_key_problems(duplicates: Mapping[KeyPath, Sequence[int]]) -> list[Problem]:
    """Returns a problem for each key that a file contains several times.

    Args:
        duplicates: path of the key -> its line numbers.
    """
    return [
        Problem(
            path,
            text=f"given {len(lines)} times, on lines {listed([str(line) for line in lines[:_MOST_LINES]])}",
            fix="keep one",
            as_written=True,
        )
        for path, lines in duplicates.items()
    ]


def closest(word: str, names: Iterable[str], cutoff: float = 0.7) -> str:
    """Returns the known word closest to a misspelt one, ignoring case, or the empty string.

    Example:
        >>> closest("zero_stge", ["zero_stage", "num_processes"])
        'zero_stage'
    """
    return next(iter(near_names(word, names, 1, cutoff)), "")


def hint(
    word: str, names: Iterable[str], otherwise: str = "", cutoff: float = 0.7, shown: Callable[[str], str] = str
) -> str:
    """Returns the remedy for an unknown word: the closest known word, or else `otherwise`."""
    near = closest(word, names, cutoff)
    return f"did you mean {shown(near)}?" if near else otherwise


def names_meant(call: _Call) -> _Call:
    """Decorates a function so that its TypeError for an unknown keyword argument suggests the closest name.

    Python's own error has no such suggestion before 3.13.

    Example:
        >>> @names_meant
        ... def train(learning_rate=0.1):
        ...     return learning_rate
        >>> train(learning_rat=1)
        Traceback (most recent call last):
        TypeError: train() got an unexpected keyword argument 'learning_rat'; did you mean 'learning_rate'?
    """
    parameters = inspect.signature(call).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                meant = closest(name, names)
                said = f"{call.__qualname__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{said}; did you mean {meant!r}?" if meant else f"{said}; it has {', '.join(names)}")
        return call(*args, **kwargs)

    return cast(_Call, checked)


def near_names(word: str, names: Iterable[str], count: int, cutoff: float = 0.6) -> list[str]:
    """Returns up to `count` known words that resemble a word, closest first."""
    folded: dict[str, str] = {}
    for name in names:
        folded.setdefault(name.lower(), name)
    return [folded[match] for match in difflib.get_close_matches(word.lower(), folded, n=count, cutoff=cutoff)]


# Kind of pydantic error that the value types do not raise themselves -> expected value, filled from the error's context
_EXPECTED: Mapping[str, str] = {
    "dict_type": "an object",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "literal_error": "{expected}",
    "mapping_type": "an object",
    "model_type": "an object",
    "string_unicode": "a text without half surrogates",
    "wrong": "{expected}",
}


def from_pydantic(error: ErrorDetails) -> Problem:
    """Converts one entry of `ValidationError.errors()` to a `Problem`."""
    path, kind = tuple(error["loc"]), error["type"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind == "missing":
        return Problem(path, text='missing or "auto"', fix="set it, or remove the section")
    assert kind in _EXPECTED, f"no text for pydantic's error {kind!r} at {path}"
    return Problem(path, expected=_EXPECTED[kind].format(**context), got=error["input"], fix=context.get("fix", ""))
