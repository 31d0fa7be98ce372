"""Locates the elements of each parameter in DeepSpeed's partitioned files (stages 1 to 3, BF16_Optimizer).

The first part is arithmetic: a rank's flat partition is a sequence of contiguous runs in files (`Elements`), from which
`pieces` cuts the pieces of each parameter. Then there is a function per layout, which `deepspeed_checkpoint.py` calls
to fill a `DeepSpeedContents`. Keys of tensors are those of this package's manifest: "master/FQN", "value/FQN",
"buffer/NAME", "state/KIND/FQN".
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor
from zeroaccel.checkpoint.manifest import Piece, TensorRecord
from zeroaccel.config.bounds import is_size
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import ITEMSIZE


class FlatPosition(NamedTuple):
    """Elements [start, start + length) of a parameter, which begin at element `offset` of rank `rank`'s partition."""

    rank: int
    start: int
    length: int
    offset: int


class Elements:
    """A rank's partition: a sequence of elements, concatenated from contiguous runs in files.

    Args:
        itemsize: bytes per element.
    """

    def __init__(self, itemsize: int) -> None:
        self.itemsize = itemsize
        self.numel = 0
        self._runs: list[Piece] = []

    def append(self, file: int, length: int, offset: int) -> None:
        """Appends `length` elements that begin at byte `offset` of a file."""
        if length:
            self._runs.append((file, self.numel, length, offset))
            self.numel += length

    def cut(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yields (file, length, byte offset) for elements [start, start + length), which must exist."""
        assert start >= 0 and start + length <= self.numel, "a cut outside of a sequence"
        index = bisect_right(self._runs, start, key=lambda run: run[1]) - 1
        while length:
            file, begin, available, offset = self._runs[index]
            count = min(length, begin + available - start)
            yield file, count, offset + (start - begin) * self.itemsize
            start, length, index = start + count, length - count, index + 1


def pieces(positions: Sequence[FlatPosition], ranks: Sequence[Elements], where: str) -> tuple[Piece, ...]:
    """Returns the pieces of one parameter.

    Raises:
        CheckpointError: a rank's partition has too few elements.
    """
    merged: list[Piece] = []
    for position in positions:
        partition = ranks[position.rank]
        if position.offset + position.length > partition.numel:
            raise CheckpointError(
                f"{where}: the partition of rank {position.rank}",
                expected=f"at least {position.offset + position.length} elements",
                got=partition.numel,
                fix="check that all files come from one save; their layout may also be unsupported",
            )
        start = position.start
        for file, length, offset in partition.cut(position.offset, position.length):
            # Merge a piece that continues the last one in the same file, to read them at once.
            last = merged[-1] if merged else None
            if last is not None and last[0] == file and last[3] + last[2] * partition.itemsize == offset:
                merged[-1] = (file, last[1], last[2] + length, last[3])
            else:
                merged.append((file, start, length, offset))
            start += length
    return tuple(merged)


def from_partitions(
    numels: Sequence[int], gaps: Sequence[int], partition_numel: int, world_size: int, where: str
) -> list[list[FlatPosition]]:
    """Computes positions for stages 1 and 2, where a group is one flat vector of its parameters in equal partitions.

    Args:
        numels: number of elements of each parameter, in the order of the vector.
        gaps: number of padding elements after each parameter.
        partition_numel: number of elements per rank, including the padding at the end.

    Returns:
        The positions of each parameter.

    Raises:
        CheckpointError: the length of the vector does not match the parameters and their padding.
    """
    used = sum(numels) + sum(gaps)
    total = partition_numel * world_size
    # DeepSpeed pads the vector to a multiple of at most 2 W elements. Any other length means that names and elements do
    # not belong together; no later check would detect that.
    if not used <= total < used + 2 * world_size + 1:
        raise CheckpointError(
            f"{where}: {world_size} partitions of {partition_numel} elements",
            expected=f"{used} elements and at most {2 * world_size} of padding",
            got=total,
            fix="check that all files come from one save; their layout may also be unsupported",
        )
    by_parameter: list[list[FlatPosition]] = []
    cursor = 0
    for numel, gap in zip(numels, gaps, strict=True):
        positions = []
        start = 0
        while start < numel:
            rank, offset = divmod(cursor + start, partition_numel)
            length = min(numel - start, partition_numel - offset)
            positions.append(FlatPosition(rank, start, length, offset))
            start += length
        by_parameter.append(positions)
        cursor += numel + gap
    return by_parameter


def from_chunks(numels: Sequence[int], world_size: int) -> tuple[list[list[FlatPosition]], int]:
    """Computes positions for stage 3: every parameter has W chunks of ceil(numel / W), a partition is a rank's chunks.

    Returns:
        (the positions of each parameter, number of elements per rank including padding).
    """
    by_parameter: list[list[FlatPosition]] = []
    cursor = 0
    for numel in numels:
        chunk = -(-numel // world_size)
        by_parameter.append(
            [
                FlatPosition(rank, rank * chunk, min(chunk, numel - rank * chunk), cursor)
                for rank in range(world_size)
                if rank * chunk < numel
            ]
        )
        cursor += chunk
    return by_parameter, cursor


_MOST_DIMS = 64
_EXPERTS = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")  # of deepspeed.moe, numbered on each rank from 0

Shapes = Sequence[Mapping[str, tuple[int, ...]]]
InFile = tuple[int, StoredTensor]
"""A tensor and the number of the file that holds it."""


@dataclass
class ParamGroup:
    """A param group of the optimizer: its hyperparameters, and the names of its parameters in order."""

    options: dict[str, Any]
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FlatStates:
    """Optimizer states of parameters that share one flat tensor on every rank.

    Attributes:
        names, shapes, positions: one entry per parameter.
        partition_numel: number of elements in each rank's flat tensor.
        states: for each rank, name of a state -> value; tensors are `InFile`.
    """

    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    positions: Sequence[Sequence[FlatPosition]]
    partition_numel: int
    states: Sequence[Mapping[str, Any]]


def positions_of_wholes(flat: FlatStates, ranks: Sequence[Elements]) -> list[list[FlatPosition]] | None:
    """Returns where each parameter's state is if ranks have it whole for every parameter with elements in their
    partitions, as the momentum of Muon at stages 1 and 2; None for a state of the partitions."""
    cursors = [0] * len(ranks)
    by_parameter: list[list[FlatPosition]] = []
    for shape, positions in zip(flat.shapes, flat.positions, strict=True):
        numel, holders = math.prod(shape), [position.rank for position in positions]
        by_parameter.append([FlatPosition(rank, 0, numel, cursors[rank]) for rank in holders[:1]])
        for rank in holders:
            cursors[rank] += numel
    return by_parameter if cursors == [each.numel for each in ranks] else None


@dataclass
class DeepSpeedContents:
    """Names, shapes and locations of a checkpoint's tensors; the functions below fill it in.

    Attributes:
        files: the files, indexed by the file numbers in pieces.
        shapes: fqn -> shape, for trainable parameters; `frozen` has the others.
        dtypes: fqn -> the dtype in the model.
        flats: optimizer states, not yet split by parameter.
    """

    files: list[TorchFile] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    flats: list[FlatStates] = field(default_factory=list)

    def record(self, tensor: InFile) -> TensorRecord:
        """Returns the record of a full tensor."""
        stored = tensor[1]
        positions = [FlatPosition(0, 0, stored.numel, 0)] if stored.numel else []
        return TensorRecord(stored.dtype, stored.shape, pieces(positions, [self.elements(tensor)], stored.storage))

    def elements(self, tensor: InFile) -> Elements:
        """Returns the elements of a tensor, as a sequence of runs."""
        file, stored = tensor
        sequence = Elements(ITEMSIZE[stored.dtype])
        for _, length, offset in self.files[file].runs(stored):
            sequence.append(file, length, offset)
        return sequence

    def read(self, record: TensorRecord) -> NDArray[np.uint8]:
        """Reads the bytes of a tensor."""
        itemsize = ITEMSIZE[record.dtype]
        parts = [self.files[file].read(offset, length * itemsize) for file, _, length, offset in record.pieces]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def add_full_state(self, name: str, shape: tuple[int, ...], state: Mapping[str, Any]) -> None:
        """Adds the states of one parameter, which are full tensors."""
        numel = math.prod(shape)
        self.flats.append(FlatStates([name], [shape], [[FlatPosition(0, 0, numel, 0)]], numel, [state]))


def with_file(file: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state with its tensors as `InFile`."""
    return {kind: (file, value) if isinstance(value, StoredTensor) else value for kind, value in state.items()}


def in_file(file: int, value: Any, where: str) -> InFile:
    """Returns a tensor as `InFile`; raises CheckpointError if the value is not a tensor."""
    if not isinstance(value, StoredTensor):
        raise CheckpointError(where, expected="a tensor", got=value)
    return file, value


def named_shapes(group: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape from a model file; raises ValueError if the content has another form."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in group.items():
        if type(name) is not str or not isinstance(shape, (tuple, list)) or len(shape) > _MOST_DIMS:
            raise ValueError(f"the shape of parameter {str(name)[:100]!r} is invalid")
        if not all(is_size(size) for size in shape):
            raise ValueError(f"the shape of parameter {name!r} does not consist of whole numbers")
        shapes[name] = tuple(shape)
    return shapes


def _padding(value: Any, where: str) -> int:
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{where}: padding", expected="a whole number", got=value)
    return value


def read_module(contents: DeepSpeedContents, file: int, content: Mapping[str, Any], *, full: bool) -> None:
    """Adds the names, dtypes, ties, buffers and frozen parameters of a model file.

    Args:
        full: True if the module's tensors are unsharded (stages 0 to 2); at stage 3 only the buffers are.
    """
    module = {name: value for name, value in (content["module"] or {}).items() if isinstance(value, StoredTensor)}
    buffers = set(content["buffer_names"])
    contents.ties = {str(alias): str(name) for alias, name in (content.get("shared_params") or {}).items()}
    for group in content.get("param_shapes") or ():
        contents.shapes.update(named_shapes(group))
    contents.frozen.update(named_shapes(content.get("frozen_param_shapes") or {}))
    first: dict[Any, str] = {}
    for name, tensor in module.items():
        if name in buffers:
            contents.buffers.append(name)
            contents.tensors[f"buffer/{name}"] = contents.record((file, tensor))
            continue
        if full and tensor.numel and name not in contents.ties:
            canonical = first.setdefault(tensor.place, name)
            if canonical != name and not (name in contents.shapes and canonical in contents.shapes):
                contents.ties[name] = canonical
        if name in contents.ties:
            continue
        has_shape = name in contents.shapes or name in contents.frozen
        if not (full or has_shape or tensor.numel):
            continue  # not trained, and its value is not saved
        contents.order.append(name)
        contents.dtypes[name] = tensor.dtype
        if name not in contents.shapes and (full or not has_shape):
            contents.frozen[name] = tensor.shape
            contents.tensors[f"value/{name}"] = contents.record((file, tensor))
    for name in (*contents.shapes, *contents.frozen):  # parameters that are missing in the module's dict
        if name not in contents.dtypes and name not in contents.ties:
            contents.order.append(name)


def read_partitioned(
    contents: DeepSpeedContents,
    shapes: Shapes,
    ranks: Sequence[tuple[int, Mapping[str, Any]]],
    counts: Sequence[int],
    *,
    padded: bool,
) -> None:
    """Adds the masters and states of stages 1 and 2, and of BF16_Optimizer.

    Args:
        shapes: for each param group, name -> shape in the order of the flat vector.
        ranks: for each rank, the number of its file and its optimizer's content.
        counts: number of ranks that share each param group; fewer for experts, of which others have their own.
        padded: True if the saved partitions include the padding at their end.
    """
    saved = ranks[0][1]["base_optimizer_state"]
    options = saved["param_groups"] if isinstance(saved, Mapping) else [{} for _ in shapes]
    for group, (named, settings) in enumerate(zip(shapes, options, strict=True)):
        contents.groups.append(ParamGroup(_without_params(settings)))
        num_holders = len(ranks) // counts[min(group, len(counts) - 1)]  # expert-parallel ranks, or 1
        for holder in range(num_holders):
            held_shapes = named if num_holders == 1 else global_experts(named, holder)
            _read_group(contents, group, held_shapes, ranks[holder::num_holders], padded=padded)
            contents.groups[-1].names += held_shapes


def global_experts(names: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    """Returns the parameters of an expert-parallel rank with the numbers that their experts have in the whole model."""
    counts: dict[str, int] = {}
    for match in filter(None, map(_EXPERTS.fullmatch, names)):
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return {
        _EXPERTS.sub(lambda match: f"{match[1]}{int(match[2]) + rank * counts[match[1]]}{match[3]}", name): shape
        for name, shape in names.items()
    }


def _read_group(
    contents: DeepSpeedContents,
    group: int,
    named: Mapping[str, tuple[int, ...]],
    ranks: Sequence[tuple[int, Mapping[str, Any]]],
    *,
    padded: bool,
) -> None:
    """Adds the masters and states of one param group, given the ranks that share its parameters."""
    address = f"{contents.files[ranks[0][0]].path}: param group {group}"
    tensors = [
        in_file(file, _item(body["single_partition_of_fp32_groups"], group, address), address) for file, body in ranks
    ]
    # BF16_Optimizer saves partitions with their padding; the ZeRO optimizers remove it and save its size.
    cut_off = [0 if padded else _padding(_item(body["group_paddings"], group, address), address) for _, body in ranks]
    sizes = {stored.numel + rest for (_, stored), rest in zip(tensors, cut_off, strict=True)}
    if len(sizes) != 1:
        raise CheckpointError(f"{address}: partitions", expected="the same size on all ranks", got=sorted(sizes))
    partition_numel = sizes.pop()
    gaps = ranks[0][1].get("param_alignment_paddings")
    numels = [math.prod(shape) for shape in named.values()]
    between = [_padding(gap, address) for gap in _item(gaps, group, address)] if gaps else [0] * len(numels)
    positions = from_partitions(numels, between, partition_numel, len(ranks), address)
    states = [_state(file, body["base_optimizer_state"], group, body) for file, body in ranks]
    contents.shapes.update(named)
    contents.order += [name for name in named if name not in contents.order]
    _add_flat(contents, named, positions, tensors, partition_numel, states)


def _item(values: Any, index: int, where: str) -> Any:
    try:
        return values[index]
    except (IndexError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: missing in a rank's file") from error


def _without_params(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("params", "step")}


def _state(file: int, saved: Any, index: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of one flat parameter, with its tensors as `InFile`."""
    if isinstance(saved, Mapping):
        state = saved["state"].get(index, {})
    else:  # "elastic": a list of states without padding; the step count is separate
        state = dict(saved[index])
        if "base_optimizer_state_step" in body:
            state.setdefault("step", body["base_optimizer_state_step"])
    return with_file(file, state)


def _add_flat(
    contents: DeepSpeedContents,
    named: Mapping[str, tuple[int, ...]],
    positions: Sequence[Sequence[FlatPosition]],
    tensors: Sequence[InFile],
    partition_numel: int,
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Adds the masters of parameters that share one flat tensor on every rank, and their states."""
    ranks = [contents.elements(tensor) for tensor in tensors]
    for (name, shape), param_positions in zip(named.items(), positions, strict=True):
        masters = pieces(param_positions, ranks, f"parameter {name}")
        contents.tensors[f"master/{name}"] = TensorRecord(tensors[0][1].dtype, shape, masters)
    contents.flats.append(FlatStates(list(named), list(named.values()), positions, partition_numel, states))


def read_chunked(
    contents: DeepSpeedContents,
    shapes: Shapes,
    models: Sequence[tuple[int, Mapping[str, Any]]],
    ranks: Sequence[tuple[int, Mapping[str, Any]]],
) -> None:
    """Adds the contents of stage 3: chunks of every parameter by sub-group, and frozen parameters in the model files.

    Args:
        shapes: for each sub-group, name -> shape.
        models: for each rank, the number and the content of its model file.
        ranks: for each rank, the number and the content of its optimizer file.
    """
    where = str(contents.files[ranks[0][0]].path)
    world_size = len(ranks)
    flats = [
        [in_file(file, tensor, f"{where}: fp32_flat_groups") for tensor in body["fp32_flat_groups"]]
        for file, body in ranks
    ]
    sizes = [[stored.numel for _, stored in tensors] for tensors in flats]
    expected = [from_chunks([math.prod(s) for s in named.values()], world_size) for named in shapes]
    for rank, own_sizes in enumerate(sizes):
        if own_sizes != [numel for _, numel in expected]:
            raise CheckpointError(
                f"{contents.files[ranks[rank][0]].path}: sub-groups",
                expected=f"of {[numel for _, numel in expected]} elements",
                got=own_sizes,
                fix="check that all files come from one save; their layout may also be unsupported",
            )
    # Sub-groups have no names in the files: only their sizes show that they match the shapes in the model file.
    saved = [body["optimizer_state_dict"] for _, body in ranks]
    for index, (named, (positions, numel)) in enumerate(zip(shapes, expected, strict=True)):
        states = [_state(file, state, index, {}) for (file, _), state in zip(ranks, saved, strict=True)]
        _add_flat(contents, named, positions, [tensors[index] for tensors in flats], numel, states)
    for settings in saved[0]["param_groups"]:
        names = [name for index in settings["params"] for name in shapes[index]]
        contents.groups.append(ParamGroup(_without_params(settings), names))
    read_frozen_chunks(contents, models)


def read_frozen_chunks(contents: DeepSpeedContents, models: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Adds the frozen parameters of stage 3 from the model files of all ranks."""
    for name, shape in contents.frozen.items():
        if f"value/{name}" in contents.tensors:
            continue
        fragments = []
        for file, content in models:
            address = f"{contents.files[file].path}: frozen parameter {name}"
            fragments.append(in_file(file, (content.get("frozen_param_fragments") or {}).get(name), address))
        (positions,), _ = from_chunks([math.prod(shape)], len(models))
        partitions = [contents.elements(fragment) for fragment in fragments]
        dtype = fragments[0][1].dtype
        contents.tensors[f"value/{name}"] = TensorRecord(
            dtype, shape, pieces(positions, partitions, f"frozen parameter {name}")
        )
