"""What of a parameter is on this rank where another library splits it: the local tensors of DTensors.

Tensor parallelism (`torch.distributed.tensor.parallel`) makes a parameter a DTensor over its axis of the mesh; ZeRO
then keeps, gathers and updates the local tensor, among the ranks of the other axis. An ordinary parameter is its own
local tensor. Told apart by its attributes, so that nothing is imported for who does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.errors import UsageError

__all__ = ["check_split", "is_split", "local", "local_grad", "set_local"]


def _split(tensor: Tensor) -> Any:
    """The tensor as a DTensor; None for an ordinary one."""
    return tensor if hasattr(tensor, "_local_tensor") else None


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    split = _split(tensor)
    return tensor.detach() if split is None else split._local_tensor


def set_local(param: nn.Parameter, data: Tensor) -> None:
    """Makes `data` this rank's part of the parameter, which stays the object it is."""
    split = _split(param)
    if split is None:
        param.data = data
    else:
        split._local_tensor = data


def is_split(param: Tensor) -> bool:
    """Whether other ranks have other parts of it; a DTensor that is whole everywhere is not split."""
    split = _split(param)
    return split is not None and any(placement.is_shard() for placement in split.placements)


def local_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, once it is split as the parameter is. (ranks of its axis, if it was not)"""
    split, target = _split(grad), _split(param)
    if split is None:
        return grad
    if target is not None and tuple(split.placements) != tuple(target.placements):
        split = split.redistribute(placements=target.placements)
    part: Tensor = split.to_local()
    wait = getattr(part, "wait", None)
    return wait() if wait is not None and type(part) is not Tensor else part


def check_split(named: Sequence[tuple[str, nn.Parameter]], dtype_of: Any) -> None:
    """A DTensor keeps the dtype and the equal parts it came with.

    Args:
        dtype_of: (name, parameter) -> the dtype it is to have.

    Raises:
        UsageError: its dtype would have to change, or its parts are of different sizes.
    """
    for fqn, param in named:
        split = _split(param)
        if split is None:
            continue
        wanted: torch.dtype = dtype_of(fqn, param)
        if param.dtype is not wanted:
            raise UsageError(
                f"parameter {fqn}, a DTensor",
                expected=f"{wanted}, as the config's precision says",
                got=str(param.dtype),
                fix=f"call model.to({wanted}) before parallelize_module",
            )
        for axis, placement in enumerate(split.placements):
            size = split.device_mesh.size(axis)
            if placement.is_shard() and param.shape[placement.dim] % size:
                raise UsageError(
                    f"parameter {fqn}, a DTensor",
                    expected=f"a multiple of {size} in dim {placement.dim}, so that all ranks have equal parts",
                    got=tuple(param.shape),
                    fix="change the size, or leave the module out of the plan of parallelize_module",
                )
