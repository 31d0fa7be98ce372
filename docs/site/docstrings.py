"""Adapts docstrings for griffe: its section of examples is called Examples, and each parameter has a separate line."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^ *(Args|Attributes):$")
_SHARED = re.compile(r"^(?P<indent> +)(?P<names>\w+(, \w+)+): ?(?P<text>.*)$")


class DocstringSections(griffe.Extension):
    """Renames sections that griffe does not recognize, and repeats a description that several parameters share."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of an object before griffe parses it."""
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = "\n".join(_one_line_each(text.split("\n")))


def _one_line_each(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring, with `a, b: text` in a list of parameters split into one item each."""
    result: list[str] = []
    in_section = False
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if _SECTION.match(line):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = False
        shared = _SHARED.match(line) if in_section else None
        if shared is None:
            result.append(line)
            continue
        more = []
        while index < len(lines) and lines[index].startswith(shared["indent"] + "  "):
            more.append(lines[index])
            index += 1
        for name in shared["names"].split(", "):
            result += [f"{shared['indent']}{name}: {shared['text']}", *more]
    return result
