"""The CUDA source of the kernels, compiled unchanged as C++ for the host, where the threads run in turn.

`HostRunner` takes the place of `cupy_kernels.KernelModule`, so that `DeviceKernels` works on tensors in host memory.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cuda_model.fake_cupy import FakeCupy, Function, Launch, addresses
from zeroaccel.ops.cupy_kernels import constants_of, kernel_names
from zeroaccel.ops.device_kernels import SOURCE, DeviceKernels

_SHIM = Path(__file__).with_name("cuda_on_host.h")
# No contraction, as on the device; -fwrapv, since integers of the codes are meant to wrap.
_OPTIONS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fwrapv", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-w")


class HostRunner:
    """A `KernelRunner` on the host.

    Args:
        library: with a `launch` function.

    Attributes:
        launched: the names of kernels, in the order of their launches.
        compiled: the kernels that `cupy_kernels.KernelModule` would compile: names, and values of FIXED parameters.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._cupy = FakeCupy(functools.partial(run_on_host, library))
        self._lock = threading.Lock()
        self.launched: list[str] = []
        self.compiled: set[tuple[str, tuple[object, ...]]] = set()

    def run(self, name: str, grid: tuple[int, int], threads: int, arguments: Sequence[object]) -> None:
        """Runs a kernel as `cupy_kernels.KernelModule.run` does, and returns when it has ended."""
        with self._lock:
            self.launched.append(name)
            self.compiled.add((name, _constants_of()[name](arguments)))
            Function(self._cupy, name)(grid, (threads,), arguments, 0, SimpleNamespace(ptr=0))


@functools.cache
def _constants_of() -> Mapping[str, Callable[[Sequence[object]], tuple[object, ...]]]:
    return constants_of(SOURCE.read_text(encoding="utf-8"))


def run_on_host(library: ctypes.CDLL, launch: Launch) -> None:
    """Runs a kernel of a library of `host_library`."""
    assert launch.grid[2] == launch.block[1] == launch.block[2] == 1, f"{launch.name} has more dimensions than sources"
    places, memory = addresses(launch.values)
    known = library.launch(launch.name.encode(), *launch.grid[:2], launch.block[0], places)
    assert known, f"there is no kernel {launch.name}"
    del memory


def host_kernels(architecture: int = 800) -> DeviceKernels:
    """Returns the kernels for host memory, compiled for this `__CUDA_ARCH__`; skips the test without a C++ compiler."""
    return DeviceKernels(HostRunner(host_library(architecture)))


@functools.cache
def host_library(architecture: int, code: str = SOURCE.read_text(encoding="utf-8")) -> ctypes.CDLL:
    """Returns the library of compiled kernels; its function `launch` runs them."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++ or clang++) to compile the kernels for the host with")
    folder = Path(tempfile.mkdtemp(prefix="zeroaccel-kernels-"))
    try:
        calls = "\n".join(
            f'    if (!strcmp(name, "{name}")) {{ run_grid(Call<{name}>::run, blocks, rows, threads, arguments);'
            " return 1; }"
            for name in kernel_names(code)
        )
        source = folder / "kernels.cpp"
        (folder / SOURCE.name).write_text(code, encoding="utf-8")
        source.write_text(
            f'#define __CUDA_ARCH__ {architecture}\n#include "{_SHIM}"\n#include "{SOURCE.name}"\n'
            'extern "C" int launch(const char* name, int blocks, int rows, int threads, void** arguments) {\n'
            f"{calls}\n    return 0;\n}}\n"
        )
        library = folder / "kernels.so"
        done = subprocess.run(
            [compiler, *_OPTIONS, str(source), "-o", str(library)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"the kernels do not compile as C++:\n{done.stderr[-4000:]}"
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(folder)  # the loaded library stays
