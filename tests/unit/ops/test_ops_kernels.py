"""The compiled kernels: vectors without contraction or float64, and compilation without a writable cache."""

from __future__ import annotations

import re
from typing import Any

import numba
import numpy as np
import pytest

from zeroaccel.ops import kernels, number_formats, updates

UPDATES: dict[Any, tuple[tuple[Any, ...], int]] = {  # kernel -> (dtypes of buffers, coefficients after grad_scale)
    updates.adam: ((np.float32, np.float32), 8),
    updates.lion: ((np.float32,), 6),
    updates.adagrad: ((np.float32,), 3),
    updates.rmsprop: ((np.float32,) * 3, 6),
    updates.sgd: ((np.float32,), 6),
}
NUMPY_DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}


def compiled_ir(kernel: Any, *arguments: Any) -> str:
    """Returns the optimized LLVM code of a kernel, compiled anew, because the disk cache has no LLVM code."""
    fresh = numba.njit(nogil=True, error_model="numpy")(kernel.py_func)
    fresh(*arguments)
    (text,) = fresh.inspect_llvm().values()
    return str(text)


def update_ir(kernel: Any, buffers: tuple[Any, ...], coefficients: int, dtype: Any) -> str:
    state = [np.zeros(8, np.float32), *(np.zeros(8, kind) for kind in buffers)]
    grad, out = (np.zeros(8, dtype) for _ in range(2))
    key = [] if kernel in (updates.sgd, updates.rmsprop) else [np.uint32(7)]
    return compiled_ir(kernel, *state, grad, out, (np.float32(0.5), *key, *[np.float32(0.5)] * coefficients))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("kernel", UPDATES, ids=lambda kernel: kernel.__name__)
def test_updates_are_vectors_of_float32_rounded_at_each_operation(kernel: Any, dtype: str) -> None:
    buffers, coefficients = UPDATES[kernel]
    ir = update_ir(kernel, buffers, coefficients, NUMPY_DTYPES[dtype])
    assert re.search(r"fmul <\d+ x float>", ir)
    assert not re.search(r"fpext|\bf(?:add|sub|mul|div)\b.*\bdouble\b", ir), "a float64 literal promotes the arithmetic"
    assert not re.search(r"\.fma\.|fmuladd|\b(?:contract|reassoc|fast)\b", ir), "contraction may merge two roundings"


@pytest.mark.parametrize(
    ("kernel", "buffers"),
    [(updates.adam, (np.uint16,) * 2), (updates.adam_blocks, (np.uint8,) * 4)],
    ids=["bf16", "int8"],
)
def test_rounding_at_random_is_made_of_vectors_of_32_bits(kernel: Any, buffers: tuple[Any, ...]) -> None:
    ir = update_ir(kernel, buffers, 8, np.uint16)
    assert re.search(r"fmul <\d+ x float>", ir)
    assert re.search(r"mul <\d+ x i32>", ir), "a hash in 64 bits has half the lanes"
    assert not re.search(r"mul <\d+ x i64>", ir)


def test_reductions_are_vectors() -> None:
    squares = compiled_ir(kernels.square_sums, np.zeros(8, np.uint16), np.float64(1))
    assert re.search(r"fmul <\d+ x double>", squares)
    sums = np.zeros((1, 2), np.int64)
    both = compiled_ir(
        kernels.examine, np.zeros(8, np.uint16), np.zeros(8, np.int16), np.int16(0x7FFF), np.ones(1), sums
    )
    assert re.search(r"fmul <\d+ x double>", both)
    assert re.search(r"<\d+ x i\d+> @llvm\.[su]max", both)


def test_a_kernel_works_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba has no cache folder for a function without a file, as on a read-only disk."""
    said: list[str] = []
    monkeypatch.setattr(number_formats, "log_once", lambda level, message: said.append(message))
    namespace: dict[str, Any] = {}
    exec("def add(a, b):\n    return a + b", namespace)
    assert number_formats.compiled(namespace["add"])(1, 2) == 3
    assert len(said) == 1
    assert "NUMBA_CACHE_DIR" in said[0]


def test_the_disk_cache_goes_stale_with_any_file_of_the_kernels() -> None:
    """Numba's own stamp covers the function's file only, but a loop inlines functions of several files."""
    cache = updates.adam._cache._cache_file
    assert cache._source_stamp == number_formats._stamp()
    assert len(cache._source_stamp) > 1
