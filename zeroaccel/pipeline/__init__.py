"""Pipeline parallelism: the stages of a model on ranks of their own, each with ZeRO among its data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroaccel.config.parallel import PipelineConfig

if TYPE_CHECKING:
    from zeroaccel.pipeline.pipeline_engine import PipelineEngine

__all__ = ["PipelineConfig", "PipelineEngine"]


def __getattr__(name: str) -> Any:
    # Lazy, since torch's schedules, which it extends, take longer to import than the rest of zeroaccel.
    if name != "PipelineEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zeroaccel.pipeline.pipeline_engine import PipelineEngine

    return PipelineEngine
