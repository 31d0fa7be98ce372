"""Gathers for ranks that go different ways: one generates a longer text than another, or has more batches to evaluate.

A gather needs all ranks, so they agree on each: every rank says which unit it needs now, or that it is done, and all
take part in all gathers that anybody asked for. Costs a small message per gather and does without prefetching.
`coordinator.py` asks; who turns it on is `full_params.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroaccel.comm.collectives import Collectives
from zeroaccel.zero.param_unit import ParamUnit, ShardState

__all__ = ["OnDemandUnshard"]

_DONE = -1


class OnDemandUnshard:
    """One period in which units are gathered on request. `serve` ends it, on every rank."""

    def __init__(self, units: Sequence[ParamUnit], collectives: Collectives) -> None:
        self._units = tuple(units)
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self._collectives = collectives

    def fetch(self, unit: ParamUnit) -> None:
        """Makes `unit` whole on this rank; takes part in what other ranks ask for meanwhile."""
        if unit.state is not ShardState.UNSHARDED:
            self._round(self._numbers[id(unit)])

    def serve(self) -> None:
        """This rank needs nothing more: takes part in the others' gathers until nobody does."""
        while self._round(_DONE):
            pass

    def _round(self, wanted: int) -> bool:
        """One exchange of wishes and the gathers that follow; False when all ranks are done."""
        wishes = torch.full((self._collectives.world_size,), _DONE)
        wishes[self._collectives.rank] = wanted
        self._collectives.all_reduce(wishes, "max", "who needs which unit")
        asked = sorted({int(number) for number in wishes.tolist()} - {_DONE})
        for number in asked:
            unit = self._units[number]
            if number == wanted:
                unit.unshard()
                unit.wait()
            else:
                unit.join_gather()
        return bool(asked)
