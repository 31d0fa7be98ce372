"""Tensors inside lists, tuples, dicts and the like: what a batch is, walked in one place.

Containers keep their types. Communicates nothing and knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["batch_size_of", "map_tensors", "tensors_of", "to_device"]


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """`data` with every tensor in it replaced by `function` of it; anything else stays the object it is.

    Walks lists, tuples (named ones too) and mappings. A mapping whose type cannot be made of a dict becomes a dict.
    """
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, item) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(function, item) for item in data)
    if isinstance(data, Mapping):
        mapped = {key: map_tensors(function, item) for key, item in data.items()}
        if type(data) is dict:
            return mapped
        try:
            return type(data)(mapped)  # type: ignore[call-arg]
        except TypeError:
            return mapped
    return data


def tensors_of(data: Any) -> Iterator[Tensor]:
    """Every tensor in `data`, in its order."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from tensors_of(item)
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from tensors_of(item)


def batch_size_of(data: Any) -> int | None:
    """Rows of the first tensor in `data` that has any; without a tensor the length of a list; else None."""
    for tensor in tensors_of(data):
        if tensor.dim() > 0:
            return tensor.shape[0]
    return len(data) if isinstance(data, list) else None


def to_device(data: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """`data` with its tensors on a device. An object that is no container but has `to(device)` is asked itself."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=non_blocking)
    if not isinstance(data, (list, tuple, Mapping)) and callable(move := getattr(data, "to", None)):
        return move(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(item, device, non_blocking=non_blocking) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(item, device, non_blocking=non_blocking) for item in data)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), data)
