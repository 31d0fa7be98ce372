"""Data loaders: how samples are sharded over the ranks, in which order, and the position to resume from.

`prepare_data_loader` shards a user's loader; `build_dataloader` makes a loader of a dataset for
`zeroaccel.initialize(training_data=...)`. The engine knows no loaders.
"""

from __future__ import annotations

from zeroaccel.data.prepared_loader import (
    DataLoaderConfiguration,
    PreparedLoader,
    prepare_data_loader,
    skip_first_batches,
)
from zeroaccel.data.training_data import build_dataloader

__all__ = [
    "DataLoaderConfiguration",
    "PreparedLoader",
    "build_dataloader",
    "prepare_data_loader",
    "skip_first_batches",
]
