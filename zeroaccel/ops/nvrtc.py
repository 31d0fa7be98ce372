"""Compiles and loads CUDA source with NVIDIA's run-time compiler and driver, called through ctypes.

CUDA builds of torch include the compiler's library, so no toolkit or other package is needed. torch's own wrapper
(`torch.cuda._compile_kernel`) is private, needs the headers of an installed toolkit, compiles one kernel at a time, and
passes integers as 32 bits and every float as a double, unsuitable for kernels with float32 scalars and long arrays.

`device_kernels.py` has the kernels.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_TORCHS_OWN = "libcaffe2_nvrtc.so"  # torch's library, linked against the compiler's, wherever that is


# From cuda.h: no binary for the device, unsupported PTX version, driver mismatch, compatibility not supported.
_OF_OLD_DRIVERS = frozenset({209, 222, 803, 804})
_OLD_DRIVER = (
    "; this torch needs a driver for CUDA {}: update the driver, or install a torch for the CUDA that nvidia-smi shows"
)


class KernelError(RuntimeError):
    """Kernels cannot be compiled, loaded or launched; the message gives the reason."""


class Nvrtc:
    """NVIDIA's run-time compiler.

    Args:
        library: a library with the functions of NVRTC.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def facts(self) -> tuple[str, ...]:
        """Returns the compiler's version and options, which determine the result of `compile` with its arguments."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"NVRTC {major.value}.{minor.value}", *_OPTIONS

    def architectures(self) -> list[int]:
        """Returns the supported compute capabilities, such as 80 for 8.0, ascending."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def target(self, capability: tuple[int, int]) -> str:
        """Returns the target architecture: the device's own, or a virtual one that a newer device also supports.

        Raises:
            KernelError: the device is too old for this compiler.
        """
        wanted = 10 * capability[0] + capability[1]
        fitting = [arch for arch in self.architectures() if arch <= wanted]
        if not fitting:
            raise KernelError(f"NVRTC does not support compute capability {capability[0]}.{capability[1]}")
        return f"sm_{wanted}" if fitting[-1] == wanted else f"compute_{fitting[-1]}"

    def compile(self, source: str, name: str, target: str) -> bytes:
        """Returns the compiled image: machine code for targets such as "sm_80", PTX for "compute_80".

        Args:
            name: file name in the compiler's messages.

        Raises:
            KernelError: compilation failed; includes the compiler's messages.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            options = [option.encode() for option in (f"--gpu-architecture={target}", *_OPTIONS)]
            status = self._library.nvrtcCompileProgram(
                program, len(options), (ctypes.c_char_p * len(options))(*options)
            )
            if status:
                log = self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
                raise KernelError(f"NVRTC for {target}: {self._words(status)}: {log.strip()}")
            return self._read(program, "nvrtcGetCUBIN" if target.startswith("sm_") else "nvrtcGetPTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, function: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(function, program, text)
        return text.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise KernelError(f"{function}: {self._words(status)}")

    def _words(self, status: int) -> str:
        words: bytes = self._library.nvrtcGetErrorString(status)
        return words.decode()


def open_nvrtc() -> Nvrtc:
    """Opens this torch's compiler, or one from another installed package.

    Raises:
        KernelError: there is no compiler.
    """
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
            library.nvrtcCreateProgram  # noqa: B018  # also works if the library is only linked against NVRTC
        except (OSError, AttributeError):
            continue
        return Nvrtc(library)
    raise KernelError("libnvrtc was not found: install a CUDA build of torch, or zeroaccel[cuda], which include it")


def old_driver() -> str:
    """Returns a message if the driver is too old for this torch, so that CUDA finds no device; otherwise ""."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # no driver
        return ""
    newest = number.value // 1000, number.value % 1000 // 10
    # Within a major version of CUDA, an older driver supports a newer torch.
    if status or newest[0] >= int((torch.version.cuda or "0").split(".")[0]):
        return ""
    return f"this machine's NVIDIA driver supports CUDA {newest[0]}.{newest[1]}{_OLD_DRIVER.format(torch.version.cuda)}"


def _candidates() -> Iterator[str]:
    yield str(Path(torch.__file__).parent / "lib" / _TORCHS_OWN)
    major = (torch.version.cuda or "").split(".")[0]
    if major:
        yield f"libnvrtc.so.{major}"
    # NVIDIA's packages: nvidia/cuda_nvrtc/lib up to CUDA 12, nvidia/cu13/lib since CUDA 13.
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package is not None else ():
        # A version other than torch's works too: its output depends only on the device and the driver.
        names = sorted(Path(folder).glob("*/lib/libnvrtc.so.*"), key=lambda name: (name.suffix != f".{major}", name))
        yield from (str(name) for name in names)
    yield "libnvrtc.so"


class DriverModule:
    """Compiled kernels loaded on a device, in torch's context.

    Args:
        image: result of `Nvrtc.compile`.
        device: a CUDA device with an index, which torch has initialized.
        names: names of the kernels.

    Raises:
        KernelError: the driver cannot load the image, or a kernel is missing in it.
    """

    def __init__(self, image: bytes, device: torch.device, names: Iterable[str]) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise KernelError(f"the driver's library: {error}") from error
        self._device = device
        self._context = ctypes.c_void_p()
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device.index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self._module = ctypes.c_void_p()
        self._in_context("cuModuleLoadData", ctypes.byref(self._module), image)
        # All at once, because the driver loads a kernel at its first use, which may synchronize the whole device.
        self._functions = {name: self._function(name) for name in names}

    def _function(self, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._in_context("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        return function

    def run(self, name: str, grid: tuple[int, int], threads: int, arguments: Sequence[object]) -> None:
        """Launches a kernel on torch's current stream of the device, asynchronously.

        Args:
            grid: number of blocks in x and y.
            threads: number of threads per block.
            arguments: ctypes values, in the kernel's order.

        Raises:
            KernelError: the launch failed, possibly because of an earlier error on the device.
        """
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        addresses = argument_addresses(arguments)
        self._in_context("cuLaunchKernel", self._functions[name], *grid, 1, threads, 1, 1, 0, stream, addresses, None)

    def _in_context(self, function: str, *arguments: object) -> None:
        # A thread that has not used the device has no context, or that of another device is current.
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(function, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            words = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(words))
            fix = _OLD_DRIVER.format(torch.version.cuda) if status in _OF_OLD_DRIVERS else ""
            raise KernelError(f"{function} on {self._device}: {(words.value or b'').decode()} ({status}){fix}")


def argument_addresses(arguments: Sequence[object]) -> ctypes.Array[ctypes.c_void_p]:
    """Returns the addresses of ctypes values, which must outlive the array."""
    return (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))  # type: ignore[arg-type]
