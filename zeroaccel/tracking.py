"""Trackers, under the same module name as in accelerate."""

from __future__ import annotations

from zeroaccel.telemetry.trackers import GeneralTracker, TensorBoardTracker, WandBTracker

__all__ = ["GeneralTracker", "TensorBoardTracker", "WandBTracker"]
