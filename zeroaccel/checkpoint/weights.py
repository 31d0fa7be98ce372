"""The model's full weights in their own dtypes, as files that libraries of models read; unsharded one unit at a time.

A safetensors file is written as tensors come, so rank 0 holds one unsharded unit and a chunk to copy through; a pickle
(.bin, .pt) needs all of its tensors in rank 0's memory at once. `save_weights` writes one file, `save_model_files`
files of limited size with an index: which tensor goes into which is planned from the shapes alone. The exact fp32
weights are in checkpoints.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroaccel.checkpoint import zero_to_fp32
from zeroaccel.checkpoint.atomic_write import NewFile, remove_abandoned, write_all, write_durably
from zeroaccel.checkpoint.consolidate import named_errors
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
    "parse_nbytes",
    "placeholder_state_dict",
    "plan_files",
    "save_model_files",
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


_STEMS = {".safetensors": "model", ".bin": "pytorch_model"}

Announced = tuple[str, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class ModelFile:
    """One file to write.

    Attributes:
        tensors: name, dtype and shape, in the order in which they come.
    """

    name: str
    tensors: Sequence[Announced]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(_nbytes(item) for item in self.tensors)


def parse_nbytes(size: int | str) -> int:
    """Bytes of "10GB" (powers of 1000), "5GiB" (of 1024), or of a number; UsageError for anything else."""
    with named_errors():
        return zero_to_fp32.parse_nbytes(str(size))


def plan_files(tensors: Sequence[Announced], max_nbytes: int, suffix: str) -> list[ModelFile]:
    """Runs of tensors of at most `max_nbytes` together, in their order; a larger tensor goes alone."""
    runs: list[list[Announced]] = [[]]
    total = 0
    for item in tensors:
        if runs[-1] and total + _nbytes(item) > max_nbytes:
            runs.append([])
            total = 0
        runs[-1].append(item)
        total += _nbytes(item)
    stem = _STEMS[suffix]
    if len(runs) == 1:
        return [ModelFile(f"{stem}{suffix}", runs[0])]
    return [ModelFile(f"{stem}-{n:05d}-of-{len(runs):05d}{suffix}", run) for n, run in enumerate(runs, start=1)]


def save_model_files(
    folder: Path,
    holdings: EngineState,
    collectives: Collectives,
    *,
    max_nbytes: int,
    pickled: bool = False,
    exclude_frozen: bool = False,
) -> list[str]:
    """Writes all parameters and persistent buffers into `folder`, on rank 0. (all ranks)

    `model.safetensors`, or `model-00001-of-0000N.safetensors` and so on with `model.safetensors.index.json`; pickled,
    `pytorch_model.bin` and the like. Tied parameters are one tensor, in safetensors files under the first of their
    names. Each file replaces its predecessor when it is complete, and files of an earlier save in other numbers go.

    Returns:
        The names of the files, index included.

    Raises:
        CheckpointError: the folder cannot be written; on every rank.
    """
    suffix = ".bin" if pickled else ".safetensors"
    files = plan_files(list(announced(holdings, exclude_frozen=exclude_frozen)), max_nbytes, suffix)
    stream_into(
        folder,
        lambda: _Writer(folder, files, holdings, pickled=pickled),
        holdings,
        collectives,
        exclude_frozen=exclude_frozen,
    )
    names = [file.name for file in files]
    return names if len(files) == 1 else [*names, _index_name(suffix)]


class _Writer:
    """Opens the files one after the other, as their tensors come."""

    def __init__(self, folder: Path, files: Sequence[ModelFile], holdings: EngineState, *, pickled: bool) -> None:
        self._folder, self._files, self._holdings, self._pickled = folder, files, holdings, pickled
        self._ties = ties_of(holdings.model)
        self._open: PickledWeights | StreamedWeights | None = None
        self._written = 0
        self._left = 0

    def add(self, name: str, value: Tensor) -> None:
        if self._open is None:
            file = self._files[self._written]
            self._left = len(file.tensors)
            held = {item[0] for item in file.tensors}
            ties = {alias: first for alias, first in self._ties.items() if first in held}
            path = self._folder / file.name
            if self._pickled:
                self._open = PickledWeights(path, self._holdings.model)
            else:
                self._open = StreamedWeights(path, file.tensors, ties)
        self._open.add(name, value)
        self._left -= 1
        if self._left == 0:
            self._open.finish()
            self._open.close()
            self._open = None
            self._written += 1

    def finish(self) -> None:
        assert self._written == len(self._files) or not self._files[0].tensors, "a file was not filled"
        suffix = Path(self._files[0].name).suffix
        index = self._folder / _index_name(suffix)
        if len(self._files) > 1:
            names = {name: file.name for file in self._files for name, _, _ in file.tensors}
            aliases = {alias: names[first] for alias, first in self._ties.items() if self._pickled and first in names}
            total = sum(file.nbytes for file in self._files)
            content = {"metadata": {"total_size": total}, "weight_map": {**names, **aliases}}
            write_durably(index, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")
            remove_abandoned(index)
        else:
            index.unlink(missing_ok=True)
        kept = {file.name for file in self._files}
        stale = re.compile(rf"{_STEMS[suffix]}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}")
        for path in self._folder.iterdir():
            if stale.fullmatch(path.name) and path.name not in kept:
                path.unlink()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


def _index_name(suffix: str) -> str:
    return f"{_STEMS[suffix]}{suffix}.index.json"


def _nbytes(item: Announced) -> int:
    return torch.Size(item[2]).numel() * item[1].itemsize
