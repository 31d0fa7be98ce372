"""Dispatch to `kernels`: CPU tensors viewed as arrays, and one span of a call per thread.

Every compiled loop over tensors runs through `launch`, which names what it reads and writes.

Threads are Python's, over kernels that release the GIL, because Numba's own parallel layers end the process when it
forks after OpenMP started (every DataLoader worker does) or when two threads enter their work queue at once. A
hand-over costs about 50 us, so short calls run on the calling thread. Neither the number of threads nor the spans may
change a result; that is the kernels' contract.
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
"""Devices whose tensors `launch` takes: those of the second have no values, and nothing is computed of them."""

_MIN_SPAN_NUMEL = 1 << 17  # elements: about 60 us of Adam
_ALIGNMENT_NUMEL = 64  # spans start on cache lines, whatever the dtype

_PATTERNS = {
    **{torch.float32: np.float32, torch.uint8: np.uint8, torch.int16: np.int16},
    **{torch.bfloat16: np.uint16, torch.float16: np.int16},
}
_pool: ThreadPoolExecutor | None = None
_num_threads: int | None = None


def array_of(tensor: Tensor) -> Array:
    """A flat view, not a copy, in the form that `kernels` reads: float32, uint8, bfloat16 as uint16, float16 as int16.

    Args:
        tensor: contiguous, on the CPU, in one of the four dtypes.
    """
    assert tensor.is_contiguous(), f"a kernel needs contiguous memory, got strides {tensor.stride()}"
    flat = tensor.detach().view(-1)
    if tensor.dtype in (torch.float32, torch.uint8):
        return flat.numpy()
    return flat.view(torch.int16).numpy().view(_PATTERNS[tensor.dtype])


class _Memory:
    """NumPy's array interface over the memory of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        dtype = np.dtype(_PATTERNS[tensor.dtype])
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel(),),
            "typestr": dtype.str,
            "version": 3,
        }


def unowned_array(tensor: Tensor) -> Array:
    """As `array_of`, also of int16, for the length of a call: the array does not keep the memory alive.

    A storage that `Tensor.numpy` has seen can never be freed by resizing again, as those of sharded units must be.
    """
    assert tensor.is_contiguous(), f"a kernel needs contiguous memory, got strides {tensor.stride()}"
    return np.asarray(_Memory(tensor)) if tensor.numel() else np.empty(0, _PATTERNS[tensor.dtype])


def threads() -> int:
    """How many threads a call is spread over: those of `use_threads`, else of torch's own operations."""
    return _num_threads or torch.get_num_threads()


def use_threads(count: int | None) -> None:
    """Sets how many threads calls are spread over in this process; None for torch's number."""
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

    Autograd, torch's dispatcher and its profilers do not see what a compiled loop touches: it is named here, for those
    who follow accesses, such as the stream model of the tests.

    Example:
        >>> values, total = torch.ones(3), torch.zeros(3)
        >>> def bind():
        ...     source, target = array_of(values), array_of(total)
        ...     return lambda start, stop: target[start:stop].__iadd__(source[start:stop])
        >>> _ = launch("add", 3, bind, reads=[values, total], writes=[total])
        >>> total
        tensor([1., 1., 1.])

    Args:
        kernel: its name.
        numel: elements that the spans divide.
        bind: views the tensors as arrays; returns what is called with each span, [start, stop) in elements.
        reads, writes: every tensor that is touched, on the CPU; one that is read and written is in both.
        divisible: False for one span, whose elements share bytes that only one thread may write.

    Returns:
        What the calls return, in the order of the spans; nothing for tensors without values.
    """
    if writes and (writes[0].is_meta or hasattr(writes[0], "fake_device")):
        return []  # of an estimate: there are no values
    work = bind()
    return in_spans(numel, work) if divisible else [work(0, numel)]


def in_spans(numel: int, work: Callable[[int, int], _Result]) -> list[_Result]:
    """Calls ``work(start, stop)`` over spans that make up [0, numel), on up to `threads` threads.

    Returns when every span is done, with the results in order; an exception in `work` is raised here, also only then.
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
        wait(others)  # they write into memory that the caller owns
    return [first, *(other.result() for other in others)]


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = executor(os.cpu_count() or 1, "zeroaccel-kernel", CPU)
    return _pool


def _forget_threads() -> None:
    """A forked child has the pool object but none of its threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
