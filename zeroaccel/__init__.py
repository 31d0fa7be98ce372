"""zeroaccel: ZeRO stages 0 to 3 on torch.distributed, without DeepSpeed and without a compiler."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroaccel.assembly import initialize as initialize
    from zeroaccel.zero.engine import Engine as Engine

__all__ = ["Engine", "__version__", "initialize"]
__version__ = "0.1.0"

_HOMES = {"Engine": "zeroaccel.zero.engine", "initialize": "zeroaccel.assembly"}


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line can import the package without importing torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'zeroaccel' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
