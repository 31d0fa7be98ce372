"""Stage 0 of DeepSpeed: the optimizer's content has positions and no names, so names are found by the values.

A master, rounded to the model's dtype, is the model's parameter bit for bit. Where two parameters of one size round to
the same bits, the first in the model's order is taken first, which is the order they are in anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroaccel.checkpoint.formats.deepspeed_layout import FlatPosition, pieces
from zeroaccel.checkpoint.formats.deepspeed_read import FlatStates, Found, InFile, ParamGroup, in_file
from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor
from zeroaccel.checkpoint.manifest import ITEMSIZE, TensorRecord
from zeroaccel.errors import CheckpointError

__all__ = ["name_positions", "read_unsharded"]


def read_unsharded(found: Found, file: int, optimizer: Mapping[str, Any] | None) -> list[list[dict[str, Any]]]:
    """Masters of 16-bit training by name, and the optimizer's states where they can be named.

    Args:
        optimizer: the content of "optimizer" in the model's file.

    Returns:
        For each param group the states of its parameters by position, when they cannot be named; else [].
    """
    if optimizer is None:
        return []
    inner = optimizer.get("optimizer_state_dict", optimizer)
    where = f"{found.files[file].path}: optimizer"
    if "fp32_groups_flat" in optimizer:
        for index, value in enumerate(optimizer["fp32_groups_flat"]):
            tensor = in_file(file, value, where)
            names, places = _names_in(found, tensor, where)
            _trainable(found, names, inner, index)
            state = _with_file(file, inner["state"].get(index, {}))
            shapes = [found.shapes[name] for name in names]
            found.flats.append(FlatStates(names, shapes, places, tensor[1].numel, [state]))
        return []
    if "fp32_groups" in optimizer:
        for index, (values, settings) in enumerate(zip(optimizer["fp32_groups"], inner["param_groups"], strict=True)):
            names = [_names_in(found, in_file(file, value, where), where)[0][0] for value in values]
            _trainable(found, names, inner, index)
            states = [_with_file(file, inner["state"].get(position, {})) for position in settings["params"]]
            for name, state in zip(names, states, strict=True):
                _add_state(found, name, state)
        return []
    return [
        [_with_file(file, inner["state"].get(position, {})) for position in settings["params"]]
        for settings in _grouped(found, inner)
    ]


def _grouped(found: Found, inner: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    settings = list(inner["param_groups"])
    for group in settings:
        found.groups.append(ParamGroup({key: value for key, value in group.items() if key != "params"}))
    return settings


def name_positions(
    found: Found, positional: Sequence[Sequence[dict[str, Any]]], names: Sequence[Sequence[str]], where: str
) -> None:
    """Gives the states of fp32 training at stage 0 the names of the resuming optimizer's parameters, by position.

    Args:
        names: of the parameters of each param group, in the optimizer's order.

    Raises:
        CheckpointError: numbers or shapes do not agree.
    """
    if [len(group) for group in positional] != [len(group) for group in names]:
        # Parameters without a state may be among either: frozen ones, and those without elements.
        shapes = {**found.frozen, **found.shapes}
        positional = [[state for state in group if state] for group in positional]
        names = [[name for name in group if 0 not in shapes.get(name, ())] for group in names]
    sizes = [len(group) for group in positional]
    if sizes != [len(group) for group in names]:
        raise CheckpointError(
            f"{where}: param groups (a checkpoint of fp32 training at stage 0 has no names for them)",
            expected=f"groups of {[len(group) for group in names]} parameters, as the optimizer has them",
            got=sizes,
            fix="build the optimizer as when it was saved, or pass load_optimizer_states=False",
        )
    for index, (states, group) in enumerate(zip(positional, names, strict=True)):
        for state, name in zip(states, group, strict=True):
            shape = found.frozen.get(name, found.shapes.get(name))
            if shape is None:
                raise CheckpointError(f"{where}: parameter {name} of the optimizer is not in the checkpoint")
            for kind, value in state.items():
                if isinstance(value, tuple) and value[1].shape not in (shape, ()):
                    raise CheckpointError(f"{where}: {kind} of {name}", expected=f"shape {shape}", got=value[1].shape)
            if state:
                found.shapes[name] = shape
                found.frozen.pop(name, None)
                _add_state(found, name, state)
        found.groups[index].names = list(group)


def _with_file(file: int, state: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: (file, value) if isinstance(value, StoredTensor) else value for kind, value in state.items()}


def _add_state(found: Found, name: str, state: dict[str, Any]) -> None:
    shape = found.shapes[name]
    numel = int(np.prod(shape, dtype=np.int64))
    found.flats.append(FlatStates([name], [shape], [[FlatPosition(0, 0, numel, 0)]], numel, [state]))


def _trainable(found: Found, names: Sequence[str], inner: Mapping[str, Any], index: int) -> None:
    for name in names:
        found.shapes[name] = found.frozen.pop(name)
    settings = inner["param_groups"][index]
    options = {key: value for key, value in settings.items() if key not in ("params", "step")}
    found.groups.append(ParamGroup(options, list(names)))


def _names_in(found: Found, tensor: InFile, where: str) -> tuple[list[str], list[list[FlatPosition]]]:
    """The parameters a tensor of masters holds one behind the other, and their places; adds the masters."""
    stored = tensor[1]
    held = found.sequence([tensor])
    record = found.record(tensor)
    masters = _read(found, record).view("<f4")
    names: list[str] = []
    places: list[list[FlatPosition]] = []
    cursor = 0
    while cursor < stored.numel:
        name = _next(found, masters[cursor:], f"{where}, element {cursor} of a master")
        shape = found.frozen[name]
        numel = int(np.prod(shape, dtype=np.int64))
        place = [FlatPosition(0, 0, numel, cursor)]
        found.tensors[f"master/{name}"] = TensorRecord(stored.dtype, shape, pieces(place, [held], name))
        names.append(name)
        places.append(place)
        cursor += numel
    return names, places


def _next(found: Found, masters: NDArray[np.float32], where: str) -> str:
    for name, shape in sorted(found.frozen.items(), key=lambda item: -int(np.prod(item[1], dtype=np.int64))):
        numel = int(np.prod(shape, dtype=np.int64))
        if not numel or numel > masters.size or f"master/{name}" in found.tensors:
            continue
        record = found.tensors[f"value/{name}"]
        if np.array_equal(_rounded(masters[:numel], record.dtype), _read(found, record)):
            return name
    raise CheckpointError(f"{where}: rounds to no parameter of the model", fix="the file is damaged or of another kind")


def _read(found: Found, record: TensorRecord) -> NDArray[np.uint8]:
    itemsize = ITEMSIZE[record.dtype]
    parts = [found.files[file].read(offset, length * itemsize) for file, _, length, offset in record.pieces]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    if dtype == "BF16":
        bits = values.view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).view(np.uint8)
