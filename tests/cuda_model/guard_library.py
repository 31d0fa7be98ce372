"""Compiles `guard.cpp`, once per version of torch and of the source, and loads it.

Nothing here imports torch: the library has to be loaded before it. Compiling takes a C++ compiler and about 20 seconds;
the result lies in a folder of the user's cache, and its name contains a digest of its inputs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

device_type = "cuda"
"""Type of the devices that `loaded` makes, or "xpu"; set it before the first call."""

_SOURCE = Path(__file__).with_name("guard.cpp")
_FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=1")


def why_not() -> str | None:
    """Returns the reason why the library cannot be compiled here; None if it can."""
    if _compiler() is None:
        return "the CUDA model needs a C++ compiler (g++ or clang++)"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "the CUDA model needs torch"
    if any(Path(spec.origin).parent.glob("lib/*torch_cuda.*")):
        return "the CUDA model replaces CUDA, so it needs torch's build for CPUs"
    return None


def compiled() -> Path:
    """Returns the library, and compiles it if necessary.

    Raises:
        RuntimeError: the compiler rejects the source; the error contains its messages.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None, why_not()
    assert spec.origin is not None, "torch is not a package"
    torch = Path(spec.origin).parent
    made_from = hashlib.sha256(_SOURCE.read_bytes() + importlib.metadata.version("torch").encode() + bytes(torch))
    library = _cache() / f"cuda_guard-{made_from.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = _compiler()
    assert compiler is not None, why_not()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        result = Path(folder) / library.name
        headers = (f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include")
        libraries = (f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib")
        command = [compiler, *_FLAGS, *headers, str(_SOURCE), "-o", str(result), *libraries]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{outcome.stderr[-3000:]}")
        # Renamed, not written in place: another process may load it at the same time.
        result.replace(library)
    return library


@functools.cache
def loaded() -> ctypes.CDLL:
    """Loads the library in this process, which must not have imported torch before the first call."""
    library = ctypes.CDLL(str(compiled()))
    library.register_devices.argtypes = [ctypes.c_bool]
    library.register_devices(device_type == "xpu")
    library.current_device.restype = library.current_stream.restype = ctypes.c_int64
    library.set_current_device.argtypes = library.current_stream.argtypes = [ctypes.c_int64]
    library.set_current_stream.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return library


EventReport = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
"""Callback that gets (event, device, stream); keep a reference as long as it is set."""


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "zeroaccel-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
