"""Translates a config tree as users and libraries write it into the schema's names.

The second step of `load`: it translates other spellings, keys of older releases, dotted keys and "auto", unquotes
numbers and flags, and finds unknown keys. The schema then checks the values. The given tree stays unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from zeroaccel.config.diagnostics import KeyPath, Note, Problem, closest, dotted
from zeroaccel.config.section import (
    AUTO,
    AlsoSpelled,
    ConfigSection,
    Retired,
    as_text,
    nested_section,
    out_of_quotes,
    spellings,
    takes_auto,
)

UnknownKeys = Literal["strict", "standard", "lenient"]
"""Handling of an unknown key that DeepSpeed ignores: "strict" always raises an error; "standard" raises one if the key
resembles a known key or belongs to another section, and else adds a note; "lenient" always adds a note."""

_MOST_PLACES = 3  # a key that is valid in more sections gets no suggestion

_MOST_HINTS = 50
_MOST_UNKNOWN = 50  # a file with more unknown keys is of another kind, so they are errors


class NormalizedConfig:
    """A tree in the schema's names, with notes and problems from its translation.

    Attributes:
        tree: the tree for validation by the schema, without unknown keys and "auto".
        written: path in the schema's names -> path as written, for every known key.
        unresolved: paths, in the schema's names, whose value is "auto".
        notes: notes about translated older forms, comments, and ignored unknown keys.
        unknown: paths of all unknown keys, as written.
        problems: unknown keys, and settings that are given under two names.
    """

    def __init__(
        self, root: type[ConfigSection], tree_given: Mapping[str, Any], unknown_keys: UnknownKeys = "standard"
    ) -> None:
        self.written: dict[KeyPath, KeyPath] = {}
        self.unresolved: list[KeyPath] = []
        self.notes: list[Note] = []
        self.unknown: list[KeyPath] = []
        self.problems: list[Problem] = []
        self._root = root
        self._hints = 0
        self._mode = unknown_keys
        self.tree = self._section(root, tree_given, (), ())
        self._fill_from_dotted_keys(tree_given)

    def _section(
        self, section: type[ConfigSection], tree_given: Mapping[str, Any], path: KeyPath, written: KeyPath
    ) -> dict[str, Any]:
        names = _names(section)
        tree: dict[str, Any] = {}
        for key, value in tree_given.items():
            here = (*written, key)
            if key in section.retired:
                self._retired(section.retired[key], value, tree, path, here)
            elif key in names:
                name, mark = names[key]
                if mark is not None and mark.deprecated:
                    self.notes.append(Note(here, f"an older name of {dotted((*path, name))}"))
                self._place(section, name, value, tree, path, here)
            elif key in section.unread.split():
                self.written[(*path, key)] = here
                tree[key] = value
            elif path or "." not in str(key):
                self._note_unknown(section, key, path, here)
        return tree

    def _is_duplicate(self, target: KeyPath, written: KeyPath, *, agrees: bool = False) -> bool:
        """Returns True and adds a problem if the setting was already given under another name; else stores its name.

        Args:
            agrees: True if both values are equal, which causes a note instead of a problem.
        """
        earlier = self.written.setdefault(target, written)
        if earlier != written:
            what = f"the same setting as {dotted(earlier)}"
            if agrees:
                self.notes.append(Note(written, f"{what}, with the same value"))
            else:
                self.problems.append(Problem(written, text=what, fix="keep one", as_written=True))
        return earlier != written

    def _place(
        self,
        section: type[ConfigSection],
        name: str,
        value: object,
        tree: dict[str, Any],
        path: KeyPath,
        written: KeyPath,
    ) -> None:
        """Stores the value of one field in `tree`, under its own name."""
        target = (*path, name)
        field = section.model_fields[name]
        nested = nested_section(field)
        value = self._read(bool if nested is not None and nested.from_flag else field.annotation, value, written)
        if self._is_duplicate(target, written, agrees=name in tree and _is_plain(value) and tree[name] == value):
            return
        # The tree omits "auto", so that the schema's default applies until facts fill the key.
        if _is_auto(value) and not takes_auto(field):
            self.unresolved.append(target)
        elif nested is not None and isinstance(value, bool) and value in nested.from_flag:
            meaning = nested.from_flag[value]
            self.notes.append(Note(written, f"{str(value).lower()} is an older form of {_as_text(meaning)}"))
            tree[name] = self._stand_for(meaning, target, written)
        elif nested is not None and isinstance(value, Mapping):
            tree[name] = self._section(nested, value, target, written)
        elif isinstance(value, Mapping):
            # `Any` for the arguments of an optimizer; None for sections whose values are not read.
            is_mapping = get_origin(field.annotation) in (dict, Mapping)
            value_type = get_args(field.annotation)[1] if is_mapping else None
            tree[name] = self._free(value, target, written, value_type)
        else:
            tree[name] = value

    def _read(self, annotation: Any, value: object, written: KeyPath) -> object:
        """Returns a value, unquoted and with a note if its type expects a number or a flag."""
        read = out_of_quotes(annotation, value)
        if read is not value and (isinstance(value, str) or read != value):
            self.notes.append(Note(written, f"{value!r} in quotes is read as {as_text(read)}"))
        return read

    def _stand_for(self, meaning: Mapping[str, object], path: KeyPath, written: KeyPath) -> dict[str, Any]:
        """Returns the section that one older key means; records that key as the spelling of all its keys."""
        self.written.update({(*path, key): written for key in meaning})
        return dict(meaning)

    def _free(self, tree_given: Mapping[Any, Any], path: KeyPath, written: KeyPath, value_type: Any) -> dict[str, Any]:
        """Translates an object with free keys, such as the arguments of an optimizer."""
        tree: dict[str, Any] = {}
        for key, value in tree_given.items():
            target, here = (*path, key), (*written, key)
            if not isinstance(key, str):
                self.problems.append(_no_string(here))
                continue
            self.written[target] = here
            if _is_auto(value):
                self.unresolved.append(target)
            else:
                is_object = isinstance(value, Mapping)
                tree[key] = (
                    self._free(value, target, here, value_type) if is_object else self._read(value_type, value, here)
                )
        return tree

    def _retired(self, retired: Retired, value: object, tree: dict[str, Any], path: KeyPath, written: KeyPath) -> None:
        """Stores the section that a key of an older release means in `tree`."""
        replacement = (*path, retired.becomes)
        value = self._read(bool, value, written)
        if _is_auto(value):
            self.unresolved.append(replacement)
        elif not isinstance(value, bool):
            self.problems.append(Problem(written, expected="true or false", got=value, as_written=True))
        elif value and not self._is_duplicate(replacement, written):
            meaning = _as_text(retired.when_true)
            self.notes.append(Note(written, f"an older form of {dotted(replacement)} with {meaning}"))
            tree[retired.becomes] = self._stand_for(retired.when_true, replacement, written)
        elif not value:
            self.notes.append(Note(written, "false is the default; the key is no longer needed"))

    def _fill_from_dotted_keys(self, tree_given: Mapping[str, Any]) -> None:
        """Reads top-level keys like "zero_optimization.reduce_bucket_size", which fine-tuning libraries add.

        They fill keys that are absent or "auto"; a value in the section itself takes precedence. Sizes are rounded
        down, because these libraries compute them as a fraction of a product.
        """
        for key, value in tree_given.items():
            if not isinstance(key, str) or "." not in key:
                continue
            path = self._resolve(key)
            if path is None:
                self._note_unknown(self._root, key, (), (key,))
            elif path in self.written and path not in self.unresolved:
                self.notes.append(Note((key,), f"not used, because the section {dotted(path[:-1])} has its own value"))
            elif not _is_auto(value):
                self._fill(path, value, (key,))

    def _fill(self, path: tuple[str, ...], value: object, written: KeyPath) -> None:
        section, tree = self._root, self.tree
        for key in path[:-1]:
            section = nested_section(section.model_fields[key]) or section
            if tree.get(key) is None:
                tree[key] = {}
            tree = tree[key]
            if not isinstance(tree, dict):
                return  # another value in place of the section, which the schema reports
        if isinstance(value, float) and math.isfinite(value) and type(section.model_fields[path[-1]].default) is int:
            value = int(value)
        if path in self.unresolved:
            self.unresolved.remove(path)
            del self.written[path]
        self._place(section, path[-1], value, tree, path[:-1], written)

    def _resolve(self, key: str) -> tuple[str, ...] | None:
        """Returns the path of a dotted key in the schema's names, or None if there is no such field."""
        section: type[ConfigSection] | None = self._root
        path: tuple[str, ...] = ()
        for name in key.split("."):
            names = _names(section).get(name) if section is not None else None
            if section is None or names is None:
                return None
            path = (*path, names[0])
            section = nested_section(section.model_fields[names[0]])
        return path

    def _note_unknown(self, section: type[ConfigSection], key: object, path: KeyPath, written: KeyPath) -> None:
        """Adds a problem or a note for an unknown key."""
        if not isinstance(key, str):
            self.problems.append(_no_string(written))
            return
        if self._root.is_open and key.startswith("_"):
            self.notes.append(Note(written, "taken for a comment, because it begins with _"))
            return
        self.unknown.append(written)
        meant = self._meant(section, key)
        fix = f"did you mean {meant}?" if meant else f"keys here are {_listed(section)}" if path else ""
        ignores = self._mode == "lenient" or (self._mode == "standard" and not (meant and section.is_read))
        if section.is_open and ignores and len(self.unknown) <= _MOST_UNKNOWN:
            hint = f"; {fix}" if meant else ""
            self.notes.append(Note(written, f"unknown key, which changes nothing{hint}", warns=True))
        else:
            self.problems.append(Problem(written, text="unknown key", fix=fix, as_written=True))

    def _meant(self, section: type[ConfigSection], key: str) -> str:
        """Returns the quoted name closest to an unknown key, or the empty string."""
        self._hints += 1
        if self._hints > _MOST_HINTS:
            return ""  # each suggestion takes milliseconds, and a file with so many unknown keys is of another kind
        if "." in key:
            near = closest(key, map(dotted, _every_spelling(self._root)))
        else:
            near = closest(key, [*_names(section), *section.retired, *section.unread.split()])
        if near:
            return f'"{near}"'
        inside = [f"{field}.{key}" for field, names in section.inner.items() if key in names]
        elsewhere = inside or [dotted(path) for path in _every_spelling(self._root) if path[-1] == key]
        return " or ".join(f'"{name}"' for name in elsewhere) if len(elsewhere) <= _MOST_PLACES else ""


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO  # the type first: an array compares element by element


def _no_string(written: KeyPath) -> Problem:
    return Problem(written, text="unknown key", fix="keys are strings", as_written=True)


def _names(section: type[ConfigSection]) -> dict[str, tuple[str, AlsoSpelled | None]]:
    """Returns every spelling of a section's keys -> (the field's name, the mark of a spelling other than that name)."""
    names: dict[str, tuple[str, AlsoSpelled | None]] = {}
    for name, field in section.model_fields.items():
        names[name] = (name, None)
        names.update({mark.name: (name, mark) for mark in spellings(field)})
    return names


def _every_spelling(section: type[ConfigSection], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of every key under each of its valid names."""
    for name, (field, _) in _names(section).items():
        yield (*above, name)
        nested = nested_section(section.model_fields[field])
        if nested is not None:
            yield from _every_spelling(nested, (*above, name))
    for name in (*section.retired, *section.unread.split()):
        yield (*above, name)


def _listed(section: type[ConfigSection]) -> str:
    names = [*section.model_fields, *section.unread.split()]
    return ", ".join(names) if len(names) <= 12 else ", ".join(names[:12]) + ", ..."


def _as_text(meaning: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in meaning.items())
