"""The local half of a reduce-scatter over all-to-all: sums what the ranks sent, always in the order of the ranks.

Knows nothing of process groups; `comm` moves the chunks. CPU only: elsewhere the backend reduces.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from zeroaccel.ops import kernels
from zeroaccel.ops.dispatch import array_of, in_spans

__all__ = ["sum_ranks"]


def sum_ranks(out: Tensor, flat_chunks: Tensor, scale: float) -> None:
    """``out = round(scale * (((c0 + c1) + c2) + ...))``, for the chunks c0, c1, ... of ranks 0, 1, ...

    Sums and scales in float32; rounds to the dtype of `out` (nearest, ties to even; overflow to inf, NaN kept).

    Args:
        out: (S,), contiguous, on the CPU; float32, bfloat16 or float16, not necessarily as the chunks. May be one of
            the chunks, but must not overlap them otherwise.
        flat_chunks: (W, S), contiguous, on the CPU, in one of the three dtypes: row r came from rank r.
        scale: a float32 factor, 1 / W for a mean.
    """
    ranks, numel = flat_chunks.shape
    assert ranks >= 1, "there is no rank to sum over"
    assert out.shape == (numel,), f"out must have the shape of a chunk, ({numel},), got {tuple(out.shape)}"
    target, flat, factor = array_of(out), array_of(flat_chunks), np.float32(scale)
    in_spans(numel, lambda start, stop: kernels.sum_rows(target, flat, numel, start, stop, factor))
