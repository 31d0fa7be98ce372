"""Collectives on nested containers of tensors, like accelerate's `utils.operations`.

`Accelerator` has them as methods; they work in any process of a job, also without an engine. The ranks first compare
shapes, dtypes and the structure of containers, so that a mismatch raises on every rank instead of a hang or mixed-up
bytes. `comm.Collectives` runs the collectives.

Letters: W = world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import Topology, init_process_group
from zeroaccel.data.metric_samples import RealSamples, real_objects, real_rows
from zeroaccel.errors import UsageError
from zeroaccel.nested import leaves_of, map_tensors

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "collectives_of_process",
    "concatenate",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "pad_across_processes",
    "reduce",
]

_cached: tuple[Topology, Collectives] | None = None


def collectives_of_process() -> Collectives:
    """Returns the collectives over all ranks, for calls from scripts; the first call joins the job. (all ranks)"""
    global _cached
    topology = init_process_group()
    if _cached is None or _cached[0] is not topology:
        _cached = topology, Collectives(topology)
    return _cached[1]


def _require_tensors(data: Any, call: str) -> Iterator[Tensor]:
    """Yields the tensors in `data`. Any other leaf is an error: the collective would silently leave it unchanged."""
    for path, leaf in leaves_of(data):
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"{call}: the value at {path or 'the top'}",
                expected="tensors, or tuples, lists and mappings of them",
                got=type(leaf).__name__,
                fix="gather other objects with gather_object",
            )
        yield leaf


def gather(data: Any) -> Any:
    """All-gathers along dim 0 in rank order: (n, ...) becomes (W*n, ...), a 0-dim tensor becomes (W,). (all ranks)

    Raises:
        UsageError: a leaf is not a tensor, or the ranks' shapes or dtypes differ; raised on every rank.

    Example:
        >>> import torch
        >>> from zeroaccel.operations import gather
        >>> batch = {"predictions": torch.tensor([1, 0]), "labels": torch.tensor([1, 1])}
        >>> gather(batch)["predictions"]  # of one rank; of W ranks (2*W,)
        tensor([1, 0])
    """
    _require_alike(data, "gather", "pad with pad_across_processes, or use gather_object, which accepts any object")

    def of_all(tensor: Tensor) -> Tensor:
        rows = _rows(tensor, "gather")
        return rows if tensor.dim() == 0 else rows.flatten(0, 1)

    return map_tensors(of_all, data)


def reduce(data: Any, reduction: Literal["mean", "sum", "none"] = "mean", scale: float = 1.0) -> Any:
    """All-reduces: the sum or mean of each tensor over the ranks, times `scale`; the same bits on all. (all ranks)

    The mean of integers is a floating-point tensor.

    Raises:
        UsageError: the reduction is unknown, or the ranks' shapes or dtypes differ; raised on every rank.

    Example:
        >>> import torch
        >>> from zeroaccel.operations import reduce
        >>> loss = torch.tensor(0.5)
        >>> reduce(loss, "mean").item()
        0.5
    """
    if reduction not in ("mean", "sum", "none"):
        raise UsageError("reduce: reduction", expected='"mean", "sum" or "none"', got=reduction)
    _require_alike(data, "reduce")

    def of_all(tensor: Tensor) -> Tensor:
        if reduction == "none":
            return tensor
        # All-gather, then add in rank order: a backend's all-reduce adds in an order that depends on its algorithm,
        # and so do its last bits.
        first, *others = _rows(tensor, "reduce").unbind(0)
        total = first.clone()
        for other in others:
            total += other
        total = total / collectives_of_process().world_size if reduction == "mean" else total
        return total * scale if scale != 1.0 else total

    return map_tensors(of_all, data)


def broadcast(data: Any, from_process: int = 0) -> Any:
    """Returns the tensors of rank `from_process`; shapes and dtypes must be the same on all ranks. (all ranks)

    Example:
        >>> import torch
        >>> from zeroaccel.operations import broadcast
        >>> broadcast(torch.arange(3), from_process=0)
        tensor([0, 1, 2])
    """
    _require_rank("broadcast", from_process)
    _require_alike(data, "broadcast", "use broadcast_object_list, which accepts any object")

    def of_one(tensor: Tensor) -> Tensor:
        flat = tensor.detach().contiguous().view(-1).clone()
        collectives_of_process().broadcast(flat.view(torch.uint8) if flat.numel() else flat, from_process, "broadcast")
        return flat.view(tensor.shape)

    return map_tensors(of_one, data)


def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    """Replaces the contents of the list with those of rank `from_process`, sent by pickle. (all ranks)

    Example:
        >>> from zeroaccel.operations import broadcast_object_list
        >>> broadcast_object_list(["run-1", 3])
        ['run-1', 3]
    """
    _require_rank("broadcast_object_list", from_process)
    collectives = collectives_of_process()
    mine = list(objects) if collectives.rank == from_process else None
    objects[:] = collectives.gather_objects(mine, "broadcast_object_list")[from_process]
    return objects


def gather_object(data: Any) -> list[Any]:
    """Gathers the objects of all ranks by pickle, in rank order; concatenates them if all are lists. (all ranks)

    Example:
        >>> from zeroaccel.operations import gather_object
        >>> gather_object(["a text of this rank"])
        ['a text of this rank']
    """
    return _joined(collectives_of_process().gather_objects(data, "gather_object"))


def _joined(objects: list[Any]) -> list[Any]:
    if all(isinstance(item, list) for item in objects):
        return [item for items in objects for item in items]
    return objects


def gather_for_metrics(data: Any, samples: RealSamples | None = None, *, use_gather_object: bool = False) -> Any:
    """Gathers like `gather` and drops the rows and items of repeated samples. (all ranks)

    Data with leaves other than tensors on any rank is gathered as objects.

    Args:
        samples: samples of this rank's batch that are not repeated; None if no rank's are.
        use_gather_object: gather tensors as objects too, so that their shapes may differ.

    Raises:
        UsageError: a leaf has neither a row per sample nor one row, or shapes differ; raised on every rank.
    """
    call = "gather_for_metrics"
    as_objects = use_gather_object or not all(isinstance(leaf, Tensor) for _, leaf in leaves_of(data))
    objects: list[Any] = []  # none or one
    shapes: list[str] = []
    counts: list[int] = []
    error: UsageError | None = None
    try:
        if as_objects:
            objects = real_objects(data, samples)
        else:
            shapes, counts = _shapes(data, call), list(real_rows(data, samples))
    except UsageError as raised:
        error = raised
    collectives = collectives_of_process()
    with collectives.flight_recorder.holding(error):
        ranks = collectives.gather_objects((str(error or ""), as_objects, objects, shapes, counts), call)
    if error is not None:
        raise error
    for text, *_ in ranks:
        if text:
            raise UsageError(text)
    if any(objects_there for _, objects_there, *_ in ranks):
        found = [rank[2] for rank in ranks]
        if not all(objects_there for _, objects_there, *_ in ranks):  # for example an empty list on one rank
            found = collectives_of_process().gather_objects(
                objects if as_objects else real_objects(data, samples), call
            )
        return _joined([item for items in found for item in items])
    fix = "pad with pad_across_processes, or set use_gather_object=True, which accepts any shapes"
    _require_same([rank[3] for rank in ranks], call, fix)
    counts_by_leaf = zip(*(rank[4] for rank in ranks), strict=True)

    def of_all(tensor: Tensor) -> Tensor:
        rows = _rows(tensor, call)
        parts = rows[:, None] if tensor.dim() == 0 else rows
        return torch.cat([block[:count] for block, count in zip(parts, next(counts_by_leaf), strict=True)])

    return map_tensors(of_all, data)


def pad_across_processes(data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pads every tensor along `dim` to the largest size on any rank, so that `gather` accepts it. (all ranks)

    Tensors without a dim `dim` stay unchanged.

    Args:
        pad_index: the value of the padding.
        pad_first: put the padding before the data instead of after it.

    Example:
        >>> import torch
        >>> from zeroaccel.operations import gather, pad_across_processes
        >>> tokens = torch.ones(2, 7)  # another length on each rank
        >>> gather(pad_across_processes(tokens, dim=1)).shape
        torch.Size([2, 7])
    """
    tensors = _require_tensors(data, "pad_across_processes")
    sizes = [tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else None for tensor in tensors]
    sizes_by_rank = collectives_of_process().gather_objects(sizes, "pad_across_processes")
    counts = [len(row) for row in sizes_by_rank]
    _require(len(set(counts)) == 1, "pad_across_processes", counts, "number of tensors")
    target_sizes = iter([None if None in column else max(column) for column in zip(*sizes_by_rank, strict=True)])

    def padded(tensor: Tensor) -> Tensor:
        size = next(target_sizes)
        if size is None or size == tensor.shape[dim]:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = size
        out = tensor.new_full(shape, pad_index)
        start = size - tensor.shape[dim] if pad_first else 0
        out.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
        return out

    return map_tensors(padded, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenates the tensors of several nested containers of the same structure along `dim`."""
    columns = zip(*(_require_tensors(item, "concatenate") for item in data), strict=True)
    joined = iter([torch.cat(column, dim=dim) for column in columns])
    return map_tensors(lambda _: next(joined), data[0])


def _rows(tensor: Tensor, call: str) -> Tensor:
    """Returns the tensors of all ranks, stacked: (W, ...)."""
    collectives = collectives_of_process()
    data = tensor.detach().contiguous()
    rows = data.new_empty((collectives.world_size, *data.shape))
    if data.numel():
        # As bytes, because not every backend supports every dtype.
        out, shard = rows.view(-1).view(torch.uint8), data.view(-1).view(torch.uint8)
        collectives.all_gather(out, shard, call).wait()
    return rows


def _require_alike(data: Any, call: str, fix: str = "") -> None:
    """Raises unless all ranks have the same shapes and dtypes: a backend would mix up bytes, or hang, silently."""
    shapes: list[str] = []
    error: UsageError | None = None
    try:
        shapes = _shapes(data, call)
    except UsageError as raised:
        error = raised
    collectives = collectives_of_process()
    with collectives.flight_recorder.holding(error):
        shapes_by_rank = collectives.gather_objects(str(error) if error else shapes, f"{call}: shapes")
    if error is not None:
        raise error
    errors = [text for text in shapes_by_rank if isinstance(text, str)]
    if errors:
        raise UsageError(errors[0])
    _require_same(shapes_by_rank, call, fix)


def _shapes(data: Any, call: str) -> list[str]:
    return [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in _require_tensors(data, call)]


def _require_same(shapes_by_rank: Sequence[Any], call: str, fix: str) -> None:
    alike = all(row == shapes_by_rank[0] for row in shapes_by_rank)
    _require(alike, call, shapes_by_rank, "shapes and dtypes", fix)


def _require(alike: bool, call: str, by_rank: Sequence[Any], what: str, fix: str = "") -> None:
    if not alike:
        got = "; ".join(
            f"rank {rank}: {', '.join(row) if isinstance(row, list) else row}" for rank, row in enumerate(by_rank)
        )
        raise UsageError(call, expected=f"the same {what} on every rank", got=got, fix=fix)


def _require_rank(call: str, rank: int) -> None:
    world_size = collectives_of_process().world_size
    if not 0 <= rank < world_size:
        raise UsageError(f"{call}: from_process", expected=f"0 to {world_size - 1}", got=rank)
