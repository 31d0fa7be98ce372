"""`import deepspeed` for libraries and scripts that are written for DeepSpeed, implemented by zeroaccel's engine.

`install()` puts a finder before Python's own, which provides the modules of `surface` and the metadata of a
distribution of that name; `uninstall()` removes it. `python -m zeroaccel.compat script.py` runs a script, and every
Python process it starts, with it. Nothing of zeroaccel imports this package, and importing it imports no torch: it is
loaded before the user's script.
"""

from __future__ import annotations

from zeroaccel.compat.finder import VERSION, install, is_installed, uninstall

__all__ = ["VERSION", "install", "is_installed", "uninstall"]
