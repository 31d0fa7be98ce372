"""Makes units whole before they are used and gives them up afterwards, in forward, backward and recomputation.

Told what happens by `hooks.py`, asks `schedule.py` what to fetch ahead and what to keep, and moves `ParamUnit`s.
Knows nothing of modules, autograd nodes or gradients.

[Note: uses] One run of a unit's forward is a `Use`. Its backward begins when the gradient of an output arrives and is over
when the gradients of all inputs are computed. Several uses of one unit may be open at a time (two forwards before one
backward, a layer applied twice); the unit is given up when the last of them is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroaccel.zero.schedule import Schedule
from zeroaccel.zero.unit import ParamUnit, ShardState

__all__ = ["Residency", "Use"]


class Use:
    """One run of a unit's forward, until its backward is over.

    Attributes:
        pending_inputs: inputs whose gradient is still to come.
        has_inputs: any input needs a gradient; if none does, the end of the backward is told by the last gradient.
    """

    __slots__ = ("has_inputs", "pending_inputs", "started", "unit")

    def __init__(self, unit: ParamUnit) -> None:
        self.unit = unit
        self.pending_inputs = 0
        self.has_inputs = False
        self.started = False


class Residency:
    """Who is whole, and why."""

    def __init__(self, units: Sequence[ParamUnit], schedule: Schedule) -> None:
        self._units = {unit.name: unit for unit in units}
        self._schedule = schedule
        self._running: list[ParamUnit] = []
        self._open: dict[str, list[Use]] = {unit.name: [] for unit in units}
        self._live: dict[str, int] = {}
        self._lenders: dict[str, list[ParamUnit]] = {}
        self.in_backward = False

    @property
    def live_numel(self) -> int:
        """Elements of all units that are whole or on their way."""
        return sum(self._live.values())

    # -- forward

    def begin_pass(self, *, training: bool) -> None:
        """The root's forward begins."""
        if not self._schedule.in_pass and not self.in_backward:
            self._schedule.begin("train" if training else "eval")

    def end_forward_pass(self, *, training: bool) -> None:
        """The root's forward is over; without a backward to come everything is given up."""
        if not training and not self.in_backward and not self._running and not any(self._open.values()):
            self._give_up_all()
            self._schedule.end()

    def enter_forward(self, unit: ParamUnit) -> None:
        """A module of `unit` is about to run: makes it whole, with those whose parameters it borrows."""
        self._running.append(unit)
        self._require(unit)
        for lender in self._lenders.get(unit.name, ()):
            self._require(lender)

    def exit_forward(self, unit: ParamUnit) -> None:
        """The module is done, or raised."""
        assert self._running and self._running[-1] is unit, f"{unit.name} left forward out of order"
        self._running.pop()
        if self.in_backward:  # recomputation: its backward follows at once
            return
        for candidate in (unit, *self._lenders.get(unit.name, ())):
            if candidate not in self._running:
                self._release(candidate)

    def borrow(self, unit: ParamUnit) -> None:
        """A parameter of `unit` is read by other code than its own modules, e.g. a tied head that reads the embedding.

        From now on it is whole whenever the borrower runs, forward and backward.
        """
        if unit.state is ShardState.UNSHARDED or not (self._running or self.in_backward):
            return
        self._require(unit)
        if self._running and self._running[-1] is not unit:
            lenders = self._lenders.setdefault(self._running[-1].name, [])
            if unit not in lenders:
                lenders.append(unit)

    # -- backward

    def enter_backward(self, use: Use) -> None:
        """The gradient of an output of this use has arrived: what it computed with must be whole again."""
        if use.started:
            return
        use.started = True
        for unit in (use.unit, *self._lenders.get(use.unit.name, ())):
            if not self._open[unit.name]:
                self._require(unit)
            self._open[unit.name].append(use)

    def input_done(self, use: Use) -> None:
        """The gradient of one input of this use is computed; after the last one the use is over."""
        use.pending_inputs -= 1
        if use.pending_inputs == 0:
            self._close(use)

    def gradients_done(self, unit: ParamUnit) -> None:
        """All parameters of `unit` have their gradients: ends the uses whose inputs need none."""
        for use in list(self._open[unit.name]):
            if use.unit is unit and not use.has_inputs:
                self._close(use)

    def end_backward(self) -> None:
        """The backward is over: everything is given up."""
        self.in_backward = False
        for uses in self._open.values():
            uses.clear()
        self._give_up_all()
        self._schedule.end()

    def reset(self) -> None:
        """After an exception anywhere: back to all sharded, nothing recorded."""
        self._running.clear()
        self.end_backward()
        self._schedule.forget()

    # -- moving

    def _close(self, use: Use) -> None:
        for unit in (use.unit, *self._lenders.get(use.unit.name, ())):
            uses = self._open[unit.name]
            if use in uses:
                uses.remove(use)
                if not uses and unit not in self._running:
                    self._release(unit)

    def _require(self, unit: ParamUnit) -> None:
        if self.in_backward and self._open[unit.name]:
            unit.wait()  # recomputed within its own backward: whole already, and not another step of the schedule
            return
        ahead = self._schedule.need(unit.name, self._live)
        self._unshard(unit)
        for name in ahead:
            self._unshard(self._units[name])
        unit.wait()

    def _unshard(self, unit: ParamUnit) -> None:
        unit.unshard()
        self._live[unit.name] = unit.numel

    def _release(self, unit: ParamUnit) -> None:
        if not self._schedule.keep(unit.name, self.live_numel):
            unit.reshard()
            self._live.pop(unit.name, None)

    def _give_up_all(self) -> None:
        for name in list(self._live):
            self._units[name].reshard()
        self._live.clear()
