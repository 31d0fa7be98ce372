"""Collectives on what scripts hold: tensors in nested tuples, lists, mappings and dataclass-like outputs.

`Accelerator` offers them as methods; they work in any process of a job, also before there is an engine. What differs
between ranks in a way that would garble the result is told on every rank before anything is sent. The moves themselves
are `comm.Collectives`'.

Letters: W = world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from zeroaccel.accelerate.nested import map_tensors, to_device
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import Topology, init_process_group
from zeroaccel.errors import UsageError

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "collectives_of_process",
    "concatenate",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
]

_cached: tuple[Topology, Collectives] | None = None


def collectives_of_process() -> Collectives:
    """The collectives that scripts' own calls go through; joins the job at the first call. (all ranks)"""
    global _cached
    topology = init_process_group()
    if _cached is None or _cached[0] is not topology:
        _cached = topology, Collectives(topology)
    return _cached[1]


def send_to_device(data: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """`data` with every tensor on `device`; objects with a `to` of their own, as batches of tokens, use that."""
    return to_device(data, device, non_blocking=non_blocking)


def _require_tensors(data: Any, call: str, path: str = "") -> Iterator[Tensor]:
    """The tensors in `data`; anything else in it is an error, as it would silently stay this rank's own."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for key, item in data.items():
            yield from _require_tensors(item, call, f"{path}[{key!r}]")
    elif isinstance(data, (tuple, list)):
        for index, item in enumerate(data):
            yield from _require_tensors(item, call, f"{path}[{index}]")
    else:
        raise UsageError(
            f"{call}: the value at {path or 'the top'}",
            expected="tensors, or tuples, lists and mappings of them",
            got=type(data).__name__,
            fix="gather other objects with gather_object",
        )


def gather(data: Any) -> Any:
    """Every tensor of shape (n, ...) becomes (W*n, ...), the ranks one after the other; a 0-dim one (W,). (all ranks)

    Raises:
        UsageError: something is no tensor, or the ranks' shapes or dtypes differ; on every rank.
    """
    _require_alike(data, "gather", "pad_across_processes makes them equal; gather_object takes anything")

    def of_all(tensor: Tensor) -> Tensor:
        rows = _rows(tensor, "gather")
        return rows if tensor.dim() == 0 else rows.flatten(0, 1)

    return map_tensors(of_all, data)


def reduce(data: Any, reduction: Literal["mean", "sum", "none"] = "mean", scale: float = 1.0) -> Any:
    """Every tensor becomes its sum or mean over the ranks, the same bits on all of them, times `scale`. (all ranks)

    Sums run in the order of the ranks; means of integers are floating.

    Raises:
        UsageError: another reduction, or the ranks' shapes or dtypes differ; on every rank.
    """
    if reduction not in ("mean", "sum", "none"):
        raise UsageError("reduce: reduction", expected='"mean", "sum" or "none"', got=reduction)
    _require_alike(data, "reduce")

    def of_all(tensor: Tensor) -> Tensor:
        if reduction == "none":
            return tensor
        first, *others = _rows(tensor, "reduce").unbind(0)
        total = first.clone()
        for other in others:
            total += other
        total = total / collectives_of_process().world_size if reduction == "mean" else total
        return total * scale if scale != 1.0 else total

    return map_tensors(of_all, data)


def broadcast(data: Any, from_process: int = 0) -> Any:
    """Every tensor becomes that of one rank; the ranks must hold the same shapes and dtypes. (all ranks)"""
    _require_rank("broadcast", from_process)
    _require_alike(data, "broadcast", "broadcast_object_list takes anything")

    def of_one(tensor: Tensor) -> Tensor:
        flat = tensor.detach().contiguous().view(-1).clone()
        collectives_of_process().broadcast(flat.view(torch.uint8) if flat.numel() else flat, from_process, "broadcast")
        return flat.view(tensor.shape)

    return map_tensors(of_one, data)


def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    """Replaces the list's contents by those of one rank. Pickled. (all ranks)"""
    _require_rank("broadcast_object_list", from_process)
    collectives = collectives_of_process()
    mine = list(objects) if collectives.rank == from_process else None
    objects[:] = collectives.gather_objects(mine, "broadcast_object_list")[from_process]
    return objects


def gather_object(data: Any) -> list[Any]:
    """The objects of all ranks, by rank, on every rank; lists are strung together. Pickled. (all ranks)"""
    everyone = collectives_of_process().gather_objects(data, "gather_object")
    if all(isinstance(item, list) for item in everyone):
        return [item for items in everyone for item in items]
    return everyone


def pad_across_processes(data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Every tensor is padded along `dim` to the largest size any rank has, so that `gather` takes it. (all ranks)

    A tensor with too few dims for `dim` stays as it is.

    Args:
        pad_index: the value of the padding.
        pad_first: padding goes before the data rather than behind it.
    """
    found = _require_tensors(data, "pad_across_processes")
    sizes = [tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else None for tensor in found]
    everyone = collectives_of_process().gather_objects(sizes, "pad_across_processes")
    counts = [len(theirs) for theirs in everyone]
    _require(len(set(counts)) == 1, "pad_across_processes", counts, "number of tensors")
    widest = [None if None in column else max(column) for column in zip(*everyone, strict=True)]
    wanted = iter(widest)

    def padded(tensor: Tensor) -> Tensor:
        size = next(wanted)
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
    """One nested structure from several of the same form, their tensors strung together along `dim`."""
    columns = zip(*(_require_tensors(item, "concatenate") for item in data), strict=True)
    joined = iter([torch.cat(column, dim=dim) for column in columns])
    return map_tensors(lambda _: next(joined), data[0])


def _rows(tensor: Tensor, call: str) -> Tensor:
    """(W, ...) the tensors of all ranks."""
    collectives = collectives_of_process()
    own = tensor.detach().contiguous()
    rows = own.new_empty((collectives.world_size, *own.shape))
    if own.numel():
        # As bytes, so that every dtype travels on every backend.
        out, shard = rows.view(-1).view(torch.uint8), own.view(-1).view(torch.uint8)
        collectives.all_gather(out, shard, call).wait()
    return rows


def _require_alike(data: Any, call: str, fix: str = "") -> None:
    """All ranks must hold the same shapes and dtypes: a backend would mix up bytes, or wait, without a word."""
    held: list[str] = []
    error: UsageError | None = None
    try:
        held = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in _require_tensors(data, call)]
    except UsageError as raised:
        error = raised
    everyone = collectives_of_process().gather_objects(str(error) if error else held, f"{call}: shapes")
    if error is not None:
        raise error
    told = [text for text in everyone if isinstance(text, str)]
    if told:
        raise UsageError(told[0])
    _require(all(theirs == everyone[0] for theirs in everyone), call, everyone, "shapes and dtypes", fix)


def _require(right: bool, call: str, everyone: Sequence[Any], what: str, fix: str = "") -> None:
    if not right:
        got = "; ".join(
            f"rank {rank}: {', '.join(theirs) if isinstance(theirs, list) else theirs}"
            for rank, theirs in enumerate(everyone)
        )
        raise UsageError(call, expected=f"the same {what} on every rank", got=got, fix=fix)


def _require_rank(call: str, rank: int) -> None:
    world_size = collectives_of_process().world_size
    if not 0 <= rank < world_size:
        raise UsageError(f"{call}: from_process", expected=f"0 to {world_size - 1}", got=rank)
