"""CuPy's interface without CuPy: the part that `ops/cupy_kernels.py` uses, with launches as calls of a function.

`tests/unit/ops/test_cupy_kernels.py` compares its signatures with those of CuPy, where CuPy is installed. An argument
of another kind than CuPy accepts is an error, as is a wrong stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from zeroaccel.ops.cupy_kernels import OPTIONS, kernel_names

_SCALARS = (np.float32, np.float64, np.int32, np.uint32, np.int64, np.uint64)


class Launch(NamedTuple):
    """One launch.

    Attributes:
        name: name of the kernel.
        grid: number of blocks in x, y and z.
        block: number of threads of a block in x, y and z.
        values: the arguments, as bytes of their C types.
        stream: pointer of the stream.
    """

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    values: Sequence[bytes]
    stream: int


class FakeCupy:
    """In the place of the module `cupy`.

    Args:
        run: gets each launch.
        cuda: the version of CUDA that it is built for.
        version: the version of CuPy.
        fails: errors of "compile", of "launch", or of looking up the kernel of a name.

    Attributes:
        sources: the sources that were compiled, in order.
    """

    def __init__(
        self,
        run: Callable[[Launch], object] = lambda launch: None,
        cuda: int = 12,
        fails: Mapping[str, Exception] | None = None,
        version: str = "14.0 (fake)",
    ) -> None:
        self.__version__ = version
        self.__spec__ = ModuleSpec("cupy", None)
        self.run = run
        self.fails = fails or {}
        self.sources: list[str] = []
        runtime = SimpleNamespace(runtimeGetVersion=lambda: 1000 * cuda + 90)
        self.cuda = SimpleNamespace(runtime=runtime)

    def RawModule(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: bool | None = None,
    ) -> _RawModule:
        """Compiles a source when its first function is looked up."""
        if code is None or path is not None or backend != "nvrtc" or options != OPTIONS:
            raise TypeError(f"RawModule with path={path}, options={options}, backend={backend}")
        return _RawModule(self, code)

    def check(self, what: str) -> None:
        """Raises the error that `fails` has for it."""
        if what in self.fails:
            raise self.fails[what]


class _RawModule:
    def __init__(self, cupy: FakeCupy, code: str) -> None:
        self._cupy = cupy
        self._code = code
        self._is_compiled = False

    def get_function(self, name: str) -> SimpleNamespace:
        """Returns a kernel, whose attribute `kernel` is its function on the thread's device."""
        if not self._is_compiled:
            self._cupy.check("compile")
            self._cupy.sources.append(self._code)
            self._is_compiled = True
        self._cupy.check(name)
        if name not in kernel_names(self._code):
            raise RuntimeError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        return SimpleNamespace(kernel=Function(self._cupy, name))


class Function:
    """A kernel on a device, which takes the stream of a launch."""

    def __init__(self, cupy: FakeCupy, name: str) -> None:
        self._cupy = cupy
        self._name = name

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[object],
        shared_mem: int = 0,
        stream: Any = None,
        enable_cooperative_groups: bool = False,
    ) -> None:
        """Launches the kernel."""
        self._cupy.check("launch")
        assert isinstance(grid, tuple), "CuPy takes no list for a grid"
        assert isinstance(block, tuple), "CuPy takes no list for a block"
        assert shared_mem == 0, "the kernels use no memory of this kind"
        whole_grid, whole_block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        values = [_bytes(value) for value in args]
        self._cupy.run(Launch(self._name, whole_grid, whole_block, values, stream.ptr))


def _bytes(value: object) -> bytes:
    if value is None:
        return bytes(8)
    if isinstance(value, _SCALARS):
        return value.tobytes()
    if isinstance(value, np.ndarray) and value.size == 1:
        return value.tobytes()
    raise TypeError(f"CuPy does not take {type(value).__name__} {value!r} for a kernel's argument")


def addresses(values: Sequence[bytes]) -> tuple[Any, Sequence[object]]:
    """Returns an array of the values' addresses, as the driver takes it, and the memory that must outlive it."""
    # To full words: the library reads at most 8 bytes of a scalar.
    memory = [ctypes.create_string_buffer(value.ljust(8, b"\0")) for value in values]
    return (ctypes.c_void_p * len(memory))(*(ctypes.addressof(each) for each in memory)), memory
