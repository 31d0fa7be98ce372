"""Trackers, under the same module name as in accelerate."""

from __future__ import annotations

from zeroaccel.telemetry.trackers import GeneralTracker, TensorBoardTracker, WandBTracker, register_tracker_class

__all__ = ["GeneralTracker", "TensorBoardTracker", "WandBTracker", "register_tracker_class"]
