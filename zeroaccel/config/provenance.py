"""Where the values of a config came from: the tree as given, the place of each key, and what was said about them.

`load` makes one `Provenance` and `schema.Config` carries it. A path is a tuple of keys in the schema's own names; for
people it is dotted, in the spelling that was written, after the place it was written at. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Path", "Provenance", "dotted"]

Path = tuple[str | int, ...]


def dotted(path: Path) -> str:
    """The path as people write it: keys joined by dots, positions in a list in brackets."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


@dataclass(frozen=True)
class Provenance:
    """Where a config came from; two configs with equal values are equal whatever their origins.

    Attributes:
        name: the source as a whole, for messages: a file's path, or "config" for a dict.
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
    places: Mapping[Path, str] = field(default_factory=dict, compare=False)
    written: Mapping[Path, Path] = field(default_factory=dict, compare=False)
    unresolved: tuple[str, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    resolved: Mapping[str, Any] = field(default_factory=dict, compare=False)
    resolved_sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def spelling(self, path: Path) -> Path:
        """The path in the spelling that was written, as far as it was written."""
        for end in range(len(path), 0, -1):
            written = self.written.get(path[:end])
            if written is not None:
                return written + path[end:]
        return path

    def where(self, path: Path) -> str:
        """The address of a key for a message: its place, or that of the section it is missing from, and its path."""
        return self.where_written(self.spelling(path))

    def where_written(self, written: Path) -> str:
        """The same for a path in the spelling that was written."""
        for end in range(len(written), 0, -1):
            place = self.places.get(written[:end])
            if place is not None:
                return f"{place}: {dotted(written)}"
        return dotted(written)

    def sources(self) -> dict[str, str]:
        """Dotted path in the schema's names -> source, of every key that was given."""
        return {dotted(path): self.places.get(written, self.name) for path, written in self.written.items()}
