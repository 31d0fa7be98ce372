"""Compiles, caches, loads and launches CUDA source by CuPy: the only use of CuPy in zeroaccel.

`cupy.RawModule` calls NVIDIA's run-time compiler, keeps the machine code in a folder of the user and loads it into the
context that torch uses. Its functions launch on torch's stream, of which they get the pointer, with pointers and
scalars as numpy values. An own binding of compiler and driver would have to follow every version of CUDA. torch's
wrapper (`torch.cuda._compile_kernel`) is private, needs the headers of an installed toolkit, and passes integers as 32
bits and floats as doubles. CuPy owns no memory, stream or tensor here, and has no part in updates on the CPU, where it
cannot run.

A CuPy package is built for one major version of CUDA, that of torch. It is optional, and imported when the first kernel
on a CUDA device is wanted. `device_kernels.py` has the kernels, and does without them if this module raises.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Options of the compiler. CuPy adds others; `device_kernels.cu` says what follows for float32."""

_LEAST_VERSION = 13  # the extras ask for it, too
_OWN_CACHE = "set CUPY_CACHE_DIR to a folder that only you can write to"


class KernelError(RuntimeError):
    """Kernels cannot be compiled, loaded or launched.

    Attributes:
        reason: the fault, with its place.
        fix: the remedy; empty if there is none.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"{reason}; {fix}" if fix else reason)
        self.reason = reason
        self.fix = fix


def open_cupy() -> Any:
    """Imports CuPy for the CUDA of torch.

    Raises:
        KernelError: there is none, it is built for another CUDA, or it cannot start.
    """
    if find_spec("cupy") is None:
        raise KernelError("CuPy is not installed", _install())
    _check_cache(_cache_folder())
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:
        raise KernelError(f"CuPy cannot be imported: {_last_line(error)}", _replace()) from error
    if int(cupy.__version__.partition(".")[0]) < _LEAST_VERSION:
        raise KernelError(f"CuPy {cupy.__version__} is older than {_LEAST_VERSION}", _install())
    if (built := cupy.cuda.runtime.runtimeGetVersion() // 1000) != int(_cuda_major()):
        reason = f"CuPy {cupy.__version__} is built for CUDA {built}, torch for CUDA {torch.version.cuda}"
        raise KernelError(reason, _replace())
    return cupy


def installed_cupy() -> list[str]:
    """Returns the names of installed packages that contain CuPy, without importing it."""
    names = {distribution.metadata["Name"] or "" for distribution in distributions()}
    return sorted(name for name in names if name == "cupy" or name.startswith("cupy-"))


def _replace() -> str:
    return f"pip uninstall {' '.join(installed_cupy()) or 'cupy'}, then {_install()}"


def _install() -> str:
    major = _cuda_major()
    return f"pip install 'zeroaccel[cuda{major}]'" if major in ("12", "13") else f"pip install cupy-cuda{major}x"


def _cuda_major() -> str:
    return (torch.version.cuda or "0").partition(".")[0]


def _last_line(error: Exception) -> str:
    """Returns the cause of an error whose message may be framed by lines of "="."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =")]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _cache_folder() -> Path:
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))


def _check_cache(folder: Path) -> None:
    """Raises an error if CuPy could not keep kernels in its folder, or if others could change them.

    This user's processes execute the files. CuPy makes the folder when it is imported, with the rights of the umask.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise KernelError(f"CuPy's folder of compiled kernels, {folder}: {error.strerror}", _OWN_CACHE) from error
    if status.st_uid != os.getuid():
        wrong = f"belongs to user {status.st_uid}, and you are user {os.getuid()}"
    elif status.st_mode & 0o002:
        wrong = "can be changed by every user of this machine"
    elif not os.access(folder, os.W_OK | os.X_OK):
        wrong = "cannot be written"
    else:
        return
    raise KernelError(f"CuPy's folder of compiled kernels, {folder}, {wrong}", _OWN_CACHE)


_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(([^)]*)\) \{')


def kernel_names(source: str) -> list[str]:
    """Returns the names of the kernels that a CUDA source defines.

    Example:
        >>> kernel_names('extern "C" __global__ void __launch_bounds__(256) adam(float* master) {}')
        ['adam']
    """
    return [found[1] for found in _KERNEL.finditer(source)]


def with_constants(source: str, values: Mapping[str, Sequence[int]]) -> str:
    """Returns a source with some of its kernels, and constants for their FIXED parameters.

    The compiler drops what it cannot reach, so that a kernel for one dtype has no decisions about dtypes, and takes a
    fraction of the time of the file.

    Args:
        values: for each of these kernels, the values of its FIXED parameters, in order.

    Example:
        >>> with_constants('extern "C" __global__ void sum(int n, FIXED kind) { ... }', {"sum": [1]})
        'extern "C" __global__ void sum(int n, FIXED kind) { kind = 1; ... }'
    """

    def replaced(found: re.Match[str]) -> str:
        if found[1] not in values:
            return f"static __device__ void {found[1]}({found[2]}) {{"
        constants = zip(re.findall(r"FIXED (\w+)", found[2]), values[found[1]], strict=True)
        return " ".join([found[0], *(f"{name} = {value};" for name, value in constants)])

    return _KERNEL.sub(replaced, source)


class KernelModule:
    """Kernels on a device, in torch's context.

    Kernels without FIXED parameters are loaded at once, others when a launch has new values for these: those that a
    step launches, at the start (`device_kernels.load_kernels`).

    Args:
        cupy: the module.
        source: CUDA source.
        device: a CUDA device with an index, which torch has initialized.

    Raises:
        KernelError: the source does not compile, or the driver cannot load it.
    """

    def __init__(self, cupy: Any, source: str, device: torch.device) -> None:
        self._cupy = cupy
        self._source = source
        self._device = device
        self._constants_of = constants_of(source)
        self._functions: dict[tuple[str, tuple[Any, ...]], Any] = {}
        self._load({name: () for name, parameters in _KERNEL.findall(source) if "FIXED" not in parameters})

    def _load(self, kernels: Mapping[str, tuple[Any, ...]]) -> None:
        try:
            with torch.cuda.device(self._device):
                code = with_constants(self._source, kernels)
                module = self._cupy.RawModule(code=code, options=OPTIONS, backend="nvrtc")
                for name, values in kernels.items():
                    self._functions[name, values] = module.get_function(name).kernel
        except Exception as error:  # of CuPy's compiler, its cache, the driver or the run-time library
            reason = f"CuPy {self._cupy.__version__} on {self._device}: {_text(error)}"
            raise KernelError(reason, _fix_of(error)) from error

    def run(self, name: str, grid: tuple[int, int], threads: int, arguments: Sequence[object]) -> None:
        """Launches a kernel on torch's current stream of the device, asynchronously.

        Args:
            grid: number of blocks in x and y.
            threads: number of threads per block.
            arguments: numpy values in the kernel's order; None for a null pointer.

        Raises:
            KernelError: the kernel does not compile or load, or the launch failed, possibly because of an earlier
                error on the device.
        """
        key = name, self._constants_of[name](arguments)
        if key not in self._functions:
            self._load(dict([key]))
        stream = SimpleNamespace(ptr=torch.cuda.current_stream(self._device).cuda_stream)
        try:
            # A launch uses the context of the thread's device, which differs in a thread that has not chosen one. CuPy
            # follows the device that torch selects.
            if torch.cuda.current_device() == self._device.index:
                self._functions[key](grid, (threads,), arguments, 0, stream)
            else:
                with torch.cuda.device(self._device):
                    self._functions[key](grid, (threads,), arguments, 0, stream)
        except RuntimeError as error:
            raise KernelError(f"{name} on {self._device}: {_text(error)}") from error


def constants_of(source: str) -> dict[str, Callable[[Sequence[Any]], tuple[Any, ...]]]:
    """Returns for each kernel a function that takes a launch's arguments and returns those of FIXED parameters."""
    return {name: _fixed_of(parameters) for name, parameters in _KERNEL.findall(source)}


def _fixed_of(parameters: str) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    places = [place for place, each in enumerate(parameters.split(",")) if "FIXED" in each]
    # Ten times as fast as the loop, and called in each launch.
    return itemgetter(*places) if len(places) > 1 else lambda arguments: tuple(arguments[place] for place in places)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"


def _fix_of(error: Exception) -> str:
    """Returns the remedy for an error of CuPy, by its words: its classes differ between versions."""
    text = _text(error)
    if isinstance(error, OSError) and error.filename is not None:
        return _OWN_CACHE
    if "libnvrtc" in text:
        return f"CuPy finds no compiler: pip install 'cupy-cuda{_cuda_major()}x[ctk]'"
    if any(word in text for word in ("InsufficientDriver", "UNSUPPORTED_PTX", "NO_BINARY", "SYSTEM_DRIVER")):
        return f"the driver is too old for CUDA {torch.version.cuda}: update it"
    return f"install another release of CuPy, {_install()} --upgrade, and report the text if it remains"
