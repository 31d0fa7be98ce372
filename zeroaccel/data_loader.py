"""Loaders, where scripts for accelerate import them from."""

from __future__ import annotations

from zeroaccel.data import DataLoaderConfiguration, PreparedLoader, prepare_data_loader, skip_first_batches

__all__ = ["DataLoaderConfiguration", "PreparedLoader", "prepare_data_loader", "skip_first_batches"]
