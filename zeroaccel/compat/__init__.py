"""What libraries that know DeepSpeed import, answered by zeroaccel's engine.

`install()` puts a finder in front of Python's own, so that `import deepspeed` and the metadata of a distribution of
that name are answered with the surface of `surface`; `uninstall()` takes everything back. `python -m zeroaccel.compat
script.py` runs a script, and every Python process it starts, with it. Nothing of zeroaccel imports this package, and
importing it imports no torch: it is loaded before the user's script.
"""

from __future__ import annotations

from zeroaccel.compat.finder import VERSION, install, is_installed, uninstall

__all__ = ["VERSION", "install", "is_installed", "uninstall"]
