"""Docstrings as griffe reads them: its section of examples is called Examples."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the sections, which would be plain text otherwise."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object, before its docstring is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
