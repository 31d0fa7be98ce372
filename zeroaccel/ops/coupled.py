"""Sums that a coupled optimizer takes over all parameters, to the same bits however these are sharded.

An optimizer that estimates its step size from all parameters, or clips by their common norm, cannot be stepped on a
shard, unless the sums it needs go over the shards of all ranks. A class declares by the protocol `CoupledOptimizer`
that it takes them from a `Reductions` that the engine passes in. Knows nothing of processes: the all-reduce is a
function.
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
_TILE_NUMEL = 1 << 22  # bounds the float64 and int64 temporaries: 32 MiB each


def _one_process(tensor: Tensor, op: Literal["sum", "max"]) -> None:
    """The all-reduce over one rank."""


class Reductions:
    """Sums and maxima over the elements of all parameters.

    A sum of floats depends on its order, and so on how parameters are cut into shards. So `sum` adds integers: each
    value is rounded to a multiple of 2**-50 of a power of two above the largest, and what is added then is exact up to
    2**38 elements. The same bits on one process and on any number of shards; off by at most N * 2**-50 of the largest.

    Args:
        all_reduce: over the ranks among which the parameters are divided; by default there is one.
        counts: whether this rank's elements are in sums; of elements that several ranks hold, one rank counts.

    Example:
        >>> Reductions().sum([torch.tensor([1.0, 2.0]), torch.tensor([0.5])])
        3.5
    """

    def __init__(self, all_reduce: AllReduce = _one_process, *, counts: bool = True) -> None:
        self._all_reduce = all_reduce
        self._counts = counts

    def sum(self, tensors: Sequence[Tensor]) -> float:
        """The sum of all elements of `tensors`, of those of every rank. (all ranks, each with as many calls)

        Args:
            tensors: floating, any shapes, e.g. one per parameter that this process has; may be none.

        Returns:
            NaN where an element is not finite.
        """
        largest = self.largest(tensors)
        if not math.isfinite(largest):
            return math.nan
        exponent = math.frexp(largest)[1]
        halves = torch.zeros(2, dtype=torch.int64)
        for tile in _tiles(tensors) if self._counts else ():
            # Two products, since one power of two may be beyond what a float64 holds.
            scaled = (
                tile.double().mul_(math.ldexp(1.0, -exponent // 2)).mul_(math.ldexp(1.0, -exponent - -exponent // 2))
            )
            units = scaled.mul_(math.ldexp(1.0, _BITS)).round_().long()
            halves += torch.stack(((units >> _HALF).sum(), (units & ((1 << _HALF) - 1)).sum())).cpu()
        self._all_reduce(halves, "sum")
        total = (int(halves[0]) << _HALF) + int(halves[1])
        return math.ldexp(float(total), exponent - _BITS)

    def largest(self, tensors: Sequence[Tensor]) -> float:
        """The largest magnitude of any element of any rank; 0.0 of none, inf where one is not finite. (all ranks)"""
        largest = 0.0
        for tile in _tiles(tensors):
            own = float(tile.abs().max())
            largest = max(largest, own) if math.isfinite(own) else math.inf
        maximum = torch.tensor([largest], dtype=torch.float64)
        self._all_reduce(maximum, "max")
        return float(maximum)


def _tiles(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor.numel():
            yield from tensor.detach().reshape(-1).split(_TILE_NUMEL)


@runtime_checkable
class CoupledOptimizer(Protocol):
    """An optimizer whose rule couples parameters by sums that it takes from `Reductions`, and by nothing else.

    Otherwise it is elementwise. Its constructor makes a `Reductions()` of its own, so that it works alone; at stages 1
    to 3 the engine replaces that by one over all shards. `step()` must ask for the same sums in the same order on every
    rank, also on a rank that has no parameters.

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
        """Takes sums from `reductions` from now on."""
