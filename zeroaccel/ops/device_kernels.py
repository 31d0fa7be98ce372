"""The kernels of `device_kernels.cu` on a CUDA device: compiled once per process, launched on torch's current stream.

`kernels_for` is how the rest of the package gets at them; where it answers None, callers use torch operations with the
same bits. Every kernel is launched by `DeviceKernels.launch`, which names what is read and written.

Launching allocates nothing and does not wait for the device.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from zeroaccel.logs import log_once
from zeroaccel.ops.kernel_cache import cached_image
from zeroaccel.ops.nvrtc import DriverModule, KernelError, open_nvrtc

SOURCE = Path(__file__).with_suffix(".cu")
"""What is compiled."""

Argument = Tensor | np.generic | Sequence[Tensor | None] | Sequence[int] | None
"""Of a kernel: a tensor is its address, None a null pointer, and a number has the C type of its dtype; a list is one of
the structures of `MANY` addresses or counts."""

MANY = 64
"""Tensors that one launch takes: MANY of the source."""

_THREADS = 256  # per block: THREADS of the source
_ITEMS = 4  # per thread of an update: ITEMS of the source
_WARPS = _THREADS // 32
_MAX_BLOCKS = 1024  # of a reduction: each ends in an atomic operation on one word
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_C_TYPES: Mapping[type[np.generic], Any] = {
    **{np.float32: ctypes.c_float, np.float64: ctypes.c_double},
    **{np.int32: ctypes.c_int32, np.uint32: ctypes.c_uint32, np.int64: ctypes.c_int64},
}


def kernel_names(source: str) -> list[str]:
    """The names of the kernels that a CUDA source defines.

    Example:
        >>> kernel_names('extern "C" __global__ void __launch_bounds__(256) adam(float* master) {}')
        ['adam']
    """
    return re.findall(r"__global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(", source)


class KernelRunner(Protocol):
    """What has compiled kernels."""

    def run(self, name: str, grid: tuple[int, int], threads: int, arguments: Sequence[object]) -> None:
        """See `nvrtc.DriverModule.run`."""


class DeviceKernels:
    """The kernels on one device. Tensors are contiguous, and lie there.

    Args:
        runner: has the compiled source.
    """

    def __init__(self, runner: KernelRunner) -> None:
        self._runner = runner

    def launch(
        self,
        name: str,
        arguments: Sequence[Argument],
        *,
        reads: Sequence[Tensor | None],
        writes: Sequence[Tensor | None],
        blocks: int,
        rows: int = 1,
    ) -> None:
        """Launches one kernel; all others of this class come down to it.

        Args:
            arguments: of the kernel, in its order.
            reads: the tensors among them that it reads; None stands for none.
            writes: likewise, that it writes. What it adds to is in both.
            blocks: of threads, in x.
            rows: likewise, in y.
        """
        self._runner.run(name, (blocks, rows), _THREADS, [_c_value(argument) for argument in arguments])

    # -- updates

    def update(
        self,
        name: str,
        state: Sequence[Tensor | None],
        grad: Tensor,
        out: Tensor | None,
        control: Tensor | None,
        scalars: Sequence[np.generic],
    ) -> None:
        """An optimizer's update in one pass, as the loop of that name in `updates`.

        Args:
            state: the float32 master (L,), then what the loop has before its gradient.
            grad: (L,) float32, bfloat16 or float16.
            out: (L,) in one of these dtypes, gets the rounded master; None for nothing.
            control: (2,) float32, see `step_control`; None to multiply gradients by the first of the scalars.
            scalars: of the loop, from its grad_scale on.
        """
        moment = next((_KINDS.get(tensor.dtype, 0) for tensor in state[1:] if tensor is not None), 0)
        kinds = (_KINDS[grad.dtype], moment, 0 if out is None else _KINDS[out.dtype])
        numel = grad.numel()
        if numel == 0:
            return
        arguments: list[Argument] = [*state, grad, out, control, *scalars, np.int64(numel), *_int32(*kinds)]
        self.launch(
            name,
            arguments,
            reads=[*state, grad, control],
            writes=[*state, out],
            blocks=-(-numel // (_THREADS * _ITEMS)),
        )

    def update_many(
        self,
        name: str,
        columns: Mapping[str, Sequence[Tensor | None]],
        numbers: Sequence[Argument],
        *,
        reads: str,
        writes: str,
        beside: Sequence[Tensor] = (),
    ) -> None:
        """One launch for an update of several tensors, at most `MANY`.

        Args:
            columns: of each of the kernel's arguments with a tensor per row, the tensors, by a letter.
            numbers: the kernel's other arguments, behind the counts of elements.
            reads, writes: the letters of the columns that are read, and written.
            beside: those tensors among the numbers that are written; others are read.
        """
        first = next(iter(columns.values()))
        numels = [tensor.numel() for tensor in first if tensor is not None]
        assert len(first) == len(numels) <= MANY, f"{len(first)} tensors in one launch"
        self.launch(
            name,
            [*columns.values(), numels, *numbers],
            reads=[
                *(tensor for letter in reads for tensor in columns[letter]),
                *(each for each in numbers if isinstance(each, Tensor) and all(each is not own for own in beside)),
            ],
            writes=[*(tensor for letter in writes for tensor in columns[letter]), *beside],
            blocks=update_blocks(numels),
            rows=len(numels),
        )

    # -- the norm and the decisions of a step

    def max_abs_into(self, tensor: Tensor, largest: Tensor) -> None:
        """See `reductions.max_abs_into`."""
        numel = tensor.numel()
        arguments: list[Argument] = [tensor, largest, np.int64(numel), np.int32(_KINDS[tensor.dtype])]
        self.launch("max_abs", arguments, reads=[tensor, largest], writes=[largest], blocks=_reduction_blocks(numel))

    def square_sums_into(self, tensor: Tensor, largest: Tensor, sums: Tensor) -> None:
        """See `reductions.square_sums_into`."""
        numel = tensor.numel()
        arguments: list[Argument] = [tensor, largest, sums, np.int64(numel), np.int32(_KINDS[tensor.dtype])]
        blocks = _reduction_blocks(numel)
        self.launch("square_sums", arguments, reads=[tensor, largest, sums], writes=[sums], blocks=blocks)

    def write_facts(self, largest: Tensor, history: int, settings: int, stop: bool, facts: Tensor) -> None:
        """See `step_control.write_facts`."""
        arguments: list[Argument] = [largest, np.int64(history), np.int64(settings), np.int32(stop), facts]
        self.launch("write_facts", arguments, reads=[largest], writes=[facts], blocks=1)

    def largest_of_facts(self, facts: Tensor, largest: Tensor) -> None:
        """See `step_control.largest_of_facts`."""
        self.launch("largest_of_facts", [facts, largest], reads=[facts], writes=[largest], blocks=1)

    def finalize(
        self,
        facts: Tensor,
        sums: Tensor | None,
        control: Tensor,
        summary: Tensor,
        factors: tuple[float, float, float],
        *,
        skip_overflow: bool,
    ) -> None:
        """See `step_control.finalize`; `factors` are scale, clipping and grad_factor."""
        numbers: list[np.generic] = [*(np.float64(factor) for factor in factors), np.int32(skip_overflow)]
        arguments: list[Argument] = [facts, sums, control, summary, *numbers]
        self.launch("finalize", arguments, reads=[facts, sums], writes=[control, summary], blocks=1)

    # -- codes

    def encode(
        self,
        values: Tensor,
        codes: Tensor,
        code_format: tuple[int, int],
        order: Tensor | None = None,
        skip: tuple[int, int] = (0, 0),
    ) -> None:
        """Makes the codes of rows; see `comm/quantized.py`.

        Args:
            values: (M, n) float32, bfloat16 or float16.
            codes: (K, nbytes) uint8.
            code_format: the largest number of a code (127, 7; 448 in e4m3), and values per block.
            order: (K,) int32, the row of `values` that each code is of; None for the same one.
            skip: the rows of `codes` from the first up to the second are left as they are.
        """
        numel = values.shape[1]
        if numel and codes.shape[0] > skip[1] - skip[0]:
            numbers = _code_numbers(numel, codes, _KINDS[values.dtype], *code_format, *skip)
            blocks, rows = _code_blocks(numel, code_format), codes.shape[0]
            arguments = [values, order, codes, *numbers]
            self.launch("encode", arguments, reads=[values, order], writes=[codes], blocks=blocks, rows=rows)

    def decode(self, codes: Tensor, out: Tensor, code_format: tuple[int, int], *, adds: bool = False) -> None:
        """Writes the values of codes.

        Args:
            codes: (K, nbytes) uint8.
            out: (K, n) float32, bfloat16 or float16.
            code_format: the largest number of a code (127, 7; 448 in e4m3), and values per block.
            adds: whether the values are added to `out`, which is float32 then.
        """
        numel = out.shape[1]
        if numel:
            arguments = [codes, out, *_code_numbers(numel, codes, _KINDS[out.dtype], *code_format, adds)]
            blocks, rows = _code_blocks(numel, code_format), codes.shape[0]
            reads = [codes, out] if adds else [codes]
            self.launch("decode", arguments, reads=reads, writes=[out], blocks=blocks, rows=rows)

    def decode_levels(self, scales: Tensor, codes: Tensor, out: Tensor, levels: Tensor, block_numel: int) -> None:
        """Writes the values of codes that are indices of levels; see `comm/level_codes.py`.

        Args:
            scales: (n / block_numel,) float32, or uint8 for powers of two.
            codes: (n / 2,) uint8.
            out: (n,) float32, bfloat16 or float16, whole blocks.
            levels: (16,) float32.
            block_numel: a power of two, at least 8.
        """
        numel = out.numel()
        assert numel % block_numel == 0, f"{numel} values are no whole blocks"
        if numel:
            numbers = _int32(_KINDS[out.dtype], block_numel, scales.dtype is torch.uint8)
            arguments: list[Argument] = [scales, codes, out, levels, np.int64(numel), *numbers]
            blocks = -(-numel // (8 * _THREADS))
            self.launch("decode_levels", arguments, reads=[scales, codes, levels], writes=[out], blocks=blocks)

    def sum_codes(
        self,
        codes: Tensor,
        values: Tensor,
        own: int,
        totals: Tensor,
        code_format: tuple[int, int],
        order: Tensor | None = None,
    ) -> None:
        """Adds up what the ranks sent, in their order; this rank's own rows were not encoded.

        Args:
            codes: (W, R, nbytes) uint8.
            values: (M, n) float32, bfloat16 or float16, among them this rank's own.
            own: this rank.
            totals: (R, n) float32.
            code_format: the largest number of a code (127, 7; 448 in e4m3), and values per block.
            order: (W * R,) int32, the row of `values` of each rank's rows; None for the same one.
        """
        (ranks, rows, _), numel = codes.shape, totals.shape[1]
        if numel:
            numbers = _code_numbers(numel, codes, _KINDS[values.dtype], *code_format, ranks, own)
            arguments = [codes, values, order, totals, *numbers]
            blocks = _code_blocks(numel, code_format)
            self.launch("sum_codes", arguments, reads=[codes, values, order], writes=[totals], blocks=blocks, rows=rows)


def _c_value(argument: Argument) -> object:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, Tensor):
        assert argument.is_contiguous(), f"a kernel needs contiguous memory, got strides {argument.stride()}"
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, np.generic):
        return _C_TYPES[type(argument)](argument.item())
    if isinstance(argument[0], int):
        return (ctypes.c_int64 * MANY)(*cast(Sequence[int], argument))
    return (ctypes.c_void_p * MANY)(*(cast(Any, _c_value(cast(Argument, each))).value for each in argument))


def update_blocks(numels: Sequence[int]) -> int:
    """Thread blocks for the largest of the tensors that an update has in one launch."""
    return max(1, -(-max(numels) // (_THREADS * _ITEMS)))


def dtype_kind(tensor: Tensor | None) -> np.int32:
    """Of a kernel's argument: the number of a tensor's dtype, 0 of none."""
    return np.int32(0 if tensor is None else _KINDS[tensor.dtype])


def _int32(*numbers: int) -> list[np.int32]:
    return [np.int32(number) for number in numbers]


def _reduction_blocks(numel: int) -> int:
    return max(1, min(-(-numel // (_THREADS * _ITEMS)), _MAX_BLOCKS))


def _code_numbers(numel: int, codes: Tensor, *numbers: int) -> list[Argument]:
    return [np.int64(numel), np.int64(codes.shape[-1]), *_int32(*numbers)]


def _code_blocks(numel: int, code_format: tuple[int, int]) -> int:
    """Thread blocks for a row: a warp per block of values."""
    return -(-numel // (code_format[1] * _WARPS))


# -- compiling

_compiled: dict[int, DeviceKernels | None] = {}
_lock = threading.Lock()


def kernels_for(device: torch.device) -> DeviceKernels | None:
    """The kernels on a device; None where there are none, which the log says once, with the reason.

    Compiles at the first call for a device.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if index not in _compiled:
            _compiled[index] = _compile(torch.device("cuda", index))
        return _compiled[index]


def compile_kernels(device: torch.device) -> DeviceKernels:
    """Compiles the kernels for a CUDA device with an index, or takes them from the user's cache, and loads them.

    Raises:
        KernelError: there is no compiler or no driver, or one of them fails.
    """
    if torch.version.hip:
        raise KernelError("they are written for CUDA, and this torch is built for ROCm")
    if torch.version.cuda is None:
        raise KernelError("this torch is built without CUDA")
    nvrtc = open_nvrtc()
    target = nvrtc.target(torch.cuda.get_device_capability(device))
    source = SOURCE.read_text(encoding="utf-8")
    key = [source, target, *nvrtc.facts()]
    image = cached_image(key, lambda: nvrtc.compile(source, SOURCE.name, target))
    return DeviceKernels(DriverModule(image, device, kernel_names(source)))


def _compile(device: torch.device) -> DeviceKernels | None:
    try:
        return compile_kernels(device)
    except (KernelError, OSError) as error:
        log_once(
            logging.WARNING,
            f"{device}: zeroaccel's kernels are not available, so updates, norms and codes run as torch operations:"
            f" the same bits, but several times the memory traffic: {error}",
        )
        return None
