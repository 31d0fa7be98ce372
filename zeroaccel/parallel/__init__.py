"""Parallelism beside ZeRO's: sequences that are cut over ranks, and long ones tile by tile."""

from __future__ import annotations

from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.parallel.sequence import SequenceGroup, SequenceLoader
from zeroaccel.parallel.tiling import DeferredLogits, TiledLoss, TiledModules, tiled_cross_entropy
from zeroaccel.parallel.ulysses import UlyssesAttention

__all__ = [
    "DeferredLogits",
    "ParallelConfig",
    "SequenceGroup",
    "SequenceLoader",
    "TiledLoss",
    "TiledModules",
    "UlyssesAttention",
    "tiled_cross_entropy",
]
