"""Sequence, tensor, expert and pipeline parallelism beside ZeRO, and tiled computation for long sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroaccel.config.parallel import ParallelConfig, PipelineConfig
from zeroaccel.parallel.sequence import SequenceGroup, SequenceLoader
from zeroaccel.parallel.tiling import DeferredLogits, TiledLoss, TiledModules, tiled_cross_entropy
from zeroaccel.parallel.ulysses import UlyssesAttention

if TYPE_CHECKING:
    from zeroaccel.parallel.pipeline_engine import PipelineEngine

__all__ = [
    "DeferredLogits",
    "ParallelConfig",
    "PipelineConfig",
    "PipelineEngine",
    "SequenceGroup",
    "SequenceLoader",
    "TiledLoss",
    "TiledModules",
    "UlyssesAttention",
    "tiled_cross_entropy",
]


def __getattr__(name: str) -> Any:
    # Lazy: torch's schedules, which PipelineEngine extends, take longer to import than the rest of zeroaccel.
    if name != "PipelineEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zeroaccel.parallel.pipeline_engine import PipelineEngine

    return PipelineEngine
