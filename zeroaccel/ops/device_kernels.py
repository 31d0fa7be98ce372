"""The kernels of `device_kernels.cu` on a CUDA device: compiled as they are used, launched on torch's current stream.

The rest of the package gets them from `kernels_for`; if it returns None, as it does without CuPy, callers use torch
operations with the same bits. `DeviceKernels.launch` launches all kernels; its arguments list the tensors that they
read and write.

A launch allocates no memory and does not wait for the device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zeroaccel.logs import log_once
from zeroaccel.ops.cupy_kernels import KernelError, KernelModule, open_cupy

SOURCE = Path(__file__).with_suffix(".cu")
"""The CUDA source of all kernels."""

Argument = Tensor | np.generic | Sequence[Tensor | None] | Sequence[int] | None
"""A kernel argument: a tensor passes its address, None a null pointer, a number the C type of its dtype, and a list a
structure of `MANY` addresses or counts."""

MANY = 64
"""Maximum number of tensors of one launch; `MANY` in the source."""

_THREADS = 256  # threads per block: THREADS in the source
_ITEMS = 4  # elements per thread of an update: ITEMS in the source
_WARPS = _THREADS // 32
_MAX_BLOCKS = 1024  # maximum for a reduction, each of whose blocks ends in an atomic operation on one word
_KINDS = {torch.float32: np.int32(0), torch.bfloat16: np.int32(1), torch.float16: np.int32(2)}
_STRUCTURE = np.dtype(("V", 8 * MANY))  # `Tensors` or `Numels` in the source


class KernelRunner(Protocol):
    """Runs compiled kernels."""

    def run(self, name: str, grid: tuple[int, int], threads: int, arguments: Sequence[object]) -> None:
        """See `cupy_kernels.KernelModule.run`."""


class DeviceKernels:
    """The kernels on one device. All tensors must be contiguous and on this device.

    Args:
        runner: runs the compiled source.
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
        """Launches one kernel; all other methods use this one.

        Args:
            arguments: the kernel's arguments in order.
            reads: the arguments that it reads; None entries are ignored.
            writes: the arguments that it writes; a tensor that it adds to is in both.
            blocks: number of thread blocks in x.
            rows: number of thread blocks in y.
        """
        self._runner.run(name, (blocks, rows), _THREADS, [_value(argument) for argument in arguments])

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
        """Runs an optimizer's update in one pass, like the loop of the same name in `updates`.

        Args:
            state: the float32 master (L,), then the loop's other arguments before the gradient.
            grad: (L,) float32, bfloat16 or float16.
            out: (L,) in one of these dtypes, gets the rounded master; None for no copy.
            control: (2,) float32, see `step_control`; None to multiply gradients by the first scalar.
            scalars: the loop's scalars, starting with grad_scale.
        """
        numel = grad.numel()
        if numel == 0:
            return
        moment = next((_KINDS.get(tensor.dtype) for tensor in state[1:] if tensor is not None), 0)
        numbers = [*scalars, np.int64(numel), dtype_kind(grad), np.int32(moment or 0), dtype_kind(out)]
        arguments, reads = [*state, grad, out, control, *numbers], [*state, grad, control]
        self.launch(name, arguments, reads=reads, writes=[*state, out], blocks=update_blocks([numel]))

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
        """Updates several tensors, at most `MANY`, in one launch.

        Args:
            columns: letter -> tensors, one per row, for each kernel argument with a tensor per row.
            numbers: the kernel's other arguments, after the numbers of elements.
            reads, writes: letters of the columns that the kernel reads, and writes.
            beside: tensors among `numbers` that the kernel writes; it reads the others.
        """
        first = next(iter(columns.values()))
        numels = [tensor.numel() for tensor in first if tensor is not None]
        assert len(first) == len(numels) <= MANY, f"{len(first)} tensors in one launch"
        self.launch(
            name,
            [*columns.values(), numels, *numbers],
            reads=[
                *(tensor for letter in reads for tensor in columns[letter]),
                *(each for each in numbers if isinstance(each, Tensor) and all(each is not t for t in beside)),
            ],
            writes=[*(tensor for letter in writes for tensor in columns[letter]), *beside],
            blocks=update_blocks(numels),
            rows=len(numels),
        )

    # -- the norm and the decisions of a step

    def max_abs_into(self, tensor: Tensor, largest: Tensor) -> None:
        """See `reductions.max_abs_into`."""
        self._reduce("max_abs", tensor, [tensor, largest])

    def square_sums_into(self, tensor: Tensor, largest: Tensor, sums: Tensor) -> None:
        """See `reductions.square_sums_into`."""
        self._reduce("square_sums", tensor, [tensor, largest, sums])

    def _reduce(self, name: str, tensor: Tensor, tensors: list[Tensor]) -> None:
        numbers: list[Argument] = [np.int64(tensor.numel()), dtype_kind(tensor)]
        blocks = min(update_blocks([tensor.numel()]), _MAX_BLOCKS)
        self.launch(name, [*tensors, *numbers], reads=tensors, writes=tensors[-1:], blocks=blocks)

    def write_facts(self, largest: Tensor, history: int, settings: int, stop: bool, order: int, facts: Tensor) -> None:
        """See `step_control.write_facts`."""
        numbers: list[Argument] = [np.int64(history), np.int64(settings), np.int32(stop), np.int64(order)]
        self.launch("write_facts", [largest, *numbers, facts], reads=[largest], writes=[facts], blocks=1)

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
        numbers: list[Argument] = [*(np.float64(factor) for factor in factors), np.int32(skip_overflow)]
        tensors = [facts, sums, control, summary]
        self.launch("finalize", [*tensors, *numbers], reads=tensors[:2], writes=tensors[2:], blocks=1)

    def mark_changed(self, before: Tensor, after: Tensor, bits: Tensor) -> None:
        """See `changed.mark_changed`."""
        tensors, blocks = [before, after, bits], -(-bits.numel() // _THREADS)
        self.launch("mark_changed", [*tensors, np.int64(before.numel())], reads=tensors, writes=[bits], blocks=blocks)

    # -- codes

    def encode(
        self,
        values: Tensor,
        codes: Tensor,
        code_format: tuple[int, int],
        order: Tensor | None = None,
        skip: tuple[int, int] = (0, 0),
    ) -> None:
        """Writes the codes of rows; see `comm/quantized.py`.

        Args:
            values: (M, n) float32, bfloat16 or float16.
            codes: (K, nbytes) uint8.
            code_format: largest number of a code (127 or 7; 448 in e4m3), and values per block.
            order: (K,) int32, index of the row of `values` for each row of `codes`; None for the same index.
            skip: rows [first, second) of `codes` do not change.
        """
        numel = values.shape[1]
        if numel and codes.shape[0] > skip[1] - skip[0]:
            arguments = [values, order, codes, *_code_numbers(numel, codes, _KINDS[values.dtype], *code_format, *skip)]
            blocks, rows = _code_blocks(numel, code_format), codes.shape[0]
            self.launch("encode", arguments, reads=[values, order], writes=[codes], blocks=blocks, rows=rows)

    def decode(self, codes: Tensor, out: Tensor, code_format: tuple[int, int], *, adds: bool = False) -> None:
        """Writes the values of codes.

        Args:
            codes: (K, nbytes) uint8.
            out: (K, n) float32, bfloat16 or float16.
            code_format: largest number of a code (127 or 7; 448 in e4m3), and values per block.
            adds: add the values to `out`, which must be float32.
        """
        numel = out.shape[1]
        if numel:
            arguments = [codes, out, *_code_numbers(numel, codes, _KINDS[out.dtype], *code_format, adds)]
            blocks, rows = _code_blocks(numel, code_format), codes.shape[0]
            reads = [codes, out] if adds else [codes]
            self.launch("decode", arguments, reads=reads, writes=[out], blocks=blocks, rows=rows)

    def decode_levels(
        self, code: Tensor, out: Tensor, levels: Tensor, block_numel: int, codes_at: int, *, has_exponents: bool
    ) -> None:
        """Writes the values of codes that are indices of levels; see `comm/level_codes.py`.

        Args:
            code: (K, nbytes) uint8; in a row, scales, (n / block_numel,) float32, or uint8 for powers of two, and from
                byte `codes_at` the codes, (n / 2,).
            out: (K, n) float32, bfloat16 or float16, in whole blocks.
            levels: (16,) float32.
            block_numel: a power of two, at least 8.
        """
        rows, numel = out.shape
        assert numel % block_numel == 0, f"{numel} values are not whole blocks"
        if numel:
            numbers = _code_numbers(numel, code, codes_at, _KINDS[out.dtype], block_numel, has_exponents)
            blocks = -(-numel // (16 * _THREADS))
            arguments = [code, out, levels, *numbers]
            self.launch("decode_levels", arguments, reads=[code, levels], writes=[out], blocks=blocks, rows=rows)

    def sum_codes(
        self,
        codes: Tensor,
        values: Tensor,
        own_row: int,
        totals: Tensor,
        code_format: tuple[int, int],
        order: Tensor | None = None,
    ) -> None:
        """Sums the ranks' rows in the order of the ranks; this rank's own rows are not encoded.

        Args:
            codes: (W, R, nbytes) uint8.
            values: (M, n) float32, bfloat16 or float16, including this rank's own rows.
            own_row: this rank.
            totals: (R, n) float32.
            code_format: largest number of a code (127 or 7; 448 in e4m3), and values per block.
            order: (W * R,) int32, index of the row of `values` for each rank's rows; None for the same index.
        """
        (ranks, rows, _), numel = codes.shape, totals.shape[1]
        if numel:
            tensors, blocks = [codes, values, order, totals], _code_blocks(numel, code_format)
            numbers = _code_numbers(numel, codes, _KINDS[values.dtype], *code_format, ranks, own_row)
            self.launch("sum_codes", [*tensors, *numbers], reads=tensors[:3], writes=[totals], blocks=blocks, rows=rows)


def _value(argument: Argument) -> np.generic | np.ndarray[Any, Any] | None:
    """Returns what CuPy passes to a kernel: a numpy scalar, or an array of one element by value; None for null."""
    if argument is None or isinstance(argument, np.generic):
        return argument
    if isinstance(argument, Tensor):
        return np.uint64(_address(argument))
    words = np.zeros(MANY, np.uint64)
    words[: len(argument)] = [each if isinstance(each, int) else _address(each) for each in argument]
    return words.view(_STRUCTURE)


def _address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), f"a kernel needs contiguous memory, got strides {tensor.stride()}"
    return tensor.data_ptr()


def update_blocks(numels: Sequence[int]) -> int:
    """Returns the number of thread blocks for the largest tensor of an update."""
    return max(1, -(-max(numels) // (_THREADS * _ITEMS)))


def dtype_kind(tensor: Tensor | None) -> np.int32:
    """Returns the number of a tensor's dtype as a kernel argument; 0 for None."""
    return _KINDS[torch.float32 if tensor is None else tensor.dtype]


def _code_numbers(numel: int, codes: Tensor, *numbers: int | np.int32) -> list[Argument]:
    return [np.int64(numel), np.int64(codes.shape[-1]), *(np.int32(number) for number in numbers)]


def _code_blocks(numel: int, code_format: tuple[int, int]) -> int:
    """Returns the number of thread blocks for a row, with one warp per block of values."""
    return -(-numel // (code_format[1] * _WARPS))


# -- compiling

_compiled: dict[torch.device, DeviceKernels | None] = {}
_lock = threading.Lock()


def kernels_for(device: torch.device) -> DeviceKernels | None:
    """Returns the kernels on a device; None if they are not available, with the reason in the log, once.

    Compiles at the first call for a device, which shows whether CuPy can, the kernels that are the same for all dtypes.
    """
    if device.type != "cuda":
        return None
    device = _indexed(device)
    with _lock:
        if device not in _compiled:
            try:
                _compiled[device] = compile_kernels(device)
            except KernelError as error:
                _refuse(device, error)
        return _compiled[device]


def _indexed(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _refuse(device: torch.device, error: KernelError) -> None:
    _compiled[device] = None
    log_once(
        logging.WARNING,
        f"{device}: zeroaccel's kernels are not available; updates, norms and codes run as torch operations, with"
        f" the same results but several times the memory traffic: {error}",
    )


def compile_kernels(device: torch.device) -> DeviceKernels:
    """Compiles the kernels for a CUDA device with an index, or reads them from CuPy's cache, and loads them.

    Raises:
        KernelError: CuPy, its compiler or the driver is missing, or fails.
    """
    if torch.version.hip or torch.version.cuda is None:
        raise KernelError(f"this torch is built {'for ROCm' if torch.version.hip else 'without CUDA'}")
    try:
        torch.cuda.get_device_capability(device)
    except RuntimeError as error:  # no driver, or one that fails
        raise KernelError(str(error).partition("\n")[0]) from error
    cupy = open_cupy()
    source = SOURCE.read_text(encoding="utf-8")
    return DeviceKernels(KernelModule(cupy, source, device))


def load_kernels(device: torch.device, launch: Callable[[], object]) -> None:
    """Loads the kernels that `launch` launches, before training needs them; does nothing for a device without kernels.

    Loading may wait for the device, which a backward must not do beside its collectives. If a kernel cannot be compiled
    or loaded, the device does without any from here on, and the log has the reason.
    """
    if kernels_for(device) is None:
        return
    try:
        launch()
    except KernelError as error:
        _refuse(_indexed(device), error)
