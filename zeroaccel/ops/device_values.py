"""What the host asks of tensors that may lie on a device: their values, and whether two begin at one place.

`read_values` is the one place where a training step reads values of a device tensor. A read of a CUDA tensor blocks the
host until the device has computed it, and until the host has caught up again the device has nothing queued. So a step
takes all values that it needs in one call, and counting the calls counts the waits (`tests/cuda_model`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def read_values(tensor: Tensor) -> list[Any]:
    """The elements as Python numbers, in order; of a device tensor, once the current stream has computed them.

    Example:
        >>> import torch
        >>> read_values(torch.tensor([[1, 2], [3, 4]]))
        [1, 2, 3, 4]

    Args:
        tensor: (N,) or any shape, any dtype and device. One copy to host memory, however many elements there are.

    Returns:
        N numbers: float, int or bool by the dtype.
    """
    values: list[Any] = tensor.detach().reshape(-1).tolist()
    return values


def begin_together(first: Tensor, second: Tensor) -> bool:
    """Whether the first elements of two tensors are at one place of one storage.

    By storage and offset, not by `data_ptr`: any two tensors without elements have one address, 0, and tensors without
    memory of their own, as fake ones, have none.

    Example:
        >>> import torch
        >>> full = torch.zeros(6)
        >>> begin_together(full[2:], full[2:4]), begin_together(full[2:], full[3:])
        (True, False)

    Args:
        first, second: any shapes, devices; of one dtype.
    """
    assert first.dtype == second.dtype, f"offsets count elements, of {first.dtype} and {second.dtype}"
    one_storage = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    return one_storage and first.storage_offset() == second.storage_offset()
