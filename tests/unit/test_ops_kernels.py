"""How the kernels are compiled: into vectors, without contraction or float64, and where no cache can be written."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zeroaccel.ops import kernels

WIDTH = r"\b(?:v?sqrtps|fsqrt\s+v)"  # x86 and Arm: a square root of a whole vector


def assembly(kernel: Any, *arguments: Any) -> str:
    kernel(*arguments)
    signature = next(s for s in kernel.signatures if len(s) == len(arguments))
    return str(kernel.inspect_asm(signature))


@pytest.fixture(scope="module")
def adam() -> str:
    arrays = [np.zeros(64, np.float32) for _ in range(4)]
    return assembly(kernels.adam, *arrays, None, *[np.float32(0.5)] * 9)
