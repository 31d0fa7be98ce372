"""Trackers, where scripts for accelerate import them from."""

from __future__ import annotations

from zeroaccel.telemetry.trackers import GeneralTracker, TensorBoardTracker, WandBTracker

__all__ = ["GeneralTracker", "TensorBoardTracker", "WandBTracker"]
