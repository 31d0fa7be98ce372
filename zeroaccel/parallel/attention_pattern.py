"""Which tokens attend to which, block by block: ring attention (`ring.py`) does not build masks of S x S tokens.

transformers passes a mask as a function of (sample, head, query, key). Its own functions are known by their names:
`Band` bounds the keys of a query, so that blocks outside of it are skipped and those inside need no mask. An unknown
function skips nothing, and each block is masked by its values.

Letters: B samples, S tokens of whole sequences, n queries and m keys of a block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[[Any, Any, Any, Any], Any]

_ANY = float("inf")
_BLOCKS = "blockwise_overlay"


class Block(Enum):
    """The keys of a block that its queries attend to. DIAGONAL: each query those up to its own position."""

    NONE, PART, ALL, DIAGONAL = range(4)


@dataclass(frozen=True)
class Band:
    """Bounds of the keys of a query at position q: from q - before to q + after.

    Attributes:
        exact: the query attends to all of these.
    """

    before: float = _ANY
    after: float = _ANY
    exact: bool = True

    @classmethod
    def of(cls, function: MaskFunction) -> Band | None:
        """Returns the bounds of a mask function of transformers; None if part of it is of another library.

        Example:
            >>> from transformers.masking_utils import sliding_window_causal_mask_function
            >>> Band.of(sliding_window_causal_mask_function(5))
            Band(before=4, after=0, exact=True)
        """
        known, name = _parts_of(function)
        if name in ("and_masks", "or_masks"):
            parts = [cls.of(item) for item in known["mask_functions"]]
            bands = [item for item in parts if item is not None]
            if len(bands) < len(parts):
                return None
            end = min if name == "and_masks" else max
            exact = name == "and_masks" and all(item.exact for item in bands)
            return cls(end(item.before for item in bands), end(item.after for item in bands), exact)
        if name == "sliding_window_overlay":
            return cls(before=known["sliding_window"] - 1)
        if name == "sliding_window_bidirectional_overlay":
            return cls(known["sliding_window"], known["sliding_window"])
        if name == "chunked_overlay":
            return cls(known["chunk_size"] - 1, known["chunk_size"] - 1, exact=False)
        return {"causal_mask_function": cls(after=0), "bidirectional_mask_function": cls()}.get(
            name, cls(exact=False) if name else None
        )

    def meets(self, queries: range, keys: range) -> bool:
        """True if a query may attend to a key."""
        return bool(queries and keys) and keys[-1] >= queries[0] - self.before and keys[0] <= queries[-1] + self.after

    def covers(self, queries: range, keys: range) -> bool:
        """True if each query attends to all keys."""
        return self.exact and keys[0] >= queries[-1] - self.before and keys[-1] <= queries[0] + self.after


def with_blocks(function: MaskFunction, whole: Callable[[Tensor], Tensor]) -> MaskFunction:
    """Returns a mask function of transformers with other block ids: tokens of a block attend to each other.

    Args:
        whole: returns the ids of all tokens, from this rank's.
    """
    from transformers import masking_utils

    known, name = _parts_of(function)
    if name in ("and_masks", "or_masks"):
        parts = known["mask_functions"]
        changed = [with_blocks(item, whole) for item in parts]
        is_changed = any(new is not old for new, old in zip(changed, parts, strict=True))
        return getattr(masking_utils, name)(*changed) if is_changed else function
    return masking_utils.blockwise_overlay(whole(known["block_sequence_ids"])) if name == _BLOCKS else function


def _parts_of(function: MaskFunction) -> tuple[Mapping[str, Any], str]:
    """Returns the values that a mask function of transformers depends on and the name of its maker; "" for others."""
    if not inspect.isfunction(function) or function.__module__ != "transformers.masking_utils":
        return {}, ""
    return inspect.getclosurevars(function).nonlocals, function.__qualname__.split(".")[0]


@dataclass(frozen=True)
class WholeSequences:
    """Inputs for the masks of one forward, for all S tokens.

    Attributes:
        padding: (B, S) bool, False for padding; None without a padding mask.
        packed: (B, S) index of each token's sequence in its row; None if each row is one sequence.
        positions: (B, S) positions of tokens in their sequences, for packed ones.
    """

    length: int
    device: torch.device
    padding: Tensor | None
    packed: Tensor | None
    positions: Tensor | None = None

    def within(self, function: MaskFunction) -> MaskFunction:
        """Returns a mask function for packed sequences, as transformers does: with positions in each of them."""
        if (places := self.positions) is None or self.packed is None:
            return function

        def of_positions(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return function(batch, head, places[batch, query], places[batch, key])

        return of_positions

    def ends(self, pieces: Sequence[range]) -> dict[int, list[int]]:
        """Returns the packed sequences of the first and last tokens of pieces, in each row."""
        if self.packed is None:
            return {}
        places = sorted({place for piece in pieces if piece for place in (piece[0], piece[-1])})
        return dict(zip(places, self.packed[:, places].T.tolist(), strict=True))

    def padded(self, pieces: Sequence[range]) -> set[int]:
        """Returns the first tokens of the pieces that have padding."""
        if self.padding is None:
            return set()
        full = torch.stack([self.padding[:, piece.start : piece.stop].all() for piece in pieces]).tolist()
        return {piece.start for piece, is_full in zip(pieces, full, strict=True) if not is_full}


class Pattern:
    """Which tokens of whole sequences attend to which; each block of them on demand.

    Args:
        band: bounds of the keys of a query.
        pieces: the parts of the sequence that make up blocks.
        function: transformers' mask function; without one, `band` is exact.
        rows: B, for a function.
        values: (B, H, S, S) or broadcastable: a mask that the model made itself, instead of a function.
        sequences: padding, and packed sequences, which do not attend to each other; None without either.
        whole: makes the mask of all tokens, for attention that takes one.
    """

    def __init__(
        self,
        band: Band | None,
        pieces: Sequence[range],
        *,
        function: MaskFunction | None = None,
        rows: int = 1,
        values: Tensor | None = None,
        sequences: WholeSequences | None = None,
        whole: Callable[[], Any] = lambda: None,
    ) -> None:
        self.band = band or Band(exact=False)
        self._pieces, self._sequences = pieces, sequences
        self._rows, self._is_known, self._values = rows, band is not None, values
        self._function = sequences.within(function) if function is not None and sequences is not None else function
        self._masks: dict[tuple[int, int], Tensor] = {}
        self.whole = whole

    @cached_property
    def _ends(self) -> dict[int, list[int]]:
        return {} if self._sequences is None else self._sequences.ends(self._pieces)

    @cached_property
    def _padded(self) -> set[int]:
        return set() if self._sequences is None else self._sequences.padded(self._pieces)

    def block(self, queries: range, keys: range) -> Block:
        """Returns which keys of a piece the queries of another attend to; the same on all ranks."""
        if not self.band.meets(queries, keys):
            return Block.NONE
        is_one = True
        if self._ends:
            of_rows = zip(*(self._ends[place] for place in (queries[0], queries[-1], keys[0], keys[-1])), strict=True)
            rows = list(of_rows)
            if all(last < start or first > end for start, end, first, last in rows):
                return Block.NONE
            is_one = all(len(set(row)) == 1 for row in rows)
        if not is_one or keys.start in self._padded:
            return Block.PART
        if self.band.covers(queries, keys):
            return Block.ALL
        is_causal = self.band.exact and self.band.after == 0 and self.band.before >= len(keys) - 1
        return Block.DIAGONAL if is_causal and queries == keys else Block.PART

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Returns the mask of a block, broadcastable to (B, H, n, m): True if attended to, or values to add."""
        if self._values is not None:
            return self._values[..., queries.start : queries.stop, keys.start : keys.stop]
        q, k = (torch.arange(piece.start, piece.stop, device=device) for piece in (queries, keys))
        mask = (k >= q[:, None] - self.band.before) & (k <= q[:, None] + self.band.after)
        mask = mask[None, None]
        sequences = self._sequences
        if self._function is not None and not (self._is_known and self.band.exact):
            mask = self._called(torch.arange(self._rows, device=device), q, k)
        if sequences is not None and sequences.packed is not None:
            mask = mask & (sequences.packed[:, q][:, None, :, None] == sequences.packed[:, k][:, None, None])
        if sequences is not None and sequences.padding is not None:
            mask = mask & sequences.padding[:, k][:, None, None]
        return mask

    def _called(self, rows: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert self._function is not None, "a mask without a function is its band"
        head = rows.new_zeros(1)
        if self._is_known:  # works on tensors of indices
            mask: Tensor = self._function(rows[:, None, None, None], head[:, None, None, None], q[:, None], k[None])
            return mask
        from transformers import masking_utils

        masks: Any = masking_utils
        block = int(q[0]), int(k[0])  # slow, and the same in each layer
        if block not in self._masks:
            with masks.TransformGetItemToIndex():
                self._masks[block] = masks._vmap_expansion_sdpa(self._function)(rows, head, q, k)
        return self._masks[block]
