"""What the launcher said about training, read from this process's environment: no other face looks."""

from __future__ import annotations

import os
from collections.abc import Mapping

from zeroaccel.config.launch.launch_sources import LaunchedSettings, from_environment

__all__ = ["launched"]


def launched(environ: Mapping[str, str] | None = None) -> tuple[LaunchedSettings, dict[str, str]]:
    """The settings of the launch, and field -> who said it.

    Args:
        environ: instead of this process's environment.

    Raises:
        ConfigError: a variable has a value that means nothing.
    """
    return from_environment(os.environ if environ is None else environ)
