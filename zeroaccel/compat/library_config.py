"""Configs as accelerate, transformers and TRL pass them to `deepspeed`: read with the place of each key, and corrected.

These libraries read a file into a dict, change it, and pass the dict. `ReadConfig` is such a dict that remembers its
file. `from_library` converts it to the documented format, since the libraries also add keys that users do not write and
that the config checks would refuse. `finder` lets accelerate's reader call `read`.
"""

from __future__ import annotations

import copy
import enum
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroaccel.config import Config
from zeroaccel.config.auto_values import after
from zeroaccel.config.diagnostics import at, put
from zeroaccel.config.document import Document, key_paths, read_document
from zeroaccel.errors import ConfigError
from zeroaccel.logs import log_note

_CLIPPING = 1.0  # DeepSpeed's default since 0.19.3
_SECTIONS = ("zero_optimization", "optimizer", "scheduler", "fp16", "bf16")


class ReadConfig(dict[str, Any]):
    """The content of a config file, which a library changes; copies remember the file, and pickled ones are dicts."""

    def __init__(self, tree: Mapping[str, Any], document: Document) -> None:
        super().__init__(tree)
        self.document = document

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadConfig:
        return ReadConfig({key: copy.deepcopy(value, memo) for key, value in self.items()}, self.document)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def read(source: Any) -> Any:
    """Reads a file or a text into a `ReadConfig`; returns dicts unchanged.

    Raises:
        ConfigError: as for `read_document`.
    """
    if not isinstance(source, (str, os.PathLike)):
        return source
    document = read_document(source)
    return ReadConfig(copy.deepcopy(document.tree), document)


def from_library(config: Mapping[str, Any] | str | os.PathLike[str] | Config) -> Document:
    """Returns the config in the documented format, with the places of keys that came from a file.

    A dotted key at the top level of a dict, such as TRL's "zero_optimization.reduce_bucket_size", moves into its
    section; accelerate's `steps_per_print: inf` is removed; members of DeepSpeed's enumerations become their values.

    Raises:
        ConfigError: as for `read_document`; or the section of a dotted key is not an object.
    """
    if not isinstance(config, Mapping):
        return read_document(config.raw if isinstance(config, Config) else config)
    tree: dict[str, Any] = _values(copy.deepcopy(dict(config)))
    for key in [key for key in tree if "." in key and key.partition(".")[0] in _SECTIONS]:
        value = tree.pop(key)
        size = int(value) if isinstance(value, float) else value  # computed, such as 0.9 * hidden ** 2
        if at(tree, key) in (None, "auto") and not put(tree, key.split("."), size):
            raise ConfigError(key, expected="an object for its section", got=at(tree, key.rpartition(".")[0]))
    if tree.get("steps_per_print") == math.inf:
        del tree["steps_per_print"]
    if not isinstance(config, ReadConfig):
        return replace(read_document({}), tree=tree)
    document = config.document
    places = dict(document.places)
    for path in key_paths(tree):
        if at(document.tree, path) == "auto" and at(tree, path) != "auto":
            places[path] = after(places.get(path), '"auto", which the program filled in')
    return replace(document, tree=tree, places=places)


def with_clipping(
    config: Mapping[str, Any] | str | os.PathLike[str] | Config | Document, *, has_optimizer: bool = False
) -> Document:
    """Reads a config and adds DeepSpeed's clipping if it sets none: gradients are clipped at norm 1.0.

    accelerate omits the key if a launcher or its environment asks for 0; then nothing is clipped.

    Args:
        has_optimizer: log a note, as for a config with an optimizer.
    """
    document = config if isinstance(config, Document) else from_library(config)
    if document.tree.get("gradient_clipping", "auto") != "auto":
        return document
    asked = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "")
    norm = 0.0 if asked.strip() in ("0", "0.0") else _CLIPPING
    if norm and (has_optimizer or document.tree.get("optimizer")):
        log_note(
            logging.WARNING,
            f"gradient_clipping: not in the config, so gradients are clipped at norm {norm}, as DeepSpeed clips since "
            "0.19.3; set it to this norm, or to 0 to clip nothing",
        )
    places = {("gradient_clipping",): "DeepSpeed's default", **document.places}
    return replace(document, tree={**document.tree, "gradient_clipping": norm}, places=places)


def _values(tree: Any) -> Any:
    """Replaces members of enumerations, such as `OffloadDeviceEnum.cpu`, by their values."""
    if isinstance(tree, Mapping):
        return {key: _values(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_values(value) for value in tree]
    return tree.value if isinstance(tree, enum.Enum) else tree
