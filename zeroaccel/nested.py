"""Tensors in nested containers, such as batches and model outputs: an extension of `torch.utils._pytree`.

pytree walks lists, tuples, namedtuples, dicts and the types that libraries register. It treats subclasses of these and
other mappings (transformers' `BatchEncoding`) as leaves; here they are containers and keep their types. This module
imports torch and no other module of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["batch_size_of", "leaves_of", "map_leaves", "map_tensors", "tensors_of", "to_device"]


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Applies `function` to each leaf of `data`, that is, to each object other than a list, tuple or mapping.

    Containers keep their types; a mapping whose type cannot be constructed from a dict becomes a dict.
    """

    def of_leaf(value: Any) -> Any:
        if isinstance(value, Mapping):
            items = tree_map(of_leaf, dict(value))
            try:
                return type(value)(items)  # type: ignore[call-arg]
            except TypeError:
                return items
        if isinstance(value, (list, tuple)):
            items = tree_map(of_leaf, list(value))
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return function(value)

    return tree_map(of_leaf, data)


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Applies `function` to each tensor in `data`; other leaves stay the same objects."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, data)


def leaves_of(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) for every leaf of `data`, in order; a path is such as `[0]['labels']`."""
    # pytree's flatten_with_path rejects types that are registered without keys, such as transformers' outputs.
    if isinstance(data, Mapping):
        for key, item in data.items():
            yield from leaves_of(item, f"{path}[{key!r}]")
    elif isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            yield from leaves_of(item, f"{path}[{index}]")
    else:
        yield path, data


def tensors_of(data: Any) -> Iterator[Tensor]:
    """Yields every tensor in `data`, in order."""
    return (leaf for _, leaf in leaves_of(data) if isinstance(leaf, Tensor))


def batch_size_of(data: Any) -> int | None:
    """Returns dim 0 of the first tensor with dims; without such a tensor, the length of a list, else None."""
    for tensor in tensors_of(data):
        if tensor.dim() > 0:
            return tensor.shape[0]
    return len(data) if isinstance(data, list) else None


def to_device(data: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """Moves the tensors in `data`, and other leaves with a `to(device)` method, to a device."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return map_leaves(moved, data)
