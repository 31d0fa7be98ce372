"""The size of a run's network. Apart from `gated_network.py`, which needs torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Size of a network and its batch."""

    layers: int = 3
    width: int = 64
    inner: int = 128
    tokens: int = 64
    vocabulary: int = 512
