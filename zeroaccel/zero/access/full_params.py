"""Whole parameters outside forward and backward: to read them, to write them, to generate.

`GatheredParameters` is for some parameters and may write; `gathered` is for a whole engine and only reads;
`iter_named_full_params` streams. All are collective. Where a parameter lies and who else needs it is
`param_registry.py`'s; gathers for ranks that go different ways are `coordinator.py`'s; optimizer states and gradients
`safe_get_set.py`'s.

[Note: writes] A write inside `GatheredParameters` counts if a rank was named to make it: that rank's values go to all
ranks, into the shard and, where they differ from what the master rounds to, into the master; elements nobody touched
keep all their fp32 bits. Without a named rank the values are compared, by a hash, with those at the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agree_or_raise, agreed
from zeroaccel.errors import UsageError
from zeroaccel.zero.access.param_registry import ParamHandle, ParamRegistry, place_of
from zeroaccel.zero.coordinator import OnDemandUnshard, ParamCoordinator
from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.param_unit import ParamUnit

__all__ = [
    "GatheredParameters",
    "gathered",
    "iter_named_full_params",
    "overwrite",
    "register_external_parameter",
    "store",
]


class GatheredParameters:
    """Parameters are whole inside the with-block. (all ranks, with the same parameters)

    Works at every stage, for models of an engine and of `zero.Init`; may be nested. Parameters that are neither, None
    and anything else in `params` are let alone.

    Args:
        params: one parameter, or any number of them.
        modifier_rank: the rank whose writes count. Without it, a write is an error.
        fwd_module: accepted; parameters are noticed without it.
        enabled: False makes it do nothing.

    Raises:
        UsageError: on every rank, on leaving: a parameter was written without a `modifier_rank`, or was given other
            storage. On entering: there is no rank `modifier_rank`.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params or ())
        self._params = given if enabled else []
        self._rank = modifier_rank
        self._places: list[ParamHandle] = []
        self._masters: dict[int, Tensor] = {}

    def __enter__(self) -> None:
        found = {id(place.param): place for param in self._params if (place := place_of(param)) is not None}
        self._places = sorted(found.values(), key=lambda place: place.order)
        for keeper, places in _by_keeper(self._places):
            ranks = keeper.collectives.world_size
            if self._rank is not None and not (type(self._rank) is int and 0 <= self._rank < ranks):
                raise UsageError("GatheredParameters(modifier_rank)", expected=f"0 to {ranks - 1}", got=self._rank)
            keeper.hold(_units(places))
            for place in places:
                keeper.prints.enter(place.buffer, place.index, writes=self._rank is not None)
                if self._rank is not None and place.buffer.masters.reads_weights:
                    _require_settled(place)  # these masters can be read only while the weights are as they are
                    self._masters[id(place)] = place.buffer.masters.read(place.reach(place.buffer.rank))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        places, self._places = self._places, []
        for keeper, own in _by_keeper(places):
            try:
                self._settle(keeper, own, error)
            finally:
                for place in own:
                    keeper.prints.leave(place.buffer, place.index, writes=self._rank is not None)
                    place.buffer.accept_write(place.index)
                keeper.release(_units(own))

    def _settle(self, keeper: ParamRegistry, places: Sequence[ParamHandle], raised: BaseException | None) -> None:
        error = raised if isinstance(raised, Exception) else None
        if raised is None:
            error = _replaced(places) or (None if self._rank is not None else _written(keeper, places))
        elif error is None:
            return  # the program is ending: nobody is asked
        label = f"GatheredParameters({places[0].slot.fqn}, {len(places)} in all)"
        try:
            agree_or_raise(keeper.collectives, error, label)
        except Exception:
            if raised is None:
                raise
            return  # this rank's own exception goes on as it is; the others have been told
        if self._rank is None:
            return
        for place in places:
            view = place.buffer.view(place.index).detach()
            keeper.collectives.broadcast(view.view(-1), self._rank, f"new values of {place.slot.fqn}")
            store(place, self._masters.get(id(place)))
            keeper.prints.refresh(place.buffer, place.index)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted, and not needed: a parameter that is read outside its module is noticed by itself.

    Raises:
        UsageError: they are not a module and a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            "register_external_parameter(module, parameter)",
            expected="a module and a parameter",
            got=f"{type(module).__name__} and {type(parameter).__name__}",
        )


@contextmanager
def gathered(keeper: ParamRegistry, coordinator: ParamCoordinator, budget: int | None) -> Iterator[None]:
    """See `Engine.gathered`."""
    collectives = keeper.collectives
    with agreed(collectives, "engine.gathered: budget"):
        if budget is not None and (type(budget) is not int or budget < 0):
            raise UsageError("engine.gathered(budget)", expected="a number of bytes, or None", got=budget)
        if coordinator.on_demand is not None:
            raise UsageError("engine.gathered()", expected="not to be nested")
    budgets = collectives.gather_objects(budget, "engine.gathered: budget")
    if len(set(budgets)) > 1:
        raise UsageError("engine.gathered(budget)", expected="the same on all ranks", got=budgets)
    travelling = [unit for unit in keeper.units if not unit.persistent]
    kept = _that_fit(travelling, budget)
    keeper.hold(kept)
    coordinator.end_step()  # what is whole on some ranks only would be asked for by the others alone
    coordinator.on_demand = on_demand = OnDemandUnshard(travelling, collectives)
    try:
        yield
    finally:
        on_demand.finish()
        coordinator.on_demand = None
        keeper.release(kept)


def iter_named_full_params(keeper: ParamRegistry) -> Iterator[tuple[str, Tensor]]:
    """See `Engine.iter_named_full_params`."""
    for unit in keeper.units:
        keeper.hold([unit])
        try:
            for buffer in unit.buffers:
                for index, slot in enumerate(buffer.layout.slots):
                    yield slot.fqn, buffer.view(index).detach()
        finally:
            keeper.release([unit])


def store(place: ParamHandle, before: Tensor | None = None) -> None:
    """Takes the values in the unsharded parameter, equal on all ranks, into the shard and the master.

    Args:
        before: the masters as they were, where they can no longer be read.
    """
    buffer = place.buffer
    own = place.slot.range & buffer.own
    with torch.no_grad():
        if not buffer.persistent:
            buffer.shard.write(own, buffer.full[own.at(0)])
            place.unit.drop_secondary()
        _require_settled(place)
        part = place.slot.range & buffer.masters.range
        buffer.masters.follow_weights(part, buffer.full[part.at(0)], before)


def overwrite(place: ParamHandle, value: Tensor) -> None:
    """Gives a parameter, which must be unsharded, another value: here, in the shard and in the master.

    Args:
        value: of the parameter's shape, any dtype, equal on all ranks; the master keeps bits that 16 bits drop.
    """
    buffer, slot = place.buffer, place.slot
    own = slot.range & buffer.own
    _require_settled(place)
    with torch.no_grad():
        flat = value.detach().reshape(-1).to(buffer.full.device)
        new = FlatTensor(slot.range, flat.float() if flat.dtype is torch.float64 else flat)
        buffer.full[slot.range.at(0)].copy_(new.values)
        buffer.accept_write(place.index)
        if not buffer.persistent:
            buffer.shard.write(own, buffer.full[own.at(0)])
        part = slot.range & buffer.masters.range
        buffer.masters.write(part, new[part])


def _require_settled(place: ParamHandle) -> None:
    training = place.keeper.training
    if training is not None and training.updates is not None:
        training.updates.require_settled(f"new values of {place.slot.fqn}")


def _by_keeper(places: Sequence[ParamHandle]) -> list[tuple[ParamRegistry, list[ParamHandle]]]:
    groups: dict[int, tuple[ParamRegistry, list[ParamHandle]]] = {}
    for place in places:
        groups.setdefault(place.order[0], (place.keeper, []))[1].append(place)
    return list(groups.values())


def _units(places: Sequence[ParamHandle]) -> list[ParamUnit]:
    return list({id(place.unit): place.unit for place in places}.values())


def _that_fit(units: Sequence[ParamUnit], budget: int | None) -> list[ParamUnit]:
    chosen, room = [], budget
    for unit in units:
        nbytes = sum(buffer.nbytes for buffer in unit.buffers)
        if room is None or nbytes <= room:
            chosen.append(unit)
            room = None if room is None else room - nbytes
    return chosen


def _replaced(places: Sequence[ParamHandle]) -> UsageError | None:
    found = [place.slot.fqn for place in places if place.replaced]
    if not found:
        return None
    return UsageError(
        f"GatheredParameters: {', '.join(found)}",
        expected="parameters to be changed in place",
        got="other storage assigned to .data",
        fix="copy into it: param.data.copy_(values)",
    )


def _written(keeper: ParamRegistry, places: Sequence[ParamHandle]) -> UsageError | None:
    found = [place.slot.fqn for place in places if keeper.prints.changed(place.buffer, place.index)]
    if not found:
        return None
    whole = any(place.buffer.persistent for place in places)
    return UsageError(
        f"GatheredParameters: {', '.join(found)} written without a modifier_rank",
        fix="pass the rank whose values count: GatheredParameters(params, modifier_rank=0)"
        + ("; this rank's copy is no longer that of the others" if whole else "; the values are as they were before"),
    )
