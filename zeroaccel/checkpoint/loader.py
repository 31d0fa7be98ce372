"""Loading: each rank reads its own elements of masters, states and parameters, at any world size.

The counterpart of `save_plan.py`. The checkpoint is compared with the engine before the load changes anything. If
reading finds damage later, the engine is partly loaded and refuses to run until a load succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroaccel.checkpoint.compatibility import hyperparameters
from zeroaccel.checkpoint.plain_codec import decode, with_class
from zeroaccel.checkpoint.save_plan import EngineState, persistent_buffers
from zeroaccel.checkpoint.tensor_store import TensorStore, UnreadStore
from zeroaccel.errors import CheckpointError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.access.safetensors_file import dtype_of
from zeroaccel.zero.layout import FlatLayout, FlatRange, Slot
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit, ShardState
from zeroaccel.zero.quantized_weights import load_state, state_owners
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.masters import MasterPiece


@dataclass(frozen=True)
class LoadReport:
    """Amount of data in a load.

    Attributes:
        requested_nbytes: size of the elements that this rank keeps.
        read_nbytes: number of bytes read from the disk.
    """

    requested_nbytes: int
    read_nbytes: int


def load_weights(engine_state: EngineState, store: TensorStore, buffers: Mapping[str, Tensor]) -> None:
    """Fills masters, other parameters and buffers. `refresh_copies` then updates the parameters' own copies.

    Parameters without values in the checkpoint stay unchanged.

    Args:
        buffers: the result of `read_buffers`.
    """
    absent: list[str] = []
    for buffer in engine_state.buffers():
        keys = {slot.fqn: _weight_key(slot, store) for slot in buffer.layout.slots}
        absent += [fqn for fqn, key in keys.items() if key is None]
        # The `store.read` below fills the memory of all buffers at once, in the order of the files. A storage in a tier
        # has memory only temporarily, so it calls `store.read` itself.
        buffer.masters.load(partial(_fill_weights, buffer, keys, store), store.read)
    store.read()
    load_state(engine_state.model, buffers)
    owners = state_owners(engine_state.model)
    for name, value in persistent_buffers(engine_state.model):
        if name in buffers and name not in owners:
            value.detach().copy_(buffers[name].view(value.shape))
    if absent:
        logger.warning("parameters left unchanged, because they are not in the checkpoint: %s", listed(absent))


def note_files(engine_state: EngineState, store: UnreadStore, where: str) -> None:
    """Makes `store` note the files with this rank's weights, states and progress, without reading them."""
    fetch_buffers(engine_state, store)
    for buffer in engine_state.buffers():
        within = buffer.masters.range
        keys = {slot.fqn: _weight_key(slot, store) for slot in buffer.layout.slots}
        _fill_weights(buffer, keys, store, within, torch.empty(within.numel, device="meta"))
        store.read()
    manifest = store.manifest
    if engine_state.optimizer is not None:
        groups = engine_state.optimizer.optimizer.param_groups
        for buffer in engine_state.optimizer.buffers:
            for piece in buffer.masters.pieces:
                _state(piece, buffer.layout, groups[piece.group], store, where)
                store.read()
        for group in hyperparameters(engine_state.optimizer, manifest, where):
            decode(dict(group), store.fetch)
    states = manifest.random_state
    state = None if states is None or engine_state.job.rank >= len(states) else states[engine_state.job.rank]
    for saved in (manifest.client_state, manifest.lr_scheduler, manifest.loss_scale, state):
        decode(saved, store.fetch)


def fetch_buffers(engine_state: EngineState, store: TensorStore) -> dict[str, Tensor]:
    """Returns the flat values of the model's buffers that are in the checkpoint."""
    buffers = {}
    for name, value in persistent_buffers(engine_state.model):
        if (saved := store.manifest.buffer(name)) is not None:
            key = f"buffer/{saved}"
            buffers[name] = torch.empty(store.manifest.tensors[key].numel, dtype=value.dtype, device=value.device)
            store.fill(key, 0, buffers[name])
    store.read()
    return buffers


def read_buffers(engine_state: EngineState, store: TensorStore) -> dict[str, Tensor]:
    """Returns `fetch_buffers` without the quantization state of codes that the checkpoint omits.

    Raises:
        CheckpointError: the model's quantization state of omitted codes differs, so the codes do too.
    """
    buffers, manifest = fetch_buffers(engine_state, store), store.manifest
    tensors = dict(persistent_buffers(engine_state.model))
    for name, fqn in state_owners(engine_state.model).items():
        canonical = manifest.canonical(fqn)
        if name not in buffers or canonical is None or manifest.parameters[canonical].saved:
            continue
        if not torch.equal(buffers.pop(name), tensors[name].view(-1)):
            raise CheckpointError(
                f"parameter {fqn}: the checkpoint does not contain the base model of its adapters",
                expected="the base of their training, quantized in the same way",
                got=f"a base whose {name.removeprefix(fqn).lstrip('.')} differs",
                fix="load that base first, or save it too: checkpoint.exclude_frozen_parameters false",
            )
    return buffers


def _weight_key(slot: Slot, store: TensorStore) -> str | None:
    """Returns the key of the checkpoint's tensor with a parameter's weights; None if there is none."""
    name = store.manifest.canonical(slot.fqn)
    return store.manifest.weight_key(name) if name is not None else None


def _fill_weights(
    buffer: FlatBuffer, keys: Mapping[str, str | None], store: TensorStore, within: FlatRange, target: Tensor
) -> None:
    """Schedules the elements of a range that are in the checkpoint for the next `store.read` into `target`."""
    for slot, selection in buffer.layout.slots_in(within):
        key = keys[slot.fqn]
        if key is not None:
            _fill(store, key, slot, selection, target[selection.at(within.start)])


def _fill(store: TensorStore, key: str, slot: Slot, selection: FlatRange, target: Tensor) -> None:
    """Schedules a selection of a slot's elements for the next `store.read` into `target`, (selection.numel,)."""
    for start, run in slot.runs(selection):
        store.fill(key, start, target[run.at(selection.start)])


def refresh_copies(units: Sequence[ParamUnit]) -> None:
    """Rounds masters to the parameters' own dtype and gathers persistent units. (all ranks)"""
    for unit in units:
        stale = False
        unit.drop_copies()
        for buffer in unit.buffers:
            buffer.note_written(buffer.own)
            buffer.masters.publish()
            stale |= buffer.trainable and not buffer.masters.is_replicated
        # Each rank has rounded its own masters only, but persistent units hold the parameters of all ranks.
        if unit.persistent and stale:
            unit.reshard()
            unit.unshard()
            unit.wait()
        assert unit.persistent or unit.state is ShardState.SHARDED, f"{unit.name} was unsharded while it was loaded"


def load_optimizer(optimizer: ShardedOptimizer, store: TensorStore, where: str) -> None:
    """Fills the states of this rank's pieces and the hyperparameters of the param groups.

    Raises:
        CheckpointError: the states do not fit the pieces, or are damaged.
    """
    inner = optimizer.optimizer
    loaded: dict[Tensor, dict[str, Any]] = {}
    for buffer in optimizer.buffers:

        def state_of(piece: MasterPiece, layout: FlatLayout = buffer.layout) -> dict[str, Any]:
            return _state(piece, layout, inner.param_groups[piece.group], store, where)

        buffer.masters.load_states(state_of, store.read)
        params = [piece.param for piece in buffer.masters.pieces]
        loaded.update({param: inner.state[param] for param in params if param in inner.state})
    store.read()
    for param, state in loaded.items():
        state.update({name: with_class(value, inner, param.device, where) for name, value in state.items()})
    groups = hyperparameters(optimizer, store.manifest, where)
    # Settings that the class adds at its first step are loaded too if the classes are the same.
    is_same_class = store.manifest.saved_optimizer["type"] == type(inner).__name__
    for group, saved in zip(inner.param_groups, groups, strict=True):
        settings = decode(dict(saved), store.fetch)
        group.update(
            {name: value for name, value in settings.items() if is_same_class or name in group or name == "initial_lr"}
        )
    # Drop states of tensors other than pieces, such as those from `train()` of some classes.
    inner.state.clear()
    inner.state.update(loaded)
    # Like torch's load_state_dict at its end: the class converts older or foreign forms of its state.
    inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})


def _state(
    piece: MasterPiece, layout: FlatLayout, group: Mapping[str, Any], store: TensorStore, where: str
) -> dict[str, Any]:
    """Returns the state of one piece; the next `store.read` fills its tensors."""
    reached = [slot for slot, _ in layout.slots_in(piece.range, padded=True)]
    slots = [(slot, name) for slot in reached if (name := store.manifest.canonical(slot.fqn)) is not None]
    saved = [(slot, name) for slot, name in slots if store.manifest.has_state(name)]
    if not saved:
        return {}
    state: dict[str, Any] = _scalars(saved, store, where)
    if group.get("capturable") or group.get("fused"):  # torch requires step counts on the same device
        state = {
            key: value.to(piece.param.device) if isinstance(value, Tensor) else value for key, value in state.items()
        }
    for slot, name in saved:
        for kind in store.manifest.state_names(name):
            _fill_state(state, kind, piece, slot, f"state/{kind}/{name}", store, where)
    return state


def _scalars(slots: list[tuple[Slot, str]], store: TensorStore, where: str) -> dict[str, Any]:
    """Returns the states of a piece other than tensors of elements; they must agree between its parameters."""
    saved = store.manifest.saved_optimizer["scalars"]
    first = saved.get(slots[0][1], {})
    for slot, name in slots[1:]:
        if saved.get(name, {}) != first and "plain/" not in str(first):
            raise CheckpointError(
                f"{where}: optimizer state of {slot.fqn}",
                expected=f"{first} like {slots[0][0].fqn}, which is in the same param group",
                got=saved.get(name, {}),
                fix="group the parameters as in the checkpoint, or pass load_optimizer_states=False",
            )
    decoded: dict[str, Any] = decode(first, store.fetch)
    return decoded


def _fill_state(
    state: dict[str, Any], kind: str, piece: MasterPiece, slot: Slot, key: str, store: TensorStore, where: str
) -> None:
    record = store.manifest.tensors[key]
    device, shape = piece.param.device, piece.shape
    if tuple(record.shape) == slot.whole_shape:
        if kind not in state:
            state[kind] = torch.zeros(shape, dtype=dtype_of(record.dtype), device=device)
        selection = slot.range & piece.range  # a piece may hold a part of a slot, parts of several, or only padding
        if selection:
            _fill(store, key, slot, selection, state[kind].view(-1)[selection.at(piece.range.start)])
    elif shape == slot.whole_shape:
        state[kind] = torch.zeros(record.shape, dtype=dtype_of(record.dtype), device=device)
        store.fill(key, 0, state[kind].view(-1))
    else:
        raise CheckpointError(
            f"{where}: optimizer state {kind!r} of {slot.fqn}",
            expected=f"one value per element, shape {slot.whole_shape}",
            got=tuple(record.shape),
            fix="load it without a sharded optimizer (stage 0), or pass load_optimizer_states=False",
        )
