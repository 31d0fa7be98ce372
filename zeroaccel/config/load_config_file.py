"""Loads a config: reads it, translates it to the schema's names, validates and checks it, and reports all mistakes.

Only this module creates a `Config`. It runs the steps of `document`, `normalize`, `schema`, `support` and `checks` in
order; `auto_values` fills "auto" if facts are given. The caller merges other sources.
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

    `facts` fill the keys whose value is "auto"; without facts, their attributes have defaults, and `Config.unresolved`
    lists them. `gradient_clipping` defaults to 0, no clipping. `Config.notes` lists keys without effect, which are
    logged once with their place: as a warning if a requested effect is missing, else as information.

    Args:
        source: a dict, which stays unchanged; the path of a file; JSON text; or urlsafe base64 of JSON. Comments,
            trailing commas and unquoted keys (JSON5) are valid. Also a `Document`; a `Config` is returned unchanged.
        sources: dotted path, as written -> source of its value, for a dict merged from several places; used in
            messages and in `Config.sources`.
        facts: facts that fill every "auto". A given `Config` already has its own.
        unknown_keys: handling of unknown keys that DeepSpeed ignores. "strict" raises an error. "standard" raises an
            error if the key resembles a known key or belongs to another section, else warns. "lenient" warns.

    Raises:
        ConfigError: the source is unreadable, or settings in it are invalid, contradict a fact or stay "auto"; the
            message lists all of them in the order of the source, one per line.

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
    # 1. Read the source, with the place of each key.
    document = source if isinstance(source, Document) else read_document(source)

    # 2. Translate to the schema's names, and fill "auto" before validating values, because a fact may be invalid.
    normalized, filled, as_given, origin = translate(document, sources, facts, unknown_keys)

    # 3. Validate values. The checks between keys then skip invalid keys, so that each mistake takes one line. A switch
    # that is still "auto" neither enables nor refuses its section.
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

    # 4. Collect notes on keys without effect; their places are the user's, without the source of filled values.
    notes = [*document.notes, *normalized.notes, *filled.notes, *support_notes(config, origin.written, unresolved)]
    config._origin = replace(origin, notes=tuple(note.line(as_given) for note in notes))
    for note, line in zip(notes, config.notes, strict=True):
        log_note(logging.WARNING if note.warns else logging.INFO, line)
    return config


def _validated(tree: dict[str, Any], origin: Provenance) -> tuple[Config, list[Problem]]:
    """Returns the config with all valid values, and a problem for each invalid one."""
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
    """Returns a copy of the tree without the key at `path`; for a path into a list, without the list."""
    key = str(path[0])
    if key not in tree:
        return tree
    rest = {name: value for name, value in tree.items() if name != key}
    if len(path) > 1 and isinstance(tree[key], dict):
        rest[key] = _without(tree[key], path[1:])
    return rest
