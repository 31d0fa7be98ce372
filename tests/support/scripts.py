"""Loads scripts of the tree that belong to no package as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.support.environment import ROOT


def load_script(path: str) -> ModuleType:
    """Loads a file, given relative to the root of the tree, as a module."""
    name = "_script_" + path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    return module
