"""Data loaders, under the same module name as in accelerate."""

from __future__ import annotations

from zeroaccel.data import DataLoaderConfiguration, PreparedLoader, prepare_data_loader, skip_first_batches

__all__ = ["DataLoaderConfiguration", "PreparedLoader", "prepare_data_loader", "skip_first_batches"]
