"""Attributes that are replaced temporarily."""

from __future__ import annotations

import sys
from typing import Any


class Replacements:
    """Replaced attributes; `undo` restores all of them, last first."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, Any, bool]] = []

    def set(self, owner: object, name: str, value: object) -> Any:
        """Replaces an attribute of a module or class; returns the original."""
        own = name in vars(owner)
        before = vars(owner)[name] if own else getattr(owner, name, None)
        self._undo.append((owner, name, before, own))
        setattr(owner, name, value)
        return before

    def everywhere(self, value: object, stand_in: object, package: str = "zeroaccel") -> None:
        """Replaces a function or class in every module of a package that has it, under any name."""
        found = 0
        for module_name, module in list(sys.modules.items()):
            if module_name == package or module_name.startswith(f"{package}."):
                for name, attribute in list(vars(module).items()):
                    if attribute is value:
                        self.set(module, name, stand_in)
                        found += 1
        assert found, f"no module of {package} contains {value}"

    def undo(self) -> None:
        """Restores all attributes."""
        while self._undo:
            owner, name, before, own = self._undo.pop()
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
