"""Joins the parts of DeepSpeed's checkpoints of tensor, pipeline and expert parallel training.

Every combination of pipeline stage and tensor rank ("mp_rank" in names of files) has files like those of a
data-parallel job, which `deepspeed_checkpoint.py` reads as checkpoints of their own. Pipeline stages have different
parameters. Tensor ranks have slices of one, and patterns of `universal_checkpoint_info` in the model files say along
which dimension. A pipeline's layers, and the experts of `deepspeed.moe`, have files of their own, with weights only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroaccel.checkpoint.formats.deepspeed_partitioned import DeepSpeedContents, ParamGroup
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor
from zeroaccel.checkpoint.manifest import Piece, TensorRecord
from zeroaccel.errors import CheckpointError, listed
from zeroaccel.zero.access.safetensors_file import ITEMSIZE

LAYER = re.compile(r"layer_(?P<layer>\d+)-(?:model_(?P<mp>\d+)-)?model_states\.pt")
EXPERT = re.compile(r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")
_REPLICATED = (
    "tp_replicated_parameter_patterns",
    "parameter_to_average_patterns",
    "pipeline_replicated_parameter_patterns",
)


def require_parts(
    folder: Path, parts: Sequence[tuple[Path | None, Mapping[int, Path], Mapping[int, Path]]], experts: Sequence[Path]
) -> None:
    """Raises CheckpointError unless every mp_rank and every expert has its files.

    Args:
        parts: for each mp_rank, its model file, model files by rank, and optimizer files by rank.
    """
    for number, (full_model, models, optims) in enumerate(parts):
        if full_model is None and not models:
            raise CheckpointError(
                f"{folder}: incomplete: mp_rank_{number:02d}_model_states.pt or "
                f"zero_pp_rank_0_mp_rank_{number:02d}_model_states.pt is missing",
                fix="copy it from the machine that wrote it",
            )
        if optims.keys() != parts[0][2].keys():
            raise CheckpointError(
                f"{folder}: optimizer files of mp_rank_{number:02d}",
                expected=f"those of ranks {sorted(parts[0][2])}, as of mp_rank_00",
                got=sorted(optims),
                fix="copy the others from the machines that wrote them",
            )
    names = {path.name for path in experts}
    for path in experts:
        match = EXPERT.fullmatch(path.name)
        number = int(match["expert"]) if match is not None else 0
        before = re.sub(r"expert_\d+", f"expert_{number - 1}", path.name)
        if number and before not in names:
            raise CheckpointError(f"{folder}: incomplete: {before} is missing", fix="copy it from its machine")


@dataclass(frozen=True)
class Slices:
    """How the tensor-parallel parts of a parameter join.

    Attributes:
        dim: the dimension along which they do; None if all parts are equal.
        blocks: sizes of the blocks of `dim` in the whole parameter, each of which has a slice in every part; one block
            of any size if empty.
        most: size of `dim` without the padding of a vocabulary, or None.
    """

    dim: int | None
    blocks: tuple[int, ...] = ()
    most: int | None = None


@dataclass(frozen=True)
class SliceRules:
    """`universal_checkpoint_info`: patterns of parameter names, by the way that their parts join.

    Attributes:
        num_slices: number of tensor ranks. Further parts are copies: modules that pipeline stages share.
        are_joined: True for a universal checkpoint, whose masters and states are whole in every part.
    """

    info: Mapping[str, Any]
    num_slices: int
    where: str
    are_joined: bool = False

    def of(self, name: str, shapes: Sequence[tuple[int, ...]]) -> Slices:
        """Returns how the parts of a parameter with these shapes join.

        Raises:
            CheckpointError: the checkpoint does not say it.
        """
        if len(shapes) == 1 or self._matches(_REPLICATED, name):
            return Slices(None)
        if not self.info:
            raise CheckpointError(
                f"{self.where}: universal_checkpoint_info",
                expected=f"patterns that say how the {len(shapes)} tensor-parallel parts of {name} join",
                got="none in the model file",
                fix="save with DeepSpeed's AutoTP (0.19 and later) or Megatron-DeepSpeed, which write them",
            )
        for item in self.info.get("parameter_with_sub_params") or ():
            if any(re.match(pattern, name) for pattern in item["patterns"]):
                return self._blocks(item, shapes)
        if self._matches(("parameter_with_2_sub_params_cat_dim_0",), name):
            rows = sum(shape[0] for shape in shapes)
            return Slices(0, (rows // 2, rows // 2))
        if self._matches(("vocabulary_parameter_patterns",), name):
            return Slices(0, most=self.info.get("original_vocab_size"))
        return Slices(1 if self._matches(("parameter_with_row_parallelism_patterns",), name) else 0)

    def _matches(self, kinds: Sequence[str], name: str) -> bool:
        return any(re.match(pattern, name) for kind in kinds for pattern in self.info.get(kind) or ())

    def _blocks(self, item: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> Slices:
        dim = int(item["partition_dim"])
        size, total = item["shape"][dim], sum(shape[dim] for shape in shapes)
        sizes = tuple(size) if isinstance(size, (tuple, list)) else (total // int(size),) * int(size)
        return Slices(dim, tuple(int(each) for each in sizes))


def joined(name: str, records: Sequence[TensorRecord], slices: Slices, where: str) -> TensorRecord:
    """Returns the record of a whole tensor, given its tensor-parallel parts in order.

    Raises:
        CheckpointError: shapes do not agree.
    """
    first, dim = records[0], slices.dim
    if dim is None or not first.shape:
        return first
    sizes = [record.shape[dim] if dim < len(record.shape) else -1 for record in records]
    others = {(*record.shape[:dim], *record.shape[dim + 1 :]) for record in records}
    total = sum(sizes)
    blocks = slices.blocks or (total,)
    if -1 in sizes or len(others) != 1 or sum(blocks) != total or (len(blocks) > 1 and len(set(sizes)) != 1):
        raise CheckpointError(
            f"{where}: the tensor-parallel parts of {name}",
            expected=f"shapes that differ in dimension {dim} only{f', blocks of {blocks}' if len(blocks) > 1 else ''}",
            got=[record.shape for record in records],
        )
    most = min(total, slices.most or total)
    shape = (*first.shape[:dim], most, *first.shape[dim + 1 :])
    inner = math.prod(first.shape[dim + 1 :])
    runs: list[tuple[int, int, int]] = []  # (part's index, start in it, length) along `dim`, in the order of the whole
    cursor = [0] * len(records)
    for block in blocks:
        for index, size in enumerate(sizes):
            length = size * block // total
            runs.append((index, cursor[index], length))
            cursor[index] += length
    pieces: list[Piece] = []
    for row in range(math.prod(first.shape[:dim])):
        done = row * most
        for index, start, length in runs:
            length = min(length, (row + 1) * most - done)
            begin = (row * sizes[index] + start) * inner
            pieces += _cut(records[index], begin, length * inner, done * inner)
            done += length
    return TensorRecord(first.dtype, shape, tuple(pieces))


def _cut(record: TensorRecord, start: int, length: int, at: int) -> Iterator[Piece]:
    """Yields the pieces of elements [start, start + length), which become those from `at` on."""
    itemsize = ITEMSIZE[record.dtype]
    for file, first, count, offset in record.runs:
        low, high = max(start, first), min(start + length, first + count)
        if low < high:
            yield file, at + low - start, high - low, offset + (low - first) * itemsize


def shifted(record: TensorRecord, by: int) -> TensorRecord:
    """Returns a record whose files have numbers that are larger by `by`."""
    pieces = tuple((file + by, start, length, offset) for file, start, length, offset in record.pieces)
    return TensorRecord(record.dtype, record.shape, pieces, record.split)


@dataclass
class Parts:
    """Records of the parts of a checkpoint by key, collected part by part.

    Attributes:
        records: key -> records, one per part that has the key, in order.
        scalars: fqn -> states without one value per element.
    """

    records: dict[str, list[TensorRecord]] = field(default_factory=dict)
    scalars: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def add(self, contents: DeepSpeedContents, states: Any, source: DeepSpeedContents) -> None:
        """Adds the files, names, groups, tensors and states of the part `source`; `states` are its `States`."""
        by = len(contents.files)
        contents.files += source.files
        for key, record in {**source.tensors, **states.tensors}.items():
            self.records.setdefault(key, []).append(shifted(record, by))
        for name, scalars in states.scalars.items():
            self.scalars.setdefault(name, {kind: _shifted_value(value, by) for kind, value in scalars.items()})
        for name in source.order:
            if name not in contents.order:
                contents.order.append(name)
        contents.dtypes = {**source.dtypes, **contents.dtypes}
        contents.ties = {**source.ties, **contents.ties}
        contents.buffers += [name for name in source.buffers if name not in contents.buffers]
        contents.shapes = {**source.shapes, **contents.shapes}
        contents.frozen = {**source.frozen, **contents.frozen}
        for index, group in enumerate(source.groups):
            if index == len(contents.groups):
                contents.groups.append(ParamGroup(group.options))
            names = contents.groups[index].names
            names += [name for name in group.names if name not in names]

    def join(self, contents: DeepSpeedContents, rules: SliceRules) -> dict[str, TensorRecord]:
        """Joins the tensors; sets their shapes in `contents`; returns the records of states."""
        states: dict[str, TensorRecord] = {}
        for key, records in self.records.items():
            name = key.split("/", 2)[-1] if key.startswith("state/") else key.partition("/")[2]
            is_buffer = key.startswith("buffer/")
            records = records[: rules.num_slices]
            is_whole = is_buffer or (rules.are_joined and not key.startswith("value/"))
            slices = Slices(None) if is_whole else rules.of(name, [record.shape for record in records])
            record = joined(key, records, slices, rules.where)
            if key.startswith("state/"):
                states[key] = record
                continue
            contents.tensors[key] = record
            for shapes in (contents.shapes, contents.frozen):
                if name in shapes and not is_buffer:
                    shapes[name] = record.shape
        return states


def _shifted_value(value: Any, by: int) -> Any:
    is_tensor = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], StoredTensor)
    return (value[0] + by, value[1]) if is_tensor else value


def add_weights_of_files(
    contents: DeepSpeedContents, paths: Sequence[Path], buffer_names: frozenset[str], rules: SliceRules
) -> Callable[[str], str]:
    """Adds names, dtypes, buffers and weights without masters from files of a pipeline's layers, or of experts.

    A layer's parameters are named by its number. A module that layers share, which DeepSpeed names by its key, gets the
    name that it has in `deepspeed.pipe.PipelineModule` of this package: that of the first such layer.

    Args:
        paths: the files; those of one layer in the order of the tensor ranks.

    Returns:
        A function that renames the parameters of shared modules, also at the end of a key.
    """
    shapes = {**contents.shapes, **contents.frozen}
    shared: dict[str, list[str]] = {}  # name within a shared module -> names by key
    for name in (*shapes, *buffer_names):
        if match := _TIED.fullmatch(name):
            shared.setdefault(match[1], []).append(name)
    renamed: dict[str, str] = {}
    order: list[str] = []
    for name, records in _values_by_name(contents, paths):
        number, _, inner = name.partition(".")
        key = name
        if name not in shapes and name not in buffer_names and inner in shared:
            if len(shared[inner]) > 1:
                raise CheckpointError(
                    f"{rules.where}: {name}", expected="one shared module with such a name", got=shared[inner]
                )
            (key,), name = shared[inner], f"{number}.module.{inner}"
            if key in renamed:
                contents.ties[name] = renamed[key]
                continue
            renamed[key] = name
        if key in buffer_names:
            contents.buffers += [name] if name not in contents.buffers else []
            contents.tensors[f"buffer/{name}"] = records[0]
            continue
        order.append(name)
        contents.dtypes[name] = records[0].dtype
        if key not in shapes:
            record = joined(name, records, rules.of(name, [each.shape for each in records]), rules.where)
            contents.frozen[name], contents.tensors[f"value/{name}"] = record.shape, record
    absent = sorted(shapes.keys() - set(order) - contents.dtypes.keys() - renamed.keys())
    if absent and any(LAYER.fullmatch(path.name) for path in paths):
        raise CheckpointError(
            f"{rules.where}: incomplete: no file of a layer has {listed(absent)}", fix="copy it from its machine"
        )

    def rename(key: str) -> str:
        head, slash, name = key.rpartition("/")
        return f"{head}{slash}{renamed.get(name, name)}"

    contents.shapes = {rename(name): shape for name, shape in contents.shapes.items()}
    contents.frozen = {rename(name): shape for name, shape in contents.frozen.items()}
    contents.tensors = {rename(key): record for key, record in contents.tensors.items()}
    for group in contents.groups:
        group.names = [rename(name) for name in group.names]
    contents.order = list(dict.fromkeys([*order, *map(rename, contents.order)]))
    return rename


def _values_by_name(contents: DeepSpeedContents, paths: Sequence[Path]) -> Iterator[tuple[str, list[TensorRecord]]]:
    """Adds files to `contents`; yields the name of each of their tensors, and its records by tensor rank."""
    by_layer: dict[str, dict[str, list[TensorRecord]]] = {}
    for path in paths:
        file = TorchFile(path)
        if not isinstance(file.content, dict):
            raise CheckpointError(f"{path}", expected="a dictionary", got=type(file.content).__name__)
        contents.files.append(file)
        match = LAYER.fullmatch(path.name)
        prefix = f"{int(match['layer'])}." if match is not None else ""
        layer = by_layer.setdefault(prefix or path.name.partition("_mp_rank")[0], {})
        for key, value in file.content.items():
            if isinstance(value, StoredTensor):
                layer.setdefault(f"{prefix}{key}", []).append(contents.record((len(contents.files) - 1, value)))
    for layer in by_layer.values():
        yield from layer.items()
