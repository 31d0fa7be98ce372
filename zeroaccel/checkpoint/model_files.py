"""A model as libraries of models keep it: safetensors files of limited size with an index, streamed from the shards.

Which tensor goes into which file is planned from the shapes alone; then units are gathered one at a time and written as
they come. No rank holds more than one unit, and rank 0 a chunk to copy through (of pickled files, one file).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeroaccel.checkpoint import zero_to_fp32
from zeroaccel.checkpoint.atomic_write import remove_abandoned, write_durably
from zeroaccel.checkpoint.consolidate import named_errors
from zeroaccel.checkpoint.save_plan import EngineState, ties_of
from zeroaccel.checkpoint.weights import PickledWeights, StreamedWeights, announced, stream_into
from zeroaccel.comm.collectives import Collectives

__all__ = ["parse_nbytes", "plan_files", "save_model_files"]

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
