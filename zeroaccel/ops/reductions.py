"""Reductions with the same bits in any layout: the L2 norm of a gradient, and sums in the order of the ranks.

The norm must not depend on how elements are divided among tensors, ranks and devices. A sum of floats depends on its
order, so the norm is a sum of integers. The caller connects its three steps with two all-reduces:

    largest = max(max_abs(t) for t in tensors)                  # all-reduce MAX
    exponent = norm_exponent(largest)
    high, low = square_sums(t, exponent), added over tensors    # all-reduce SUM of the two int64
    norm = norm_from(high, low, exponent)

`examine` reads a tensor once for both, if the exponent is expected; a tensor without that exponent needs `square_sums`.

The sums are exact up to 2**38 elements over all ranks (2.7e11). Squares are rounded to multiples of 2**-50 of
``4**exponent``, at most 4 times the largest square, so the norm's relative error is at most N * 2**-50 for N elements,
and typically about sqrt(N) * 2**-50. CPU, torch operations and kernels give the same sum, kernels in other parts.

`max_abs_into` and `square_sums_into` compute the same on a device without blocking the host: they add to values on the
device, from which `step_control.py` computes the norm.

`sum_ranks` is the local half of a reduce-scatter by all-to-all, on the CPU only: elsewhere the backend reduces. This
module does not depend on ranks or process groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeroaccel.ops import kernels
from zeroaccel.ops.device_kernels import kernels_for, load_kernels
from zeroaccel.ops.device_values import read_values
from zeroaccel.ops.dispatch import array_of, launch
from zeroaccel.ops.number_formats import Array

SUM_BITS = kernels.NORM_BITS
"""Number of low bits of a square that go into the lower of its two sums."""

_BITS = SUM_BITS
_INFINITY = 0x7F800000
_TILE_NUMEL = 1 << 22  # limits the float64 and int64 temporaries on devices other than the CPU to 32 MiB each


def max_abs(tensor: Tensor) -> float:
    """Returns the largest absolute value; 0.0 for an empty tensor; inf if there is an inf **or a NaN**.

    inf represents both, because maxima, in Python and in collectives, may drop a NaN.

    Args:
        tensor: contiguous float32, bfloat16 or float16.
    """
    if tensor.numel() == 0:
        return 0.0
    if tensor.device.type != "cpu":
        found = torch.zeros(1, dtype=torch.int32, device=tensor.device)
        max_abs_into(tensor, found)
        [largest] = read_values(found.view(torch.float32))
        return math.inf if math.isnan(largest) else largest

    return examine(tensor, ()).largest


def _magnitude(pattern: int, like: Tensor) -> float:
    """Returns the number with this pattern in the dtype of `like`; inf for a NaN."""
    integer = torch.int32 if like.element_size() == 4 else torch.int16
    largest = float(torch.tensor(pattern, dtype=integer).view(like.dtype))
    return math.inf if math.isnan(largest) else largest


@dataclass(frozen=True)
class Examined:
    """The results of one pass over a tensor in host memory.

    Attributes:
        largest: result of `max_abs`.
        sums: exponent -> result of `square_sums`; exponents that are too small for `largest` have other numbers.
    """

    largest: float
    sums: Mapping[int, tuple[int, int]]


def exponents_around(largest: float) -> tuple[int, ...]:
    """Returns the exponent of a finite magnitude and its neighbours, as far as float32 has them.

    Example:
        >>> exponents_around(3.0)
        (1, 2, 3)
    """
    middle = norm_exponent(largest)
    return tuple(exponent for exponent in (middle - 1, middle, middle + 1) if -148 <= exponent <= 128)


def examine(tensor: Tensor, exponents: Sequence[int]) -> Examined:
    """Does the work of `max_abs`, and of `square_sums` for each of the exponents, in one pass.

    Example:
        >>> values = torch.tensor([1.0, -3.0])
        >>> found = examine(values, [2, 3])
        >>> found.largest, found.sums[2] == square_sums(values, 2)
        (3.0, True)

    Args:
        tensor: contiguous float32, bfloat16 or float16, on the CPU.
    """
    scales = np.array([math.ldexp(1.0, _BITS - exponent) for exponent in exponents], np.float64)

    def bind() -> Callable[[int, int], tuple[int, Array]]:
        flat = array_of(tensor)
        patterns = flat.view(f"i{flat.itemsize}")
        mask = patterns.dtype.type(np.iinfo(patterns.dtype).max)  # clears the sign

        def work(start: int, stop: int) -> tuple[int, Array]:
            sums = np.zeros((len(scales), 2), np.int64)
            return kernels.examine(flat[start:stop], patterns[start:stop], mask, scales, sums), sums

        return work

    spans = launch("examine", tensor.numel(), bind, reads=[tensor], writes=[])
    totals: Array = sum((found for _, found in spans), np.zeros((len(scales), 2), np.int64))
    sums = {exponent: (high, low) for exponent, (high, low) in zip(exponents, totals.tolist(), strict=True)}
    return Examined(_magnitude(max(pattern for pattern, _ in spans), tensor), sums)


def max_abs_into(tensor: Tensor, largest: Tensor) -> None:
    """Computes ``largest = max(largest, max_abs(tensor))``, as bits, without blocking the host.

    Example:
        >>> largest = torch.zeros(1, dtype=torch.int32)
        >>> for part in torch.tensor([[1.0, -3.0], [2.0, 0.5]]):
        ...     max_abs_into(part, largest)
        >>> largest.view(torch.float32).item()
        3.0

    Args:
        tensor: contiguous float32, bfloat16 or float16, any number of elements.
        largest: (1,) int32 on the same device, bits of a float32 without a sign; 0 before the first call. At least
            0x7f800000 if an element is inf or NaN.
    """
    if tensor.numel() == 0:
        return
    device_kernels = kernels_for(tensor.device)
    if device_kernels is not None:
        device_kernels.max_abs_into(tensor.detach(), largest)
    elif tensor.device.type == "cpu":
        value = torch.tensor([max_abs(tensor)], dtype=torch.float32)
        torch.maximum(largest, value.view(torch.int32), out=largest)
    else:
        _raise_largest(tensor.detach().view(-1), largest)


def _raise_largest(flat: Tensor, largest: Tensor) -> None:
    integer = torch.int32 if flat.element_size() == 4 else torch.int16
    for tile in flat.view(integer).split(_TILE_NUMEL):
        pattern = (tile & torch.iinfo(integer).max).amax()  # integers order like magnitudes, NaN above inf
        value = pattern.view(1).view(flat.dtype).to(torch.float32)
        torch.maximum(largest, value.view(torch.int32) & 0x7FFFFFFF, out=largest)


def square_sums_into(tensor: Tensor, largest: Tensor, sums: Tensor) -> None:
    """Computes ``sums += square_sums(tensor, norm_exponent(largest))`` without blocking the host.

    Args:
        tensor: contiguous float32, bfloat16 or float16, any number of elements.
        largest: (1,) int32 on the same device, from `max_abs_into` over all tensors of all ranks.
        sums: (2,) int64 on the same device; zeros before the first call. Meaningless if `largest` is not finite.
    """
    if tensor.numel() == 0:
        return
    device_kernels = kernels_for(tensor.device)
    if device_kernels is not None:
        device_kernels.square_sums_into(tensor.detach(), largest, sums)
        return
    if tensor.device.type == "cpu":
        if int(largest) < _INFINITY:
            exponent = norm_exponent(float(largest.view(torch.float32)))
            sums += torch.tensor(square_sums(tensor, exponent), dtype=torch.int64)
        return
    _add_square_sums(tensor.detach().view(-1), _norm_scale(largest), sums)


def load_kernels_of_norms(dtypes: Iterable[torch.dtype], device: torch.device) -> None:
    """Loads the kernels of `max_abs_into` and `square_sums_into` for each dtype; see `device_kernels.load_kernels`."""

    def launch() -> None:
        largest = torch.zeros(1, dtype=torch.int32, device=device)
        sums = torch.zeros(2, dtype=torch.int64, device=device)
        for dtype in dtypes:
            value = torch.zeros(1, dtype=dtype, device=device)
            max_abs_into(value, largest)
            square_sums_into(value, largest, sums)

    load_kernels(device, launch)


def _norm_scale(largest: Tensor) -> Tensor:
    """Returns the factor of values before they are squared, (1,) float64."""
    return power_of_two(_BITS - torch.frexp(largest.view(torch.float32).to(torch.float64))[1])


def power_of_two(exponent: Tensor) -> Tensor:
    """Returns ``2.0**exponent`` in float64, exactly: builds the bits from integers, limited to [-1000, 1000]."""
    return ((exponent.to(torch.int64).clamp(-1000, 1000) + 1023) << 52).view(torch.float64)


def norm_exponent(largest: float) -> int:
    """Returns the smallest integer e with ``2**e > largest``; 0 for 0.0. `largest` must be finite."""
    assert math.isfinite(largest), f"norm_exponent: the largest magnitude is not finite: {largest}"
    return math.frexp(largest)[1]


def square_sums(tensor: Tensor, exponent: int) -> tuple[int, int]:
    """Sums ``(x / 2**exponent)**2`` in units of 2**-50, in two parts: the sum is ``(high * 2**25 + low) * 2**-50``.

    Args:
        tensor: contiguous float32, bfloat16 or float16, every magnitude below 2**exponent.
        exponent: from `norm_exponent`, the same on every rank.

    Returns:
        (high, low): each below 2**63 for sums over at most 2**38 elements.
    """
    if tensor.device.type != "cpu":
        totals = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        # A number with this exponent.
        below = torch.full((1,), math.ldexp(0.5, exponent), dtype=torch.float32, device=tensor.device)
        square_sums_into(tensor, below.view(torch.int32), totals)
        high, low = read_values(totals)
        return high, low
    scale = math.ldexp(1.0, _BITS - exponent)

    def bind() -> Callable[[int, int], tuple[int, int]]:
        flat = array_of(tensor)
        return lambda start, stop: kernels.square_sums(flat[start:stop], np.float64(scale))

    spans = launch("square_sums", tensor.numel(), bind, reads=[tensor], writes=[])
    return sum(high for high, _ in spans), sum(low for _, low in spans)


def _add_square_sums(flat: Tensor, scale: float | Tensor, totals: Tensor) -> None:
    for tile in flat.split(_TILE_NUMEL):
        squares = (tile.to(torch.float64) * scale).square_().round_().to(torch.int64)
        totals[0] += (squares >> _BITS).sum()
        totals[1] += (squares & ((1 << _BITS) - 1)).sum()


def norm_from(high: int, low: int, exponent: int) -> float:
    """Returns the norm from the added results of `square_sums`."""
    return math.ldexp(math.sqrt((high << _BITS) + low), exponent - _BITS)


def l2_norm(tensors: Iterable[Tensor]) -> float:
    """Returns the norm of all elements of this rank's `tensors` (see `max_abs`); inf if one is not finite.

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
    """Computes ``out = round(scale * (((c0 + c1) + c2) + ...))`` for the chunks c0, c1, ... of ranks 0, 1, ...

    Sums and scales in float32; rounds to the dtype of `out` (nearest, ties to even; overflow to inf, NaN kept).

    Example:
        >>> out = torch.empty(2)
        >>> sum_ranks(out, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), scale=0.5)
        >>> out
        tensor([2., 3.])

    Args:
        out: (S,), contiguous, on the CPU; float32, bfloat16 or float16, possibly another dtype than the chunks'. May be
            one of the chunks, but must not overlap them in any other way.
        flat_chunks: (W, S), contiguous, on the CPU, in one of the three dtypes: row r came from rank r.
        scale: a float32 factor, such as 1 / W for a mean.
    """
    ranks, numel = flat_chunks.shape
    assert ranks >= 1, "sum_ranks needs at least one rank"
    assert out.shape == (numel,), f"out: expected the shape of a chunk, ({numel},), got {tuple(out.shape)}"

    def bind() -> Callable[[int, int], None]:
        target, flat, factor = array_of(out), array_of(flat_chunks), np.float32(scale)
        return lambda start, stop: kernels.sum_rows(target, flat, numel, start, stop, factor)

    launch("sum_rows", numel, bind, reads=[flat_chunks], writes=[out])


def scale_rounded_once(out: Tensor, flat: Tensor, scale: float) -> None:
    """Computes out = round(scale * flat) with one rounding of the float32 product, mostly without a float32 copy.

    Args:
        out, flat: (n,), float32, bfloat16 or float16, on the same device; the dtypes may differ.
        scale: factor, which is rounded to float32.
    """
    # torch multiplies 16-bit elements by a Python number in float32 and rounds the product to the dtype of the input.
    if out.dtype == flat.dtype or flat.dtype is torch.float32:
        torch.mul(flat, scale, out=out)
    else:
        widened = out if out.dtype is torch.float32 else torch.empty_like(flat, dtype=torch.float32)
        widened.copy_(flat)
        torch.mul(widened, scale, out=out)
