"""torch's caching allocator: the block for each request, and the memory reserved for the allocated bytes.

(c10/cuda/CUDACachingAllocator.cpp.) Sizes are rounded to 512 bytes. A request takes the smallest free block of its
stream's pool that is large enough; small requests (up to 1 MiB) and large ones have separate pools. The allocator
splits off the remainder of the block and merges free neighbours. If no block fits, `cudaMalloc` makes a *segment*: 2
MiB for small requests, 20 MiB for those below 10 MiB, otherwise the size in units of 2 MiB. Segments do not merge, so
free bytes in several of them cannot serve one large request: fragmentation. With *expandable* segments each pool is one
segment that grows by pages of 2 MiB (small pool) or 20 MiB (large pool).

Not modelled: memory that returns to the device when it is full, and blocks that wait for `record_stream`'s events.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

_ROUND = 512
_SMALL_NBYTES = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE_FROM = 10 << 20  # a request of this size or more gets a segment of its own
_SEGMENT_ROUND = 2 << 20
_KEEPS_SMALL = 512  # a small block's remainder is split off from this size on, a large block's above 1 MiB


@dataclass(eq=False)
class Block:
    """A range of bytes of a segment, linked to its neighbours; `order` counts the frees."""

    nbytes: int
    pool: tuple[int, bool]
    is_free: bool = False
    order: int = 0
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Assigns blocks to the requests of streams.

    Args:
        expandable: True for expandable segments.

    Attributes:
        allocated, reserved: bytes in use, rounded like the requests, and bytes of all segments.
        peak_allocated, peak_reserved: the maximum of each; `reserved` never falls.
        num_mallocs: number of driver calls that allocated memory.

    Example:
        >>> allocator = CachingAllocator()
        >>> first, second = (allocator.malloc(0, 30 << 20) for _ in range(2))
        >>> allocator.free(first), allocator.free(second)
        (None, None)
        >>> block = allocator.malloc(0, 60 << 20)  # neither segment has room for it
        >>> allocator.reserved >> 20
        120
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self._free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = {}
        self._ends: dict[tuple[int, bool], Block] = {}
        self._count = 0
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.num_mallocs = 0

    def malloc(self, stream: int, nbytes: int) -> Block:
        """Returns the block for a request; `num_mallocs` rises if the driver has to allocate."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        pool = stream, size <= _SMALL_NBYTES
        block = self._best(pool, size) or (self._grown(pool, size) if self._expandable else self._segment(pool, size))
        block.is_free = False
        self._split(block, size)
        self.allocated += block.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def free(self, block: Block) -> None:
        """Returns a block to its pool immediately."""
        assert not block.is_free, "the block was freed before"
        self.allocated -= block.nbytes
        block.is_free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._free[block.pool].remove(self._entry(neighbour))
                self._merge(block, neighbour)
        self._put(block)

    def _best(self, pool: tuple[int, bool], size: int) -> Block | None:
        blocks = self._free.get(pool, [])
        for index, (nbytes, _, block) in enumerate(blocks):
            if nbytes >= size:
                del blocks[index]
                return block
        return None

    def _segment(self, pool: tuple[int, bool], size: int) -> Block:
        if pool[1]:
            nbytes = _SMALL_SEGMENT
        elif size < _LARGE_FROM:
            nbytes = _LARGE_SEGMENT
        else:
            nbytes = -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
        return self._made(pool, nbytes)

    def _grown(self, pool: tuple[int, bool], size: int) -> Block:
        """Extends a pool's segment by the pages that a request needs; returns the block at its end."""
        last = self._ends.get(pool)
        spare = last.nbytes if last is not None and last.is_free else 0
        page = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        block = self._made(pool, -(-(size - spare) // page) * page)
        if last is not None:
            block.before, last.after = last, block
            if spare:
                self._free[pool].remove(self._entry(last))
                self._merge(block, last)
        self._ends[pool] = block
        return block

    def _made(self, pool: tuple[int, bool], nbytes: int) -> Block:
        self.num_mallocs += 1
        self.reserved += nbytes
        return Block(nbytes, pool)

    def _split(self, block: Block, size: int) -> None:
        rest = block.nbytes - size
        if rest < _KEEPS_SMALL if block.pool[1] or self._expandable else rest <= _SMALL_NBYTES:
            return
        block.nbytes = size
        other = Block(rest, block.pool, is_free=True, before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        block.after = other
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = other
        self._put(other)

    def _merge(self, block: Block, neighbour: Block) -> None:
        """Merges the neighbour, which is in no list of free blocks, into `block`."""
        if block.before is neighbour:
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.nbytes += neighbour.nbytes
        if self._ends.get(block.pool) is neighbour:
            self._ends[block.pool] = block

    def _put(self, block: Block) -> None:
        self._count += 1
        block.order = self._count
        insort(self._free.setdefault(block.pool, []), self._entry(block), key=lambda entry: entry[:2])

    @staticmethod
    def _entry(block: Block) -> tuple[int, int, Block]:
        return block.nbytes, block.order, block
