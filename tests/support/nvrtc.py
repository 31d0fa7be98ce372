"""NVIDIA's run-time compiler by ctypes, to read what the kernels become without a device or CuPy."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the compiler of an installed package; skips the test without one."""
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations or () if package is not None else ()
    names = [name for folder in folders for name in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))]
    if not names:
        pytest.skip("no NVRTC (pip install nvidia-cuda-nvrtc-cu12)")
    return ctypes.CDLL(str(names[-1]))


def architectures() -> list[int]:
    """Returns the compute capabilities that it supports, such as 80 for 8.0."""
    count = ctypes.c_int()
    library().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    library().nvrtcGetSupportedArchs(found)
    return list(found)


def compile_ptx(source: str, options: Sequence[str]) -> str:
    """Returns the PTX of a source."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc = library()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    try:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), words):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise AssertionError(log.value.decode(errors="replace"))
        assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert nvrtc.nvrtcGetPTX(program, text) == 0
        return text.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
