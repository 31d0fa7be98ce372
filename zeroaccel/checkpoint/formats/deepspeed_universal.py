"""Universal checkpoints: a folder for each parameter, with a file for each of its values, of full size.

Called by `deepspeed_format.py`. Names and shapes come from the copy of the model's file beside, because a converted
stage 3 has flat tensors. Frozen parameters and buffers come from there, too: in the folders they are not exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroaccel.checkpoint.formats.deepspeed_layout import FlatPosition
from zeroaccel.checkpoint.formats.deepspeed_read import FlatStates, Found, InFile, ParamGroup, named_shapes
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor
from zeroaccel.checkpoint.manifest import TensorRecord
from zeroaccel.errors import CheckpointError

__all__ = ["read_universal"]


def read_universal(found: Found, folder: Path, model: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _add(found: Found, folder: Path, name: str, shape: tuple[int, ...], step: Any) -> None:
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


def _step_value(found: Found, folder: Path, step: StoredTensor) -> InFile:
    path = folder / "optimizer_state.pt"
    for index, file in enumerate(found.files):
        if file.path == path:
            return index, step
    found.files.append(TorchFile(path))
    return len(found.files) - 1, step


def _open(found: Found, path: Path) -> tuple[int, Any]:
    file = TorchFile(path)
    found.files.append(file)
    content = file.content
    if isinstance(content, Mapping):
        if content.get("vocab_tensor") or "sub_param_shape" in content:
            raise CheckpointError(f"{path}: of tensor parallel training", expected="data parallel only")
        content = content.get("param")
    return len(found.files) - 1, content
