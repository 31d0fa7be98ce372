"""Reductions to the same bits in any layout: the L2 norm of a gradient, and sums in the order of the ranks.

The norm must not depend on how elements are spread over tensors, ranks and devices. A sum of floats depends on its
order, so the norm is a sum of integers, in three moves that the caller joins with two all-reduces:

    largest = max(max_abs(t) for t in tensors)                  # all-reduce MAX
    exponent = norm_exponent(largest)
    high, low = square_sums(t, exponent), added over tensors    # all-reduce SUM of the two int64
    norm = norm_from(high, low, exponent)

The sums are exact up to 2**38 elements over all ranks (2.7e11). Squares are rounded to multiples of 2**-50 of
``4**exponent``, at most 4 times the largest square, so the norm's relative error is at most N * 2**-50 for N elements,
and about sqrt(N) * 2**-50 where they do not conspire. The CPU and the torch path give equal integers.

`sum_ranks` is the local half of a reduce-scatter over all-to-all, on the CPU only: elsewhere the backend reduces.
Nothing here knows of ranks or process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from zeroaccel.ops import kernels
from zeroaccel.ops.dispatch import array_of, in_spans

_BITS = kernels.NORM_BITS
_TILE_NUMEL = 1 << 22  # bounds the float64 and int64 temporaries off the CPU: 32 MiB each


def max_abs(tensor: Tensor) -> float:
    """The largest absolute value; 0.0 of an empty tensor; inf if there is an inf **or a NaN**.

    One word for "not finite", because a MAX, be it Python's or a collective's, drops a NaN as often as not.

    Args:
        tensor: contiguous float32, bfloat16 or float16.
    """
    if tensor.numel() == 0:
        return 0.0
    if tensor.device.type != "cpu":
        largest = float(torch.linalg.vector_norm(tensor.detach(), math.inf))
        return math.inf if math.isnan(largest) else largest
    integer = torch.int32 if tensor.element_size() == 4 else torch.int16
    patterns = tensor.detach().view(-1).view(integer).numpy()
    mask = patterns.dtype.type(torch.iinfo(integer).max)
    pattern = max(in_spans(patterns.size, lambda start, stop: kernels.largest_pattern(patterns[start:stop], mask)))
    largest = float(torch.tensor(pattern, dtype=integer).view(tensor.dtype))
    return math.inf if math.isnan(largest) else largest


def norm_exponent(largest: float) -> int:
    """The least integer e with ``2**e > largest``; 0 for 0.0. Not for inf, which is itself the norm."""
    assert math.isfinite(largest), f"the norm of gradients that are not finite has no scale, got {largest}"
    return math.frexp(largest)[1]


def square_sums(tensor: Tensor, exponent: int) -> tuple[int, int]:
    """Sums ``(x / 2**exponent)**2`` in units of 2**-50, cut in two: the sum is ``(high * 2**25 + low) * 2**-50``.

    Args:
        tensor: contiguous float32, bfloat16 or float16, every magnitude below 2**exponent.
        exponent: from `norm_exponent`, the same on every rank.

    Returns:
        (high, low): each below 2**63 as long as all the elements that are added up are at most 2**38.
    """
    scale = math.ldexp(1.0, _BITS - exponent)
    if tensor.device.type != "cpu":
        return _square_sums_in_tiles(tensor.detach().view(-1), scale)
    flat = array_of(tensor)
    spans = in_spans(flat.size, lambda start, stop: kernels.square_sums(flat[start:stop], np.float64(scale)))
    return sum(high for high, _ in spans), sum(low for _, low in spans)


def _square_sums_in_tiles(flat: Tensor, scale: float) -> tuple[int, int]:
    totals = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _TILE_NUMEL):
        squares = (flat[start : start + _TILE_NUMEL].to(torch.float64) * scale).square_().round_().to(torch.int64)
        totals[0] += (squares >> _BITS).sum()
        totals[1] += (squares & ((1 << _BITS) - 1)).sum()
    high, low = totals.tolist()
    return high, low


def norm_from(high: int, low: int, exponent: int) -> float:
    """The norm that the added results of `square_sums` stand for."""
    return math.ldexp(math.sqrt((high << _BITS) + low), exponent - _BITS)


def l2_norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all elements of `tensors` (as for `max_abs`) on this rank alone; inf if one is not finite.

    Example:
        >>> l2_norm([torch.tensor([3.0, 0.0]), torch.tensor([4.0])])
        5.0
    """
    tensors = list(tensors)
    largest = max((max_abs(tensor) for tensor in tensors), default=0.0)
    if not math.isfinite(largest):
        return largest
    exponent = norm_exponent(largest)
    parts = [square_sums(tensor, exponent) for tensor in tensors]
    return norm_from(sum(high for high, _ in parts), sum(low for _, low in parts), exponent)


def sum_ranks(out: Tensor, flat_chunks: Tensor, scale: float) -> None:
    """``out = round(scale * (((c0 + c1) + c2) + ...))``, for the chunks c0, c1, ... of ranks 0, 1, ...

    Sums and scales in float32; rounds to the dtype of `out` (nearest, ties to even; overflow to inf, NaN kept).

    Example:
        >>> out = torch.empty(2)
        >>> sum_ranks(out, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), scale=0.5)
        >>> out
        tensor([2., 3.])

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
