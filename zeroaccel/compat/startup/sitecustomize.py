"""Python runs this module at the start of processes that inherit the facade; see `zeroaccel.compat.finder`."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

__all__: list[str] = []

_HERE = Path(__file__).parent


def _install() -> None:
    from zeroaccel.compat import install

    install(shadow=os.environ.get("ZEROACCEL_COMPAT") == "shadow")


def _run_hidden() -> None:
    """Runs the `sitecustomize` that Python would find without this folder."""
    paths = [path for path in sys.path if Path(path or ".").resolve() != _HERE.resolve()]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("ZEROACCEL_COMPAT"):
    _install()
_run_hidden()
