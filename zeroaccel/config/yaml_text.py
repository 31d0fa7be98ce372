"""YAML with places: parses a launch file's text and remembers where each key stands, so that errors can point at it.

The twin of `json_text`, for the files people write by hand. Given text, returns data; reading files is for
`launch_file`. Only what YAML has in common with JSON is read: no tags that build objects.
"""

from __future__ import annotations

from typing import Any

import yaml

from zeroaccel.config.json_text import JsonText, excerpt
from zeroaccel.config.origin import Path
from zeroaccel.errors import ConfigError

__all__ = ["parse_yaml"]


def parse_yaml(text: str, name: str) -> JsonText:
    """Parses one YAML document.

    Args:
        text: the whole text; an empty one says nothing, which reads as an empty object.
        name: what to call it in messages, usually the file's path.

    Raises:
        ConfigError: it is not YAML; the message has name, line and column, the line itself and a caret below it.
    """
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            value = {} if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(text, name, error) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # unprintable characters, impossible dates
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    places: dict[Path, str] = {}
    duplicates: dict[Path, list[int]] = {}
    try:
        _note_keys(node, (), name, places, duplicates)
    except RecursionError:
        raise ConfigError(f"{name}: an alias stands for something that contains it", fix="write it out") from None
    return JsonText(value, places, {path: lines for path, lines in duplicates.items() if len(lines) > 1})


def _syntax_error(text: str, name: str, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    what = error.problem or error.context or "cannot be read"
    if mark is None:
        return ConfigError(f"{name}: not valid YAML: {what}")
    line, column = mark.line + 1, mark.column + 1
    if text.split("\n")[mark.line : mark.line + 1] in ([], [""]) and error.context_mark is not None:
        # The end of the text is where it was noticed; where the open thing began says more.
        line, column = error.context_mark.line + 1, error.context_mark.column + 1
    return ConfigError(f"{name}:{line}:{column}: not valid YAML: {what}\n{excerpt(text, line, column)}")


def _note_keys(
    node: yaml.Node | None, path: Path, name: str, places: dict[Path, str], duplicates: dict[Path, list[int]]
) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, below in node.value:
            here = (*path, _key(key))
            places[here] = f"{name}:{key.start_mark.line + 1}:{key.start_mark.column + 1}"
            duplicates.setdefault(here, []).append(key.start_mark.line + 1)
            _note_keys(below, here, name, places, duplicates)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_keys(item, (*path, index), name, places, duplicates)


def _key(node: yaml.Node) -> Any:
    """The key as the loader builds it; keys that are not plain text are an error of whoever reads the tree."""
    text: str = getattr(node, "value", "")
    if node.tag == "tag:yaml.org,2002:str" or not isinstance(node, yaml.ScalarNode):
        return str(text)
    return yaml.safe_load(text)
