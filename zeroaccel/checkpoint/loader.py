"""Loading: each rank reads its own elements of masters, states and parameters, whatever wrote them.

The counterpart of `save_plan.py`. A checkpoint is checked against the engine before anything changes; damage that shows
only while reading leaves the engine half loaded, which `engine.py` does not let anybody use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from zeroaccel.checkpoint.compatibility import hyperparameters
from zeroaccel.checkpoint.plain_codec import decode
from zeroaccel.checkpoint.save_plan import EngineState, persistent_buffers, reached_slots
from zeroaccel.checkpoint.tensor_store import TensorStore
from zeroaccel.errors import CheckpointError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.access.safetensors_file import dtype_of
from zeroaccel.zero.layout import Slot
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit, ShardState
from zeroaccel.zero.sharded_optimizer import Piece, ShardedOptimizer
from zeroaccel.zero.storage.nvme_shard import NvmeShard

__all__ = ["LoadReport", "load_optimizer", "load_weights", "refresh_copies"]


@dataclass(frozen=True)
class LoadReport:
    """What loading read.

    Attributes:
        wanted_nbytes: of the tensors this rank keeps.
        read_nbytes: from the disk.
    """

    requested_nbytes: int
    read_nbytes: int


def load_weights(holdings: EngineState, store: TensorStore) -> None:
    """Fills masters, other parameters and buffers; the parameters' own copies follow in `refresh_copies`.

    Parameters that were left out of the checkpoint, or have no namesake there, stay as they are.
    """
    kept: list[str] = []
    packed: list[tuple[FlatBuffer, Tensor]] = []
    for buffer in holdings.buffers():
        if holdings.optimizer is not None and holdings.optimizer.is_away(buffer):
            kept += _load_masters_away(buffer, holdings.optimizer, store)
        elif buffer.master is None and buffer.home is not None:
            low, high = buffer.layout.bounds(buffer.rank)
            with _or_released(buffer.home):
                kept += _fill_weights(buffer, store, buffer.home.bring(), low, high)
                store.read()
                buffer.home.commit()
        else:
            target, low, high = _weights(buffer)
            kept += _fill_weights(buffer, store, target, low, high)
            if buffer.packed is not None:
                packed.append((buffer, target))
    buffers = {}
    for name, held in persistent_buffers(holdings.model):
        if f"buffer/{name}" in store.manifest.tensors:
            buffers[name] = torch.empty(held.numel(), dtype=held.dtype, device=held.device)
            store.fill(f"buffer/{name}", 0, buffers[name])
    store.read()
    for buffer, values in packed:
        buffer.set_shard(buffer.layout.bounds(buffer.rank)[0], values)
    for name, held in persistent_buffers(holdings.model):
        if name in buffers:
            held.detach().copy_(buffers[name].view(held.shape))
    if kept:
        logger.warning("not in the checkpoint, so they stay as they are: %s", listed(kept))


def _fill_weights(buffer: FlatBuffer, store: TensorStore, target: Tensor, low: int, high: int) -> list[str]:
    """Notes what goes into `target`, elements [low, high) of the buffer; returns what the checkpoint does not have."""
    kept = []
    for slot in buffer.layout.slots:
        start, end = max(slot.start, low), min(slot.end, high)
        name = store.manifest.canonical(slot.fqn)
        key = store.manifest.weight_key(name) if name is not None else None
        if key is None:
            kept.append(slot.fqn)
        elif start < end:
            store.fill(key, start - slot.start, target[start - low : end - low])
    return kept


def _load_masters_away(buffer: FlatBuffer, optimizer: ShardedOptimizer, store: TensorStore) -> list[str]:
    """Masters of a buffer into their tier, and their rounded copies, sub-group by sub-group."""
    states = optimizer.states
    assert states is not None, "masters away without a tier"
    kept: list[str] = []
    origin, _ = buffer.layout.bounds(buffer.rank)
    with _or_released(buffer.home):
        copies = buffer.shard if buffer.home is None else buffer.home.open()
        for group in optimizer.sub_groups(buffer):
            with states.changing(group) as (master, _):
                kept = _fill_weights(buffer, store, master, group.start, group.end)
                store.read()
                copies[group.start - origin : group.end - origin].copy_(master)
        if buffer.home is not None:
            buffer.home.commit()
    return kept


@contextmanager
def _or_released(home: NvmeShard | None) -> Iterator[None]:
    """A shard that cannot be filled, since the checkpoint is damaged, goes back to its tier as it is."""
    try:
        yield
    except BaseException:
        if home is not None:
            home.release()
        raise


def _weights(buffer: FlatBuffer) -> tuple[Tensor, int, int]:
    """(the values that count, first element, one past the last) of a buffer on this rank."""
    low, high = buffer.layout.bounds(buffer.rank)
    if buffer.master is not None:
        return (buffer.master, 0, buffer.layout.numel) if buffer.master_is_replicated else (buffer.master, low, high)
    if buffer.resident:
        return buffer.full, 0, buffer.layout.numel
    return buffer.values(), low, high


def refresh_copies(units: Sequence[ParamUnit]) -> None:
    """Rounds masters to the parameters' own dtype and gathers what is whole on every rank. (all ranks)"""
    for unit in units:
        stale = False
        unit.drop_second()
        for buffer in unit.buffers:
            if not buffer.trainable:
                continue
            whole = buffer.master is not None and (buffer.master_is_replicated or buffer.layout.world_size == 1)
            if buffer.master is not None and buffer.master_is_apart:
                if buffer.home is not None:
                    buffer.home.open().copy_(buffer.master)
                    buffer.home.commit()
                else:
                    (buffer.full if whole and buffer.resident else buffer.shard).copy_(buffer.master)
            stale |= not whole
        if unit.resident and stale:
            unit.reshard()
            unit.unshard()
            unit.wait()
        assert unit.resident or unit.state is ShardState.SHARDED, f"{unit.name} was whole while it was loaded"


def load_optimizer(optimizer: ShardedOptimizer, store: TensorStore, where: str) -> None:
    """Fills the states of this rank's pieces and the hyperparameters of the param groups.

    Raises:
        CheckpointError: the states do not fit the pieces, or are damaged.
    """
    states: dict[Tensor, dict[str, Any]] = {}
    away = [pieces for pieces in optimizer.pieces.values() if pieces and pieces[0].sub_group is not None]
    for pieces in away:
        _load_states_away(pieces, optimizer, store, where)
    for pieces in optimizer.pieces.values():
        for piece in pieces:
            if piece.sub_group is not None:
                if piece.master in optimizer.optimizer.state:
                    states[piece.master] = optimizer.optimizer.state[piece.master]
            elif state := _state(piece, optimizer.optimizer.param_groups[piece.group], store, where):
                states[piece.master] = state
    store.read()
    inner = optimizer.optimizer
    groups = hyperparameters(optimizer, store.manifest, where)
    assert store.manifest.optimizer is not None, "hyperparameters of a checkpoint without an optimizer"
    is_same_class = store.manifest.optimizer["type"] == type(inner).__name__  # which may count from its first step on
    for group, saved in zip(inner.param_groups, groups, strict=True):
        settings = decode(dict(saved), store.fetch)
        group.update(
            {name: value for name, value in settings.items() if is_same_class or name in group or name == "initial_lr"}
        )
    inner.state.clear()
    inner.state.update(states)
    # As torch's own load_state_dict ends: the class brings an older or foreign form of its state up to date.
    inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})


def _load_states_away(pieces: Sequence[Piece], optimizer: ShardedOptimizer, store: TensorStore, where: str) -> None:
    """States of one buffer's pieces into their tier, sub-group by sub-group."""
    states, inner = optimizer.states, optimizer.optimizer
    assert states is not None, "states away without a tier"
    for group, held in groupby(pieces, key=lambda piece: piece.sub_group):
        assert group is not None, "a piece without a sub-group among some that have one"
        found = {piece.master: _state(piece, inner.param_groups[piece.group], store, where) for piece in held}
        store.read()
        for state in found.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0 and name in group.states:
                    state[name] = value.to(group.states[name])
        states.replace_states(group, inner, found)


def _state(piece: Piece, group: Mapping[str, Any], store: TensorStore, where: str) -> dict[str, Any]:
    """The state of one piece; its tensors are filled by the next `store.read`."""
    slots = [(slot, name) for slot in reached_slots(piece) if (name := store.manifest.canonical(slot.fqn)) is not None]
    known = [(slot, name) for slot, name in slots if _has_state(name, store)]
    if not known:
        return {}
    state: dict[str, Any] = _scalars(known, store, where)
    if group.get("capturable") or group.get("fused"):  # torch then wants its step counts beside the elements
        state = {
            key: value.to(piece.master.device) if isinstance(value, Tensor) else value for key, value in state.items()
        }
    for slot, name in known:
        for kind in store.manifest.state_names(name):
            _fill_state(state, kind, piece, slot, f"state/{kind}/{name}", store, where)
    return state


def _has_state(name: str, store: TensorStore) -> bool:
    saved: Mapping[str, Any] = store.manifest.optimizer or {"scalars": {}}
    return name in saved["scalars"] or bool(store.manifest.state_names(name))


def _scalars(known: list[tuple[Slot, str]], store: TensorStore, where: str) -> dict[str, Any]:
    """What the parameters of a piece have besides tensors of elements: they must agree."""
    assert store.manifest.optimizer is not None, "states without an optimizer"
    saved = store.manifest.optimizer["scalars"]
    first = saved.get(known[0][1], {})
    for slot, name in known[1:]:
        if saved.get(name, {}) != first and "plain/" not in str(first):
            raise CheckpointError(
                f"{where}: optimizer state of {slot.fqn}",
                expected=f"{first} as of {known[0][0].fqn}, which is in the same param group",
                got=saved.get(name, {}),
                fix="group the parameters as when it was saved, or pass load_optimizer_states=False",
            )
    decoded: dict[str, Any] = decode(first, store.fetch)
    return decoded


def _fill_state(
    state: dict[str, Any], kind: str, piece: Piece, slot: Slot, key: str, store: TensorStore, where: str
) -> None:
    record = store.manifest.tensors[key]
    device = piece.master.device
    shape = tuple(piece.master.shape)
    if tuple(record.shape) == slot.shape:
        if kind not in state:
            state[kind] = torch.zeros(shape, dtype=dtype_of(record.dtype), device=device)
        start, end = max(slot.start, piece.start), min(slot.end, piece.end)
        if start < end:
            store.fill(key, start - slot.start, state[kind].view(-1)[start - piece.start : end - piece.start])
    elif shape == slot.shape:
        state[kind] = torch.zeros(record.shape, dtype=dtype_of(record.dtype), device=device)
        store.fill(key, 0, state[kind].view(-1))
    else:
        raise CheckpointError(
            f"{where}: optimizer state {kind!r} of {slot.fqn}",
            expected=f"one value per element, shape {slot.shape}",
            got=tuple(record.shape),
            fix="load it without sharding of the optimizer (stage 0), or pass load_optimizer_states=False",
        )
