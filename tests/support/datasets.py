"""Datasets of numbers: map-style, iterable, and iterable with a length."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[int]):
    """The numbers 0 ... ``length - 1``, by index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.length


class Stream(IterableDataset[int]):
    """Iterates over the same numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class SizedStream(Stream):
    """An iterable dataset with a length."""

    def __len__(self) -> int:
        return self.length
