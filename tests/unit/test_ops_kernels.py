"""How the kernels are compiled: to vectors, with neither contraction nor float64, and where no cache can be written."""

from __future__ import annotations

import re
from typing import Any

import numba
import numpy as np
import pytest

from zeroaccel.ops import kernels

UPDATES = {  # kernel -> (buffers, coefficients after grad_scale)
    kernels.adam: (2, 8),
    kernels.lion: (1, 6),
    kernels.adagrad: (1, 3),
    kernels.sgd: (1, 6),
}
NUMPY_DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}


def compiled_ir(kernel: Any, *arguments: Any) -> str:
    """The optimised LLVM code of a kernel, compiled anew: what is loaded from the disk cache cannot be looked at."""
    fresh = numba.njit(nogil=True, error_model="numpy")(kernel.py_func)
    fresh(*arguments)
    (text,) = fresh.inspect_llvm().values()
    return str(text)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("kernel", UPDATES, ids=lambda kernel: kernel.__name__)
def test_updates_are_vectors_of_float32_rounded_at_each_operation(kernel: Any, dtype: str) -> None:
    buffers, coefficients = UPDATES[kernel]
    state = [np.zeros(8, np.float32) for _ in range(1 + buffers)]
    grad, out = (np.zeros(8, NUMPY_DTYPES[dtype]) for _ in range(2))
    ir = compiled_ir(kernel, *state, grad, out, *[np.float32(0.5)] * (1 + coefficients))
    assert re.search(r"fmul <\d+ x float>", ir)
    assert not re.search(r"fpext|\bf(?:add|sub|mul|div)\b.*\bdouble\b", ir), "a float64 literal promotes the arithmetic"
    assert not re.search(r"\.fma\.|fmuladd|\b(?:contract|reassoc|fast)\b", ir), "two roundings may become one"


def test_reductions_are_vectors() -> None:
    squares = compiled_ir(kernels.square_sums, np.zeros(8, np.uint16), np.float64(1))
    assert re.search(r"fmul <\d+ x double>", squares)
    largest = compiled_ir(kernels.largest_pattern, np.zeros(8, np.int16), np.int16(0x7FFF))
    assert re.search(r"<\d+ x i\d+> @llvm\.[su]max", largest)


def test_a_kernel_works_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba finds no folder for a function that came from no file; the answer is the same as for a read-only disk."""
    said: list[str] = []
    monkeypatch.setattr(kernels, "log_once", lambda level, message: said.append(message))
    namespace: dict[str, Any] = {}
    exec("def add(a, b):\n    return a + b", namespace)
    assert kernels._compiled(namespace["add"])(1, 2) == 3
    assert len(said) == 1
    assert "NUMBA_CACHE_DIR" in said[0]
