"""Sums over all parameters for coupled optimizers, with the same bits for any sharding.

An optimizer that estimates its step size from all parameters, or clips by their common norm, can be stepped on a shard
only if its sums cover the shards of all ranks. A class that implements the protocol `CoupledOptimizer` takes them from
a `Reductions` that the engine passes in. This module does not depend on processes: the all-reduce is a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["CoupledOptimizer", "Reductions"]

AllReduce = Callable[[Tensor, Literal["sum", "max"]], None]
"""Replaces a tensor in host memory by its sum or maximum over the ranks."""

_BITS = 50
_HALF = 25
_TILE_NUMEL = 1 << 22  # limits the float64 and int64 temporaries to 32 MiB each


def _one_process(tensor: Tensor, op: Literal["sum", "max"]) -> None:
    """All-reduces over one rank, which changes nothing."""


class Reductions:
    """Sums and maxima over the elements of all parameters.

    A sum of floats depends on its order, and so on the sharding. `sum` adds integers instead: it rounds each value to a
    multiple of 2**-50 times a power of two above the largest; then the addition is exact up to 2**38 elements. One
    process and any number of shards give the same bits, with an error of at most N * 2**-50 of the largest value.

    Args:
        all_reduce: all-reduce over the ranks that share the parameters; default: one rank.
        counts: include this rank's elements in sums; of several ranks with the same elements, one must count.

    Example:
        >>> Reductions().sum([torch.tensor([1.0, 2.0]), torch.tensor([0.5])])
        3.5
    """

    def __init__(self, all_reduce: AllReduce = _one_process, *, counts: bool = True) -> None:
        self._all_reduce = all_reduce
        self._counts = counts

    def sum(self, tensors: Sequence[Tensor]) -> float:
        """Returns the sum of all elements of every rank's `tensors`. (all ranks, with the same number of calls)

        Args:
            tensors: floating-point tensors of any shape, such as one per parameter of this process; may be empty.

        Returns:
            The sum, or NaN if an element is not finite.
        """
        largest = self.largest(tensors)
        if not math.isfinite(largest):
            return math.nan
        exponent = math.frexp(largest)[1]
        halves = torch.zeros(2, dtype=torch.int64)
        for tile in _tiles(tensors) if self._counts else ():
            # Two products, because one power of two may exceed the range of float64.
            scaled = (
                tile.double().mul_(math.ldexp(1.0, -exponent // 2)).mul_(math.ldexp(1.0, -exponent - -exponent // 2))
            )
            units = scaled.mul_(math.ldexp(1.0, _BITS)).round_().long()
            halves += torch.stack(((units >> _HALF).sum(), (units & ((1 << _HALF) - 1)).sum())).cpu()
        self._all_reduce(halves, "sum")
        total = (int(halves[0]) << _HALF) + int(halves[1])
        return math.ldexp(float(total), exponent - _BITS)

    def largest(self, tensors: Sequence[Tensor]) -> float:
        """Returns the largest magnitude over all ranks; 0.0 without elements, inf if one is not finite. (all ranks)"""
        largest = 0.0
        for tile in _tiles(tensors):
            local = float(tile.abs().max())
            largest = max(largest, local) if math.isfinite(local) else math.inf
        maximum = torch.tensor([largest], dtype=torch.float64)
        self._all_reduce(maximum, "max")
        return float(maximum)


def _tiles(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor.numel():
            yield from tensor.detach().reshape(-1).split(_TILE_NUMEL)


@runtime_checkable
class CoupledOptimizer(Protocol):
    """An optimizer that couples parameters only by sums from `Reductions`, and is elementwise in all other respects.

    Its constructor creates a `Reductions()`, so that it works without an engine; at stages 1 to 3 the engine replaces
    it by one over all shards. `step()` must compute the same sums in the same order on every rank, including ranks
    without parameters.

    Example:
        class GloballyScaled(torch.optim.Optimizer):
            def __init__(self, params, lr=0.1):
                super().__init__(params, {"lr": lr})
                self.use_reductions(Reductions())

            def use_reductions(self, reductions):
                self.reductions = reductions

            @torch.no_grad()
            def step(self, closure=None):
                params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
                norm = self.reductions.sum([p.grad.square() for p in params]) ** 0.5
                for p in params:
                    p.sub_(p.grad * (self.param_groups[0]["lr"] / max(norm, 1.0)))
    """

    def use_reductions(self, reductions: Reductions) -> None:
        """Sets the source of all later sums."""
