"""Data: who gets which samples, in which order, and where each loader is.

`prepare_data_loader` deals a user's loader out to ranks; `build_dataloader` makes one of a dataset for
`zeroaccel.initialize`. Below the faces nothing knows of loaders.
"""

from __future__ import annotations

from zeroaccel.data.loader_preparation import DataLoaderConfiguration, prepare_data_loader
from zeroaccel.data.prepared_loader import PreparedLoader, skip_first_batches
from zeroaccel.data.training_data import build_dataloader

__all__ = [
    "DataLoaderConfiguration",
    "PreparedLoader",
    "build_dataloader",
    "prepare_data_loader",
    "skip_first_batches",
]
