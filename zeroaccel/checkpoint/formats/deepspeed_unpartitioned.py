"""DeepSpeed's checkpoints of full tensors: stage 0, and universal ones. Called by `deepspeed_checkpoint.py`.

Stage 0 keeps the optimizer's content by position, without names, so names are found by the values: a master, rounded to
the model's dtype, is the model's parameter bit for bit. Where two parameters of one size round to the same bits, the
first in the model's order is taken first, which is the order they are in anyway.

A universal checkpoint has a folder for each parameter, with a file for each of its values. Names and shapes come from
the copy of the model's file in it, because a converted stage 3 has flat tensors. Frozen parameters and buffers come
from there, too: in the folders they are not exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroaccel.checkpoint.formats.deepspeed_partitioned import (
    DeepSpeedContents,
    FlatPosition,
    FlatStates,
    InFile,
    ParamGroup,
    in_file,
    named_shapes,
    pieces,
)
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor
from zeroaccel.checkpoint.manifest import ITEMSIZE, TensorRecord
from zeroaccel.errors import CheckpointError

__all__ = ["name_positions", "read_universal", "read_unsharded"]


def read_unsharded(
    found: DeepSpeedContents, file: int, optimizer: Mapping[str, Any] | None
) -> list[list[dict[str, Any]]]:
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


def _grouped(found: DeepSpeedContents, inner: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    settings = list(inner["param_groups"])
    for group in settings:
        found.groups.append(ParamGroup({key: value for key, value in group.items() if key != "params"}))
    return settings


def name_positions(
    found: DeepSpeedContents, positional: Sequence[Sequence[dict[str, Any]]], names: Sequence[Sequence[str]], where: str
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


def _add_state(found: DeepSpeedContents, name: str, state: dict[str, Any]) -> None:
    shape = found.shapes[name]
    numel = int(np.prod(shape, dtype=np.int64))
    found.flats.append(FlatStates([name], [shape], [[FlatPosition(0, 0, numel, 0)]], numel, [state]))


def _trainable(found: DeepSpeedContents, names: Sequence[str], inner: Mapping[str, Any], index: int) -> None:
    for name in names:
        found.shapes[name] = found.frozen.pop(name)
    settings = inner["param_groups"][index]
    options = {key: value for key, value in settings.items() if key not in ("params", "step")}
    found.groups.append(ParamGroup(options, list(names)))


def _names_in(found: DeepSpeedContents, tensor: InFile, where: str) -> tuple[list[str], list[list[FlatPosition]]]:
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


def _next(found: DeepSpeedContents, masters: NDArray[np.float32], where: str) -> str:
    for name, shape in sorted(found.frozen.items(), key=lambda item: -int(np.prod(item[1], dtype=np.int64))):
        numel = int(np.prod(shape, dtype=np.int64))
        if not numel or numel > masters.size or f"master/{name}" in found.tensors:
            continue
        record = found.tensors[f"value/{name}"]
        if np.array_equal(_rounded(masters[:numel], record.dtype), _read(found, record)):
            return name
    raise CheckpointError(f"{where}: rounds to no parameter of the model", fix="the file is damaged or of another kind")


def _read(found: DeepSpeedContents, record: TensorRecord) -> NDArray[np.uint8]:
    itemsize = ITEMSIZE[record.dtype]
    parts = [found.files[file].read(offset, length * itemsize) for file, _, length, offset in record.pieces]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    if dtype == "BF16":
        bits = values.view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).view(np.uint8)


def read_universal(found: DeepSpeedContents, folder: Path, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Masters, states and param groups; `found` already has what the model's file says.

    Args:
        folder: "zero", with a folder for each parameter.
        model: the content of the model's file.

    Returns:
        The optimizer's content besides tensors.

    Raises:
        CheckpointError: a file is missing or of another size, or the values are known to be mixed up.
    """
    optimizer = TorchFile(folder / "optimizer_state.pt").content
    zero = (model.get("ds_config") or {}).get("zero_optimization") or {}
    # Neither stage 3 nor BF16_Optimizer reorders parameters.
    if zero.get("round_robin_gradients") and "zero_stage" in optimizer and "fp32_flat_groups" not in optimizer:
        raise CheckpointError(
            f"{folder}: converted from a run with round_robin_gradients, whose values the conversion mixes up",
            fix="load the checkpoint it was converted from",
        )
    steps = _steps(optimizer)
    shapes = [named_shapes(group) for group in model["param_shapes"]]
    for index, named in enumerate(shapes):
        for name, shape in named.items():
            _add(found, folder / name, name, tuple(shape), steps.get(index))
    for index, settings in enumerate(optimizer["param_groups"]):
        members = settings["params"] if "fp32_flat_groups" in optimizer else [index]
        names = [name for member in members for name in shapes[member]]
        options = {key: value for key, value in settings.items() if key not in ("params", "step")}
        found.groups.append(ParamGroup(options, names))
    return dict(optimizer)


def _steps(optimizer: Mapping[str, Any]) -> dict[int, Any]:
    """Sub-group -> step count, where the parameters' folders have none (stage 3)."""
    state = (optimizer.get("optimizer_state_dict") or {}).get("state") or {}
    return {index: values["step"] for index, values in state.items() if "step" in values}


def _add(found: DeepSpeedContents, folder: Path, name: str, shape: tuple[int, ...], step: Any) -> None:
    numel = math.prod(shape)
    path = folder / "fp32.pt"
    if path.parent.parent != folder.parent or not path.is_file():
        raise CheckpointError(f"{path}: missing, so the values of parameter {name} are")
    state: dict[str, Any] = {}
    for path in sorted(folder.glob("*.pt")):
        file, value = _open(found, path)
        if path.stem == "step":
            state["step"] = (file, value) if isinstance(value, StoredTensor) else value
            continue
        if not isinstance(value, StoredTensor) or value.numel != numel:
            raise CheckpointError(f"{path}", expected=f"a tensor of {numel} elements, as {name} has", got=value)
        record = found.record((file, value))
        if path.stem == "fp32":
            found.tensors[f"master/{name}"] = TensorRecord(record.dtype, shape, record.pieces)
        else:
            state[path.stem] = (file, value)
    if step is not None and "step" not in state:
        state["step"] = step if not isinstance(step, StoredTensor) else _step_value(found, folder.parent, step)
    if state:
        found.flats.append(FlatStates([name], [shape], [[FlatPosition(0, 0, numel, 0)]], numel, [state]))


def _step_value(found: DeepSpeedContents, folder: Path, step: StoredTensor) -> InFile:
    path = folder / "optimizer_state.pt"
    for index, file in enumerate(found.files):
        if file.path == path:
            return index, step
    found.files.append(TorchFile(path))
    return len(found.files) - 1, step


def _open(found: DeepSpeedContents, path: Path) -> tuple[int, Any]:
    file = TorchFile(path)
    found.files.append(file)
    content = file.content
    if isinstance(content, Mapping):
        if content.get("vocab_tensor") or "sub_param_shape" in content:
            raise CheckpointError(f"{path}: of tensor parallel training", expected="data parallel only")
        content = content.get("param")
    return len(found.files) - 1, content
