"""Writes the model's full weights, in their own dtypes, to files that model libraries read; gathers unit by unit.

A safetensors file is written tensor by tensor, so rank 0 holds one unsharded unit and a chunk for copies. A pickle
(.bin, .pt) needs all of its tensors in rank 0's memory at once. `save_weights` writes one file; `save_model_files`
writes files of limited size with an index, planned from the shapes alone. Checkpoints have the exact fp32 weights.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from zeroaccel.checkpoint import zero_to_fp32
from zeroaccel.checkpoint.atomic_write import NewFile, remove_abandoned, write_all, write_durably
from zeroaccel.checkpoint.consolidate import named_errors
from zeroaccel.checkpoint.requantize import Errors, requantized
from zeroaccel.checkpoint.save_plan import EngineState, code_names, persistent_buffers, shared_buffers
from zeroaccel.checkpoint.source_layout import compare_with_source, renamed, reverted, source_of
from zeroaccel.checkpoint.zero_to_fp32 import CHUNK_NBYTES
from zeroaccel.comm.agree import agreed, from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import CheckpointError, EngineStateError, UsageError
from zeroaccel.zero.access.coded_weights import CODES, CodedWeight, Decoded
from zeroaccel.zero.access.lazy_tensors import Box, LazyTensor, Node, materialized
from zeroaccel.zero.access.safetensors_file import dtype_name, lay_out_tensors
from zeroaccel.zero.module_names import plain_names
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit, ShardState
from zeroaccel.zero.quantized_weights import join_wrappers

TensorSpec = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape) of a tensor of the model."""

WeightsWriter: TypeAlias = "PickledWeights | StreamedWeights | _ShardedWeights"
"""`add` appends the next tensor, and `finish` gives every file its final name. `close`, which must follow `finish` or a
failure, removes unfinished files."""

Requantize: TypeAlias = bool | str | os.PathLike[str]
"""True to encode weights as in the files that the model comes from, or the folder of these files."""

_PICKLES = (".bin", ".pt", ".pth")


def save_weights(
    path: Path, engine_state: EngineState, *, exclude_frozen: bool, requantize: Requantize = False
) -> None:
    """Writes all parameters and persistent buffers to `path`, on rank 0. (all ranks)

    Args:
        path: the output file. Its suffix selects the format: .safetensors, or .bin, .pt, .pth for `torch.save`. A
            pickle has a tied parameter under each of its names, a safetensors file under the first only, with the
            others in the metadata.
        requantize: see `Output`.

    Raises:
        CheckpointError: the suffix is unknown, or the disk is full or fails; raised on every rank.
    """
    output = Output(engine_state, exclude_frozen=exclude_frozen, requantize=requantize)
    stream_into(path.parent, lambda: _writer_of(path, output.specs, output), output, engine_state.job)


def _writer_of(path: Path, tensors: Sequence[TensorSpec], output: Output) -> PickledWeights | StreamedWeights:
    if path.suffix in _PICKLES:
        return PickledWeights(path, output)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}", expected="a name ending in .safetensors, .bin, .pt or .pth")
    return StreamedWeights(path, tensors, output.ties)


def stream_into(
    folder: Path, open_writer: Callable[[], WeightsWriter], output: Output, collectives: Collectives
) -> None:
    """Creates `folder` and passes all full weights to a writer, on rank 0. (all ranks)

    Args:
        open_writer: makes the writer; called on rank 0 after the folder exists.

    Raises:
        CheckpointError: the disk is full or fails, or the writer raised an error; raised on every rank.
    """
    writer: WeightsWriter | None = None
    with agreed(collectives, f"save {folder.name}: folder"), _named_errors(folder):
        if collectives.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            writer = open_writer()
    error: Exception | None = None
    for name, value in output:
        try:
            if writer is not None and error is None:
                writer.add(name, value)
        except Exception as raised:
            # The other ranks wait for rank 0 in the next all-gather, so it joins the remaining ones and raises at the
            # end, where all ranks agree.
            error = raised
    with agreed(collectives, f"save {folder.name}: write"), _named_errors(folder):
        try:
            if error is not None:
                raise error
            if writer is not None:
                writer.finish()
                output.compare(folder)
        finally:
            if writer is not None:
                writer.close()


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """Converts an OSError to a CheckpointError with the file's name."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error})",
            fix="free some space or choose another folder",
        ) from error


def consolidated_state_dict(
    engine_state: EngineState, *, exclude_frozen: bool, also: Collection[str] = ()
) -> dict[str, Tensor] | None:
    """Gathers all parameters and persistent buffers in host memory, in the model's order. (all ranks)

    Args:
        also: names of frozen parameters to include although `exclude_frozen` is True.

    Returns:
        On rank 0, a state dict of copies in the engine's dtypes; all names of a tied parameter map to one tensor. None
        on the other ranks, which join the all-gathers, one unit at a time.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in _streamed(engine_state, exclude_frozen=exclude_frozen, also=also):
        if engine_state.job.rank == 0:
            tensors[name] = value.to("cpu", copy=True)
    return with_ties(tensors, engine_state) if engine_state.job.rank == 0 else None


def placeholder_state_dict(
    engine_state: EngineState, *, exclude_frozen: bool, also: Collection[str] = ()
) -> dict[str, Tensor]:
    """Returns a `consolidated_state_dict` on the meta device: names, shapes and dtypes, no values."""
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, dtype, shape in tensor_specs(engine_state, exclude_frozen=exclude_frozen, also=also)
    }
    return with_ties(tensors, engine_state)


def with_ties(tensors: dict[str, Tensor], engine_state: EngineState) -> dict[str, Tensor]:
    """Returns the tensors under all of their names in the model's state dict, in its order."""
    tensors = join_wrappers(engine_state.model, tensors)
    every = {**engine_state.ties, **shared_buffers(engine_state.model)}
    ties = {alias: name for alias, name in every.items() if name in tensors}
    named = {**tensors, **{alias: tensors[name] for alias, name in ties.items()}}
    return {name: named[name] for name in engine_state.state_dict_names if name in named}


class FullValues:
    """Full values of this rank's stage by name. All ranks must request them in the same order. (all ranks)

    A unit stays unsharded from the first request for one of its values until the first for another unit's.
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
        """Returns a parameter or persistent buffer, valid until the next call."""
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
        """Reshards the unit that `value` unsharded."""
        if self._open is not None:
            self._open.reshard()
            self._open = None


class Requests:
    """Gathers full values by name, on all ranks in the order of rank 0's requests, which `lazy` tensors make."""

    _LABEL = "weights on demand"

    def __init__(self, engine_state: EngineState) -> None:
        self._ranks = engine_state.job
        self._values = FullValues(engine_state)
        self._is_over = False

    def lazy(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> LazyTensor:
        """Returns a tensor without values in memory, which gathers them when they are read on rank 0."""
        return LazyTensor(_Gathered(functools.partial(self._ask, name), shape, dtype))

    def _ask(self, name: str) -> Tensor:
        if self._is_over:
            raise EngineStateError(f"{name}: the save has ended without reading its value")
        from_rank_0(self._ranks, lambda: name, self._LABEL)
        return self._values.value(name)

    def end(self) -> None:
        """Ends `serve` on the other ranks. (rank 0)"""
        self._is_over = True
        from_rank_0(self._ranks, str, self._LABEL)  # an empty name
        self._values.reshard()

    def serve(self) -> None:
        """Takes part in rank 0's requests until `end`. (the other ranks)"""
        while name := from_rank_0(self._ranks, str, self._LABEL):
            self._values.value(name)
        self._values.reshard()


class _Gathered(Node):
    """A parameter or buffer of the engine."""

    def __init__(self, ask: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._ask = ask

    def fill(self, box: Box, out: Tensor) -> None:
        out.copy_(self._ask()[tuple(slice(*ends) for ends in box)])


class Output:
    """The model's full tensors under the names that files get: those of the source, if transformers converted them.

    Attributes:
        specs: name, dtype and shape of each tensor, by descending item size.
        ties: alias -> name of the same tensor.
    """

    def __init__(self, engine_state: EngineState, *, exclude_frozen: bool, requantize: Requantize = False) -> None:
        """Plans the output. (all ranks)

        Args:
            requantize: encode weights as the files of the source do; see `requantize.py`. A folder, if it is not that
                of the model's config.
        """
        self._state, self._exclude_frozen = engine_state, exclude_frozen
        self._requests = Requests(engine_state)
        self._converted: dict[str, Tensor] | None = None
        self._errors: Errors | None = None
        self.ties: Mapping[str, str] = engine_state.ties
        model = engine_state.model
        named, plain = model.named_parameters(), plain_names(model)
        coded = {f"{plain(name)}.{CODES}": each for name, each in named if isinstance(each, CodedWeight)}
        decoded = {name.removesuffix(f".{CODES}") for name in coded}
        is_whole = engine_state.whole_model is None and decoded.issuperset(set(code_names(model)) - coded.keys())
        if is_whole and not (exclude_frozen and hasattr(model, "peft_config")):
            tensors: dict[str, Tensor] = {}
            for name, dtype, shape in self._own_specs():
                lazy = self._requests.lazy(name, dtype, shape)
                if name in coded:
                    lazy = LazyTensor(Decoded(coded[name], functools.partial(materialized, lazy)))
                tensors[name.removesuffix(f".{CODES}") if name in coded else name] = lazy
            files = reverted(model, tensors)
            if requantize:
                with agreed(engine_state.job, "save: requantize"):
                    files, self._errors = requantized(files, source_of(model, requantize))
            if any(tensors.get(name) is not value for name, value in files.items()) or coded:
                self._converted = dict(sorted(files.items(), key=lambda item: -item[1].element_size()))
                rename = functools.partial(renamed, model)
                self.ties = {rename(alias): rename(name) for alias, name in engine_state.ties.items()}
        elif requantize:
            raise UsageError(
                "save: requantize",
                expected="all weights of the model, of which this job decoded the codes",
                got="pipeline stages, codes of a library, or exclude_frozen_parameters",
                fix="save a checkpoint, and convert it with zeroaccel zero-to-fp32 --like MODEL --requantize",
            )
        self.specs = [spec for _, spec in _specs_by_rank(engine_state, exclude_frozen=exclude_frozen)]
        if self._converted is not None:
            self.specs = [(name, value.dtype, tuple(value.shape)) for name, value in self._converted.items()]

    def _own_specs(self) -> Iterator[TensorSpec]:
        return tensor_specs(self._state, exclude_frozen=self._exclude_frozen)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and values on rank 0, each valid until the next; the other ranks take part. (all ranks)"""
        if self._converted is None:
            yield from _streamed(self._state, exclude_frozen=self._exclude_frozen)
        elif self._state.job.rank != 0:
            self._requests.serve()
        else:
            try:
                for name, value in self._converted.items():
                    yield name, materialized(value)
            finally:
                self._requests.end()

    def under_all_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors under all of their names."""
        if self._converted is None:
            return with_ties(tensors, self._state)
        return {**tensors, **{alias: tensors[name] for alias, name in self.ties.items() if name in tensors}}

    def compare(self, folder: Path) -> None:
        """Logs differences from the source of a transformers model, and errors of encoding. (rank 0)"""
        shapes = {name: torch.empty(shape, device="meta") for name, _, shape in self.specs}
        if not self._exclude_frozen:
            compare_with_source(self._state.model, shapes, folder)
        if self._errors is not None:
            self._errors.report(folder)


def _streamed(
    engine_state: EngineState, *, exclude_frozen: bool, also: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full value) of the whole model, by descending item size. (all ranks)

    A value is valid on rank 0, until the next one.
    """
    values = FullValues(engine_state)
    for source, (name, dtype, shape) in _specs_by_rank(engine_state, exclude_frozen=exclude_frozen, also=also):
        value = torch.empty(0)
        if source == engine_state.lead:
            value = values.value(name)
        if source != 0:  # a tensor of a later stage: broadcast it to all ranks, although only rank 0 needs it
            if source != engine_state.job.rank:
                value = torch.empty(shape, dtype=dtype, device=engine_state.job.topology.device)
            value = value.contiguous()
            engine_state.job.broadcast(value, source, f"full value of {name}")
        yield name, value
    values.reshard()


def _specs_by_rank(
    engine_state: EngineState, *, exclude_frozen: bool, also: Collection[str] = ()
) -> list[tuple[int, TensorSpec]]:
    """Returns (rank that has it, spec) for each tensor of the whole model, in the order of `_streamed`. (all ranks)"""
    specs_here = list(tensor_specs(engine_state, exclude_frozen=exclude_frozen, also=also))
    if engine_state.whole_model is None:
        return [(0, spec) for spec in specs_here]
    leads = engine_state.lead == engine_state.job.rank
    per_rank: list[list[TensorSpec]] = engine_state.job.gather_objects(specs_here if leads else [], "tensors of stages")
    first: dict[str, tuple[int, TensorSpec]] = {}
    for rank, specs in enumerate(per_rank):
        for spec in specs:
            first.setdefault(spec[0], (rank, spec))
    return sorted(first.values(), key=lambda item: -item[1][1].itemsize)


def tensor_specs(
    engine_state: EngineState, *, exclude_frozen: bool, also: Collection[str] = ()
) -> Iterator[TensorSpec]:
    """Yields name, dtype and shape of this stage's tensors, in the order of `_streamed`; gathers nothing."""
    # Largest items first, so that every tensor in a safetensors file is aligned to its item size without gaps.
    for itemsize in (8, 4, 2, 1):
        for buffer in engine_state.buffers():
            if buffer.dtype.itemsize == itemsize:
                for slot, param in zip(buffer.layout.slots, buffer.params, strict=True):
                    if not exclude_frozen or param.requires_grad or slot.fqn in also:
                        yield slot.fqn, buffer.dtype, slot.whole_shape
        for name, value in persistent_buffers(engine_state.model):
            if value.dtype.itemsize == itemsize:
                yield name, value.dtype, tuple(value.shape)


class StreamedWeights:
    """Writes a safetensors file tensor by tensor, in the order of its header.

    Args:
        tensors: the tensors, in the order of the calls of `add`.
        ties: alias -> name of the same tensor; the metadata lists the aliases of `tensors`.
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
        # Copy through a separate chunk: once numpy has a view of a storage, resizing cannot free the storage any more,
        # and resharding frees a unit's flat buffer, of which `value` may be a view, in that way.
        data = value.contiguous().view(-1).view(torch.uint8)
        for chunk in data.split(CHUNK_NBYTES) if data.numel() else ():
            self._chunk[: chunk.numel()].copy_(chunk)
            write_all(self._file.handle, self._chunk[: chunk.numel()].numpy().data)

    def finish(self) -> None:
        """Flushes the file and gives it its final name."""
        self._file.publish()
        remove_abandoned(self._file.path)

    def close(self) -> None:
        """Removes the file unless it is finished."""
        self._file.close()


class PickledWeights:
    """Collects copies in host memory and writes them at the end, with `torch.save`."""

    def __init__(self, path: Path, output: Output) -> None:
        self._path = path
        self._output = output
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Copies a tensor."""
        self._tensors[name] = value.to("cpu", copy=True)

    def finish(self) -> None:
        """Writes the file, flushes it and gives it its final name."""
        with NewFile(self._path) as new, os.fdopen(new.handle, "wb", closefd=False) as file:
            try:
                torch.save(self._output.under_all_names(self._tensors), file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch hides the error of a full disk behind its own
                    raise error.__context__ from None
                raise
            file.flush()
            new.publish()
        remove_abandoned(self._path)

    def close(self) -> None:
        """Does nothing, because no file is open."""


@dataclass(frozen=True)
class ModelFile:
    """One file to write.

    Attributes:
        tensors: name, dtype and shape of each tensor, in the order of the file.
    """

    name: str
    tensors: Sequence[TensorSpec]

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(_nbytes(item) for item in self.tensors)


def parse_nbytes(size: int | str) -> int:
    """Returns the bytes of a size: "10GB" (powers of 1000), "5GiB" (powers of 1024), or a number.

    Raises:
        UsageError: `size` is something else.

    Example:
        >>> parse_nbytes("10GB"), parse_nbytes("1.5 KiB"), parse_nbytes(4096)
        (10000000000, 1536, 4096)
    """
    with named_errors():
        return zero_to_fp32.parse_nbytes(str(size))


def plan_files(tensors: Sequence[TensorSpec], max_nbytes: int, suffix: str) -> list[ModelFile]:
    """Plans files of at most `max_nbytes` each, in the order of the tensors; a larger tensor gets its own file.

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
    requantize: Requantize = False,
) -> list[str]:
    """Writes all parameters and persistent buffers into `folder`, on rank 0. (all ranks)

    The files are `model.safetensors`, or `model-00001-of-0000N.safetensors` etc. and `model.safetensors.index.json`; if
    `pickled`, they begin with `pytorch_model` and end with `.bin`. Safetensors files have a tied parameter under its
    first name only. Each file replaces an old one when it is complete; other files of an earlier save are removed.
    For `requantize` see `Output`.

    Returns:
        The names of the files, including the index.

    Raises:
        CheckpointError: the folder is not writable; raised on every rank.
    """
    suffix = ".bin" if pickled else ".safetensors"
    output = Output(engine_state, exclude_frozen=exclude_frozen, requantize=requantize)
    files = plan_files(output.specs, max_nbytes, suffix)
    stream_into(folder, lambda: _ShardedWeights(folder, files, output), output, engine_state.job)
    names = [file.name for file in files]
    return names if len(files) == 1 else [*names, _index_name(suffix)]


class _ShardedWeights:
    """Writes the files one after the other; opens each at its first tensor."""

    def __init__(self, folder: Path, files: Sequence[ModelFile], output: Output) -> None:
        self._folder, self._files, self._output = folder, files, output
        self._open: WeightsWriter | None = None
        self._num_written = 0
        self._num_missing = 0  # number of tensors that the open file still needs

    def add(self, name: str, value: Tensor) -> None:
        if self._open is None:
            file = self._files[self._num_written]
            self._num_missing = len(file.tensors)
            self._open = _writer_of(self._folder / file.name, file.tensors, self._output)
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
        # Write the index after the files that it names, and remove files of an earlier save last, when no index names
        # them any more.
        if len(self._files) > 1:
            names = {name: file.name for file in self._files for name, _, _ in file.tensors}
            ties = self._output.ties if suffix == ".bin" else {}
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
