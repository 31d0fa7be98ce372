"""Collects the data of a save: views of this rank's elements, and descriptions of all tensors.

It changes and gathers nothing. At every stage, a rank saves the shard of each buffer that it would own at stage 3, so
that each element is saved once. The 16-bit copy of a master is not saved. The plan reads values through the buffers'
storages, which stream values in a tier a chunk at a time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.checkpoint.manifest import ParameterRecord
from zeroaccel.checkpoint.plain_codec import encode, without_class
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.logs import log_once
from zeroaccel.ops.shard_step import ShardOptimizer
from zeroaccel.optim.optimizer_copy import element_states
from zeroaccel.zero.access.safetensors_file import dtype_name
from zeroaccel.zero.layout import FlatRange, Slot, whole_of
from zeroaccel.zero.module_names import plain_modules, plain_names
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.quantized_weights import state_tensors
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.shards import Elements
from zeroaccel.zero.tensor_subclasses import is_scale_beside_codes, is_small_float, named_tensors, scales_of

_SAMPLED_NUMEL = 64
_HOLD_ADAPTERS = ("modules_to_save", "prompt_encoder")


@dataclass(frozen=True)
class WholeModel:
    """Facts about a model before an axis of the mesh divides it among the ranks.

    Attributes:
        order: names of the parameters.
        ties: alias -> the first name of the same parameter.
        buffers: names of the persistent buffers.
        state_dict_names: keys of a full state dict, in order.
        param_ids: ids of the parameters.
        fingerprint: a digest of a few elements of each parameter.
    """

    order: tuple[str, ...]
    ties: Mapping[str, str]
    buffers: tuple[str, ...]
    state_dict_names: tuple[str, ...]
    param_ids: frozenset[int]
    fingerprint: str

    @classmethod
    def of(cls, model: nn.Module) -> WholeModel:
        """Collects the facts of a model that is not divided yet."""
        digest = hashlib.blake2b(digest_size=16)
        plain = plain_names(model)
        for name, param in model.named_parameters():
            flat = param.detach().view(-1) if param.is_contiguous() else param.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLED_NUMEL)].cpu().double() if not flat.is_meta else flat
            digest.update(f"{plain(name)} {tuple(param.shape)} {sample.tolist() if not flat.is_meta else ''}".encode())
        return cls(
            tuple(plain(name) for name, _ in model.named_parameters()),
            ties_of(model),
            tuple(name for name, _ in persistent_buffers(model)),
            tuple(state_dict_names(model)),
            frozenset(id(param) for param in model.parameters()),
            digest.hexdigest(),
        )


@dataclass(frozen=True)
class EngineState:
    """The parts of an engine that a checkpoint saves and loads.

    Attributes:
        collectives: the engine's collectives.
        whole_model: facts about the whole model if the ranks hold parts of it; else None.
    """

    model: nn.Module
    units: Sequence[ParamUnit]
    optimizer: ShardedOptimizer | None
    collectives: Collectives
    whole_model: WholeModel | None

    @property
    def job(self) -> Collectives:
        """Collectives over all ranks, each of which writes a file."""
        return self.collectives.job

    @property
    def lead(self) -> int:
        """The first rank of this pipeline stage, which describes the stage."""
        return self.job.rank - self.collectives.peers.rank

    @property
    def ties(self) -> Mapping[str, str]:
        """alias -> the first name of the same parameter, in the whole model."""
        return ties_of(self.model) if self.whole_model is None else self.whole_model.ties

    @property
    def state_dict_names(self) -> Sequence[str]:
        """Keys of a full state dict, in order."""
        return state_dict_names(self.model) if self.whole_model is None else self.whole_model.state_dict_names

    def saves(self, buffer: FlatBuffer) -> bool:
        """Returns True if this rank saves its part of a buffer: only one of the ranks that hold it does."""
        return self.collectives.replica == 0 and (self.collectives.is_first_data_group or buffer.is_split)

    def whole(self, slot: Slot, shard: Tensor) -> Tensor:
        """Returns the whole parameter, given this rank's shard of it. (all ranks)"""
        return whole_of(slot, shard, self.collectives)

    def buffers(self) -> Iterator[FlatBuffer]:
        """Returns every flat buffer, in the order of the units."""
        return (buffer for unit in self.units for buffer in unit.buffers)


@dataclass(frozen=True)
class SaveItem:
    """Elements [start, start + data.numel()) of the tensor `key` with shape `shape`.

    `data` is a flat, live view, or reads the elements from a tier a chunk at a time. `TensorRecord` explains `split`
    and the order of elements.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    data: Elements
    split: tuple[int, int, int] | None = None


@dataclass
class SavePlan:
    """The data that one rank saves.

    Attributes:
        entries: the tensors.
        scalars: fqn -> encoded optimizer state other than tensors of elements.
    """

    rank: int
    entries: list[SaveItem] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    _plain_count: int = 0

    @classmethod
    def collect(cls, engine_state: EngineState, *, left_out: frozenset[int] = frozenset()) -> SavePlan:
        """Collects this rank's part of the parameters, masters and states.

        Args:
            left_out: ids of the parameters whose values are not saved.

        Raises:
            CheckpointError: an optimizer state has an unsupported form; the message names the state.
        """
        plan = cls(engine_state.job.rank)
        for buffer in filter(engine_state.saves, engine_state.buffers()):
            plan._add_weights(buffer, left_out)
            if engine_state.optimizer is not None:
                plan._add_states(engine_state.optimizer, buffer)
        return plan

    def keep(self, tensor: Tensor) -> str:
        """Adds a copy of a small tensor that belongs to plain data. Returns its key."""
        key = f"plain/{self.rank}/{self._plain_count}"
        self._plain_count += 1
        self.add_full(key, tensor.detach().clone())
        return key

    def add_full(self, key: str, tensor: Tensor) -> None:
        """Adds a tensor that this rank saves alone."""
        data = tensor.detach().contiguous().view(-1)
        self.entries.append(SaveItem(key, dtype_name(tensor.dtype), tuple(tensor.shape), 0, data))

    def _add_weights(self, buffer: FlatBuffer, left_out: frozenset[int]) -> None:
        kind = "master" if buffer.trainable else "value"
        for slot, param in zip(buffer.layout.slots, buffer.params, strict=True):
            interval = slot.range & buffer.own
            if id(param) in left_out:
                continue
            if interval:
                self._add(f"{kind}/{slot.fqn}", slot, interval, buffer.masters.elements(interval))
            # A parameter without elements still has a shape and a dtype, which a full state dict needs.
            elif slot.numel == 0 and buffer.rank == 0:
                none = FlatRange(buffer.own.start, buffer.own.start)
                self._add(f"{kind}/{slot.fqn}", slot, slot.range, buffer.masters.elements(none))

    def _add(self, key: str, slot: Slot, interval: FlatRange, data: Elements) -> None:
        data = data.detach() if isinstance(data, Tensor) else data
        start, split = interval.start - slot.start, None
        if slot.split is not None:
            start += slot.split.index * slot.numel
            # Parts along dim 0 are contiguous in row-major order. Parts along another dim, or of several blocks, are
            # not, so they are saved part after part.
            if slot.split.dim or slot.split.blocks > 1:
                split = (slot.split.dim, slot.split.parts, slot.split.blocks)
        self.entries.append(SaveItem(key, dtype_name(data.dtype), slot.whole_shape, start, data, split))

    def _add_states(self, optimizer: ShardedOptimizer, buffer: FlatBuffer) -> None:
        for piece in buffer.masters.pieces:
            names, rest = optimizer.state_of(piece)
            if not (names or rest):
                continue
            for slot, reached in buffer.layout.slots_in(piece.range, padded=True):
                # A parameter that spans several pieces is saved once, with the piece of its first element on this rank.
                # So are its scalars; if every rank has all pieces, the rank whose shard has its first element saves.
                interval = slot.range & buffer.own
                if interval and interval.start in piece.range:
                    for name in names:
                        key = self._state_key(name, slot.fqn, optimizer)
                        self._add(key, slot, interval, buffer.masters.elements(interval, name))
                if reached.start in buffer.own and reached.start in (slot.start, buffer.own.start):
                    is_full_parameter = piece.range == slot.range and piece.shape == slot.shape
                    self._add_rest(rest, slot, optimizer, alone=is_full_parameter)

    def _add_rest(self, rest: dict[str, Any], slot: Slot, optimizer: ShardedOptimizer, *, alone: bool) -> None:
        """Adds the state that does not have one value per element."""
        scalars: dict[str, Any] = {}
        for name, value in rest.items():
            if isinstance(value, Tensor) and value.dim() > 0 and alone:
                self.add_full(self._state_key(name, slot.fqn, optimizer), value)
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"optimizer {type(optimizer.optimizer).__name__}, state {name!r} of {slot.fqn}",
                    expected="one value per element of the shard, or one per shard",
                    got=tuple(value.shape),
                )
            else:
                where = f"optimizer {type(optimizer.optimizer).__name__}, state of {slot.fqn}[{name!r}]"
                scalars[name] = encode(without_class(value, optimizer.optimizer), where, self.keep, _SAVE_WEIGHTS)
        self.scalars[slot.fqn] = scalars

    @staticmethod
    def _state_key(name: Any, fqn: str, optimizer: ShardedOptimizer) -> str:
        if not isinstance(name, str) or not name or "/" in name:
            raise CheckpointError(
                f"optimizer {type(optimizer.optimizer).__name__}: state of {fqn}",
                expected='state names without "/"',
                got=name,
            )
        return f"state/{name}/{fqn}"


_SAVE_WEIGHTS = "save the weights alone (Trainer: save_only_model=True), or use an optimizer whose states are tensors"
_TRIED_SIZE = 8  # largest size per dim of the sample tensor that stands for a piece


def saved_nbytes(engine_state: EngineState) -> int:
    """Returns the size in bytes of this rank's saved weights, masters and elementwise states, even before the states
    exist."""
    sizes: dict[tuple[int, tuple[int, ...]], int] = {}
    total = 0
    for buffer in filter(engine_state.saves, engine_state.buffers()):
        total += buffer.own.numel * (torch.float32 if buffer.trainable else buffer.dtype).itemsize
        if engine_state.optimizer is None or not buffer.trainable:
            continue
        for piece in buffer.masters.pieces:
            kind = piece.group, tuple(min(size, _TRIED_SIZE) for size in piece.shape)
            if kind not in sizes:
                inner = engine_state.optimizer.optimizer
                blocks = inner.moments if isinstance(inner, ShardOptimizer) and inner.moments_dtype == "int8" else ()
                states = element_states(inner, *kind)  # saved as numbers per element: 8-bit blocks as bfloat16
                sizes[kind] = sum(2 if name in blocks else dtype.itemsize for name, dtype in states.items())
            total += (piece.range & buffer.own).numel * sizes[kind]
    return total


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for each name of the persistent buffers, and the small state of quantized weights."""
    # Under every name, like a state dict: a file has no ties of buffers.
    for prefix, module in plain_modules(model, remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
    yield from state_tensors(model)


def code_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of quantized weights' codes, scales and state, which must not be rounded."""
    codes = [name for name, param in named_tensors(model) if scales_of(param) is not None]
    for prefix, module in plain_modules(model, remove_duplicate=False):
        names = (
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and (is_small_float(buffer) or is_scale_beside_codes(module, name))
        )
        codes += [f"{prefix}.{name}" if prefix else name for name in names]
    return (*codes, *(name for name, _ in state_tensors(model)))


def describe_parameters(engine_state: EngineState, *, left_out: frozenset[int]) -> dict[str, ParameterRecord]:
    """Returns fqn -> record, in the order of the model's parameters."""
    groups = engine_state.optimizer.group_of if engine_state.optimizer is not None else {}
    records = {
        slot.fqn: ParameterRecord(
            dtype_name(buffer.dtype),
            slot.whole_shape,
            buffer.trainable,
            groups.get(slot.fqn),
            saved=id(param) not in left_out,
        )
        for buffer in engine_state.buffers()
        for slot, param in zip(buffer.layout.slots, buffer.params, strict=True)
    }
    return {name: records[name] for name, _ in named_tensors(engine_state.model)}


def ties_of(model: nn.Module) -> dict[str, str]:
    """Returns alias -> the first name of the same parameter."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    plain = plain_names(model)
    for alias, param in model.named_parameters(remove_duplicate=False):
        name = plain(alias)
        canonical = first.setdefault(id(param), name)
        if canonical != name:
            ties[name] = canonical
    return ties


def shared_buffers(model: nn.Module) -> dict[str, str]:
    """Returns alias -> the first name of the same persistent buffer; VeRA's layers share projections, for example."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                full = f"{prefix}.{name}" if prefix else name
                canonical = first.setdefault(id(buffer), full)
                if canonical != full:
                    ties[full] = canonical
    return ties


def state_dict_names(model: nn.Module) -> list[str]:
    """Returns the keys of a state dict, in order, without reading a value."""
    names: list[str] = []
    plain = plain_names(model)
    for prefix, module in plain_modules(model, remove_duplicate=False):
        here = [
            *module._parameters,
            *(name for name in module._buffers if name not in module._non_persistent_buffers_set),
        ]
        names += [f"{prefix}.{name}" if prefix else name for name in here]
    scaled = ((plain(name), scales_of(param)) for name, param in model.named_parameters())
    names += [f"{name}.{scale}" for name, scales in scaled for scale in scales or ()]
    return names + [name for name, _ in state_tensors(model)]


# -- the base model of adapters like PEFT's
# A run loads a frozen base with a name from its source before it resumes, so a checkpoint need not contain it. Frozen
# adapters, such as inactive ones, have no other source and are saved.


def base_name(model: nn.Module) -> str:
    """Returns the name of the base model of the adapters; "" without adapters, or if the base has no name."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or not adapters:
        return ""
    names = [getattr(adapter, "base_model_name_or_path", None) for adapter in adapters.values()]
    names.append(getattr(getattr(model, "config", None), "_name_or_path", None))
    return next((str(name) for name in names if name), "")


def left_out(model: nn.Module, exclude_frozen: bool | None) -> tuple[frozenset[int], str]:
    """Returns the ids of the parameters whose values a checkpoint omits, and the name of the adapters' base.

    Args:
        exclude_frozen: True to omit all frozen parameters, False to omit none, None to omit a base with a name.

    Raises:
        UsageError: `exclude_frozen` is neither a bool nor None.
    """
    if exclude_frozen is not None:
        if not isinstance(exclude_frozen, bool):
            raise UsageError(
                "save_checkpoint(exclude_frozen_parameters)", expected="True, False or None", got=exclude_frozen
            )
        frozen = frozenset(id(param) for _, param in named_tensors(model) if not param.requires_grad)
        return (frozen if exclude_frozen else frozenset()), base_name(model)
    name = base_name(model)
    if not name:
        return frozenset(), ""
    adapters = {id(param) for module in model.modules() for param in _adapters_of(module)}
    base = frozenset(id(p) for _, p in named_tensors(model) if not p.requires_grad and id(p) not in adapters)
    if base:
        log_once(
            logging.WARNING,
            f"save_checkpoint: the checkpoint omits the frozen base {name!r}; load it before you resume. "
            'Set "checkpoint": {"exclude_frozen_parameters": false} to save it too',
        )
    return base, name


def _adapters_of(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that an adapter layer adds to the module that it wraps."""
    wrapped = module._modules.get("base_layer")
    if wrapped is not None:
        inside = {id(param) for param in wrapped.parameters()}
        return [param for param in module.parameters() if id(param) not in inside]
    added = [child for name in _HOLD_ADAPTERS if (child := module._modules.get(name)) is not None]
    return [param for child in added for param in child.parameters()]
