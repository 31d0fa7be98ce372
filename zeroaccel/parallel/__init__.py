"""Parallelism beside ZeRO's: sequences that are cut over ranks."""

from __future__ import annotations

from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.parallel.sequence import SequenceGroup, SequenceLoader
from zeroaccel.parallel.ulysses import UlyssesAttention

__all__ = ["ParallelConfig", "SequenceGroup", "SequenceLoader", "UlyssesAttention"]
