"""Filling "auto": a config tree and the facts in, the same tree without "auto" out, and per value how it came about.

`auto_rules` holds the rules and `facts` what they read; this file applies them. `load` calls `fill` between translating
the keys and validating the values; `resolve` is the same for whoever wants the plain dict. Facts are never looked up
here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroaccel.config.auto_rules import RULES, Known, Rule, shown
from zeroaccel.config.document import given_paths, read_document
from zeroaccel.config.facts import Fact, Facts
from zeroaccel.config.normalize import NormalizedConfig
from zeroaccel.config.problems import Note, Problem, report
from zeroaccel.config.provenance import Path, Provenance, dotted
from zeroaccel.config.schema import Config
from zeroaccel.config.section import ConfigSection, nested_section, spellings

__all__ = ["Filled", "Resolved", "after", "as_written", "fill", "resolve", "spelled"]

_OPTIONAL = ("optimizer", "scheduler")
"""Sections that facts complete but never create: whether there is one decides who makes the object."""


@dataclass(frozen=True)
class Resolved:
    """A config tree in which every value is known.

    Attributes:
        tree: the plain dict, in the spelling it was written in; older forms of a key are in today's.
        sources: dotted path in `tree` -> where the value came from, or the formula that filled it. Also of an "auto"
            whose key is now absent, as its default is not written down.
    """

    tree: dict[str, Any]
    sources: Mapping[str, str]


@dataclass
class Filled:
    """What the rules made of a tree in the schema's names.

    Attributes:
        tree: with the values that were found; an "auto" left to its default is absent, or that default.
        sources: path -> how its value came about, of every key that was "auto" or came from a fact.
        notes: of each "auto" that took its default.
        problems: contradictions, and "auto" that nothing fills.
    """

    tree: dict[str, Any]
    sources: dict[Path, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def resolve(tree: Mapping[str, Any], facts: Facts, *, sources: Mapping[str, str] | None = None) -> Resolved:
    """Fills every "auto" of a config tree.

    Args:
        tree: a config in the DeepSpeed JSON format; it is not changed.
        facts: what is known beside it.
        sources: dotted path as written -> where its value came from, told in messages and handed on.

    Returns:
        Its `tree` and `sources` are what `load_config` takes.

    Raises:
        ConfigError: a fact contradicts a value, nothing fills an "auto" that needs a value, or a key is unknown: all
            of them, one line each.
    """
    document = read_document(tree)
    order = list(given_paths(document.tree))
    canonical = NormalizedConfig(Config, document.tree)
    places = {path: sources[dotted(path)] for path in order if dotted(path) in sources} if sources else {}
    filled = fill(canonical.tree, canonical.unresolved, facts)
    problems = [*canonical.problems, *filled.problems]
    if problems:
        raise report(problems, Provenance(places=places, written=canonical.written), order)
    written = canonical.written
    told = {path: places[written[path]] for path in written if written[path] in places}
    for path, how in filled.sources.items():
        told[path] = after(told.get(path), how)
    return Resolved(
        as_written(filled.tree, (), written),
        {dotted(spelled(path, written)): source for path, source in told.items()},
    )


def after(place: str | None, how: str) -> str:
    """The source of a filled value: where "auto" was written, if that is known, and what filled it."""
    return how if place is None else f"{place} ({how})"


def fill(tree: dict[str, Any], unresolved: Collection[Path], facts: Facts) -> Filled:
    """Applies the rules of `auto_rules`.

    Args:
        tree: in the schema's names, without "auto"; it is filled in place.
        unresolved: paths whose value is "auto".
        facts: what is known beside it.
    """
    filled, known = Filled(tree), Known(facts, tree)
    for rule in RULES:
        _apply(rule, known, filled, unresolved)
    ruled = {rule.path for rule in RULES}
    for path in unresolved:
        if any(key[: len(path)] == path for key in filled.sources if key != path):
            filled.sources[path] = "filled key by key"
        elif dotted(path) not in ruled:
            _leave(path, "", filled)
    return filled


def _apply(rule: Rule, known: Known, filled: Filled, unresolved: Collection[Path]) -> None:
    path: Path = tuple(rule.path.split("."))
    stated, given = rule.stated(known), known.at(rule.path)
    if given is not None:
        if stated is not None and stated.binding and not _same(given, stated.value):
            filled.problems.append(_contradiction(rule, given, stated))
        return
    is_auto = path in unresolved or (path[0] not in _OPTIONAL and any(path[:end] in unresolved for end in (1, 2)))
    if is_auto:
        fact = rule.fill(known)
    else:
        has_section = path[0] not in _OPTIONAL or known.at(str(path[0])) is not None
        fact = stated if stated is not None and stated.binding and rule.completes and has_section else None
    if fact is not None:
        _put(filled, path, fact)
    elif path in unresolved and rule.needed(known):
        filled.problems.append(Problem(path, text='"auto", and nothing says what it is', fix=rule.fix))
    elif path in unresolved:
        _leave(path, rule.otherwise, filled)


def _contradiction(rule: Rule, given: object, stated: Fact[Any]) -> Problem:
    return Problem(
        tuple(rule.path.split(".")),
        text=f"{shown(given)} here, but {shown(stated.value)} from {stated.source}",
        fix=f'write {shown(stated.value)} or "auto" here, or {rule.reverse(given)} there',
    )


def _same(given: object, stated: object) -> bool:
    if isinstance(given, (list, tuple)) and isinstance(stated, (list, tuple)):
        return list(given) == list(stated)
    if isinstance(given, str) and isinstance(stated, str):
        return given.lower() == stated.lower()  # words may be written in any case
    return given == stated


def _put(filled: Filled, path: Path, fact: Fact[Any]) -> None:
    tree = filled.tree
    for part in path[:-1]:
        if tree.get(str(part)) is None:
            tree[str(part)] = {}
        tree = tree[str(part)]
        if not isinstance(tree, dict):
            return  # what stands in place of the section is wrong by itself
    tree[str(path[-1])] = fact.value
    filled.sources[path] = fact.source


def _leave(path: Path, why: str, filled: Filled) -> None:
    """Leaves an "auto" to its default, which is written down where it is a plain value."""
    default = _default(path)
    source = "default" if default is None else f"default {shown(default)}"
    if len(path) > 2 and path[0] in _OPTIONAL:
        source = f"default of {filled.tree[str(path[0])].get('type', 'its type')}"
    source += f", {why}" if why else ""
    if default is not None:
        _put(filled, path, Fact(default, source))
    filled.sources[path] = source
    filled.notes.append(Note(path, f'"auto" is left to its {source}', in_schema=True))


def _default(path: Path) -> Any:
    """The schema's default of a key, or None if it has none that could be written down."""
    section: type[ConfigSection] | None = Config
    default: Any = None
    for part in path:
        declared = section.model_fields.get(str(part)) if section is not None else None
        if declared is None:
            return None
        default, section = declared.default, nested_section(declared)
    return default if isinstance(default, (bool, int, float, str)) else None


# -- back to the spelling in which it was written


def as_written(tree: Mapping[str, Any], path: Path, written: Mapping[Path, Path]) -> dict[str, Any]:
    """A tree in the schema's names (the part of it at `path`) as a plain dict in the spelling that was written."""
    return {
        str(spelled((*path, name), written)[-1]): (
            as_written(value, (*path, name), written) if isinstance(value, dict) else value
        )
        for name, value in tree.items()
    }


def spelled(path: Path, written: Mapping[Path, Path]) -> Path:
    """The path with every key under the name it was written with, unless that is an older form."""
    section: type[ConfigSection] | None = Config
    spelled: list[str | int] = []
    for depth, part in enumerate(path, 1):
        declared = section.model_fields.get(str(part)) if section is not None else None
        others = {mark.name for mark in spellings(declared) if not mark.deprecated} if declared is not None else set()
        name = written.get(path[:depth], (part,))[-1]
        spelled.append(name if name in others else part)
        section = nested_section(declared) if declared is not None else None
    return tuple(spelled)
