"""Pipeline parallelism: the stages of a model on ranks of their own, each with ZeRO among its data-parallel ranks."""

from __future__ import annotations

from zeroaccel.config.parallel import PipelineConfig
from zeroaccel.pipeline.pipeline_engine import PipelineEngine

__all__ = ["PipelineConfig", "PipelineEngine"]
