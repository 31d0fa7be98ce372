"""How large the network of a run is. Apart from `gated_network.py`, which needs torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Of a network and its batch."""

    layers: int = 3
    width: int = 64
    inner: int = 128
    tokens: int = 64
    vocabulary: int = 512
