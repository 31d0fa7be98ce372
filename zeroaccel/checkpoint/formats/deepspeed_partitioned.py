"""Where DeepSpeed's partitioned files (stages 1 to 3, BF16_Optimizer) keep the elements of each parameter.

First the arithmetic: a rank's flat partition is a sequence of contiguous runs in files (`Elements`), which is cut into
the pieces of each parameter. Then one function per layout, which `deepspeed_checkpoint.py` calls and which fills in a
`DeepSpeedContents`. Keys of tensors are those of our own manifest: "master/FQN", "value/FQN", "buffer/NAME",
"state/KIND/FQN".
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor
from zeroaccel.checkpoint.manifest import ITEMSIZE, Piece, TensorRecord
from zeroaccel.errors import CheckpointError

__all__ = [
    "DeepSpeedContents",
    "Elements",
    "FlatPosition",
    "FlatStates",
    "ParamGroup",
    "from_chunks",
    "from_partitions",
    "in_file",
    "named_shapes",
    "pieces",
    "read_chunked",
    "read_frozen_chunks",
    "read_module",
    "read_partitioned",
]


class FlatPosition(NamedTuple):
    """Elements [start, start + length) of a parameter are at element `offset` of what rank `rank` has."""

    rank: int
    start: int
    length: int
    offset: int


class Elements:
    """A rank's sequence of elements, put together from contiguous runs in files.

    Args:
        itemsize: bytes per element.
    """

    def __init__(self, itemsize: int) -> None:
        self.itemsize = itemsize
        self.numel = 0
        self._runs: list[Piece] = []

    def append(self, file: int, length: int, offset: int) -> None:
        """Adds `length` elements that begin at byte `offset` of a file."""
        if length:
            self._runs.append((file, self.numel, length, offset))
            self.numel += length

    def cut(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(file, length, byte offset) of elements [start, start + length), which must exist."""
        assert start >= 0 and start + length <= self.numel, "a cut outside of a sequence"
        index = bisect_right(self._runs, start, key=lambda run: run[1]) - 1
        while length:
            file, begin, available, offset = self._runs[index]
            count = min(length, begin + available - start)
            yield file, count, offset + (start - begin) * self.itemsize
            start, length, index = start + count, length - count, index + 1


def pieces(places: Sequence[FlatPosition], ranks: Sequence[Elements], where: str) -> tuple[Piece, ...]:
    """The pieces of one parameter.

    Raises:
        CheckpointError: a rank has fewer elements than the parameter needs of it.
    """
    found: list[Piece] = []
    for place in places:
        held = ranks[place.rank]
        if place.offset + place.length > held.numel:
            raise CheckpointError(
                f"{where}: the partition of rank {place.rank}",
                expected=f"at least {place.offset + place.length} elements",
                got=held.numel,
                fix="the files are of different saves, or of a layout that is not known",
            )
        start = place.start
        for file, length, offset in held.cut(place.offset, place.length):
            if found and found[-1][0] == file and found[-1][3] + found[-1][2] * held.itemsize == offset:
                found[-1] = (file, found[-1][1], found[-1][2] + length, found[-1][3])
            else:
                found.append((file, start, length, offset))
            start += length
    return tuple(found)


def from_partitions(
    numels: Sequence[int], gaps: Sequence[int], partition_numel: int, world_size: int, where: str
) -> list[list[FlatPosition]]:
    """Stages 1 and 2: a group is one flat vector of its parameters, cut into equal partitions.

    Args:
        numels: of the parameters, in the order of the vector.
        gaps: elements of padding behind each parameter.
        partition_numel: elements per rank, with the padding at the end.

    Returns:
        The places of each parameter.

    Raises:
        CheckpointError: the vector is not as long as the parameters and their padding make it.
    """
    used = sum(numels) + sum(gaps)
    whole = partition_numel * world_size
    if not used <= whole < used + 2 * world_size + 1:  # the end is padded to a multiple of at most 2 W elements
        raise CheckpointError(
            f"{where}: {world_size} partitions of {partition_numel} elements",
            expected=f"{used} elements and at most {2 * world_size} of padding",
            got=whole,
            fix="the files are of different saves, or of a layout that is not known",
        )
    found: list[list[FlatPosition]] = []
    cursor = 0
    for numel, gap in zip(numels, gaps, strict=True):
        places = []
        start = 0
        while start < numel:
            rank, offset = divmod(cursor + start, partition_numel)
            length = min(numel - start, partition_numel - offset)
            places.append(FlatPosition(rank, start, length, offset))
            start += length
        found.append(places)
        cursor += numel + gap
    return found


def from_chunks(numels: Sequence[int], world_size: int) -> tuple[list[list[FlatPosition]], int]:
    """Stage 3: every parameter is cut into W chunks of ceil(numel / W); a rank has its chunks one behind the other.

    Returns:
        (the places of each parameter, elements per rank with padding).
    """
    found: list[list[FlatPosition]] = []
    cursor = 0
    for numel in numels:
        chunk = -(-numel // world_size)
        found.append(
            [
                FlatPosition(rank, rank * chunk, min(chunk, numel - rank * chunk), cursor)
                for rank in range(world_size)
                if rank * chunk < numel
            ]
        )
        cursor += chunk
    return found, cursor


_MOST_DIMS = 64

Shapes = Sequence[Mapping[str, tuple[int, ...]]]
InFile = tuple[int, StoredTensor]
"""A tensor and the number of the file that holds it."""


@dataclass
class ParamGroup:
    """A param group of the optimizer: its hyperparameters, and the names of its parameters in their order."""

    options: dict[str, Any]
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FlatStates:
    """Optimizer state of some parameters that lie behind each other on every rank.

    Attributes:
        names, shapes, places: of the parameters.
        partition_numel: elements of each rank's flat tensor.
        states: for each rank, the name of a state and its value; tensors come with their file.
    """

    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    places: Sequence[Sequence[FlatPosition]]
    partition_numel: int
    states: Sequence[Mapping[str, Any]]


@dataclass
class DeepSpeedContents:
    """What has been understood so far.

    Attributes:
        files: of which pieces tell the number.
        shapes: fqn -> shape, for trainable parameters; `frozen` for others.
        dtypes: fqn -> the dtype the model had.
        flats: optimizer state, not yet cut.
    """

    files: list[TorchFile]
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
        """The places of a whole tensor."""
        file, stored = tensor
        held = Elements(ITEMSIZE[stored.dtype])
        for _, length, offset in self.files[file].runs(stored):
            held.append(file, length, offset)
        places = [FlatPosition(0, 0, stored.numel, 0)] if stored.numel else []
        return TensorRecord(stored.dtype, stored.shape, pieces(places, [held], stored.storage))

    def sequence(self, tensors: Iterable[InFile]) -> Elements:
        """Tensors put behind each other; they have one dtype."""
        listed = list(tensors)
        kinds = {stored.dtype for _, stored in listed}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{self.files[listed[0][0]].path}: partitions", expected="one dtype", got=sorted(kinds)
            )
        held = Elements(ITEMSIZE[kinds.pop()] if kinds else 4)
        for file, stored in listed:
            for _, length, offset in self.files[file].runs(stored):
                held.append(file, length, offset)
        return held


def in_file(file: int, value: Any, where: str) -> InFile:
    """CheckpointError unless the value is a tensor."""
    if not isinstance(value, StoredTensor):
        raise CheckpointError(where, expected="a tensor", got=value)
    return file, value


def named_shapes(group: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """name -> shape, as a model's file says it; ValueError if it is not that."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in group.items():
        if type(name) is not str or not isinstance(shape, (tuple, list)) or len(shape) > _MOST_DIMS:
            raise ValueError(f"the shape of parameter {str(name)[:100]!r} is none")
        if any(type(size) is not int or not 0 <= size < 1 << 63 for size in shape):
            raise ValueError(f"the shape of parameter {name!r} is not of whole numbers")
        shapes[name] = tuple(shape)
    return shapes


def _padding(value: Any, where: str) -> int:
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{where}: padding", expected="a whole number", got=value)
    return value


def read_module(found: DeepSpeedContents, file: int, content: Mapping[str, Any], *, whole: bool) -> None:
    """Names, dtypes, ties, buffers and frozen parameters of a model file.

    Args:
        whole: the module's tensors are complete (stages 0 to 2); at stage 3 only the buffers are.
    """
    module = {name: value for name, value in content["module"].items() if isinstance(value, StoredTensor)}
    buffers = set(content["buffer_names"])
    found.ties = {str(alias): str(name) for alias, name in (content.get("shared_params") or {}).items()}
    for group in content.get("param_shapes") or ():
        found.shapes.update(named_shapes(group))
    found.frozen.update(named_shapes(content.get("frozen_param_shapes") or {}))
    first: dict[Any, str] = {}
    for name, tensor in module.items():
        if name in buffers:
            found.buffers.append(name)
            found.tensors[f"buffer/{name}"] = found.record((file, tensor))
            continue
        if whole and tensor.numel and name not in found.ties:
            canonical = first.setdefault(tensor.place, name)
            if canonical != name and not (name in found.shapes and canonical in found.shapes):
                found.ties[name] = canonical
        if name in found.ties:
            continue
        known = name in found.shapes or name in found.frozen
        if not (whole or known or tensor.numel):
            continue  # neither trained nor saved
        found.order.append(name)
        found.dtypes[name] = tensor.dtype
        if name not in found.shapes and (whole or not known):
            found.frozen[name] = tensor.shape
            found.tensors[f"value/{name}"] = found.record((file, tensor))
    for name in (*found.shapes, *found.frozen):  # those that are left out of the module
        if name not in found.dtypes and name not in found.ties:
            found.order.append(name)


def read_partitioned(
    found: DeepSpeedContents, shapes: Shapes, ranks: Sequence[tuple[int, Mapping[str, Any]]], *, padded: bool
) -> None:
    """Stages 1 and 2, and BF16_Optimizer.

    Args:
        shapes: for each param group, name -> shape in the order of the flat vector.
        ranks: for each rank the number of its file and its optimizer's content.
        padded: the partitions are saved with the padding at their end.
    """
    where = str(found.files[ranks[0][0]].path)
    world_size = len(ranks)
    for group, named in enumerate(shapes):
        address = f"{where}: param group {group}"
        tensors = [
            in_file(file, _item(body["single_partition_of_fp32_groups"], group, address), address)
            for file, body in ranks
        ]
        cut_off = [
            0 if padded else _padding(_item(body["group_paddings"], group, address), address) for _, body in ranks
        ]
        sizes = {stored.numel + rest for (_, stored), rest in zip(tensors, cut_off, strict=True)}
        if len(sizes) != 1:
            raise CheckpointError(f"{address}: partitions", expected="the same size on all ranks", got=sorted(sizes))
        partition_numel = sizes.pop()
        gaps = ranks[0][1].get("param_alignment_paddings")
        numels = [math.prod(shape) for shape in named.values()]
        between = [_padding(gap, address) for gap in _item(gaps, group, address)] if gaps else [0] * len(numels)
        places = from_partitions(numels, between, partition_numel, world_size, address)
        _add_masters(found, named, places, [found.sequence([tensor]) for tensor in tensors], tensors[0][1].dtype)
        states = [_state(file, body["base_optimizer_state"], group, body) for file, body in ranks]
        found.flats.append(
            FlatStates(list(named), [tuple(shape) for shape in named.values()], places, partition_numel, states)
        )
    saved = ranks[0][1]["base_optimizer_state"]
    options = saved["param_groups"] if isinstance(saved, Mapping) else [{} for _ in shapes]
    for named, settings in zip(shapes, options, strict=True):
        found.groups.append(ParamGroup(_without_params(settings), list(named)))


def _item(values: Any, index: int, where: str) -> Any:
    try:
        return values[index]
    except (IndexError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: not in the file of every rank") from error


def _without_params(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("params", "step")}


def _state(file: int, saved: Any, index: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one flat parameter; tensors with their file."""
    if isinstance(saved, Mapping):
        state = saved["state"].get(index, {})
    else:  # "elastic": a list, with the padding cut off, and the step count beside it
        state = dict(saved[index])
        if "base_optimizer_state_step" in body:
            state.setdefault("step", body["base_optimizer_state_step"])
    return {name: (file, value) if isinstance(value, StoredTensor) else value for name, value in state.items()}


def _add_masters(
    found: DeepSpeedContents,
    named: Mapping[str, tuple[int, ...]],
    places: Sequence[Sequence[FlatPosition]],
    ranks: Sequence[Elements],
    dtype: str,
) -> None:
    for (name, shape), where in zip(named.items(), places, strict=True):
        found.tensors[f"master/{name}"] = TensorRecord(dtype, tuple(shape), pieces(where, ranks, f"parameter {name}"))


def read_chunked(
    found: DeepSpeedContents,
    shapes: Shapes,
    models: Sequence[tuple[int, Mapping[str, Any]]],
    ranks: Sequence[tuple[int, Mapping[str, Any]]],
) -> None:
    """Stage 3: chunks of every parameter, sub-group by sub-group; frozen parameters in the model files.

    Args:
        shapes: for each sub-group, name -> shape.
        models, ranks: for each rank the number of its file, and the content of its model and optimizer file.
    """
    where = str(found.files[ranks[0][0]].path)
    world_size = len(ranks)
    flats = [
        [in_file(file, tensor, f"{where}: fp32_flat_groups") for tensor in body["fp32_flat_groups"]]
        for file, body in ranks
    ]
    sizes = [[stored.numel for _, stored in tensors] for tensors in flats]
    expected = [from_chunks([math.prod(s) for s in named.values()], world_size) for named in shapes]
    for rank, found_sizes in enumerate(sizes):
        if found_sizes != [numel for _, numel in expected]:
            raise CheckpointError(
                f"{found.files[ranks[rank][0]].path}: sub-groups",
                expected=f"of {[numel for _, numel in expected]} elements",
                got=found_sizes,
                fix="the files are of different saves, or of a layout that is not known",
            )
    saved = [body["optimizer_state_dict"] for _, body in ranks]
    for index, (named, (places, numel)) in enumerate(zip(shapes, expected, strict=True)):
        held = [found.sequence([tensors[index]]) for tensors in flats]
        _add_masters(found, named, places, held, flats[0][index][1].dtype)
        states = [_state(file, state, index, {}) for (file, _), state in zip(ranks, saved, strict=True)]
        found.flats.append(FlatStates(list(named), [tuple(s) for s in named.values()], places, numel, states))
    for settings in saved[0]["param_groups"]:
        names = [name for index in settings["params"] for name in shapes[index]]
        found.groups.append(ParamGroup(_without_params(settings), names))
    read_frozen_chunks(found, models)


def read_frozen_chunks(found: DeepSpeedContents, models: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Frozen parameters of stage 3, from the model files of all ranks."""
    for name, shape in found.frozen.items():
        if f"value/{name}" in found.tensors:
            continue
        fragments = []
        for file, content in models:
            address = f"{found.files[file].path}: frozen parameter {name}"
            fragments.append(in_file(file, (content.get("frozen_param_fragments") or {}).get(name), address))
        (places,), _ = from_chunks([math.prod(shape)], len(models))
        held = [found.sequence([fragment]) for fragment in fragments]
        dtype = fragments[0][1].dtype
        found.tensors[f"value/{name}"] = TensorRecord(dtype, shape, pieces(places, held, f"frozen parameter {name}"))
