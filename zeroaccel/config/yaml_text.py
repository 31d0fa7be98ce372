"""Parses the YAML of a launch file and records the place of each key for error messages.

The counterpart of `document` for launch files. It parses text; `launch_file` reads the files. Tags that build
Python objects are errors. An alias counts with its expanded size, so that a small text cannot become large data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from zeroaccel.config.diagnostics import KeyPath
from zeroaccel.config.document import JsonText, excerpt
from zeroaccel.errors import ConfigError

_MOST_CHARACTERS = 1 << 15
"""The parser takes about 10 microseconds per character."""
_MOST_LEVELS = 32
_MOST_VALUES = 10_000
_LONGEST_NUMBER = 100
_LINE_BREAK = re.compile("\r\n|[\r\x85\u2028\u2029]")


class _BoundedLoader(yaml.SafeLoader):
    """A bounded YAML parser: exceeding a bound, or an internal failure, raises an error with a place."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self._levels == _MOST_LEVELS:
            raise yaml.MarkedYAMLError(problem=f"nested more than {_MOST_LEVELS} levels deep", problem_mark=mark)
        self._levels += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._levels -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
            if number and isinstance(node, yaml.ScalarNode) and len(node.value) > _LONGEST_NUMBER:
                raise ValueError(f"a number of {len(node.value)} characters, the maximum is {_LONGEST_NUMBER}")
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"cannot be read as {kind}: {' '.join(str(error).split())}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def parse_yaml(text: str, name: str) -> JsonText:
    """Parses one YAML document.

    Args:
        text: content of the file; empty text is an empty object.
        name: name of the text in messages, usually the file's path.

    Raises:
        ConfigError: the text is not YAML, or larger than any launch file after expanding aliases; the message has
            name, line and column, the line and a caret.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(name, expected=f"a launch file of at most {_MOST_CHARACTERS} characters", got=len(text))
    try:
        loader = _BoundedLoader(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                _measured(node, {}, set())
            value = {} if node is None else loader.construct_document(node)
            places: dict[KeyPath, str] = {}
            lines: dict[KeyPath, list[int]] = {}
            for path, mark in _keys(loader, node, ()):
                places[path] = f"{name}:{mark.line + 1}:{mark.column + 1}"
                lines.setdefault(path, []).append(mark.line + 1)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(text, name, error) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # unprintable characters, impossible dates
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    return JsonText(value, places, {path: on for path, on in lines.items() if len(on) > 1})


def _syntax_error(text: str, name: str, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    what = error.problem or error.context or "cannot be read"
    if mark is None:
        return ConfigError(f"{name}: not valid YAML: {what}")
    line, column = mark.line + 1, mark.column + 1
    text = _LINE_BREAK.sub("\n", text)
    if text.split("\n")[mark.line : mark.line + 1] in ([], [""]) and error.context_mark is not None:
        # The parser reports the end of the text; the start of the unclosed bracket or quote is more useful.
        line, column = error.context_mark.line + 1, error.context_mark.column + 1
    return ConfigError(f"{name}:{line}:{column}: not valid YAML: {what}\n{excerpt(text, line, column)}")


def _measured(node: yaml.Node, measured: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """Returns (values, levels) of a node with expanded aliases; measures each node once."""
    if id(node) in above:
        problem = "an alias refers to a node that contains it; write the value instead"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    if id(node) not in measured:
        above.add(id(node))
        below = [_measured(item, measured, above) for item in _below(node)]
        above.discard(id(node))
        measured[id(node)] = 1 + sum(values for values, _ in below), 1 + max((levels for _, levels in below), default=0)
    values, levels = measured[id(node)]
    if values > _MOST_VALUES or levels > _MOST_LEVELS:
        problem = (
            f"{values} values in {levels} levels after expanding aliases; "
            f"the maximum is {_MOST_VALUES} in {_MOST_LEVELS}"
        )
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return values, levels


def _below(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [item for pair in node.value for item in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _keys(loader: _BoundedLoader, node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, yaml.Mark]]:
    """Yields the path and the place of every key."""
    if isinstance(node, yaml.MappingNode):
        for key, below in node.value:
            here = (*path, loader.construct_object(key))
            yield here, key.start_mark
            yield from _keys(loader, below, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _keys(loader, item, (*path, index))
