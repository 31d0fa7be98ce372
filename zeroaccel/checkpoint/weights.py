"""The model's weights in one file of their own dtypes, for those who want a model rather than a checkpoint.

Units are gathered one at a time. A safetensors file is written as they come; a pickle (.bin, .pt) needs all of them in
rank 0's memory at once. The exact fp32 weights are in checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroaccel.checkpoint.atomic_write import NewFile, remove_abandoned, write_all
from zeroaccel.checkpoint.dtypes import dtype_name
from zeroaccel.checkpoint.rank_file import CHUNK_NBYTES
from zeroaccel.checkpoint.save_plan import EngineState, persistent_buffers, ties_of
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit, ShardState

__all__ = [
    "PickledWeights",
    "StreamedWeights",
    "announced",
    "consolidated_state_dict",
    "placeholder_state_dict",
    "save_weights",
    "stream_into",
]

_PICKLES = (".bin", ".pt", ".pth")


def save_weights(path: Path, holdings: EngineState, collectives: Collectives, *, exclude_frozen: bool) -> None:
    """Writes all parameters and persistent buffers to `path`, on rank 0. (all ranks)

    Args:
        path: its suffix decides: .safetensors, or .bin, .pt, .pth for `torch.save`. Tied parameters are one tensor: a
            pickle has it under each of its names, a safetensors file under the first (metadata lists the others).

    Raises:
        CheckpointError: another suffix, or the disk is full or fails; on every rank.
    """

    def open_sink() -> PickledWeights | StreamedWeights:
        if path.suffix in _PICKLES:
            return PickledWeights(path, holdings.model)
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path}", expected="a name ending in .safetensors, .bin, .pt or .pth")
        tensors = list(announced(holdings, exclude_frozen=exclude_frozen))
        return StreamedWeights(path, tensors, ties_of(holdings.model))

    stream_into(path.parent, open_sink, holdings, collectives, exclude_frozen=exclude_frozen)


class Sink(Protocol):
    """Where weights go, one after the other."""

    def add(self, name: str, value: Tensor) -> None:
        """Takes the next tensor."""

    def finish(self) -> None:
        """Brings what is left to the disk."""

    def close(self) -> None:
        """Leaves nothing half-written behind; called after `finish`, and after anything that failed."""


def stream_into(
    folder: Path,
    open_sink: Callable[[], Sink],
    holdings: EngineState,
    collectives: Collectives,
    *,
    exclude_frozen: bool,
) -> None:
    """Makes `folder` and hands all weights to a sink, on rank 0. (all ranks)

    Args:
        open_sink: called on rank 0, once the folder is there.

    Raises:
        CheckpointError: the disk is full or fails, or whatever the sink raises; on every rank.
    """
    sink: Sink | None = None
    with agreed(collectives, f"save {folder.name}: folder"), _named_errors(folder):
        if holdings.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            sink = open_sink()
    error: Exception | None = None
    for name, value in _streamed(holdings, exclude_frozen=exclude_frozen):
        try:
            if sink is not None and error is None:
                sink.add(name, value)
        except Exception as raised:  # the others are on their way to the next gather, so this rank goes along
            error = raised
    with agreed(collectives, f"save {folder.name}: write"), _named_errors(folder):
        try:
            if error is not None:
                raise error
            if sink is not None:
                sink.finish()
        finally:
            if sink is not None:
                sink.close()


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """What the disk refuses, by the file it was about."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error})",
            fix="free some space or choose another folder",
        ) from error


def consolidated_state_dict(holdings: EngineState, *, exclude_frozen: bool) -> dict[str, Tensor] | None:
    """All parameters and persistent buffers in host memory, in the order of the model's own state dict. (all ranks)

    Returns:
        On rank 0 copies in the dtypes of the engine, tied parameters one tensor under each of their names; None on
        the others, which take part in gathering one unit at a time.
    """
    found: dict[str, Tensor] = {}
    for name, value in _streamed(holdings, exclude_frozen=exclude_frozen):
        if holdings.rank == 0:
            found[name] = value.to("cpu", copy=True)
    return _under_all_names(found, holdings.model) if holdings.rank == 0 else None


def placeholder_state_dict(holdings: EngineState, *, exclude_frozen: bool) -> dict[str, Tensor]:
    """Names, shapes and dtypes of what `consolidated_state_dict` gives on rank 0, on the meta device: no values."""
    found: dict[str, Tensor] = {}
    for unit in holdings.units:
        for buffer in unit.buffers:
            for index, slot in enumerate(buffer.layout.slots):
                if not (exclude_frozen and not buffer.params[index].requires_grad):
                    found[slot.fqn] = torch.empty(slot.shape, dtype=buffer.dtype, device="meta")
    for name, value in persistent_buffers(holdings.model):
        found[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return _under_all_names(found, holdings.model)


def _under_all_names(found: dict[str, Tensor], model: torch.nn.Module) -> dict[str, Tensor]:
    """The same tensors under every name that a state dict of the model has for them, in its order."""
    ties = {alias: name for alias, name in ties_of(model).items() if name in found}
    named = {**found, **{alias: found[name] for alias, name in ties.items()}}
    return {name: named[name] for name in _state_dict_names(model) if name in named}


def _streamed(holdings: EngineState, *, exclude_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, value) in descending order of item size, each unit whole only while its own are handed out. (all ranks)"""
    for itemsize in (8, 4, 2, 1):
        for unit in holdings.units:
            buffers = [buffer for buffer in unit.buffers if buffer.dtype.itemsize == itemsize]
            if buffers:
                with_unit = _whole(unit)
                for buffer in buffers:
                    for index, slot in enumerate(buffer.layout.slots):
                        if not (exclude_frozen and not buffer.params[index].requires_grad):
                            yield slot.fqn, buffer.view(index).detach()
                if with_unit:
                    unit.reshard()
        for name, value in persistent_buffers(holdings.model):
            if value.dtype.itemsize == itemsize:
                yield name, value.detach()


def _whole(unit: ParamUnit) -> bool:
    """Makes a unit whole; returns whether it was not."""
    sharded = unit.state is ShardState.SHARDED
    unit.unshard()
    unit.wait()
    return sharded


def announced(holdings: EngineState, *, exclude_frozen: bool) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """What `_streamed` will hand out, in its order, without gathering: name, dtype, shape."""
    buffers: list[FlatBuffer] = list(holdings.buffers())
    for itemsize in (8, 4, 2, 1):
        for buffer in buffers:
            if buffer.dtype.itemsize == itemsize:
                for slot, param in zip(buffer.layout.slots, buffer.params, strict=True):
                    if not (exclude_frozen and not param.requires_grad):
                        yield slot.fqn, buffer.dtype, slot.shape
        for name, value in persistent_buffers(holdings.model):
            if value.dtype.itemsize == itemsize:
                yield name, value.dtype, tuple(value.shape)


class StreamedWeights:
    """A safetensors file that is written as tensors come, in the order they were announced.

    Args:
        tensors: (name, dtype, shape) of each.
        ties: alias -> name of the same tensor; kept as metadata.
    """

    def __init__(
        self, path: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], ties: Mapping[str, str]
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **ties}}
        cursor = 0
        for name, dtype, shape in tensors:
            end = cursor + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [cursor, end]}
            cursor = end
        self._chunk = torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = NewFile(path)
        try:
            write_all(self._file.handle, memoryview(len(text).to_bytes(8, "little") + text))
        except BaseException:
            self.close()
            raise

    def add(self, name: str, value: Tensor) -> None:
        """Takes the next tensor."""
        # By way of a chunk of our own: a storage that numpy has seen can never be freed by resizing again.
        data = value.contiguous().view(-1).view(torch.uint8)
        for part in data.split(CHUNK_NBYTES) if data.numel() else ():
            self._chunk[: part.numel()].copy_(part)
            write_all(self._file.handle, self._chunk[: part.numel()].numpy().data)

    def finish(self) -> None:
        """Brings the file to disk under its name."""
        self._file.publish()
        remove_abandoned(self._file.path)

    def close(self) -> None:
        """Leaves nothing half-written behind."""
        self._file.close()


class PickledWeights:
    """Collects copies in host memory and writes them at the end, by `torch.save`."""

    def __init__(self, path: Path, model: torch.nn.Module) -> None:
        self._path = path
        self._model = model
        self._found: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Takes a tensor."""
        self._found[name] = value.to("cpu", copy=True)

    def finish(self) -> None:
        """Brings the file to disk under its name."""
        with NewFile(self._path) as new, os.fdopen(new.handle, "wb", closefd=False) as file:
            try:
                torch.save(_under_all_names(self._found, self._model), file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # which torch hides behind one of its own
                    raise error.__context__ from None
                raise
            file.flush()
            new.publish()
        remove_abandoned(self._path)

    def close(self) -> None:
        """Nothing stays open."""


def _state_dict_names(model: torch.nn.Module) -> list[str]:
    """The names of a state dict, in its order, without touching a value."""
    names: list[str] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = [
            *module._parameters,
            *(name for name in module._buffers if name not in module._non_persistent_buffers_set),
        ]
        names += [f"{prefix}.{name}" if prefix else name for name in own]
    return names
