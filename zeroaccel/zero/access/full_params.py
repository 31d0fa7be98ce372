"""Unsharded parameters outside forward and backward: to read them, to write them, to generate (FSDP: full params).

`GatheredParameters` is for some parameters and may write; `gathered` is for a model in evaluation and only reads;
`iter_named_full_params` streams. All are collective. `param_registry.py` finds a parameter's buffer and counts the uses
of a unit; gathers for ranks that go different ways are in `coordinator.py`, optimizer states and gradients in
`safe_get_set.py`.

[Note: writes] A write inside `GatheredParameters` counts if a `modifier_rank` was named: that rank's values go to all
ranks, into the shard and, where they differ from what the master rounds to, into the master; elements that were not
written keep all their fp32 bits. Without a named rank the values are compared, by a hash, with those at the beginning:
a write is an error, or with `discard_writes` is undone, as in DeepSpeed (TRL merges an adapter so, and unmerges it with
the rounding of two additions).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroaccel.comm.agree import agree_or_raise, agreed
from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once
from zeroaccel.zero.access.param_registry import ParamHandle, ParamRegistry, handle_of
from zeroaccel.zero.coordinator import OnDemandUnshard, ParamCoordinator
from zeroaccel.zero.layout import FlatTensor, whole_of
from zeroaccel.zero.param_unit import ParamUnit
from zeroaccel.zero.tensor_subclasses import scales_of, set_local


class _UnownedWrite(UsageError):
    """A write that no rank was named for."""


class GatheredParameters:
    """Unshards parameters inside the with-block. (all ranks, with the same parameters)

    Works at every stage, for models of an engine and of `zero.Init`; may be nested. It ignores None and all other
    entries of `params`.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> with GatheredParameters(layer.parameters(), modifier_rank=0):
        ...     torch.nn.init.zeros_(layer.weight)  # rank 0's values go to every shard and master
        Parameter containing:
        tensor([[0., 0.],
                [0., 0.]], requires_grad=True)

    Args:
        params: one parameter, or any number of them.
        modifier_rank: the rank whose writes count. Without it, a write is an error.
        fwd_module: accepted for DeepSpeed's signature; not needed.
        enabled: False makes it do nothing.
        discard_writes: without a `modifier_rank` the block undoes its writes at the end, and warns of them.

    Raises:
        UsageError: on every rank, on leaving: the block wrote a parameter without a `modifier_rank`, or replaced its
            storage, without `discard_writes`. On entering: there is no rank `modifier_rank`, or it has only a part
            of a parameter.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
        *,
        discard_writes: bool = False,
    ) -> None:
        listed = [params] if isinstance(params, Tensor) else list(params or ())
        self._params = listed if enabled else []
        self._rank = modifier_rank
        self._discards = discard_writes and modifier_rank is None
        self._before: dict[int, Tensor] = {}
        self._handles: list[ParamHandle] = []
        self._masters: dict[int, Tensor] = {}
        self._saving = ExitStack()

    def __enter__(self) -> None:
        # In the order of the units, which is the same on all ranks: each is gathered by a collective.
        own = [param for param in self._params if isinstance(param, Tensor)]
        params = [each for param in own for each in (param, *(scales_of(param) or {}).values())]
        unique = {id(handle.param): handle for param in params if (handle := handle_of(param)) is not None}
        self._handles = sorted(unique.values(), key=lambda handle: handle.order)
        for registry, handles in _by_registry(self._handles):
            ranks = registry.everyone.world_size
            if self._rank is not None and not (type(self._rank) is int and 0 <= self._rank < ranks):
                raise UsageError("GatheredParameters(modifier_rank)", expected=f"0 to {ranks - 1}", got=self._rank)
            if self._rank is not None:
                _refuse_split(handles)
            if self._rank is not None or self._discards:
                registry.before_write()
            registry.acquire(_units(handles), handles)
            for handle in handles:
                registry.write_detector.enter(handle.buffer, handle.index, writes=self._rank is not None)
                if self._discards and handle.buffer.persistent:  # of a sharded one the shard has them
                    self._before[id(handle)] = handle.buffer.view(handle.index).detach().clone()
                if self._rank is not None and handle.buffer.masters.reads_weights:
                    # These masters can be read only while the weights are as they are.
                    handle.require_settled("new values")
                    self._masters[id(handle)] = handle.buffer.masters.read(handle.reach(handle.buffer.rank))
        if torch.is_grad_enabled() and not all(handle.unit.persistent for handle in self._handles):
            # Of a leaf autograd saves the parameter itself, which is sharded when a later backward comes to it. What a
            # hook returns is saved instead: an alias that goes on referring to the values.
            self._saving.enter_context(saved_tensors_hooks(Tensor.detach, _as_it_is))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._saving.close()
        handles, self._handles = self._handles, []
        for registry, own in _by_registry(handles):
            # A loop over named parameters comes back to this unit at once.
            keep_values = kind is None and (self._rank is None or not any(h.buffer.shard.rounds_writes for h in own))
            try:
                self._settle(registry, own, error)
            except _UnownedWrite as write:
                keep_values = False
                if not self._discards:
                    raise
                self._undo(own, write)
            except BaseException:
                keep_values = False
                raise
            finally:
                for handle in own:
                    registry.write_detector.leave(handle.buffer, handle.index, writes=self._rank is not None)
                    handle.buffer.accept_write(handle.index)
                registry.release(_units(own), keep_values=keep_values)

    def _settle(self, registry: ParamRegistry, handles: Sequence[ParamHandle], raised: BaseException | None) -> None:
        # Errors may differ between ranks: all agree before the broadcast, so that none waits there for one that raised.
        error = raised if isinstance(raised, Exception) else None
        if raised is None:
            error = _replaced(handles, self._discards)
            if error is None and self._rank is None:
                error = _written(registry, handles)
        elif error is None:
            return  # the program is ending (KeyboardInterrupt, SystemExit): no collective any more
        label = f"GatheredParameters({handles[0].slot.fqn}, {len(handles)} in all)"
        # One small all-reduce where no rank failed: a loop over a model comes here once per parameter.
        failed = torch.tensor([float(error is not None)])
        registry.everyone.all_reduce(failed, "max", label)
        try:
            if failed.item():
                agree_or_raise(registry.everyone, error, label)
        except Exception:
            if raised is None:
                raise
            return  # this rank's own exception goes on as it is; the others have raised a CollectiveError
        if self._rank is None:
            return
        for handle in handles:
            view = handle.buffer.view(handle.index).detach()
            registry.everyone.broadcast(view.view(-1), self._rank, f"new values of {handle.slot.fqn}")
            store(handle, self._masters.get(id(handle)))
            registry.write_detector.refresh(handle.buffer, handle.index)

    def _undo(self, handles: Sequence[ParamHandle], write: _UnownedWrite) -> None:
        log_once(logging.WARNING, f"{str(write).partition(';')[0]:.300}: the values from before the block are kept")
        with torch.no_grad():
            for handle in handles:
                view = handle.buffer.view(handle.index)
                set_local(handle.param, view)
                before = self._before.pop(id(handle), None)
                if before is not None:
                    view.detach().copy_(before)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted, and not needed: the engine sees by itself that a parameter is read outside its module.

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
def gathered(registry: ParamRegistry, coordinator: ParamCoordinator, budget: int | None) -> Iterator[None]:
    """See `Engine.gathered`."""
    collectives = registry.collectives
    with agreed(collectives, "engine.gathered: budget"):
        if budget is not None and (type(budget) is not int or budget < 0):
            raise UsageError("engine.gathered(budget)", expected="a number of bytes, or None", got=budget)
        if coordinator.on_demand is not None:
            raise UsageError("engine.gathered()", expected="not to be nested")
        if collectives.part_holders is not None:
            raise UsageError(
                "engine.gathered()",
                expected="ranks that have all experts, as they may run different forwards here",
                got="experts that are divided among ranks (ep)",
                fix="run the same number of forwards on every rank, without it (synced_gpus=True of generate)",
            )
    # Another budget on one rank would be another list of units, and gathers in another order.
    budgets = collectives.gather_objects(budget, "engine.gathered: budget")
    if len(set(budgets)) > 1:
        raise UsageError("engine.gathered(budget)", expected="the same on all ranks", got=budgets)
    sharded = [unit for unit in registry.units if not unit.persistent]
    pinned = _that_fit(sharded, budget)
    registry.acquire(pinned)
    registry.complete()  # ranks that go different ways know of full units only
    coordinator.end_step()  # a unit left unsharded on some ranks only would be gathered by the others alone
    coordinator.on_demand = on_demand = OnDemandUnshard(sharded, collectives)
    try:
        yield
    finally:
        on_demand.finish()
        coordinator.on_demand = None
        registry.release(pinned)


def iter_named_full_params(registry: ParamRegistry) -> Iterator[tuple[str, Tensor]]:
    """See `Engine.iter_named_full_params`."""
    for unit in registry.units:
        registry.acquire([unit])
        try:
            for buffer in unit.buffers:
                for index, slot in enumerate(buffer.layout.slots):
                    yield slot.fqn, whole_of(slot, buffer.view(index).detach(), registry.collectives)
        finally:
            registry.release([unit])


def store(handle: ParamHandle, before: Tensor | None = None) -> None:
    """Takes the values in the unsharded parameter, equal on all ranks, into the shard and the master.

    Args:
        before: the masters as they were, where they can no longer be read.
    """
    buffer = handle.buffer
    own = handle.slot.range & buffer.own
    buffer.note_written(own)
    with torch.no_grad():
        if not buffer.persistent:  # whose shard is the full buffer itself
            buffer.shard.write(own, buffer.full[own.at(0)])
            handle.unit.drop_secondary()
        handle.require_settled("new values")
        # A replicated optimizer has the masters of the full parameter on every rank, and so all of them follow.
        part = handle.slot.range & buffer.masters.range
        buffer.masters.follow_weights(part, buffer.full[part.at(0)], before)


def overwrite(handle: ParamHandle, value: Tensor) -> None:
    """Gives a parameter, which must be unsharded, another value: here, in the shard and in the master.

    Args:
        value: of the parameter's shape, any dtype, equal on all ranks; the master keeps bits that 16 bits drop.
    """
    buffer, slot = handle.buffer, handle.slot
    own = slot.range & buffer.own
    handle.require_settled("new values")
    handle.registry.before_write()
    buffer.note_written(own)
    with torch.no_grad():
        # The master takes the value itself, not what the shard rounds it to: fp32 values keep their bits.
        flat = value.detach().reshape(-1).to(buffer.full.device)
        new = FlatTensor(slot.range, flat.float() if flat.dtype is torch.float64 else flat)
        buffer.full[slot.range.at(0)].copy_(new.values)
        buffer.accept_write(handle.index)
        if not buffer.persistent:
            buffer.shard.write(own, buffer.full[own.at(0)])
        part = slot.range & buffer.masters.range
        buffer.masters.write(part, new[part])


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def _by_registry(handles: Sequence[ParamHandle]) -> list[tuple[ParamRegistry, list[ParamHandle]]]:
    groups: dict[int, tuple[ParamRegistry, list[ParamHandle]]] = {}
    for handle in handles:
        groups.setdefault(handle.order[0], (handle.registry, []))[1].append(handle)
    return list(groups.values())


def _units(handles: Sequence[ParamHandle]) -> list[ParamUnit]:
    return list({id(handle.unit): handle.unit for handle in handles}.values())


def _that_fit(units: Sequence[ParamUnit], budget: int | None) -> list[ParamUnit]:
    chosen, room = [], budget
    for unit in units:
        nbytes = sum(buffer.nbytes for buffer in unit.buffers)
        if room is None or nbytes <= room:
            chosen.append(unit)
            room = None if room is None else room - nbytes
    return chosen


def _replaced(handles: Sequence[ParamHandle], discards: bool) -> UsageError | None:
    names = [handle.slot.fqn for handle in handles if handle.replaced]
    if not names:
        return None
    return (_UnownedWrite if discards else UsageError)(
        f"GatheredParameters: {', '.join(names)}",
        expected="parameters to be changed in place",
        got="other storage assigned to .data",
        fix="copy into it: param.data.copy_(values)",
    )


def _refuse_split(handles: Sequence[ParamHandle]) -> None:
    """One rank cannot write what it has a part of only."""
    for handle in handles:
        if handle.slot.split is not None:
            raise UsageError(
                f"GatheredParameters(modifier_rank): {handle.slot.fqn}",
                expected="parameters that every rank has whole",
                got=f"a part of shape {handle.slot.shape} of one that an axis of the mesh splits",
                fix="write it with zero.safe_set_full_fp32_param",
            )


def _written(registry: ParamRegistry, handles: Sequence[ParamHandle]) -> UsageError | None:
    changed = registry.write_detector.changed([(handle.buffer, handle.index) for handle in handles])
    names = [handle.slot.fqn for handle, was_written in zip(handles, changed, strict=True) if was_written]
    if not names:
        return None
    differs = any(handle.buffer.persistent for handle in handles)
    return _UnownedWrite(
        f"GatheredParameters: {', '.join(names)} written without a modifier_rank",
        fix="pass the rank whose values count: GatheredParameters(params, modifier_rank=0)"
        + ("; this rank's copy is no longer that of the others" if differs else "; the values are as they were before"),
    )
