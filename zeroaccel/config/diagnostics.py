"""Where each value of a config came from, and what is wrong with it, as data.

A `KeyPath` is a tuple of keys in the schema's names; messages show it dotted, in the spelling of the file, behind its
place ("ds_config.json:3:5"). The steps of loading collect `Problem`s and `Note`s instead of raising at the first, so
that one `ConfigError` lists every mistake of a file. pydantic's errors are translated here, and nowhere else.
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
    """The path as it is written in messages: keys joined by dots, positions in a list in brackets."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def at(tree: Any, path: str | KeyPath) -> Any:
    """What is at a path of dictionaries, lists and sections, dotted or in parts; None where there is nothing."""
    for part in path.split(".") if isinstance(path, str) else path:
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        elif isinstance(tree, list):
            tree = tree[part] if isinstance(part, int) and part < len(tree) else None
        else:
            tree = getattr(tree, str(part), None)
    return tree


def put(tree: dict[Any, Any], path: Sequence[str | int], value: object) -> bool:
    """Places a value at a path of dictionaries, which are made where nothing is; False where something else is."""
    section: Any = tree
    for part in path[:-1]:
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            return False
    section[path[-1]] = value
    return True


@dataclass(frozen=True)
class Provenance:
    """Where a config came from; two configs with equal values are equal whatever their origins.

    Attributes:
        name: of the source, for messages: a file's path, or "config" for a dict.
        raw: a copy of the tree as given: spellings, "auto" and all.
        places: written path -> where it was written, as "ds_config.json:3:5"; empty for a dict without sources.
        written: path in the schema's names -> path as written, of every key that was given.
        unresolved: dotted paths, in the schema's names, whose value is "auto".
        notes: one line for each key that is accepted without being followed to the letter.
        resolved: the tree in the spelling that was written, every "auto" filled, or absent where it takes its default.
        resolved_sources: dotted path in `resolved` -> where the value came from, or the formula that filled it.
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
        """The path in the spelling that was written, as far as it was written."""
        for end in range(len(path), 0, -1):
            written = self.written.get(path[:end])
            if written is not None:
                return written + path[end:]
        return path

    def where(self, path: KeyPath) -> str:
        """The address of a key for a message: its place, or that of the section it is missing from, and its path."""
        return self.where_written(self.spelling(path))

    def where_written(self, written: KeyPath) -> str:
        """The same for a path in the spelling that was written."""
        for end in range(len(written), 0, -1):
            place = self.places.get(written[:end])
            if place is not None:
                return f"{place}: {dotted(written)}"
        return dotted(written)

    def sources(self) -> dict[str, str]:
        """Dotted path in the schema's names -> source, of every key that was given."""
        return {dotted(path): self.places.get(written, self.name) for path, written in self.written.items()}


_MOST_LINES = 50

NOTHING: object = object()
"""Says that no value was found, where None may be one."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: the key, in the schema's names unless `as_written`.
        text: what is wrong, unless `expected` says it.
        expected: the correct value, as a noun phrase.
        got: the value found, or NOTHING.
        fix: what to do, in the imperative.
        as_written: the path is as written: the key is unknown, or one of two for the same setting.
    """

    path: KeyPath
    text: str = ""
    expected: str = ""
    got: object = NOTHING
    fix: str = ""
    as_written: bool = False

    def written(self, origin: Provenance) -> KeyPath:
        """The path of the key in the spelling that was written."""
        return self.path if self.as_written else origin.spelling(self.path)

    def line(self, origin: Provenance) -> str:
        """The problem as one line with an address."""
        where = origin.where_written(self.written(origin))
        if self.text:
            where = f"{where}: {self.text}"
        if self.got is NOTHING:
            return compose(where, expected=self.expected, fix=self.fix)
        return compose(where, expected=self.expected, got=self.got, fix=self.fix)


@dataclass(frozen=True)
class Note:
    """What becomes of a key that is accepted without being followed to the letter.

    Attributes:
        path: the key, as it was written unless `in_schema`.
        text: the reason, or what happens instead.
        warns: the user may count on what the key asks for, so this is logged as a warning.
        in_schema: the path is in the schema's names.
    """

    path: KeyPath
    text: str
    warns: bool = False
    in_schema: bool = False

    def line(self, origin: Provenance) -> str:
        """The note as one line with an address."""
        return f"{origin.where_written(origin.spelling(self.path) if self.in_schema else self.path)}: {self.text}"


def report(problems: Sequence[Problem], origin: Provenance, order: Iterable[KeyPath]) -> ConfigError:
    """One error with all problems, in the order in which their keys were written.

    Args:
        problems: at least one.
        origin: gives each key its place and its spelling.
        order: the paths as written, first to last.
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
    """A problem for each key that a file has several times.

    Args:
        duplicates: path of the key -> the lines it is on.
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
    """The known word that was probably meant, in any case of its letters, or the empty string.

    Example:
        >>> closest("zero_stge", ["zero_stage", "num_processes"])
        'zero_stage'
    """
    return next(iter(near_names(word, names, 1, cutoff)), "")


def hint(
    word: str, names: Iterable[str], otherwise: str = "", cutoff: float = 0.7, shown: Callable[[str], str] = str
) -> str:
    """The fix for a word that is not among the known ones: the one that was probably meant, or `otherwise`."""
    near = closest(word, names, cutoff)
    return f"did you mean {shown(near)}?" if near else otherwise


def names_meant(call: _Call) -> _Call:
    """A decorator: a keyword argument that the call does not have is refused with the one that was probably meant.

    Still a TypeError, as Python's own before 3.13 without the suggestion.

    Example:
        >>> @names_meant
        ... def train(learning_rate=0.1):
        ...     return learning_rate
        >>> train(learning_rat=1)
        Traceback (most recent call last):
        TypeError: train() got an unexpected keyword argument 'learning_rat'; did you mean 'learning_rate'?
    """
    parameters = inspect.signature(call).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]

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
    """At most so many known words that resemble a word, the nearest first."""
    folded: dict[str, str] = {}
    for name in names:
        folded.setdefault(name.lower(), name)
    return [folded[match] for match in difflib.get_close_matches(word.lower(), folded, n=count, cutoff=cutoff)]


# pydantic's kinds of error that our value types leave to it -> what was expected, filled from the error's context
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
    """One entry of `ValidationError.errors()` in our form."""
    path, kind = tuple(error["loc"]), error["type"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind == "missing":
        return Problem(path, text='missing or "auto"', fix="give it, or remove the section")
    assert kind in _EXPECTED, f"no sentence for pydantic's error {kind!r} at {path}"
    return Problem(path, expected=_EXPECTED[kind].format(**context), got=error["input"], fix=context.get("fix", ""))
