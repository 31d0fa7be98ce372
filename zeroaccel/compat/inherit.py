"""How the facade reaches processes that a process starts: by variables that Python reads at its start.

A folder with a `sitecustomize` goes first on PYTHONPATH; that file installs the finder and then runs the
`sitecustomize` that it hides, if there is one. Pure: the caller sets the variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["SWITCH", "inherited_environment"]

SWITCH = "ZEROACCEL_COMPAT"
"""Set to "1", or to "shadow" where a real DeepSpeed is to be replaced."""

_STARTUP = str(Path(__file__).parent / "startup")


def inherited_environment(environ: Mapping[str, str], *, shadow: bool = False) -> dict[str, str]:
    """The variables to set for children, given those that they have."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _STARTUP]
    return {"PYTHONPATH": os.pathsep.join([_STARTUP, *paths]), SWITCH: "shadow" if shadow else "1"}
