"""Makes units whole before they are used and gives them up afterwards, in forward, backward and recomputation.

Told what happens by `hooks.py`, asks `prefetch.py` what to fetch ahead and what to keep, and moves `ParamUnit`s.
Knows nothing of modules, autograd nodes or gradients.

[Note: uses] One run of a unit's forward is a `ForwardUse`. Its backward begins when the gradient of an output arrives.
It is over when the backward of anything begins that ran before it: autograd executes nodes in the reverse order of
their creation (it takes the ready node with the highest sequence number, and whatever a node waits for was created
later). A backward nested in another, as re-entrant checkpointing runs it, is over when the outer one goes on. So the
graph need not be touched, and inputs that many units share do not delay anybody. Several uses of one unit may be open
at a time (two forwards before one backward, a layer applied twice); the unit is given up when the last of them is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroaccel.comm.collectives import Collectives
from zeroaccel.zero.param_unit import ParamUnit, ShardState
from zeroaccel.zero.prefetch import PrefetchTrace

__all__ = ["ForwardUse", "OnDemandUnshard", "ParamCoordinator"]

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
                unit.take_part()
        return bool(asked)


class ForwardUse:
    """One run of a unit's forward.

    Attributes:
        began, ended: when, on the residency's clock.
        backward: number of the backward that has reached it; 0 before.
        task: number of the autograd task that reached it; a nested one has a higher number.
    """

    __slots__ = ("backward", "began", "ended", "task", "unit")

    def __init__(self, unit: ParamUnit, began: int) -> None:
        self.unit = unit
        self.began = self.ended = began
        self.backward = self.task = 0


class ParamCoordinator:
    """Who is whole, and why.

    Attributes:
        in_backward: between `begin_backward` and `end_backward`.
        requests: how units are gathered while ranks go different ways; None while they go the same one.
    """

    def __init__(self, units: Sequence[ParamUnit], schedule: PrefetchTrace) -> None:
        self._units = {unit.name: unit for unit in units}
        self._schedule = schedule
        self._running: list[ForwardUse] = []
        self._clock = 0
        self._backwards = 0
        self._open: dict[str, list[ForwardUse]] = {unit.name: [] for unit in units}
        self._live: dict[str, int] = {}
        self._fetched: list[str] = []  # shards on their way from a tier; gathered when the next unit is needed
        self._lenders: dict[str, list[ParamUnit]] = {}
        self._pinned: set[str] = set()
        self._second_order = 0  # the backward that will be differentiated; 0 for none
        self.in_backward = False
        self.requests: OnDemandUnshard | None = None

    @property
    def live_numel(self) -> int:
        """Elements of all units that are whole or on their way."""
        return sum(self._live.values())

    @property
    def idle(self) -> bool:
        """No unit's module is in its forward, and no backward runs."""
        return not (self._running or self.in_backward)

    def is_running(self, unit: ParamUnit) -> bool:
        """Whether a module of `unit` is in its forward."""
        return any(use.unit is unit for use in self._running)

    # -- forward

    def begin_pass(self, *, training: bool) -> None:
        """The root's forward begins."""
        if not (self._running or self.in_backward):
            self._schedule.begin("train" if training else "eval")

    def end_forward_pass(self, *, training: bool) -> None:
        """The root's forward is over; without a backward to come everything is given up."""
        if not training and not self.in_backward and not self._running and not any(self._open.values()):
            self._give_up_all()
            self._schedule.end()

    def enter_forward(self, unit: ParamUnit, task: int = -1) -> ForwardUse:
        """A module of `unit` is about to run: makes it whole, with those whose parameters it borrows.

        Args:
            task: the autograd task that recomputes it; -1 outside any backward.
        """
        if self.in_backward:
            self._close_nested(task)
        use = ForwardUse(unit, self._tick())
        self._running.append(use)
        try:
            for needed in self._needed_by(unit):
                self._require(needed)
        except BaseException:  # e.g. a collective that timed out; the module will not run, so it will not exit either
            self._running.pop()
            raise
        return use

    def exit_forward(self, use: ForwardUse, *, opaque: bool = False) -> None:
        """The module is done, or raised.

        Args:
            opaque: its output shows no tensors, so that nothing will tell when its backward begins; it stays whole.
        """
        assert self._running and self._running[-1] is use, f"{use.unit.name} left forward out of order"
        self._running.pop()
        use.ended = self._tick()
        if opaque or self.in_backward:  # recomputation: its backward follows at once
            return
        for candidate in self._needed_by(use.unit):
            if not self.is_running(candidate):
                self._release(candidate)

    def borrow(self, unit: ParamUnit) -> None:
        """A parameter of `unit` is read by other code than its own modules, e.g. a tied head that reads the embedding.

        From now on it is whole whenever the borrower runs, forward and backward.
        """
        if unit.state is ShardState.UNSHARDED or self.idle:
            return
        self._require(unit)
        if self._running and self._running[-1].unit is not unit:
            lenders = self._lenders.setdefault(self._running[-1].unit.name, [])
            if unit not in lenders:
                lenders.append(unit)

    # -- backward

    def begin_backward(self) -> None:
        """A backward begins; several may go through one graph."""
        self.in_backward = True
        self._backwards += 1

    def enter_backward(self, use: ForwardUse, task: int) -> None:
        """The gradient of an output of this use has arrived: what it computed with must be whole again.

        Args:
            task: the autograd task that is running.
        """
        if use.backward == self._backwards:
            return
        use.backward, use.task = self._backwards, task
        self._close_nested(task)
        for other in {id(u): u for uses in self._open.values() for u in uses if u.began > use.ended}.values():
            if other.task == task:
                self._close(other)
        for unit in self._needed_by(use.unit):
            if not self._open[unit.name]:
                self._require(unit)
            self._open[unit.name].append(use)

    def keep_for_second_order(self) -> None:
        """The backward that runs makes a graph of itself, which tells nobody when it needs what.

        So nothing is given up until the next backward is over, which goes through that graph, or the step comes.
        """
        self._second_order = self._backwards

    def end_backward(self) -> None:
        """The backward is over: everything is given up, unless it is to be differentiated."""
        self.in_backward = False
        for uses in self._open.values():
            uses.clear()
        if self._second_order != self._backwards:
            self._second_order = 0
        self._give_up_all()
        self._schedule.end()

    def end_step(self) -> None:
        """The weights are about to change: what a forward without a backward left whole would be out of date."""
        self._second_order = 0
        self._give_up_all()
        self._schedule.end()

    def reset(self) -> None:
        """After an exception anywhere: back to all sharded, nothing recorded."""
        self._running.clear()
        self._second_order = 0
        self.end_backward()
        self._schedule.forget()

    # -- for others than forward and backward

    def pin(self, unit: ParamUnit) -> None:
        """Makes a unit whole until `unpin`, whatever passes come and go."""
        if unit.name in self._units:
            self._pinned.add(unit.name)
            self._unshard(unit, exact=True)
            unit.wait()

    def unpin(self, unit: ParamUnit) -> None:
        """Gives a pinned unit up, unless a pass is using it."""
        if unit.name in self._units:
            self._pinned.discard(unit.name)
            if not (self.is_running(unit) or self._open[unit.name]):
                unit.reshard(leave=True)
                self._live.pop(unit.name, None)

    def lend(self, unit: ParamUnit) -> None:
        """A part of `unit` runs without it: the unit is whole from now on until the pass or the step is over."""
        if self.requests is not None:
            self.requests.fetch(unit)
        self._unshard(unit)
        unit.wait()

    # -- moving

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _needed_by(self, unit: ParamUnit) -> tuple[ParamUnit, ...]:
        return (unit, *self._lenders.get(unit.name, ()))

    def _close_nested(self, task: int) -> None:
        """Ends the uses of nested backwards, which are over when an outer one goes on."""
        for use in {id(u): u for uses in self._open.values() for u in uses if u.task > task}.values():
            self._close(use)

    def _close(self, use: ForwardUse) -> None:
        for unit in self._needed_by(use.unit):
            uses = self._open[unit.name]
            if use in uses:
                uses.remove(use)
                if not uses and not self.is_running(unit):
                    self._release(unit)

    def _require(self, unit: ParamUnit) -> None:
        if self.requests is not None:
            self.requests.fetch(unit)
            self._live[unit.name] = unit.numel
            return
        if self.in_backward and self._open[unit.name]:
            unit.wait()  # recomputed within its own backward: whole already, and not another step of the schedule
            return
        self._unshard(unit)
        ahead = self._schedule.need(unit.name, self._live)
        fetched, self._fetched = self._fetched, []
        for name in fetched:
            if name in self._live:
                self._unshard(self._units[name])
        for name in ahead:
            if self._units[name].is_away:  # one step earlier than others, as its shard has to be read first
                self._units[name].prefetch()
                self._live[name] = self._units[name].numel
                self._fetched.append(name)
            else:
                self._unshard(self._units[name])
        unit.wait()

    def _unshard(self, unit: ParamUnit, *, exact: bool = False) -> None:
        unit.unshard(exact=exact)
        self._live[unit.name] = unit.numel

    def _release(self, unit: ParamUnit) -> None:
        if unit.name in self._pinned or self._second_order:
            return
        if self.requests is not None or not self._schedule.keep(unit.name, self.live_numel):
            unit.reshard()
            self._live.pop(unit.name, None)

    def _give_up_all(self) -> None:
        if self._second_order:
            return
        for name in self._live.keys() - self._pinned:
            self._units[name].reshard()
            del self._live[name]
        self._fetched.clear()
