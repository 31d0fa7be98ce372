"""Data loaders: sharding of samples over the ranks, their order, and the position for resuming.

`prepare_data_loader` shards a user's loader; `build_dataloader` creates a loader for the dataset of
`zeroaccel.initialize(training_data=...)`. The engine does not depend on loaders.
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
