"""Unsharded parameters outside forward and backward: to read them, to write them, to generate (FSDP: full params).

`GatheredParameters` reads and writes some parameters; `gathered` reads all, for a model in evaluation;
`iter_named_full_params` streams them. All are collective. `param_registry.py` finds a parameter's buffer and counts the
holders of a unit; `coordinator.py` gathers for ranks that run different forwards; `safe_get_set.py` accesses optimizer
states and gradients.

[Note: writes] With a `modifier_rank`, that rank's values at the end of `GatheredParameters` replace those of all ranks,
in the shard and, where they differ from the rounded master, in the master; elements that the block did not write keep
all their fp32 bits. Without one, hashes compare the values with those at the start: a write is an error, or is undone
with `discard_writes`, as in DeepSpeed (TRL merges an adapter this way, and unmerging adds the rounding of two
additions).
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
from zeroaccel.errors import UsageError, listed
from zeroaccel.logs import log_once
from zeroaccel.zero.access.param_registry import ParamHandle, ParamRegistry, handle_of, parameter_of
from zeroaccel.zero.coordinator import OnDemandUnshard, ParamCoordinator
from zeroaccel.zero.layout import FlatTensor, whole_of
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.tensor_subclasses import local, scales_of, set_local, unshard_released

_Version = tuple[FlatBuffer, int, int]
"""A parameter's buffer, its index, and torch's counter of in-place writes to it."""


class _UnownedWrite(UsageError):
    """A write without a `modifier_rank`."""


class GatheredParameters:
    """Unshards parameters inside the with-block. (all ranks, with the same parameters)

    Works at every stage, for models of an engine and of `zero.Init`; may be nested. It ignores None and other entries
    of `params` that neither of them shards.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> with GatheredParameters(layer.parameters(), modifier_rank=0):
        ...     torch.nn.init.zeros_(layer.weight)  # rank 0's values go to every shard and master
        Parameter containing:
        tensor([[0., 0.],
                [0., 0.]], requires_grad=True)

    Args:
        params: one parameter, or any number of them.
        modifier_rank: rank whose writes all ranks receive. Without it, a write is an error.
        fwd_module: accepted for DeepSpeed's signature; not needed.
        enabled: False turns the block off.
        discard_writes: without a `modifier_rank`, undo writes at the end of the block and log a warning.

    Raises:
        UsageError: on every rank, at the end: the block wrote a parameter without a `modifier_rank`, or replaced its
            storage, without `discard_writes`. At the start: rank `modifier_rank` does not exist, or it has only a part
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
        self._versions: list[_Version] = []  # of all parameters that the block unshards
        self._saving = ExitStack()

    def __enter__(self) -> None:
        # In the order of the units, which is the same on all ranks: each gather is a collective.
        requested = [parameter_of(param) for param in self._params if isinstance(param, Tensor)]
        params = [each for param in requested for each in (param, *(scales_of(param) or {}).values())]
        for param in params:
            unshard_released(param)
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
            registry.acquire(_units(handles))
            for buffer in (buffer for unit in _units(handles) for buffer in unit.buffers if not buffer.persistent):
                self._versions += [(buffer, index, param._version) for index, param in enumerate(buffer.params)]
            for handle in handles:
                registry.write_detector.enter(handle.buffer, handle.index, writes=self._rank is not None)
                if self._discards and handle.buffer.persistent:  # for a sharded buffer, the shard keeps the values
                    self._before[id(handle)] = handle.buffer.view(handle.index).detach().clone()
                if self._rank is not None and handle.buffer.masters.reads_weights:
                    # These masters can be read only until the weights change.
                    handle.require_settled("new values")
                    self._masters[id(handle)] = handle.buffer.masters.read(handle.reach(handle.buffer.rank))
        if torch.is_grad_enabled() and not all(handle.unit.persistent for handle in self._handles):
            # For a leaf, autograd saves the parameter itself, which is sharded by the time of a later backward. This
            # hook makes it save an alias, which keeps referring to the values.
            self._saving.enter_context(saved_tensors_hooks(Tensor.detach, _as_it_is))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._saving.close()
        handles, self._handles, versions, self._versions = self._handles, [], self._versions, []
        for registry, group in _by_registry(handles):
            # A loop over named parameters often needs the same unit again next.
            keep_values = kind is None and (self._rank is None or not any(h.buffer.shard.rounds_writes for h in group))
            try:
                self._settle(registry, group, error, versions)
            except _UnownedWrite as write:
                keep_values = False
                if not self._discards:
                    raise
                self._undo(group, write)
            except BaseException:
                keep_values = False
                raise
            finally:
                for handle in group:
                    registry.write_detector.leave(handle.buffer, handle.index, writes=self._rank is not None)
                    handle.buffer.accept_write(handle.index)
                registry.release(_units(group), keep_values=keep_values)

    def _settle(
        self,
        registry: ParamRegistry,
        handles: Sequence[ParamHandle],
        raised: BaseException | None,
        versions: Sequence[_Version],
    ) -> None:
        # Errors may differ between ranks. All agree before the broadcast, so that no rank waits there for a failed one.
        error = raised if isinstance(raised, Exception) else None
        if raised is None:
            for handle in handles if self._rank is not None else ():
                take_assigned(handle)
            error = _replaced(handles, self._discards) or _unnamed_writes(registry, handles, versions)
            if error is None and self._rank is None:
                error = _written(registry, handles)
        elif error is None:
            return  # the program is ending (KeyboardInterrupt, SystemExit): run no more collectives
        label = f"GatheredParameters({handles[0].slot.fqn}, {len(handles)} in all)"
        # Only one small all-reduce if no rank failed: a loop over a model runs this once per parameter.
        failed = torch.tensor([float(error is not None)])
        try:
            with registry.everyone.flight_recorder.holding(error):
                registry.everyone.all_reduce(failed, "max", label)
            if failed.item():
                agree_or_raise(registry.everyone, error, label)
        except Exception:
            if raised is None:
                raise
            return  # this rank's own exception propagates; the other ranks have raised a CollectiveError
        if self._rank is None:
            return
        for handle in handles:
            view = handle.buffer.view(handle.index).detach()
            registry.everyone.broadcast(view.view(-1), self._rank, f"new values of {handle.slot.fqn}")
            store(handle, self._masters.get(id(handle)))
            registry.write_detector.refresh(handle.buffer, handle.index)

    def _undo(self, handles: Sequence[ParamHandle], write: _UnownedWrite) -> None:
        log_once(logging.WARNING, f"{str(write).partition(';')[0]:.300}: the write was undone")
        with torch.no_grad():
            for handle in handles:
                view = handle.buffer.view(handle.index)
                set_local(handle.param, view)
                before = self._before.pop(id(handle), None)
                if before is not None:
                    view.detach().copy_(before)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Checks its arguments only: the engine detects reads of a parameter outside its module without this call.

    Raises:
        UsageError: the arguments are not a module and a parameter.
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
            raise UsageError("engine.gathered()", expected="no other engine.gathered() around it")
        if collectives.part_holders is not None:
            raise UsageError(
                "engine.gathered()",
                expected="all experts on every rank, because the ranks may run different forwards here",
                got="experts that are divided among ranks (ep)",
                fix="leave it out and run the same number of forwards on every rank: generate(synced_gpus=True)",
            )
    # With different budgets the ranks would choose different units, and gather in different orders.
    budgets = collectives.gather_objects(budget, "engine.gathered: budget")
    if len(set(budgets)) > 1:
        raise UsageError("engine.gathered(budget)", expected="the same on all ranks", got=budgets)
    sharded = [unit for unit in registry.units if not unit.persistent]
    pinned = _that_fit(sharded, budget)
    registry.acquire(pinned)
    coordinator.end_step()  # if a unit stayed unsharded on some ranks, only the others would gather it
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
    """Copies the values of the unsharded parameter, equal on all ranks, into the shard and the master.

    Args:
        before: masters before the write, if they can no longer be read.
    """
    buffer = handle.buffer
    shard = handle.slot.range & buffer.own
    buffer.note_written(shard)
    with torch.no_grad():
        if not buffer.persistent:  # a persistent buffer is its own shard
            buffer.shard.write(shard, buffer.full[shard.at(0)])
            handle.unit.drop_secondary()
        handle.require_settled("new values")
        # A replicated optimizer has the masters of the full parameter on every rank; each rank updates all of them.
        master_range = handle.slot.range & buffer.masters.range
        buffer.masters.follow_weights(master_range, buffer.full[master_range.at(0)], before)


def take_assigned(handle: ParamHandle) -> None:
    """Copies values that a program assigned as `.data` of an unsharded parameter, if they have its shape and dtype."""
    data, view = local(handle.param), handle.buffer.view(handle.index)
    if data.shape != view.shape or data.dtype is not view.dtype or data.device != view.device:
        return
    if data.data_ptr() != view.data_ptr() or data.stride() != view.stride():
        with torch.no_grad():
            # The assigned tensor may be another view of the same memory.
            view.detach().copy_(data.detach().clone() if handle.buffer.owns(data) else data.detach())
        set_local(handle.param, view)


def overwrite(handle: ParamHandle, value: Tensor) -> None:
    """Writes a value to a parameter, which must be unsharded, and to its shard and its master.

    Args:
        value: tensor of the parameter's shape, any dtype, equal on all ranks; the master stores it in fp32.
    """
    buffer, slot = handle.buffer, handle.slot
    shard = slot.range & buffer.own
    handle.require_settled("new values")
    handle.registry.before_write()
    buffer.note_written(shard)
    with torch.no_grad():
        # The master receives the value itself, not the shard's rounded one: fp32 values keep their bits.
        flat = value.detach().reshape(-1).to(buffer.full.device)
        new = FlatTensor(slot.range, flat.float() if flat.dtype is torch.float64 else flat)
        buffer.full[slot.range.at(0)].copy_(new.values)
        buffer.accept_write(handle.index)
        if not buffer.persistent:
            buffer.shard.write(shard, buffer.full[shard.at(0)])
        master_range = slot.range & buffer.masters.range
        buffer.masters.write(master_range, new[master_range])


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
        expected="parameters that keep their shape and dtype"
        + ("" if discards else " and, without a modifier_rank, their storage"),
        got=f"{_described(handles)} assigned to .data",
        fix="assign values of the parameter's shape and dtype, with a modifier_rank; change shapes and dtypes before "
        "zero.Init builds the model, or in the module's constructor",
    )


def _described(handles: Sequence[ParamHandle]) -> str:
    data = next(local(handle.param) for handle in handles if handle.replaced)
    return f"a tensor of shape {tuple(data.shape)} and {data.dtype}"


def _refuse_split(handles: Sequence[ParamHandle]) -> None:
    """Raises UsageError if an axis of the mesh splits a parameter: one rank cannot write the whole of it."""
    for handle in handles:
        if handle.slot.split is not None:
            raise UsageError(
                f"GatheredParameters(modifier_rank): {handle.slot.fqn}",
                expected="parameters that are whole on every rank",
                got=f"a part of shape {handle.slot.shape}, because an axis of the mesh splits the parameter",
                fix="write it with zero.safe_set_full_fp32_param",
            )


def _unnamed_writes(
    registry: ParamRegistry, handles: Sequence[ParamHandle], versions: Sequence[_Version]
) -> UsageError | None:
    """Returns the error for writes, since `versions`, to other parameters of the units."""
    buffers = {id(buffer) for unit in _units(handles) for buffer in unit.buffers}
    names = []
    for buffer, index, before in versions:
        is_written = buffer.params[index]._version not in (before, buffer.versions[index])
        if is_written and id(buffer) in buffers and not registry.write_detector.observes(buffer, index):
            names.append(buffer.layout.slots[index].fqn)
            buffer.accept_write(index)  # a gather will overwrite it
    if not names:
        return None
    return _UnownedWrite(
        f"GatheredParameters({handles[0].slot.fqn}): {listed(names, most=3)} written",
        expected="writes to parameters that the block names",
        got="a write to another parameter of the same unit, which is lost",
        fix="name it too, with the rank whose values all ranks should get: "
        "GatheredParameters(module.parameters(), modifier_rank=0)",
    )


def _written(registry: ParamRegistry, handles: Sequence[ParamHandle]) -> UsageError | None:
    changed = registry.write_detector.changed([(handle.buffer, handle.index) for handle in handles])
    names = [handle.slot.fqn for handle, was_written in zip(handles, changed, strict=True) if was_written]
    if not names:
        return None
    differs = any(handle.buffer.persistent for handle in handles)
    return _UnownedWrite(
        f"GatheredParameters: {', '.join(names)} written without a modifier_rank",
        fix="pass the rank whose values all ranks should get: GatheredParameters(params, modifier_rank=0)"
        + ("; this rank's copy may now differ from the others'" if differs else "; the write has been undone"),
    )
