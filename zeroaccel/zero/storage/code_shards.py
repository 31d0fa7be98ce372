"""Frozen weights as codes, in any tier: a `ShardStorage` on top of another one that stores the code's bytes.

The decoded values are the weights; encoding discards the rounded bits. The buffer's layout is aligned to blocks, so
that a parameter's values do not depend on its neighbours, on the ranks or on the stage. Gathers send codes, which each
rank decodes into the full buffer; if every rank has the whole code, decoding needs no gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from zeroaccel.comm.collective_tracker import DONE
from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.comm.level_codes import FORMATS, decode, decode_rows, encode
from zeroaccel.zero.layout import FlatLayout, FlatRange, FlatTensor
from zeroaccel.zero.storage.shards import ShardPlace, ShardStorage


class CodeShard(ShardStorage):
    """Codes of this rank's weights of one frozen buffer.

    Args:
        format: a key of `FORMATS`.
        make: creates the storage of the code's bytes in a tier.
        whole: every rank has the code of all N elements.
    """

    rounds_writes = True

    def __init__(
        self, place: ShardPlace, format: str, make: Callable[[ShardPlace], ShardStorage], *, whole: bool
    ) -> None:
        super().__init__(place, persistent=whole)
        self._codec = FORMATS[format]
        self._device = place.full.device
        nbytes = code_nbytes(format, self.range.numel)
        ranks = 1 if whole else place.layout.world_size
        self._bytes = FlatLayout((), ranks * nbytes, (nbytes,) * ranks)
        codes = place.full.new_empty(nbytes if whole else 0, dtype=torch.uint8)
        self._codes = make(replace(place, layout=self._bytes, rank=0 if whole else place.rank, full=codes))
        self.is_swapped = self._codes.is_swapped
        self._staged: Tensor | None = None

    # -- values

    def elements(self, interval: FlatRange) -> Tensor:
        blocks, code = self._code_of(interval)
        return self._decoded(code, blocks.numel)[interval.at(blocks.start)]

    def write(self, interval: FlatRange, values: Tensor) -> None:
        if not interval:
            return
        # The values of a block share a scale: a block that `interval` covers only partly is decoded and encoded again.
        blocks, code = self._code_of(interval)
        changed = self._decoded(code, blocks.numel)
        changed[interval.at(blocks.start)].copy_(values)
        encode(changed, self._codec, code)
        cut = self._codec.scales_nbytes(blocks.numel)
        for run, first in zip(self._runs(blocks), (0, cut), strict=True):
            self._codes.write(run, code[first : first + run.numel])

    def stage(self) -> FlatTensor:
        device = next((tensor.device for tensor in self._codes.tensors()), torch.device("cpu"))
        self._staged = torch.empty(self.range.numel, dtype=self.dtype, device=device)
        return FlatTensor(self.range, self._staged)

    def commit(self) -> None:
        assert self._staged is not None, "committed before it was staged"
        staged, self._staged = self._staged, None
        encode(staged, self._codec, self._codes.stage().values)
        self._codes.commit()

    def discard(self) -> None:
        self._staged = None
        self._codes.discard()

    # -- gathers

    def prepare_gather(self, full: Tensor, collectives: Collectives, label: str, *, exact: bool) -> Callable[[], Work]:
        if self._bytes.world_size == 1 and (code := self.gather_input()).device == full.device:
            decode(code, self._codec, full)
            return lambda: DONE
        codes = full.new_empty(self._bytes.numel, dtype=torch.uint8)

        def take() -> None:
            if not exact:
                self.secondary.keep(codes, collectives)
            self._decode_rows(codes, full)

        gather = self._codes.prepare_gather(codes, collectives, label, exact=True)
        return lambda: _DecodedGather(gather(), take)

    def prepare_secondary_gather(self, full: Tensor, collectives: Collectives, label: str) -> Callable[[], Work]:
        codes = full.new_empty(self._bytes.numel, dtype=torch.uint8)
        gather = self.secondary.prepare_gather(codes, collectives, label)
        return lambda: _DecodedGather(gather(), lambda: self._decode_rows(codes, full))

    def keep_secondary(self, full: Tensor, collectives: Collectives) -> None:
        """Does nothing: `prepare_gather` has copied a part of the codes, which are smaller than the values."""

    def _decode_rows(self, codes: Tensor, full: Tensor) -> None:
        ranks = self._bytes.world_size
        decode_rows(codes.view(ranks, -1), self._codec, full.view(ranks, -1))

    # -- the bytes

    def gather_input(self) -> Tensor:
        return self._codes.gather_input()

    def prefetch(self) -> None:
        self._codes.prefetch()

    def swap_in(self) -> None:
        self._codes.swap_in()

    def stage_absent(self) -> None:
        self._codes.stage().values.fill_(0xFF)  # these scales are NaN in every format

    def release(self) -> None:
        self._codes.release()
        self._staged = None

    def settle(self) -> None:
        self._codes.settle()

    def tensors(self) -> Iterator[Tensor]:
        return self._codes.tensors()

    def _decoded(self, code: Tensor, numel: int) -> Tensor:
        values = torch.empty(numel, dtype=self.dtype, device=code.device)
        decode(code, self._codec, values)
        return values

    def _code_of(self, interval: FlatRange) -> tuple[FlatRange, Tensor]:
        """Returns the blocks that contain elements of `interval`, and a copy of their code."""
        block = self._codec.block_numel
        origin = self.range.start
        first, last = (interval.start - origin) // block, -(-(interval.end - origin) // block)
        blocks = FlatRange(origin + first * block, origin + last * block)
        scales, codes = (self._codes.read(run) for run in self._runs(blocks))
        code = scales.new_zeros(self._codec.nbytes(blocks.numel))
        code[: scales.numel()] = scales
        code[scales.numel() : scales.numel() + codes.numel()] = codes
        return blocks, code

    def _runs(self, blocks: FlatRange) -> tuple[FlatRange, FlatRange]:
        """Returns the byte range of the scales and that of the codes, for whole blocks."""
        codec, start = self._codec, self._codes.range.start
        scale = codec.scales_nbytes(codec.block_numel)
        per_block = codec.block_numel * codec.bits // 8
        first = (blocks.start - self.range.start) // codec.block_numel
        count = blocks.numel // codec.block_numel
        behind = start + codec.scales_nbytes(self.range.numel)
        return (
            FlatRange(start + first * scale, start + (first + count) * scale),
            FlatRange(behind + first * per_block, behind + (first + count) * per_block),
        )


class _DecodedGather:
    """A gather of codes that decodes them at the end of `wait`; a `Work`."""

    def __init__(self, gather: Work, then: Callable[[], None]) -> None:
        self._gather = gather
        self._then: Callable[[], None] | None = then

    def wait(self) -> None:
        """See `Work`."""
        self._gather.wait()
        then, self._then = self._then, None
        if then is not None:
            then()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._gather.is_completed()


def code_nbytes(format: str, numel: int) -> int:
    """Returns the code's number of bytes for `numel` elements, a multiple of the block."""
    return FORMATS[format].nbytes(numel)


def block_numel(format: str) -> int:
    """Returns the alignment, in elements, of parameters and shards of a buffer in this format."""
    return FORMATS[format].block_numel
