"""Host queries of tensors that may be on a device: reads their values, and tests if two start at the same place.

A training step reads values of device tensors only with `read_values`. Reading a CUDA tensor blocks the host until the
device has computed it; then the device's queue is empty until the host has queued new work. So a step reads all values
in one call, and the number of calls is the number of waits (`tests/cuda_model`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def read_values(tensor: Tensor) -> list[Any]:
    """Returns the elements as Python numbers, in order, after the current stream has computed them.

    Example:
        >>> import torch
        >>> read_values(torch.tensor([[1, 2], [3, 4]]))
        [1, 2, 3, 4]

    Args:
        tensor: N elements in any shape, any dtype and device. All elements take one copy to host memory.

    Returns:
        N numbers: float, int or bool, depending on the dtype.
    """
    values: list[Any] = tensor.detach().reshape(-1).tolist()
    return values


def begin_together(first: Tensor, second: Tensor) -> bool:
    """Returns True if the first elements of two tensors are at the same position of the same storage.

    Compares storage and offset, not `data_ptr`: all tensors without elements have the address 0, and fake tensors have
    no address.

    Example:
        >>> import torch
        >>> full = torch.zeros(6)
        >>> begin_together(full[2:], full[2:4]), begin_together(full[2:], full[3:])
        (True, False)

    Args:
        first, second: tensors of the same dtype, with any shapes and devices.
    """
    assert first.dtype == second.dtype, f"begin_together: expected one dtype, got {first.dtype} and {second.dtype}"
    one_storage = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    return one_storage and first.storage_offset() == second.storage_offset()
