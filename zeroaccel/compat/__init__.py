"""`import deepspeed` for libraries and scripts written for DeepSpeed, implemented by zeroaccel's engine.

`install()` puts a finder before Python's own finders; it provides the modules of `surface` and the metadata of a
`deepspeed` distribution. `uninstall()` removes it. `python -m zeroaccel.compat script.py` installs it for a script and
every Python process that the script starts. The rest of zeroaccel does not import this package, and importing it does
not import torch: it is loaded before the user's script.
"""

from __future__ import annotations

from zeroaccel.compat.finder import VERSION, install, is_installed, uninstall

__all__ = ["VERSION", "install", "is_installed", "uninstall"]
