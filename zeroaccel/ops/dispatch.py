"""Dispatch to `kernels`: views CPU tensors as arrays, and divides a call into one span per thread.

Every compiled loop over tensors runs through `launch`, whose arguments list the tensors it reads and writes.

Python threads run the kernels, which release the GIL, because Numba's own parallel layers end the process if it forks
after OpenMP started (as for DataLoader workers) or if two threads enter their work queue at once. Passing work to a
thread costs about 50 us, so short calls run on the calling thread. By the kernels' contract, neither the number of
threads nor the spans change a result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from zeroaccel.ops.device_threads import CPU, executor
from zeroaccel.ops.number_formats import Array

_Result = TypeVar("_Result")

LOOP_DEVICES = ("cpu", "meta")
"""Devices whose tensors `launch` accepts; for "meta" tensors, which have no values, it computes nothing."""

_MIN_SPAN_NUMEL = 1 << 17  # elements: about 60 us of Adam
_ALIGNMENT_NUMEL = 64  # spans start on cache lines, whatever the dtype

_PATTERNS = {
    **{torch.float32: np.float32, torch.uint8: np.uint8, torch.int16: np.int16},
    **{torch.bfloat16: np.uint16, torch.float16: np.int16},
}
_pool: ThreadPoolExecutor | None = None
_num_threads: int | None = None


class _Memory:
    """NumPy's array interface on the memory of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        dtype = np.dtype(_PATTERNS[tensor.dtype])
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel(),),
            "typestr": dtype.str,
            "version": 3,
        }


def array_of(tensor: Tensor) -> Array:
    """Returns a flat view for `kernels`: bfloat16 as uint16, float16 as int16, other dtypes unchanged.

    The view is for use within one call: it does not keep the memory alive. After `Tensor.numpy`, a storage can no
    longer be freed by resizing, which sharded units require.

    Args:
        tensor: contiguous CPU tensor; float32, bfloat16, float16, uint8 or int16.
    """
    assert tensor.is_contiguous(), f"a kernel needs contiguous memory, got strides {tensor.stride()}"
    return np.asarray(_Memory(tensor)) if tensor.numel() else np.empty(0, _PATTERNS[tensor.dtype])


def threads() -> int:
    """Returns the number of threads of a call: the value set by `use_threads`, else that of torch's operations."""
    return _num_threads or torch.get_num_threads()


def use_threads(count: int | None) -> None:
    """Sets the number of threads of calls in this process; None for torch's number."""
    global _num_threads
    _num_threads = count


def launch(
    kernel: str,
    numel: int,
    bind: Callable[[], Callable[[int, int], _Result]],
    *,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    divisible: bool = True,
) -> list[_Result]:
    """Runs a compiled loop over `numel` elements of host memory, in spans, on up to `threads` threads.

    Autograd, torch's dispatcher and its profilers do not see a compiled loop's memory accesses. `reads` and `writes`
    declare them for code that tracks accesses, such as the stream model of the tests.

    Example:
        >>> values, total = torch.ones(3), torch.zeros(3)
        >>> def bind():
        ...     source, target = array_of(values), array_of(total)
        ...     return lambda start, stop: target[start:stop].__iadd__(source[start:stop])
        >>> _ = launch("add", 3, bind, reads=[values, total], writes=[total])
        >>> total
        tensor([1., 1., 1.])

    Args:
        kernel: name of the loop.
        numel: number of elements that the spans divide.
        bind: views the tensors as arrays; returns the function that processes a span, [start, stop) in elements.
        reads, writes: all CPU tensors that the loop accesses; a tensor that is read and written is in both.
        divisible: False to use one span, if elements share bytes that only one thread may write.

    Returns:
        The results of the calls in the order of the spans; an empty list for tensors without values.
    """
    if writes and (writes[0].is_meta or hasattr(writes[0], "fake_device")):
        return []  # tensors of an estimate have no values
    work = bind()
    return in_spans(numel, work) if divisible else [work(0, numel)]


def in_spans(numel: int, work: Callable[[int, int], _Result]) -> list[_Result]:
    """Divides [0, numel) into spans and calls ``work(start, stop)`` for each, on up to `threads` threads.

    Returns the results in order, or raises an exception of `work`, after all spans are done.
    """
    spans = max(1, min(threads(), numel // _MIN_SPAN_NUMEL))
    if spans == 1:
        return [work(0, numel)]
    length = -(-numel // (spans * _ALIGNMENT_NUMEL)) * _ALIGNMENT_NUMEL
    edges = [min(index * length, numel) for index in range(spans + 1)]
    others = [_threads().submit(work, start, stop) for start, stop in pairwise(edges[1:])]
    try:
        first = work(0, edges[1])
    finally:
        wait(others)  # they write into the caller's memory
    return [first, *(other.result() for other in others)]


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = executor(os.cpu_count() or 1, "zeroaccel-kernel", CPU)
    return _pool


def _forget_threads() -> None:
    """Drops the pool in a forked child, which does not inherit its threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
