"""`zeroaccel config`: making, changing and explaining launch files.

`questions` is one table, from which the wizard (`walk`, `prompts`), the flags and their checks (`given`) and the launch
file (`render`) are made; `command` puts them together, and beside it are the sub-commands that read files.
"""

from __future__ import annotations

from .config_command import config

__all__ = ["config"]
