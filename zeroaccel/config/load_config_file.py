"""Loading a config: read, translate to the schema's names, validate, check, and report all that is wrong at once.

The only maker of `Config`. The steps are the neighbours `document`, `normalize`, `schema`, `support` and `checks`;
this file is their order. `resolve` fills "auto" if facts are given; merging other sources is up to the caller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from zeroaccel.config.auto_values import Facts, translate
from zeroaccel.config.checks import contradictions
from zeroaccel.config.diagnostics import KeyPath, Problem, Provenance, at, from_pydantic, report
from zeroaccel.config.document import Document, key_paths, read_document
from zeroaccel.config.normalize import UnknownKeys
from zeroaccel.config.schema import Config
from zeroaccel.config.support import refusals, support_notes
from zeroaccel.logs import log_note


def load_config(
    source: Mapping[str, Any] | str | os.PathLike[str] | Document | Config,
    *,
    sources: Mapping[str, str] | None = None,
    facts: Facts | None = None,
    unknown_keys: UnknownKeys = "standard",
) -> Config:
    """Loads and checks a config in the DeepSpeed JSON format.

    Keys whose value is "auto" are filled from `facts`; without them, they read as their defaults and are listed in
    `Config.unresolved`. `gradient_clipping` is 0, off, unless given. Keys that are accepted without effect are in
    `Config.notes` and logged once, with their place: as a warning where something that was asked for does not happen,
    else for information.

    Args:
        source: a dict, which is not changed; the path of a file; JSON text; or urlsafe base64 of JSON. Comments,
            trailing commas and unquoted keys (JSON5) are read. Or one of these that is read already; a `Config` is
            returned as it is.
        sources: dotted path, as written -> where its value came from, for a dict merged from several places; used in
            messages and in `Config.sources`.
        facts: what every "auto" is filled from. A `Config` has been made with its own.
        unknown_keys: what to do with keys that do not exist, where DeepSpeed ignores them. "strict": an error.
            "standard": an error if the key looks like a known one or is one of another section, else a warning.
            "lenient": a warning.

    Raises:
        ConfigError: the source cannot be read, or settings in it are wrong, contradict a fact or stay "auto": all of
            them, one line each, in the order in which they were written.

    Example:
        >>> config = load_config({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
        >>> config.precision, config.zero_optimization.stage
        ('bf16', 3)
        >>> load_config({"zero_optimization": {"stage": 4}})
        Traceback (most recent call last):
        zeroaccel.errors.ConfigError: zero_optimization.stage: expected 0, 1, 2 or 3, got 4
    """
    if isinstance(source, Config):
        return source
    # 1. Read, and remember where each key was written.
    document = source if isinstance(source, Document) else read_document(source)

    # 2. Translate to the schema's names, and fill "auto" before values are validated, as a fact may be what is wrong.
    normalized, filled, as_given, origin = translate(document, sources, facts, unknown_keys)

    # 3. Validate values. The checks between keys then leave out the keys that are wrong, so that one mistake is one
    # line; and a switch that is still "auto" neither enables nor refuses its section.
    config, invalid = _validated(filled.tree, origin)
    unresolved = {path for path in normalized.unresolved if path not in filled.sources or path[-1] == "enabled"}
    unresolved = {path for path in unresolved if at(filled.tree, path) is None}
    wrong_values = {problem.path for problem in invalid}
    among = list(contradictions(config, wrong_values))
    reported = wrong_values | {problem.path for problem in among}
    problems = [
        *document.problems,
        *normalized.problems,
        *invalid,
        *(problem for problem in filled.problems if problem.path not in reported),
        *refusals(config, unresolved),
        *among,
    ]
    if problems:
        raise report(problems, origin, key_paths(document.tree))

    # 4. Notes on what is accepted without effect; a place in them is the user's own, without what filled the value.
    notes = [*document.notes, *normalized.notes, *filled.notes, *support_notes(config, origin.written, unresolved)]
    config._origin = replace(origin, notes=tuple(note.line(as_given) for note in notes))
    for note, line in zip(notes, config.notes, strict=True):
        log_note(logging.WARNING if note.warns else logging.INFO, line)
    return config


def _validated(tree: dict[str, Any], origin: Provenance) -> tuple[Config, list[Problem]]:
    """The config made of all values that are right, and a problem for each that is not."""
    problems: list[Problem] = []
    while True:
        try:
            return Config.model_validate(tree, context=origin), problems
        except ValidationError as error:
            for entry in error.errors(include_url=False):
                problem = from_pydantic(entry)
                problems.append(problem)
                tree = _without(tree, problem.path[:-1] if entry["type"] == "missing" else problem.path)


def _without(tree: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """A copy of the tree in which the key at `path` is absent; within a list, the list."""
    key = str(path[0])
    if key not in tree:
        return tree
    rest = {name: value for name, value in tree.items() if name != key}
    if len(path) > 1 and isinstance(tree[key], dict):
        rest[key] = _without(tree[key], path[1:])
    return rest
