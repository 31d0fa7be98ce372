"""YAML with places: parses a launch file's text and remembers where each key stands, so that errors can point at it.

The counterpart of `document` for launch files. Given text, returns data; `launch_file` reads files. Only what YAML has
in common with JSON is read: no tags that build objects. Aliases count as what they stand for, so that nothing that
comes out is larger than it looks.
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
"""The parser takes some 10 microseconds per character."""
_MOST_LEVELS = 32
_MOST_VALUES = 10_000
_LONGEST_NUMBER = 100
_LINE_BREAK = re.compile("\r\n|[\r\x85\u2028\u2029]")


class _BoundedLoader(yaml.SafeLoader):
    """The parser, within bounds: what it meets beyond them, or fails at by accident, is an error with a place."""

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
                raise ValueError(f"a number of {len(node.value)} characters, at most {_LONGEST_NUMBER} are read")
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"cannot be read as {kind}: {' '.join(str(error).split())}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def parse_yaml(text: str, name: str) -> JsonText:
    """Parses one YAML document.

    Args:
        text: the content of the file; an empty one reads as an empty object.
        name: what to call it in messages, usually the file's path.

    Raises:
        ConfigError: it is not YAML, or larger than any launch file with what its aliases stand for; the message has
            name, line and column, the line itself and a caret below it.
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
        # The error is noticed at the end of the text; the start of the unclosed bracket or quote is more useful.
        line, column = error.context_mark.line + 1, error.context_mark.column + 1
    return ConfigError(f"{name}:{line}:{column}: not valid YAML: {what}\n{excerpt(text, line, column)}")


def _measured(node: yaml.Node, measured: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """(values, levels) of a node with what its aliases stand for; each node is counted out once."""
    if id(node) in above:
        problem = "an alias stands for something that contains it; write it out"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    if id(node) not in measured:
        above.add(id(node))
        below = [_measured(item, measured, above) for item in _below(node)]
        above.discard(id(node))
        measured[id(node)] = 1 + sum(values for values, _ in below), 1 + max((levels for _, levels in below), default=0)
    values, levels = measured[id(node)]
    if values > _MOST_VALUES or levels > _MOST_LEVELS:
        problem = (
            f"{values} values in {levels} levels, with what aliases stand for; "
            f"at most {_MOST_VALUES} in {_MOST_LEVELS} are read"
        )
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return values, levels


def _below(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [item for pair in node.value for item in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _keys(loader: _BoundedLoader, node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, yaml.Mark]]:
    """Every key: its path, and where it stands."""
    if isinstance(node, yaml.MappingNode):
        for key, below in node.value:
            here = (*path, loader.construct_object(key))
            yield here, key.start_mark
            yield from _keys(loader, below, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _keys(loader, item, (*path, index))
