"""Unshards units before they are used and reshards them afterwards, in forward, backward and recomputation.

`hooks.py` reports the events of modules and autograd, `prefetch.py` decides what to gather ahead and what to keep; this
file moves `ParamUnit`s accordingly. It has no dependency on modules, autograd nodes or gradients. The counterpart of
FSDP2's `FSDPState` and of DeepSpeed's `PartitionedParameterCoordinator`.

[Note: forward uses] One run of a unit's forward is a `ForwardUse`. Its backward begins when the gradient of one of its
outputs arrives. It ends when the backward of an earlier use begins: autograd executes nodes in the reverse order of
their creation (among the ready nodes it takes the one with the highest sequence number, and a node waits only for nodes
created later). A nested backward, such as re-entrant checkpointing runs, ends when the outer one continues. So the
engine does not touch the graph, and an input that many units share delays no reshard. Several uses of one unit may be
pending at a time (two forwards before one backward, a layer applied twice); the unit is resharded after the last.

[Note: uses that a backward passes by] A gather needs all ranks, but a gradient may reach a block on some of them only:
on the others the block was an identity, or its output was dropped. So when a backward skips such a use, its rank still
takes the turn of that use: it unshards and reshards the unit in the same place of the order, and the gradient counts as
zero. This also keeps prefetching the same on all ranks. A detached part of the model gets no gradient on any rank, and
needs no gather. So a use has such a turn if the same backward has reached another block of its list, and if the use
could have had a gradient.

[Note: units in turn] Several units may be parameters of one module that reads them one after the other, such as the
projections of experts. Then a forward gathers each unit when it is read, and frees the previous one. The order is that
of the units on every rank: a read also begins the units before it, and the end of the module begins the unread ones.
Backward has no such reads, so it gathers all units of the module. So does recomputation, because backward follows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zeroaccel.comm.collectives import Collectives
from zeroaccel.zero.param_unit import FetchOutcome, ParamUnit, ShardState
from zeroaccel.zero.prefetch import PrefetchTrace
from zeroaccel.zero.wrap_policy import ROOT

_LIST = re.compile(r"(.*)\.\d+(\.|$)")  # the innermost list that a module is in


class ForwardUse:
    """One run of a unit's forward.

    Attributes:
        started, ended: time of its forward, on the coordinator's clock.
        siblings: key that the blocks of one module list, and the units inside them, share in one forward of the root;
            None if the unit is in no list.
        backward: number of the backward that has reached it; 0 before.
        task: number of the autograd graph task that reached it; a nested task has a higher number.
        may_get_grad: True if a gradient may come, on this rank or on another.
        turn: "awaited", "begun" or "over" for a unit in turn; "" for others, which are unsharded from start to end.
    """

    __slots__ = ("backward", "ended", "may_get_grad", "siblings", "started", "task", "turn", "unit")

    def __init__(self, unit: ParamUnit, started: int, forward: int) -> None:
        self.unit = unit
        self.started = self.ended = started
        in_list = _LIST.match(unit.name)
        self.siblings = (forward, in_list[1]) if in_list else None
        self.backward = self.task = 0
        self.may_get_grad = True
        self.turn = ""


class ParamCoordinator:
    """Decides when to unshard and reshard each unit.

    Life of a training pass::

        root_pre_forward
            pre_forward(unit) -> use    unshard it and its external units, prefetch the next
            post_forward(use)           reshard, unless it is needed again soon
        root_post_forward
        begin_backward
            pre_backward(use)           unshard again; uses that ran after it get their post_backward
            post_backward(use)          reshard
        end_backward                    reshard everything

    Args:
        collectives: collectives of the ranks that gather; they agree once per pass on reads from files.
        on_over: called with a unit's name when its last use in a backward is over; not called if modules of other
            units read its parameters, whose gradients may come later.

    Attributes:
        in_backward: True between `begin_backward` and `end_backward`.
        on_demand: unshards units while ranks run different numbers of forwards; None while they run the same.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        trace: PrefetchTrace,
        collectives: Collectives,
        on_over: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._units = {unit.name: unit for unit in units}
        self._trace = trace
        self._on_over = on_over

        # -- forward
        self._in_root = False
        self._spans = False  # a block of several forwards and backwards is one pass
        self._num_forwards = 0
        self._clock = 0
        self._running: list[ForwardUse] = []
        self._last_ended: ForwardUse | None = None
        self._external: dict[str, list[ParamUnit]] = {}  # unit -> other units whose parameters its modules read

        # -- backward
        self.in_backward = False
        self._num_backwards = 0
        self._second_order = 0  # number of the backward that will be differentiated; 0 if there is none
        self._ahead: dict[str, set[ForwardUse]] = {unit.name: set() for unit in units}  # not reached by a backward yet
        self._turns: list[ForwardUse] = []  # those in `_ahead` that a backward may skip, in the order of their ends
        self._reached: set[tuple[int, str] | None] = set()  # lists with a block that this backward has reached
        self._pending: dict[str, list[ForwardUse]] = {unit.name: [] for unit in units}  # uses in their backward

        # -- units in memory
        self._live: dict[str, int] = {}  # unsharded or gathering -> elements
        self._read_outside: set[str] = set()  # read in this pass by a module of no unit, which may hold views
        self._pinned: set[str] = set()
        self._recent: list[ParamUnit] = []  # unpinned units that still have values: the last one and the root's
        self.on_demand: OnDemandUnshard | None = None

        # -- reads from files
        self._ranks = collectives.everyone
        self._outcome = FetchOutcome()
        self._swapping_in: list[str] = []  # units with shards being read from a tier; the next need gathers them

    @property
    def idle(self) -> bool:
        """True if no module of a unit is in its forward, and no backward runs."""
        return not (self._running or self.in_backward)

    def needed_by(self, unit: ParamUnit) -> tuple[ParamUnit, ...]:
        """Returns a unit and the other units whose parameters its modules read."""
        return (unit, *self._external.get(unit.name, ()))

    def is_running(self, unit: ParamUnit) -> bool:
        """Returns True if a module of `unit` is in its forward."""
        return any(use.unit is unit for use in self._running)

    # -- forward

    def root_pre_forward(self, *, training: bool) -> None:
        """Handles the start of the root's forward."""
        if not (self._running or self.in_backward):  # else the root calls itself, or checkpointing recomputes it
            self._num_forwards += 1
            self._in_root = True
            if not self._spans:
                self._trace.begin("train" if training else "eval")

    def pre_forward(self, unit: ParamUnit, task: int = -1, *, in_turn: bool = False) -> ForwardUse:
        """Unshards a unit, and the units whose parameters it reads, before one of its modules runs.

        Args:
            task: the autograd graph task that recomputes it; -1 outside any backward.
            in_turn: unshard it only when its parameters are read; see [Note: units in turn].
        """
        if self.in_backward:
            self._end_nested_backwards(task)
        use = ForwardUse(unit, self._tick(), self._num_forwards)
        use.task = task + 1  # at least the number of a nested backward that follows its recomputation
        self._running.append(use)
        if in_turn:
            use.turn = "awaited"
            return use
        try:
            for needed in self.needed_by(unit):
                self._ensure_unsharded(needed)
        except BaseException:  # e.g. a collective timed out; the module will not run, so it gets no post_forward
            self._running.pop()
            raise
        return use

    def post_forward(
        self, use: ForwardUse, *, opaque: bool = False, has_grad: bool = True, has_raised: bool = False
    ) -> None:
        """Reshards the units that are not needed again soon, after a module has run or raised.

        Args:
            opaque: its output has no visible tensors, so no hook will report its backward; it stays unsharded.
            has_grad: its output has a history. If not, another rank's output may have one if the unit is trainable.
            has_raised: the module raised, so nothing more is gathered.
        """
        assert self._running and self._running[-1] is use, f"{use.unit.name} left forward out of order"
        if use.turn == "awaited" and not has_raised:
            self._begin_turn(use)
        self._running.pop()
        # Units of one module end together: backward reaches the last of them first.
        last, self._last_ended = self._last_ended, use
        is_with_last = last is not None and last.ended == self._clock and last.unit.modules == use.unit.modules
        use.ended = self._clock if is_with_last else self._tick()
        if self.in_backward:
            if torch.is_grad_enabled():  # recomputed: its backward follows at once, on other ranks if not on this one
                self._add_pending(use)
            return
        if torch.is_grad_enabled():
            use.may_get_grad = has_grad or any(buffer.trainable for buffer in use.unit.buffers)
            self._ahead[use.unit.name].add(use)
            if use.may_get_grad and use.siblings is not None:
                self._turns.append(use)
        if not opaque and use.turn != "over":
            self._reshard_used(use)

    def _reshard_used(self, use: ForwardUse) -> None:
        # A module around this one may hold a view of a parameter that it read, and use it again.
        others = (other for other in self._running if other is not use)
        needed = {id(unit) for running in others for unit in self.needed_by(running.unit)}
        for candidate in self.needed_by(use.unit):
            if id(candidate) not in needed and candidate.name not in self._read_outside:
                self._reshard(candidate)

    def _begin_turn(self, use: ForwardUse) -> None:
        """Unshards a unit in turn whose parameter is read, and ends the turns of its module's units before it."""
        for other in [other for other in self._running if other.turn and other.unit.modules == use.unit.modules]:
            if other.turn == "awaited" or other is use:
                other.turn = "begun"
                for needed in self.needed_by(other.unit):
                    self._ensure_unsharded(needed)
            if other is use:
                return
            if other.turn == "begun" and not self.in_backward:
                other.turn = "over"
                self._reshard_used(other)

    def root_post_forward(self, *, training: bool) -> None:
        """Ends the root's forward; reshards everything if no backward will follow.

        Raises:
            OffloadError: a rank could not read a shard; on every rank.
        """
        if not training and not self.in_backward and not self._running and not any(self._pending.values()):
            self._end_pass()
        if not (self.in_backward or self._running):
            self._in_root = False
            self._outcome.agree(self._ranks, "forward")

    def unshard_external(self, unit: ParamUnit) -> None:
        """Unshards a unit whose parameter is read outside its own modules, e.g. when a tied head reads the embedding.

        From now on it is an external unit of the running unit, whose forward and backward unshard both.
        """
        if unit.state is ShardState.UNSHARDED or self.idle:
            return
        use = next((use for use in reversed(self._running) if use.unit is unit), None)
        if use is not None and use.turn:
            self._begin_turn(use)
            return
        self._ensure_unsharded(unit)
        if self._running and self._running[-1].unit is not unit:
            external = self._external.setdefault(self._running[-1].unit.name, [])
            if unit not in external:
                external.append(unit)

    # -- backward

    def begin_backward(self) -> None:
        """Handles the start of a backward; several may go through one graph."""
        self.in_backward = True
        self._num_backwards += 1
        self._reached.clear()

    def pre_backward(self, use: ForwardUse, task: int) -> None:
        """Unshards the units that this use's forward computed with, when the gradient of one of its outputs arrives.

        Args:
            task: the autograd graph task that is running.
        """
        if use.backward == self._num_backwards:  # a use has one pre_backward, though each of its outputs has a hook
            return
        self._reached.add(use.siblings)
        self._end_nested_backwards(task)
        for each in (*self._passed_by(use.ended), use):
            self._reach(each, task)

    def pass_rest(self) -> None:
        """Takes the turns of uses that autograd has not reached on this rank, before the rank waits for gradients."""
        for use in self._passed_by(0):
            self._reach(use, None)

    def _passed_by(self, after: int) -> list[ForwardUse]:
        """Returns the uses after a time that have a turn without a gradient, the latest first."""
        if self.on_demand is not None:
            return []
        passed = []
        for use in reversed(self._turns):
            if use.ended <= after:
                break
            if use.started > after and use.siblings in self._reached:
                passed.append(use)
        # In the order in which autograd reaches outputs: a unit before the units inside it.
        return sorted(passed, key=lambda use: (-use.ended, -use.started)) if len(passed) > 1 else passed

    def _reach(self, use: ForwardUse, task: int | None) -> None:
        """Takes the turn of a use in the backward; `task` is None if autograd has finished."""
        # See [Note: forward uses]: all later uses are over now, so their memory can be freed before the gather of this
        # unit. A use of an outer task is only interrupted by this one, and not over.
        for other in {id(u): u for uses in self._pending.values() for u in uses if u.started > use.ended}.values():
            if task is None or other.task == task or not other.backward:
                self.post_backward(other)
        use.backward = self._num_backwards
        if task is not None:
            use.task = task
        self._ahead[use.unit.name].discard(use)
        if use in self._turns:
            self._turns.remove(use)
        for unit in self.needed_by(use.unit):
            if not self._pending[unit.name]:
                self._ensure_unsharded(unit)
        self._add_pending(use)

    def _add_pending(self, use: ForwardUse) -> None:
        for unit in self.needed_by(use.unit):
            if use not in self._pending[unit.name]:
                self._pending[unit.name].append(use)

    def post_backward(self, use: ForwardUse) -> None:
        """Ends the backward of this use: reshards each of its units that has no other pending use."""
        for unit in self.needed_by(use.unit):
            uses = self._pending[unit.name]
            if use in uses:
                uses.remove(use)
                if not uses and not self.is_running(unit):
                    self._reshard(unit)
        is_external = any(use.unit in others for others in self._external.values())
        if not (self._pending[use.unit.name] or self._ahead[use.unit.name] or is_external):
            self._on_over(use.unit.name)

    def keep_for_second_order(self) -> None:
        """Keeps units unsharded while a backward builds a graph of itself (create_graph=True).

        No hook reports the reads of weights in that graph, so units stay unsharded until the next backward, which goes
        through it, or the step.
        """
        self._second_order = self._num_backwards

    def end_backward(self) -> None:
        """Ends the backward: reshards everything, unless this backward will be differentiated.

        Raises:
            OffloadError: a rank could not read a shard; on every rank.
        """
        self._close_backward()
        self._outcome.agree(self._ranks, "backward")

    def _close_backward(self) -> None:
        self.in_backward = False
        for uses in self._pending.values():
            uses.clear()
        if self._second_order != self._num_backwards:
            self._second_order = 0
        self._end_pass()

    def _end_pass(self) -> None:
        if not self._spans:
            self._reshard_all()
            self._trace.end()

    @contextmanager
    def one_pass(self, kind: str) -> Iterator[None]:
        """Makes one pass of all forwards and backwards in the block, so that units stay unsharded between them.

        Args:
            kind: name of the recording that such passes share.
        """
        self._trace.begin(kind)
        self._spans = True
        try:
            yield
        finally:
            self._spans = False
        self._end_pass()

    def end_step(self) -> None:
        """Reshards, before the weights change, units that a forward without a backward left unsharded."""
        self._forget_ahead()
        self._second_order = 0
        self._reshard_all()
        self.drop_recent()
        self._trace.end()

    def reset(self) -> None:
        """Reshards everything and drops the trace after an exception anywhere."""
        self._running.clear()
        self._forget_ahead()
        self._second_order = 0
        self.drop_recent()
        self._close_backward()
        self._in_root = False
        self._outcome.forget()
        self._trace.forget()

    # -- outside forward and backward

    def pin(self, unit: ParamUnit) -> None:
        """Unshards a unit until `unpin`, through any passes that run meanwhile."""
        if unit.name in self._units:
            self._pinned.add(unit.name)
            self._unshard(unit, exact=True)
            unit.wait()

    def unpin(self, unit: ParamUnit, *, keep_values: bool = False) -> None:
        """Reshards a pinned unit, unless a pass is using it.

        Args:
            keep_values: keep the values until another unit is pinned or a pass begins, so that a loop over parameters
                gathers each unit once.
        """
        if unit.name in self._units:
            self._pinned.discard(unit.name)
            if not (self.is_running(unit) or self._pending[unit.name]):
                # Ranks on different paths would disagree on who has the values.
                keep_values = keep_values and self.on_demand is None
                unit.reshard(keep_views=True, keep_values=keep_values)
                if keep_values:
                    self._recent.append(unit)
                self._live.pop(unit.name, None)

    def drop_recent(self) -> None:
        """Frees the values that `unpin` kept."""
        for unit in self._recent:
            unit.drop_values()
        self._recent.clear()

    def _drop_recent_but(self, unit: ParamUnit) -> None:
        # A loop over named parameters meets those of the root before, between and after all others.
        others = [other for other in self._recent if other is not unit]
        self._recent = [other for other in others if other.name == ROOT]
        for other in others:
            if other.name != ROOT:
                other.drop_values()

    def unshard_for_submodule(self, unit: ParamUnit) -> None:
        """Unshards a unit until the end of the pass or step, for a call of a module inside it that bypasses it."""
        if self.on_demand is not None:
            self.on_demand.unshard(unit)
        self._unshard(unit)
        unit.wait()
        self._read_outside.add(unit.name)

    # -- moving units

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _forget_ahead(self) -> None:
        self._turns.clear()
        for uses in self._ahead.values():
            uses.clear()

    def _end_nested_backwards(self, task: int) -> None:
        """Ends the uses of nested backwards, which are over when an outer one continues."""
        for use in {id(u): u for uses in self._pending.values() for u in uses if u.task > task}.values():
            self.post_backward(use)

    def _ensure_unsharded(self, unit: ParamUnit) -> None:
        """Unshards `unit` and starts the gathers of the units that the trace expects next."""
        if self.on_demand is not None:
            self.on_demand.unshard(unit)
            self._live[unit.name] = unit.numel
            return
        if self.in_backward and self._pending[unit.name]:
            unit.wait()  # recomputed within its own backward: already unsharded, and not another step of the trace
            return
        self._unshard(unit)
        ahead = self._trace.need(unit.name, self._live)
        # Gather the shards that the previous call began to read. The trace alone, not the speed of a disk, decides when
        # a unit is read, so all ranks issue their gathers in one order.
        swapped_in, self._swapping_in = self._swapping_in, []
        for name in swapped_in:
            if name in self._live:
                self._unshard(self._units[name])
        for name in ahead:
            if self._units[name].install is not None:
                continue  # its update comes first: waiting for it here would delay the unit that is needed now
            if self._units[name].is_swapped:
                self._units[name].prefetch()
                self._live[name] = self._units[name].numel
                self._swapping_in.append(name)
            else:
                self._unshard(self._units[name])
        # Last, so that the gathers ahead are issued before this rank blocks on the one that it needs now.
        unit.wait()

    def _unshard(self, unit: ParamUnit, *, exact: bool = False) -> None:
        if exact:
            self._drop_recent_but(unit)
        else:  # a pass begins
            self.drop_recent()
        # The results of a pass leave the engine only at its end, so one agreement there is enough.
        defers = not exact and (self.in_backward or self._in_root)
        unit.unshard(exact=exact, outcome=self._outcome if defers else None)
        self._live[unit.name] = unit.numel

    def _reshard(self, unit: ParamUnit) -> None:
        """Reshards `unit`, unless it is pinned or needed again within `stage3_max_reuse_distance`."""
        if unit.name in self._pinned or self._second_order:
            return
        if self.on_demand is not None or not self._trace.keep(unit.name, self._live):
            unit.reshard()
            self._live.pop(unit.name, None)

    def _reshard_all(self) -> None:
        if self._second_order:
            return
        self._read_outside.clear()
        for name in self._live.keys() - self._pinned:
            self._units[name].reshard()
            del self._live[name]
        self._swapping_in.clear()


_DONE = -1  # announced in place of a unit's number


class OnDemandUnshard:
    """Gathers for ranks that run different forwards: generated texts differ in length, or batches in number.

    A gather needs all ranks, so they agree on each one: every rank announces the unit that it needs now, or that it is
    done, and all ranks participate in the gathers of all announced units. This costs a small all-reduce per gather and
    disables prefetching. `full_params.py` starts it; `finish` ends it, on every rank.
    """

    def __init__(self, units: Sequence[ParamUnit], collectives: Collectives) -> None:
        self._units = tuple(units)
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self._collectives = collectives

    def unshard(self, unit: ParamUnit) -> None:
        """Unshards `unit` on this rank, participating in the gathers of other ranks meanwhile."""
        if unit.state is not ShardState.UNSHARDED:
            self._round(self._numbers[id(unit)])

    def finish(self) -> None:
        """Participates in the gathers of other ranks until all are done, when this rank needs nothing more."""
        while self._round(_DONE):
            pass

    def _round(self, needed: int) -> bool:
        """Exchanges the needed units and joins the gathers that follow; returns False when all ranks are done."""
        announced = torch.full((self._collectives.world_size,), _DONE)
        announced[self._collectives.rank] = needed
        self._collectives.all_reduce(announced, "max", "who needs which unit")
        numbers = sorted({int(number) for number in announced.tolist()} - {_DONE})
        for number in numbers:  # sorted: the gathers are collectives, and need the same order on all ranks
            unit = self._units[number]
            if number == needed:
                unit.unshard()
                unit.wait()
            else:
                unit.join_gather()
        return bool(numbers)
