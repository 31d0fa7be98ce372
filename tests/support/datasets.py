"""Datasets of numbers: with indices, as a stream, and as a stream with a length."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[int]):
    """0 ... ``length - 1``, by index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.length


class Stream(IterableDataset[int]):
    """The same numbers, one after another."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class SizedStream(Stream):
    """A stream that says how long it is."""

    def __len__(self) -> int:
        return self.length
