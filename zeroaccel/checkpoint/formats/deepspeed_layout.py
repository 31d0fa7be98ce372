"""Where the elements of a parameter are in DeepSpeed's flat partitions: arithmetic only, no files.

A `Run` says that elements from `start` of some sequence lie at a byte of a file. A rank's sequence is cut and put
together anew into the runs of one parameter, which are the pieces of a `TensorRecord`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zeroaccel.checkpoint.manifest import Piece
from zeroaccel.errors import CheckpointError

__all__ = ["Elements", "FlatPosition", "from_chunks", "from_partitions", "pieces"]


class FlatPosition(NamedTuple):
    """Elements [start, start + length) of a parameter are at element `offset` of what rank `rank` has."""

    rank: int
    start: int
    length: int
    offset: int


class Elements:
    """A rank's sequence of elements, put together from contiguous runs in files.

    Args:
        itemsize: bytes per element.
    """

    def __init__(self, itemsize: int) -> None:
        self.itemsize = itemsize
        self.numel = 0
        self._runs: list[Piece] = []

    def append(self, file: int, length: int, offset: int) -> None:
        """Adds `length` elements that begin at byte `offset` of a file."""
        if length:
            self._runs.append((file, self.numel, length, offset))
            self.numel += length

    def cut(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(file, length, byte offset) of elements [start, start + length), which must exist."""
        assert start >= 0 and start + length <= self.numel, "a cut outside of a sequence"
        index = bisect_right(self._runs, start, key=lambda run: run[1]) - 1
        while length:
            file, begin, available, offset = self._runs[index]
            count = min(length, begin + available - start)
            yield file, count, offset + (start - begin) * self.itemsize
            start, length, index = start + count, length - count, index + 1


def pieces(places: Sequence[FlatPosition], ranks: Sequence[Elements], where: str) -> tuple[Piece, ...]:
    """The pieces of one parameter.

    Raises:
        CheckpointError: a rank has fewer elements than the parameter needs of it.
    """
    found: list[Piece] = []
    for place in places:
        held = ranks[place.rank]
        if place.offset + place.length > held.numel:
            raise CheckpointError(
                f"{where}: the partition of rank {place.rank}",
                expected=f"at least {place.offset + place.length} elements",
                got=held.numel,
                fix="the files are of different saves, or of a layout that is not known",
            )
        start = place.start
        for file, length, offset in held.cut(place.offset, place.length):
            if found and found[-1][0] == file and found[-1][3] + found[-1][2] * held.itemsize == offset:
                found[-1] = (file, found[-1][1], found[-1][2] + length, found[-1][3])
            else:
                found.append((file, start, length, offset))
            start += length
    return tuple(found)


def from_partitions(
    numels: Sequence[int], gaps: Sequence[int], partition_numel: int, world_size: int, where: str
) -> list[list[FlatPosition]]:
    """Stages 1 and 2: a group is one flat vector of its parameters, cut into equal partitions.

    Args:
        numels: of the parameters, in the order of the vector.
        gaps: elements of padding behind each parameter.
        partition_numel: elements per rank, with the padding at the end.

    Returns:
        The places of each parameter.

    Raises:
        CheckpointError: the vector is not as long as the parameters and their padding make it.
    """
    used = sum(numels) + sum(gaps)
    whole = partition_numel * world_size
    if not used <= whole < used + 2 * world_size + 1:  # the end is padded to a multiple of at most 2 W elements
        raise CheckpointError(
            f"{where}: {world_size} partitions of {partition_numel} elements",
            expected=f"{used} elements and at most {2 * world_size} of padding",
            got=whole,
            fix="the files are of different saves, or of a layout that is not known",
        )
    found: list[list[FlatPosition]] = []
    cursor = 0
    for numel, gap in zip(numels, gaps, strict=True):
        places = []
        start = 0
        while start < numel:
            rank, offset = divmod(cursor + start, partition_numel)
            length = min(numel - start, partition_numel - offset)
            places.append(FlatPosition(rank, start, length, offset))
            start += length
        found.append(places)
        cursor += numel + gap
    return found


def from_chunks(numels: Sequence[int], world_size: int) -> tuple[list[list[FlatPosition]], int]:
    """Stage 3: every parameter is cut into W chunks of ceil(numel / W); a rank has its chunks one behind the other.

    Returns:
        (the places of each parameter, elements per rank with padding).
    """
    found: list[list[FlatPosition]] = []
    cursor = 0
    for numel in numels:
        chunk = -(-numel // world_size)
        found.append(
            [
                FlatPosition(rank, rank * chunk, min(chunk, numel - rank * chunk), cursor)
                for rank in range(world_size)
                if rank * chunk < numel
            ]
        )
        cursor += chunk
    return found, cursor
