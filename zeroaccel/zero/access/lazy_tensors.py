"""Tensors whose values are read, or computed, range by range: a rank reads only the bytes that its shard consists of.

A `LazyTensor` has shape, strides and dtype, and a node with the values' source: bytes of a file, a tensor in memory, or
an operation on other lazy tensors. torch functions called on lazy tensors return lazy tensors: views are recorded by
their strides, `cat` and `stack` as joints, elementwise functions as computations. So a conversion that a library wrote
for whole tensors (rename, merge of experts, split, transpose, permutation, dequantization) is applied to ranges, by the
library's own code. `read_into` then evaluates the elements [start, start + n) of the result.

A function that no node describes runs on whole tensors, when the first element of its result is read; a line of the log
names the tensor. `load_safetensors.py` reads parameters from files directly; the facade's
`transformers_loading.py` runs transformers' conversions.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zeroaccel.config.bounds import open_regular
from zeroaccel.errors import UsageError, listed
from zeroaccel.logs import log_once
from zeroaccel.ops.dispatch import array_of, in_spans
from zeroaccel.ops.kernels import look_up
from zeroaccel.zero.access.safetensors_file import TensorLocation, dtype_of, pread_into

_CHUNK_NBYTES = 8 << 20  # of one read, and of the result of one computation
_CACHED_NUMEL = 1 << 19  # elements: a processor's cache keeps the values of such a computation
_MOST_SPAN_NBYTES = 32 << 20
_MOST_TRANSPOSED_NUMEL = 32 << 20  # of a chunk of a transposed tensor: an expert, whose bytes are then read once

Box = tuple[tuple[int, int], ...]
"""(first, end) of each dimension."""

_aten = torch.ops.aten
_TABLES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of tables


class OpenFile:
    """A file that is opened at the first read, and closed by `close`; counts the bytes that it has read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_nbytes = 0
        self._handle: int | None = None

    def read(self, offset: int, into: memoryview, name: str) -> None:
        """Fills `into` with the bytes from `offset` on.

        Args:
            name: the tensor, for the error message.

        Raises:
            UsageError: the file cannot be opened or read, or ends within the tensor.
        """
        try:
            if self._handle is None:
                self._handle = open_regular(self.path)
            count = pread_into(self._handle, into, offset)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        if count < into.nbytes:
            raise UsageError(f"{self.path}: ends within tensor {name}", fix="download or save the file again")
        self.read_nbytes += into.nbytes

    def close(self) -> None:
        """Closes the file; a later read opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class Node(ABC):
    """The source of values, (shape), row-major."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    sources: Any = ()
    """The lazy tensors that the values come from, in nested containers."""
    seek_nbytes = 64 << 10
    """A further run of elements costs about as much time as this many more bytes in one run."""

    @abstractmethod
    def fill(self, box: Box, out: Tensor) -> None:
        """Writes the elements of a box to `out`, of the box's shape and of any strides and dtype."""

    def fill_flat(self, start: int, out: Tensor) -> None:
        """Writes elements [start, start + n) to `out`, (n,), contiguous, of any dtype."""
        for box, low, high in _boxes(self.shape, start, start + out.numel()):
            self.fill(box, out[low:high].view([end - first for first, end in box]))


class Stored(Node):
    """A tensor in a safetensors file."""

    seek_nbytes = 1024

    def __init__(self, name: str, place: TensorLocation, file: OpenFile) -> None:
        super().__init__(place.shape, dtype_of(place.dtype))
        self.name, self.offset, self.file = name, place.offset, file

    def fill(self, box: Box, out: Tensor) -> None:
        strides = _strides(self.shape)
        start = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
        _fill_runs(self, start, [end - first for first, end in box], strides, out)

    def fill_flat(self, start: int, out: Tensor) -> None:
        itemsize = self.dtype.itemsize
        step = _CHUNK_NBYTES // itemsize
        in_place = out.dtype is self.dtype and out.device.type == "cpu"
        for low in range(0, out.numel(), step):
            chunk = out[low : low + step]
            data = chunk if in_place else torch.empty(chunk.numel(), dtype=self.dtype)
            # A view of the tensor's memory: numpy, and so memoryview, lacks some of torch's dtypes.
            memory: Any = data.detach().view(torch.uint8).numpy()
            self.file.read(self.offset + (start + low) * itemsize, memoryview(memory), self.name)
            if not in_place:
                chunk.copy_(data)


class Loaded(Node):
    """A tensor in memory, or mapped from a file."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(values.shape, values.dtype)
        self.values = values.detach()

    def fill(self, box: Box, out: Tensor) -> None:
        out.copy_(self.values[tuple(slice(*ends) for ends in box)])


class _Concatenated(Node):
    """Tensors end to end along a dimension; one tensor alone is a contiguous copy of a view."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int, shape: Sequence[int]) -> None:
        super().__init__(shape, parts[0].dtype)
        self.sources = parts
        self.dim = dim

    def fill(self, box: Box, out: Tensor) -> None:
        if len(self.sources) == 1:
            self.sources[0].fill(box, out)
            return
        wanted_first, wanted_end = box[self.dim]
        place = 0
        for source in self.sources:
            size = source.shape[self.dim]
            first, end = max(wanted_first, place), min(wanted_end, place + size)
            if first < end:
                inner = (*box[: self.dim], (first - place, end - place), *box[self.dim + 1 :])
                source.fill(inner, out.narrow(self.dim, first - wanted_first, end - first))
            place += size


class _Computed(Node):
    """The result of an elementwise function; evaluates it on boxes of its arguments."""

    def __init__(self, call: Callable[..., Tensor], arguments: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.call, self.sources = call, arguments

    def fill(self, box: Box, out: Tensor) -> None:
        def part(value: Any) -> Any:
            if not isinstance(value, LazyTensor):
                return value.to(out.device) if isinstance(value, Tensor) else value
            ends = zip(box[len(box) - value.dim() :], value.shape, strict=True)
            inner = tuple((0, 1) if size == 1 else each for each, size in ends)
            values = torch.empty([end - first for first, end in inner], dtype=value.dtype, device=out.device)
            value.fill(inner, values)
            return values

        args, kwargs = tree_map(part, self.sources)
        # The first argument's memory is new, like its values; more new memory would take longer than the operation.
        call = self.call
        if isinstance(self.sources[0][0], LazyTensor) and args[0].shape == out.shape and args[0].dtype is self.dtype:
            call = _in_place(call)
        out.copy_(call(*args, **kwargs))


class _Cast(Node):
    """The values of a tensor in another dtype."""

    def __init__(self, source: LazyTensor, dtype: torch.dtype) -> None:
        super().__init__(source.shape, dtype)
        self.sources = (source,)

    def fill(self, box: Box, out: Tensor) -> None:
        if out.dtype is self.dtype:  # each node converts to the dtype of `out`
            self.sources[0].fill(box, out)
        else:
            values = torch.empty(out.shape, dtype=self.dtype, device=out.device)
            self.sources[0].fill(box, values)
            out.copy_(values)


class _LookedUp(Node):
    """The values that a table has for codes of 8 bits.

    Args:
        table: (T,) values of the codes 0 to T - 1.
        is_cast: the table has torch's own casts of the codes, which devices other than the CPU compute.
    """

    def __init__(self, codes: LazyTensor, table: Tensor, *, is_cast: bool) -> None:
        super().__init__(codes.shape, table.dtype)
        self.sources = (codes,)
        self.table, self.is_cast = table, is_cast

    def fill(self, box: Box, out: Tensor) -> None:
        source = self.sources[0]
        codes = torch.empty(out.shape, dtype=source.dtype, device=out.device)
        source.fill(box, codes)
        if not self.is_cast and codes.numel() and int(codes.max()) >= len(self.table):
            raise IndexError(f"code {int(codes.max())} of {_names_of(self.sources)}: the table has {len(self.table)}")
        if out.device.type != "cpu":
            out.copy_(codes.to(self.dtype) if self.is_cast else self.table.to(out.device)[codes.int()])
            return
        values = out if out.dtype is self.dtype and out.is_contiguous() else torch.empty(out.shape, dtype=self.dtype)
        into, table, array = (array_of(each) for each in (values, self.table, codes.view(torch.uint8)))
        in_spans(out.numel(), partial(look_up, into, table, array))
        if values is not out:
            out.copy_(values)


@lru_cache
def _cast_table(source: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Returns torch's casts of all 256 codes, (256,); the source has 8 bits."""
    return torch.arange(256).to(torch.uint8).view(source).to(dtype)


@lru_cache
def _in_place(call: Any) -> Callable[..., Tensor]:
    """Returns the variant of an elementwise function that writes into its first argument, or the function itself."""
    variants = getattr(_aten, call.overloadpacket.__name__ + "_", None)
    variant: Callable[..., Tensor] = getattr(variants, call._schema.overload_name or "default", call)
    return variant


class _Whole(Node):
    """One result of a function that is computed on whole tensors."""

    def __init__(self, source: _WholeCall, index: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.source, self.index = source, index
        self.sources = source.arguments

    def fill(self, box: Box, out: Tensor) -> None:
        out.copy_(self.source.results()[self.index][tuple(slice(*ends) for ends in box)])


class _WholeCall:
    """A call whose arguments are read whole at the first use of a result."""

    def __init__(self, call: Callable[..., Any], arguments: Any) -> None:
        self.call, self.arguments = call, arguments
        self.values: list[Tensor] | None = None

    def results(self) -> list[Tensor]:
        if self.values is None:
            _note_whole(self.call, self.arguments)
            args, kwargs = tree_map(materialized, self.arguments)
            self.values = [each for each in tree_leaves(self.call(*args, **kwargs)) if isinstance(each, Tensor)]
        return self.values


class LazyTensor(Tensor):
    """A tensor without values in memory; see the module's docstring."""

    node: Node
    place: Tensor  # on the meta device: shape, strides and offset of the view within the node

    @staticmethod
    def __new__(cls, node: Node, place: Tensor | None = None) -> LazyTensor:
        """Returns the whole of a node, or a view of it."""
        if place is None:
            place = torch.empty(node.shape, dtype=node.dtype, device="meta")
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, place.shape, place.stride(), _offset(place), dtype=node.dtype, device=torch.device("cpu")
        )
        made.node, made.place = node, place
        return made

    def __init__(self, node: Node, place: Tensor | None = None) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments = (args, kwargs or {})
        recorded = _recorded(func, arguments)
        if recorded is not None:
            return recorded
        _note_whole(func, arguments)
        args, kwargs = tree_map(materialized, arguments)
        return func(*args, **kwargs)

    def fill(self, box: Box, out: Tensor) -> None:
        """Writes the elements of a box to `out`; see `Node.fill`."""
        direct = _box_of_node(self.place, self.node.shape, box, out)
        if direct is not None:
            self.node.fill(*direct)
            return
        strides = self.place.stride()
        start = _offset(self.place)
        start += sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
        _fill_runs(self.node, start, [end - first for first, end in box], strides, out)

    def nodes(self) -> Iterator[Node]:
        """Yields the nodes that the values come from."""
        pending: list[Any] = [self]
        seen: set[int] = set()
        while pending:
            node = pending.pop().node
            if id(node) not in seen:
                seen.add(id(node))
                yield node
                pending += [each for each in tree_leaves(node.sources) if isinstance(each, LazyTensor)]


def read_into(tensor: Tensor, start: int, into: Tensor) -> None:
    """Writes elements [start, start + n) of a tensor, row-major, to `into`, (n,), contiguous, converted to its dtype.

    Raises:
        UsageError: a file cannot be read, or ends within the tensor.
    """
    if not isinstance(tensor, LazyTensor):
        Loaded(tensor).fill_flat(start, into)
        return
    node, place = tensor.node, tensor.place
    whole = place.is_contiguous()
    in_order, step = (True, into.numel()) if whole and isinstance(node, (Stored, Loaded)) else _chunk_numel(tensor)
    # A chunk ends where rows of the node end, so that it is few boxes.
    strides = [each for each in _strides(node.shape) if each]
    unit = max((each for each in strides if each <= (step if in_order else _MOST_TRANSPOSED_NUMEL)), default=1)
    step = max(step - step % unit, unit)
    # A transposed tensor is computed in whole rows, also at the ends of the range: each box would read the same bytes.
    row = 1 if in_order else max((each for each in strides if each <= _CACHED_NUMEL), default=1)
    first = start + (_offset(place) if whole else 0)
    ends = range((step - first) % step or step, into.numel(), step)
    for low, high in itertools.pairwise((0, *ends, into.numel())):
        chunk = into[low:high]
        before, after = (first + low) % row, -(first + high) % row
        if not whole:
            for box, begin, end in _boxes(tensor.shape, start + low, start + low + chunk.numel()):
                tensor.fill(box, chunk[begin:end].view([high - least for least, high in box]))
        elif before or after:
            values = chunk.new_empty(before + chunk.numel() + after)
            node.fill_flat(first + low - before, values)
            chunk.copy_(values[before : before + chunk.numel()])
        else:
            node.fill_flat(first + low, chunk)


def _chunk_numel(tensor: LazyTensor) -> tuple[bool, int]:
    """Returns whether the values are in the order of their sources, and the most elements to evaluate at a time."""
    nodes = list(tensor.nodes())
    sources = [each for node in nodes for each in tree_leaves(node.sources) if isinstance(each, LazyTensor)]
    computes = any(isinstance(node, (_Computed, _LookedUp)) for node in nodes)
    # Chunks of transposed tensors are long, because short ones would read each file in shorter runs.
    in_order = all(each.place.is_contiguous() for each in (tensor, *sources))
    return in_order, _CACHED_NUMEL if computes and in_order else _CHUNK_NBYTES // 4


def is_pure(node: Node) -> bool:
    """Returns False for a node whose values are computed once, on whole tensors."""
    return not isinstance(node, _Whole)


def raw_bytes(node: Node) -> Node:
    """Returns a node with the bytes, (B,), of a tensor in a file or in memory."""
    if isinstance(node, Loaded):
        return Loaded(node.values.contiguous().view(-1).view(torch.uint8))
    raw = copy.copy(node)
    raw.shape, raw.dtype = (math.prod(node.shape) * node.dtype.itemsize,), torch.uint8
    return raw


def release(tensor: Tensor) -> None:
    """Frees the results of computations on whole tensors, after the last read of a tensor."""
    for node in tensor.nodes() if isinstance(tensor, LazyTensor) else ():
        if isinstance(node, _Whole):
            node.source.values = None


def materialized(value: Any) -> Any:
    """Returns the values of a lazy tensor in memory, and anything else unchanged."""
    if not isinstance(value, LazyTensor):
        return value
    whole = torch.empty(value.shape, dtype=value.dtype)
    read_into(value, 0, whole.view(-1))
    return whole


def _note_whole(call: Any, arguments: Any) -> None:
    log_once(
        logging.WARNING, f"{_names_of(arguments)}: every rank reads it whole, since {call} cannot be applied to parts"
    )


def _names_of(arguments: Any) -> str:
    lazy = [each for each in tree_leaves(arguments) if isinstance(each, LazyTensor)]
    names = sorted({each.name for tensor in lazy for each in tensor.nodes() if isinstance(each, Stored)})
    return listed(names) or "a tensor"


# -- recording


def _recorded(func: Any, arguments: Any) -> Any:
    """Returns the result as lazy tensors, or None if it must be computed at once."""
    args, kwargs = arguments
    packet = func.overloadpacket
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
    if any(each.device.type != "cpu" for each in tensors):
        return None
    if func._schema.is_mutable:
        _refuse_writes(func, args, kwargs)
        return None
    target = kwargs.get("device")
    if target is not None and torch.device(target).type != "cpu":
        return None
    if packet in (_aten.cat, _aten.stack):
        return _join(packet, *args, **kwargs)
    if packet is _aten.index:
        return _index(func, arguments)
    on_meta = tree_map(_as_meta, arguments)
    try:
        made = func(*on_meta[0], **on_meta[1])
    except NotImplementedError:
        return None
    if packet is _aten.clone or (packet is _aten._to_copy and made.dtype is args[0].dtype):
        return LazyTensor(_Concatenated([args[0]], 0, args[0].shape))
    if packet is _aten._to_copy:
        return _cast(args[0], made.dtype)
    reinterprets = func is _aten.view.dtype and made.dtype.itemsize == args[0].dtype.itemsize
    if reinterprets or torch.Tag.pointwise in func.tags:
        lazy = tree_map(lambda each: LazyTensor(Loaded(each)) if type(each) is Tensor else each, arguments)
        return LazyTensor(_Computed(func, lazy, made.shape, made.dtype))
    outs = made if isinstance(made, (list, tuple)) else [made]
    if not all(isinstance(each, Tensor) for each in outs):
        return None
    sources = {each.place.untyped_storage()._cdata: each for each in tensors if isinstance(each, LazyTensor)}
    views = [sources.get(each.untyped_storage()._cdata) for each in outs]
    if all(source is not None for source in views):
        results = [LazyTensor(s.node, each) for s, each in zip(views, outs, strict=True) if s is not None]
    else:
        call = _WholeCall(func, arguments)
        results = [LazyTensor(_Whole(call, index, each.shape, each.dtype)) for index, each in enumerate(outs)]
    return type(made)(results) if isinstance(made, (list, tuple)) else results[0]


def _cast(source: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    if source.dtype.itemsize == 1 and source.dtype.is_floating_point and dtype in _TABLES:
        return LazyTensor(_LookedUp(source, _cast_table(source.dtype, dtype), is_cast=True))
    return LazyTensor(_Cast(source, dtype))


def _index(func: Any, arguments: Any) -> LazyTensor | None:
    """Records a lookup in a table of values: each element of the result depends on one element of the index."""
    table, indices = arguments[0]
    if isinstance(table, LazyTensor) or table.dim() != 1 or len(indices) != 1:
        return None
    node, place = indices[0].node, indices[0].place
    codes = node.sources[0] if isinstance(node, _Cast) and place.is_contiguous() and place.shape == node.shape else None
    if codes is not None and codes.dtype is torch.uint8 and table.dtype in _TABLES:
        return LazyTensor(_LookedUp(codes, table, is_cast=False))
    return LazyTensor(_Computed(func, arguments, place.shape, table.dtype))


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: Any) -> None:
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, LazyTensor):
            raise UsageError(
                f"{func} on {_names_of([value])}",
                expected="a function that returns a new tensor: nothing can write to a weight before it is read",
                fix="clone the tensor first, or load the weights unconverted",
            )


def _as_meta(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.place
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) and value.dim() else value


def _join(packet: Any, tensors: Sequence[Tensor], dim: int = 0) -> LazyTensor | None:
    if len({each.dtype for each in tensors}) > 1:
        return None
    lazy = [each if isinstance(each, LazyTensor) else LazyTensor(Loaded(each)) for each in tensors]
    if packet is _aten.stack:
        dim %= lazy[0].dim() + 1
        lazy = [LazyTensor(each.node, each.place.unsqueeze(dim)) for each in lazy]
    else:
        lazy = [each for each in lazy if tuple(each.shape) != (0,)] or lazy[:1]  # torch's old rule for empty tensors
    made: Tensor = _aten.cat([each.place for each in lazy], dim)
    return LazyTensor(_Concatenated(lazy, dim % max(made.dim(), 1), made.shape))


# -- ranges


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    """Yields boxes that make up elements [start, stop) in row-major order, with their ranges counted from `start`."""
    if start >= stop:
        return
    if not shape:
        yield (), 0, 1
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    low = 0
    if first == last or start % inner:  # a part of one row
        end = min(stop, (first + 1) * inner)
        for box, begin, until in _boxes(shape[1:], start - first * inner, end - first * inner):
            yield ((first, first + 1), *box), begin, until
        low, first = end - start, first + 1
    full = stop // inner
    if first < full and low < stop - start:
        yield ((first, full), *((0, size) for size in shape[1:])), low, low + (full - first) * inner
        low, first = low + (full - first) * inner, full
    if low < stop - start:
        for box, begin, until in _boxes(shape[1:], 0, stop - first * inner):
            yield ((first, first + 1), *box), low + begin, low + until


def _box_of_node(place: Tensor, shape: Sequence[int], box: Box, out: Tensor) -> tuple[Box, Tensor] | None:
    """Returns the box of the node for a box of a view that only selects, slices and permutes dimensions, with `out`."""
    free = {}
    offset, strides = _offset(place), _strides(shape)
    index = [offset // stride % size if size > 1 else 0 for stride, size in zip(strides, shape, strict=True)]
    for dim, size in enumerate(shape):
        if size > 1:
            free[strides[dim]] = dim
    ends = [(each, each + 1) for each in index]
    sizes, out_strides = [1] * len(shape), [0] * len(shape)
    for dim, (size, stride) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if size == 1:
            continue
        axis = free.pop(stride, None)
        if axis is None or index[axis] + size > shape[axis]:
            return None
        first, end = box[dim]
        ends[axis] = (index[axis] + first, index[axis] + end)
        sizes[axis], out_strides[axis] = end - first, out.stride(dim)
    return tuple(ends), out.as_strided(sizes, out_strides, _offset(out))


def _fill_runs(node: Node, start: int, sizes: Sequence[int], strides: Sequence[int], out: Tensor) -> None:
    """Writes the elements at `start + sum(index * stride)` of a node to `out`, of shape `sizes`.

    Reads runs of consecutive elements, and also the elements between two runs where that costs less than another read.
    """
    repeated = [dim for dim, stride in enumerate(strides) if stride == 0 and sizes[dim] > 1]
    if repeated:
        once = [1 if dim in repeated else size for dim, size in enumerate(sizes)]
        values = torch.empty(once, dtype=node.dtype, device=out.device)
        _fill_runs(node, start, once, strides, values)
        out.copy_(values.expand(sizes))
        return
    dims = [(strides[dim], size, out.stride(dim)) for dim, size in enumerate(sizes) if size > 1]
    dims.sort(key=lambda each: -each[0])
    span, itemsize, inner = 1, node.dtype.itemsize, len(dims)
    while inner:
        stride, size, _ = dims[inner - 1]
        longer = (size - 1) * stride + span
        dense = stride == span
        cheaper = longer * itemsize <= min(size * (node.seek_nbytes + span * itemsize), _MOST_SPAN_NBYTES)
        if not dense and not cheaper:
            break
        span, inner = longer, inner - 1
    if not inner and span == out.numel() and out.is_contiguous() and _in_order(dims):
        node.fill_flat(start, out.as_strided((span,), (1,), _offset(out)))
        return
    outer, rest = dims[:inner], dims[inner:]
    shape, places = [size for _, size, _ in rest], [stride for *_, stride in rest]
    run = torch.empty(span, dtype=node.dtype, device=out.device)
    picked = run.as_strided(shape, [stride for stride, *_ in rest])
    for index in itertools.product(*(range(size) for _, size, _ in outer)):
        node.fill_flat(start + sum(each * dim[0] for each, dim in zip(index, outer, strict=True)), run)
        offset = _offset(out) + sum(each * dim[2] for each, dim in zip(index, outer, strict=True))
        out.as_strided(shape, places, offset).copy_(picked)


def _in_order(dims: Sequence[tuple[int, int, int]]) -> bool:
    return all(first[2] >= second[2] for first, second in itertools.pairwise(dims))
