"""Reads DeepSpeed's checkpoints of full tensors: stage 0, and universal ones. `deepspeed_checkpoint.py` calls it.

Stage 0 saves the optimizer's content by position, without names, so names are found by the values: a master, rounded to
the model's dtype, equals the model's parameter bit for bit. If two parameters of the same size round to the same bits,
the first in the model's order is used first, which is the order of the masters too.

A universal checkpoint has a folder for each parameter, with a file for each of its values. Names and shapes come from
its copy of the model file, because the tensors of a converted stage 3 are flat. Frozen parameters and buffers come from
the model file too, because they are not exact in the folders.
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
    with_file,
)
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor
from zeroaccel.checkpoint.manifest import TensorRecord
from zeroaccel.errors import CheckpointError


def read_unsharded(
    contents: DeepSpeedContents, file: int, optimizer: Mapping[str, Any] | None
) -> list[list[dict[str, Any]]]:
    """Adds the masters of 16-bit training by name, and the optimizer's states if their names can be found.

    Args:
        optimizer: the content of "optimizer" in the model file.

    Returns:
        For each param group, the states of its parameters by position, if their names cannot be found; else [].
    """
    if optimizer is None:
        return []
    inner = optimizer.get("optimizer_state_dict", optimizer)
    # Three forms: FP16_Optimizer (a flat master per group), FP16_UnfusedOptimizer (a master per parameter), and the
    # plain optimizer's state dict of fp32 training, which has no masters to find names with.
    where = f"{contents.files[file].path}: optimizer"
    if "fp32_groups_flat" in optimizer:
        for index, value in enumerate(optimizer["fp32_groups_flat"]):
            tensor = in_file(file, value, where)
            names, positions = _match_masters(contents, tensor, where)
            _add_group(contents, names, inner, index)
            state = with_file(file, inner["state"].get(index, {}))
            shapes = [contents.shapes[name] for name in names]
            contents.flats.append(FlatStates(names, shapes, positions, tensor[1].numel, [state]))
        return []
    if "fp32_groups" in optimizer:
        for index, (values, settings) in enumerate(zip(optimizer["fp32_groups"], inner["param_groups"], strict=True)):
            names = [_match_masters(contents, in_file(file, value, where), where)[0][0] for value in values]
            _add_group(contents, names, inner, index)
            states = [with_file(file, inner["state"].get(position, {})) for position in settings["params"]]
            for name, state in zip(names, states, strict=True):
                contents.add_full_state(name, contents.shapes[name], state)
        return []
    for settings in inner["param_groups"]:
        contents.groups.append(ParamGroup({key: value for key, value in settings.items() if key != "params"}))
    return [
        [with_file(file, inner["state"].get(position, {})) for position in settings["params"]]
        for settings in inner["param_groups"]
    ]


def name_positions(
    contents: DeepSpeedContents,
    positional: Sequence[Sequence[dict[str, Any]]],
    names: Sequence[Sequence[str]],
    where: str,
) -> None:
    """Assigns the resuming optimizer's parameter names to the states of fp32 training at stage 0, by position.

    Args:
        names: for each param group, the names of its parameters in the optimizer's order.

    Raises:
        CheckpointError: numbers or shapes do not agree.
    """
    if [len(group) for group in positional] != [len(group) for group in names]:
        # Either side may include parameters without a state: frozen ones, and those without elements.
        shapes = {**contents.frozen, **contents.shapes}
        positional = [[state for state in group if state] for group in positional]
        names = [[name for name in group if 0 not in shapes.get(name, ())] for group in names]
    sizes = [len(group) for group in positional]
    if sizes != [len(group) for group in names]:
        raise CheckpointError(
            f"{where}: param groups (fp32 training at stage 0 saves them without names)",
            expected=f"groups of {[len(group) for group in names]} parameters, like the optimizer's",
            got=sizes,
            fix="build the optimizer like the saved one, or pass load_optimizer_states=False",
        )
    for index, (states, group) in enumerate(zip(positional, names, strict=True)):
        for state, name in zip(states, group, strict=True):
            shape = contents.frozen.get(name, contents.shapes.get(name))
            if shape is None:
                raise CheckpointError(f"{where}: parameter {name} of the optimizer is not in the checkpoint")
            for kind, value in state.items():
                if isinstance(value, tuple) and value[1].shape not in (shape, ()):
                    raise CheckpointError(f"{where}: {kind} of {name}", expected=f"shape {shape}", got=value[1].shape)
            if state:
                contents.shapes[name] = shape
                contents.frozen.pop(name, None)
                contents.add_full_state(name, contents.shapes[name], state)
        contents.groups[index].names = list(group)


def _add_group(contents: DeepSpeedContents, names: Sequence[str], inner: Mapping[str, Any], index: int) -> None:
    for name in names:
        contents.shapes[name] = contents.frozen.pop(name)
    settings = inner["param_groups"][index]
    options = {key: value for key, value in settings.items() if key not in ("params", "step")}
    contents.groups.append(ParamGroup(options, list(names)))


def _match_masters(
    contents: DeepSpeedContents, tensor: InFile, where: str
) -> tuple[list[str], list[list[FlatPosition]]]:
    """Adds the masters in a tensor; returns the names of their parameters and their positions in it."""
    stored = tensor[1]
    elements = contents.elements(tensor)
    record = contents.record(tensor)
    masters = contents.read(record).view("<f4")
    names: list[str] = []
    positions: list[list[FlatPosition]] = []
    cursor = 0
    while cursor < stored.numel:
        name = _match_master(contents, masters[cursor:], f"{where}, element {cursor} of a master")
        shape = contents.frozen[name]
        numel = math.prod(shape)
        position = [FlatPosition(0, 0, numel, cursor)]
        contents.tensors[f"master/{name}"] = TensorRecord(stored.dtype, shape, pieces(position, [elements], name))
        names.append(name)
        positions.append(position)
        cursor += numel
    return names, positions


def _match_master(contents: DeepSpeedContents, masters: NDArray[np.float32], where: str) -> str:
    """Returns the name of the parameter that the first masters round to, bit for bit."""
    # Largest first: a small parameter, of zeros for example, may fit the beginning of a large one by chance.
    for name, shape in sorted(contents.frozen.items(), key=lambda item: -math.prod(item[1])):
        numel = math.prod(shape)
        if not numel or numel > masters.size or f"master/{name}" in contents.tensors:
            continue
        record = contents.tensors[f"value/{name}"]
        if np.array_equal(_rounded(masters[:numel], record.dtype), contents.read(record)):
            return name
    raise CheckpointError(f"{where}: matches no parameter", fix="the file may be damaged: use another checkpoint")


def _rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    if dtype == "BF16":
        bits = values.view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).view(np.uint8)


def read_universal(contents: DeepSpeedContents, folder: Path, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds masters, states and param groups to `contents`, which already has the contents of the model file.

    Args:
        folder: the folder "zero", with a folder for each parameter.
        model: the content of the model file.

    Returns:
        The optimizer's content besides tensors.

    Raises:
        CheckpointError: a file is missing or has a wrong size, or DeepSpeed's conversion mixed up the values.
    """
    optimizer = TorchFile(folder / "optimizer_state.pt").content
    zero = (model.get("ds_config") or {}).get("zero_optimization") or {}
    # Only stages 1 and 2 reorder parameters for this key; stage 3 and BF16_Optimizer ignore it.
    if zero.get("round_robin_gradients") and "zero_stage" in optimizer and "fp32_flat_groups" not in optimizer:
        raise CheckpointError(
            f"{folder}: DeepSpeed's conversion mixed up the values, because the run set round_robin_gradients",
            fix="load the checkpoint from before the conversion",
        )
    steps = _steps(optimizer)
    shapes = [named_shapes(group) for group in model["param_shapes"]]
    is_split = int(model.get("mp_world_size") or 1) > 1  # shapes are those of a tensor rank, values are whole
    for index, named in enumerate(shapes):
        for name, shape in named.items():
            _add_universal(contents, folder / name, name, tuple(shape), steps.get(index), is_split=is_split)
    for index, settings in enumerate(optimizer["param_groups"]):
        members = settings["params"] if "fp32_flat_groups" in optimizer else [index]
        names = [name for member in members for name in shapes[member]]
        options = {key: value for key, value in settings.items() if key not in ("params", "step")}
        contents.groups.append(ParamGroup(options, names))
    return dict(optimizer)


def _steps(optimizer: Mapping[str, Any]) -> dict[int, Any]:
    """Returns sub-group -> step count, for stage 3, whose parameters' folders have none."""
    state = (optimizer.get("optimizer_state_dict") or {}).get("state") or {}
    return {index: values["step"] for index, values in state.items() if "step" in values}


def _add_universal(
    contents: DeepSpeedContents, folder: Path, name: str, shape: tuple[int, ...], step: Any, *, is_split: bool
) -> None:
    """Adds the master and the states of one parameter's folder."""
    path = folder / "fp32.pt"
    if path.parent.parent != folder.parent or not path.is_file():
        raise CheckpointError(f"{path}: missing; it should have the values of parameter {name}")
    opened = {path: _open(contents, path) for path in sorted(folder.glob("*.pt"))}
    master = opened[path][1]
    if is_split and isinstance(master, StoredTensor) and len(master.shape) == len(shape):
        shape = contents.shapes[name] = master.shape
    numel = math.prod(shape)
    state: dict[str, Any] = {}
    for path, (file, value) in opened.items():
        if path.stem == "step":
            state["step"] = (file, value) if isinstance(value, StoredTensor) else value
            continue
        if not isinstance(value, StoredTensor) or value.numel != numel:
            raise CheckpointError(f"{path}", expected=f"a tensor of {numel} elements, like {name}", got=value)
        record = contents.record((file, value))
        if path.stem == "fp32":
            contents.tensors[f"master/{name}"] = TensorRecord(record.dtype, shape, record.pieces)
        else:
            state[path.stem] = (file, value)
    if step is not None and "step" not in state:
        state["step"] = step if not isinstance(step, StoredTensor) else _step_value(contents, folder.parent, step)
    if state:
        contents.add_full_state(name, shape, state)


def _step_value(contents: DeepSpeedContents, folder: Path, step: StoredTensor) -> InFile:
    """Returns the step count of a sub-group, a tensor in the optimizer's file, as `InFile`."""
    path = folder / "optimizer_state.pt"
    for index, file in enumerate(contents.files):
        if file.path == path:
            return index, step
    contents.files.append(TorchFile(path))
    return len(contents.files) - 1, step


def _open(contents: DeepSpeedContents, path: Path) -> tuple[int, Any]:
    """Opens a file of a parameter's folder; returns its number and its value."""
    file = TorchFile(path)
    contents.files.append(file)
    content = file.content
    if isinstance(content, Mapping):
        content = content.get("param")
    return len(contents.files) - 1, content
