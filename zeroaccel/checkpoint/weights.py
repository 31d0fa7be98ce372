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
from typing import TypeAlias

import torch
from torch import Tensor

from zeroaccel.checkpoint import zero_to_fp32
from zeroaccel.checkpoint.atomic_write import NewFile, remove_abandoned, write_all, write_durably
from zeroaccel.checkpoint.consolidate import named_errors
from zeroaccel.checkpoint.save_plan import EngineState, persistent_buffers
from zeroaccel.checkpoint.zero_to_fp32 import CHUNK_NBYTES
from zeroaccel.comm.agree import agreed
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import dtype_name, lay_out_tensors
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit, ShardState
from zeroaccel.zero.quantized_weights import join_wrappers

TensorSpec = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape) of a tensor of the model."""

WeightsWriter: TypeAlias = "PickledWeights | StreamedWeights | _ShardedWeights"
"""`add` appends the next tensor, `finish` gives every file its final name; `close`, after it and after any failure,
removes unfinished files."""

_PICKLES = (".bin", ".pt", ".pth")


def save_weights(path: Path, engine_state: EngineState, *, exclude_frozen: bool) -> None:
    """Writes all parameters and persistent buffers to `path`, on rank 0. (all ranks)

    Args:
        path: its suffix decides: .safetensors, or .bin, .pt, .pth for `torch.save`. Tied parameters are one tensor: a
            pickle has it under each of its names, a safetensors file under the first (metadata lists the others).

    Raises:
        CheckpointError: another suffix, or the disk is full or fails; on every rank.
    """
    tensors = all_tensor_specs(engine_state, exclude_frozen=exclude_frozen)

    stream_into(
        path.parent,
        lambda: _writer_of(path, tensors, engine_state),
        engine_state,
        exclude_frozen=exclude_frozen,
    )


def _writer_of(
    path: Path, tensors: Sequence[TensorSpec], engine_state: EngineState
) -> PickledWeights | StreamedWeights:
    if path.suffix in _PICKLES:
        return PickledWeights(path, engine_state)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}", expected="a name ending in .safetensors, .bin, .pt or .pth")
    return StreamedWeights(path, tensors, engine_state.ties)


def stream_into(
    folder: Path,
    open_writer: Callable[[], WeightsWriter],
    engine_state: EngineState,
    *,
    exclude_frozen: bool,
) -> None:
    """Creates `folder` and passes all full weights to a writer, on rank 0. (all ranks)

    Args:
        open_writer: called on rank 0, after the folder was created.

    Raises:
        CheckpointError: the disk is full or fails, or what the writer raises; on every rank.
    """
    writer: WeightsWriter | None = None
    with agreed(engine_state.job, f"save {folder.name}: folder"), _named_errors(folder):
        if engine_state.job.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            writer = open_writer()
    error: Exception | None = None
    for name, value in _streamed(engine_state, exclude_frozen=exclude_frozen):
        try:
            if writer is not None and error is None:
                writer.add(name, value)
        except Exception as raised:
            # The other ranks wait for rank 0 in the next all-gather, so it takes part in the remaining ones and raises
            # at the end, where all ranks agree.
            error = raised
    with agreed(engine_state.job, f"save {folder.name}: write"), _named_errors(folder):
        try:
            if error is not None:
                raise error
            if writer is not None:
                writer.finish()
        finally:
            if writer is not None:
                writer.close()


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """OSErrors as CheckpointError with the file's name."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error})",
            fix="free some space or choose another folder",
        ) from error


def consolidated_state_dict(engine_state: EngineState, *, exclude_frozen: bool) -> dict[str, Tensor] | None:
    """All parameters and persistent buffers in host memory, in the order of the model's own state dict. (all ranks)

    Returns:
        On rank 0 copies in the dtypes of the engine, tied parameters one tensor under each of their names; None on
        the others, which take part in all-gathering one unit at a time.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in _streamed(engine_state, exclude_frozen=exclude_frozen):
        if engine_state.job.rank == 0:
            tensors[name] = value.to("cpu", copy=True)
    return with_ties(tensors, engine_state) if engine_state.job.rank == 0 else None


def placeholder_state_dict(engine_state: EngineState, *, exclude_frozen: bool) -> dict[str, Tensor]:
    """What `consolidated_state_dict` returns on rank 0, on the meta device: names, shapes and dtypes, no values."""
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, dtype, shape in tensor_specs(engine_state, exclude_frozen=exclude_frozen)
    }
    return with_ties(tensors, engine_state)


def with_ties(tensors: dict[str, Tensor], engine_state: EngineState) -> dict[str, Tensor]:
    """The same tensors under every name that a state dict of the model has for them, in its order."""
    tensors = join_wrappers(engine_state.model, tensors)
    ties = {alias: name for alias, name in engine_state.ties.items() if name in tensors}
    named = {**tensors, **{alias: tensors[name] for alias, name in ties.items()}}
    return {name: named[name] for name in engine_state.state_dict_names if name in named}


class FullValues:
    """Full values of this rank's stage by name, asked for in the same order on all ranks. (all ranks)

    A unit is unsharded from the first question for a value of it until one for a value of another unit.
    """

    def __init__(self, engine_state: EngineState) -> None:
        self._engine_state = engine_state
        self._homes: dict[str, tuple[ParamUnit, FlatBuffer, int]] = {
            slot.fqn: (unit, buffer, index)
            for unit in engine_state.units
            for buffer in unit.buffers
            for index, slot in enumerate(buffer.layout.slots)
        }
        self._others = dict(persistent_buffers(engine_state.model))
        self._open: ParamUnit | None = None

    def value(self, name: str) -> Tensor:
        """A parameter or persistent buffer; valid until the next question."""
        if name in self._others:
            return self._others[name].detach()
        unit, buffer, index = self._homes[name]
        if unit is not self._open:
            self.reshard()
            was_sharded = unit.state is ShardState.SHARDED
            unit.unshard()
            unit.wait()
            self._open = unit if was_sharded else None
        return self._engine_state.whole(buffer.layout.slots[index], buffer.view(index).detach())

    def reshard(self) -> None:
        """Reshards what a question has unsharded."""
        if self._open is not None:
            self._open.reshard()
            self._open = None


def _streamed(engine_state: EngineState, *, exclude_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, full value) of the whole model, by descending item size; valid on rank 0, until the next. (all ranks)"""
    values = FullValues(engine_state)
    for source, (name, dtype, shape) in _specs_by_rank(engine_state, exclude_frozen=exclude_frozen):
        value = torch.empty(0)
        if source == engine_state.lead:
            value = values.value(name)
        if source != 0:  # all ranks receive, though only rank 0 needs it: one stage's ranks send, tensor by tensor
            if source != engine_state.job.rank:
                value = torch.empty(shape, dtype=dtype, device=engine_state.job.topology.device)
            value = value.contiguous()
            engine_state.job.broadcast(value, source, f"full value of {name}")
        yield name, value
    values.reshard()


def _specs_by_rank(engine_state: EngineState, *, exclude_frozen: bool) -> list[tuple[int, TensorSpec]]:
    """Which rank has each tensor of the whole model, in the order of `_streamed`. (all ranks)"""
    own = list(tensor_specs(engine_state, exclude_frozen=exclude_frozen))
    if engine_state.whole_model is None:
        return [(0, spec) for spec in own]
    leads = engine_state.lead == engine_state.job.rank
    per_rank: list[list[TensorSpec]] = engine_state.job.gather_objects(own if leads else [], "tensors of stages")
    first: dict[str, tuple[int, TensorSpec]] = {}
    for rank, specs in enumerate(per_rank):
        for spec in specs:
            first.setdefault(spec[0], (rank, spec))
    return sorted(first.values(), key=lambda item: -item[1][1].itemsize)


def all_tensor_specs(engine_state: EngineState, *, exclude_frozen: bool) -> list[TensorSpec]:
    """Name, dtype and shape of all tensors of the model, in the order in which they are written. (all ranks)"""
    return [spec for _, spec in _specs_by_rank(engine_state, exclude_frozen=exclude_frozen)]


def tensor_specs(engine_state: EngineState, *, exclude_frozen: bool) -> Iterator[TensorSpec]:
    """Name, dtype and shape of what this rank's stage has of `_streamed`, in its order; nothing is gathered."""
    # Largest items first, so that in a safetensors file without gaps every tensor is aligned to its item size.
    for itemsize in (8, 4, 2, 1):
        for buffer in engine_state.buffers():
            if buffer.dtype.itemsize == itemsize:
                for slot, param in zip(buffer.layout.slots, buffer.params, strict=True):
                    if not (exclude_frozen and not param.requires_grad):
                        yield slot.fqn, buffer.dtype, slot.whole_shape
        for name, value in persistent_buffers(engine_state.model):
            if value.dtype.itemsize == itemsize:
                yield name, value.dtype, tuple(value.shape)


class StreamedWeights:
    """A safetensors file that is written as tensors come, in the order of its header, which is written first.

    Args:
        tensors: what will come.
        ties: alias -> name of the same tensor; those of tensors that come are saved as metadata.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec], ties: Mapping[str, str]) -> None:
        names = {name for name, _, _ in tensors}
        metadata = {"format": "pt", **{alias: first for alias, first in ties.items() if first in names}}
        layout = lay_out_tensors([(name, dtype_name(dtype), shape) for name, dtype, shape in tensors], metadata)
        self._chunk = torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
        self._file = NewFile(path)
        try:
            write_all(self._file.handle, memoryview(layout.header))
        except BaseException:
            self.close()
            raise

    def add(self, name: str, value: Tensor) -> None:
        """Appends the next tensor."""
        # Copied through a chunk of our own: a storage that numpy has seen can never be freed by resizing again, and
        # `value` may be a view of a unit's flat buffer, which is freed so when the unit is resharded.
        data = value.contiguous().view(-1).view(torch.uint8)
        for part in data.split(CHUNK_NBYTES) if data.numel() else ():
            self._chunk[: part.numel()].copy_(part)
            write_all(self._file.handle, self._chunk[: part.numel()].numpy().data)

    def finish(self) -> None:
        """Flushes the file and gives it its final name."""
        self._file.publish()
        remove_abandoned(self._file.path)

    def close(self) -> None:
        """Removes the file unless it is finished."""
        self._file.close()


class PickledWeights:
    """Collects copies in host memory and writes them at the end, with `torch.save`."""

    def __init__(self, path: Path, engine_state: EngineState) -> None:
        self._path = path
        self._engine_state = engine_state
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Copies a tensor."""
        self._tensors[name] = value.to("cpu", copy=True)

    def finish(self) -> None:
        """Writes the file, flushes it and gives it its final name."""
        with NewFile(self._path) as new, os.fdopen(new.handle, "wb", closefd=False) as file:
            try:
                torch.save(with_ties(self._tensors, self._engine_state), file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch raises an error of its own over a full disk's
                    raise error.__context__ from None
                raise
            file.flush()
            new.publish()
        remove_abandoned(self._path)

    def close(self) -> None:
        """Nothing stays open."""


@dataclass(frozen=True)
class ModelFile:
    """One file to write.

    Attributes:
        tensors: name, dtype and shape, in the order in which they come.
    """

    name: str
    tensors: Sequence[TensorSpec]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(_nbytes(item) for item in self.tensors)


def parse_nbytes(size: int | str) -> int:
    """Bytes of "10GB" (powers of 1000), "5GiB" (of 1024), or of a number; UsageError for anything else.

    Example:
        >>> parse_nbytes("10GB"), parse_nbytes("1.5 KiB"), parse_nbytes(4096)
        (10000000000, 1536, 4096)
    """
    with named_errors():
        return zero_to_fp32.parse_nbytes(str(size))


def plan_files(tensors: Sequence[TensorSpec], max_nbytes: int, suffix: str) -> list[ModelFile]:
    """Runs of tensors of at most `max_nbytes` together, in their order; a larger tensor has a file of its own.

    Example:
        >>> tensors = [("a", torch.float32, (4,)), ("b", torch.float32, (2,)), ("c", torch.float32, (2,))]
        >>> [(file.name, file.nbytes) for file in plan_files(tensors, 20, ".safetensors")]
        [('model-00001-of-00002.safetensors', 16), ('model-00002-of-00002.safetensors', 16)]
    """
    form = suffix.removeprefix(".")
    runs = zero_to_fp32.runs_within(tensors, _nbytes, max_nbytes) or [[]]
    names = zero_to_fp32.names_of_files(form, len(runs))
    return [ModelFile(name, run) for name, run in zip(names, runs, strict=True)]


def save_model_files(
    folder: Path,
    engine_state: EngineState,
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
    files = plan_files(all_tensor_specs(engine_state, exclude_frozen=exclude_frozen), max_nbytes, suffix)
    stream_into(
        folder,
        lambda: _ShardedWeights(folder, files, engine_state),
        engine_state,
        exclude_frozen=exclude_frozen,
    )
    names = [file.name for file in files]
    return names if len(files) == 1 else [*names, _index_name(suffix)]


class _ShardedWeights:
    """Opens the files one after the other, as their tensors come."""

    def __init__(self, folder: Path, files: Sequence[ModelFile], engine_state: EngineState) -> None:
        self._folder, self._files, self._holdings = folder, files, engine_state
        self._open: WeightsWriter | None = None
        self._num_written = 0
        self._num_missing = 0  # tensors that the open file still waits for

    def add(self, name: str, value: Tensor) -> None:
        if self._open is None:
            file = self._files[self._num_written]
            self._num_missing = len(file.tensors)
            self._open = _writer_of(self._folder / file.name, file.tensors, self._holdings)
        self._open.add(name, value)
        self._num_missing -= 1
        if self._num_missing == 0:
            self._open.finish()
            self._open.close()
            self._open = None
            self._num_written += 1

    def finish(self) -> None:
        assert self._num_written == len(self._files) or not self._files[0].tensors, "a file was not filled"
        suffix = Path(self._files[0].name).suffix
        index = self._folder / _index_name(suffix)
        # The index is written after the files it names, and files of an earlier save are removed last, when no index
        # names them any more.
        if len(self._files) > 1:
            names = {name: file.name for file in self._files for name, _, _ in file.tensors}
            ties = self._holdings.ties if suffix == ".bin" else {}
            aliases = {alias: names[first] for alias, first in ties.items() if first in names}
            total = sum(file.nbytes for file in self._files)
            content = {"metadata": {"total_size": total}, "weight_map": {**names, **aliases}}
            write_durably(index, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")
            remove_abandoned(index)
        else:
            index.unlink(missing_ok=True)
        current = {file.name for file in self._files}
        stale = re.compile(rf"{zero_to_fp32.STEMS[suffix[1:]]}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}")
        for path in self._folder.iterdir():
            if stale.fullmatch(path.name) and path.name not in current:
                path.unlink()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


def _index_name(suffix: str) -> str:
    return f"{zero_to_fp32.STEMS[suffix[1:]]}{suffix}.index.json"


def _nbytes(item: TensorSpec) -> int:
    return torch.Size(item[2]).numel() * item[1].itemsize
