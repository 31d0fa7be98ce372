"""The kernels compiled by NVRTC, which needs no device, and the fallback if NVRTC is missing or fails."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.ops.kernels_on_host import host_library
from zeroaccel.logs import logger
from zeroaccel.ops import Adam, device_kernels, nvrtc
from zeroaccel.ops.device_kernels import SOURCE, DeviceKernels, kernel_names, kernels_for
from zeroaccel.ops.nvrtc import KernelError, Nvrtc, open_nvrtc

CUDA = torch.device("cuda", 0)
ARCHITECTURES = [70, 75, 80, 86, 89, 90, 100, 120]


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    try:
        return open_nvrtc()
    except KernelError as error:
        pytest.skip(f"no NVRTC (pip install nvidia-cuda-nvrtc-cu12): {error}")


def body_of(ptx: str, kernel: str) -> str:
    found = re.search(rf"\.entry {kernel}\((.*?)^\}}", ptx, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{kernel} is not in the PTX"
    return found[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ptx_rounds_each_operation_once(compiler: Nvrtc, architecture: int) -> None:
    if architecture not in compiler.architectures():
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    source = SOURCE.read_text()
    ptx = compiler.compile(source, SOURCE.name, f"compute_{architecture}").rstrip(b"\0").decode()
    # Divisions and roots are single PTX instructions, which the driver expands with correct rounding.
    contracted_or_rough = [r"\bfma\.", r"\bmad\.(rn|rz|f)", r"\.ftz", r"\.approx", r"\.full", r"\bmul\.f(32|64)"]
    assert [pattern for pattern in contracted_or_rough if re.search(pattern, ptx)] == []
    assert re.findall(r"\b(?:add|sub)\.f(?:32|64)", ptx) == []  # the compiler may contract them without .rn
    for kernel in kernel_names(source):
        body_of(ptx, kernel)
    for kernel in ("adam", "adam_blocks", "adagrad"):
        assert "div.rn.f32" in body_of(ptx, kernel)
        assert "sqrt.rn.f32" in body_of(ptx, kernel)
    assert "div.rn.f64" in body_of(ptx, "finalize")
    assert "sqrt.rn.f64" in body_of(ptx, "finalize")
    assert ("redux.sync" in ptx) == (architecture >= 80)


def test_machine_code_is_made_for_known_devices(compiler: Nvrtc) -> None:
    known = compiler.architectures()
    assert compiler.target((8, 0)) == "sm_80"
    assert compiler.target((99, 1)) == f"compute_{known[-1]}"
    assert compiler.compile(SOURCE.read_text(), SOURCE.name, "sm_80")[:4] == b"\x7fELF"
    with pytest.raises(KernelError, match=r"does not support compute capability 1\.0"):
        compiler.target((1, 0))


def test_the_compiler_names_the_line(compiler: Nvrtc) -> None:
    with pytest.raises(KernelError, match=r"kernels\.cu\(2\): error: identifier \"nothing\" is undefined"):
        compiler.compile("__global__ void f() {\n    nothing = 1;\n}", "kernels.cu", "compute_80")


def test_nvrtc_of_torch_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc-builtins.so.13.0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: package)
    for version, wanted in (
        ("12.8", ["libcaffe2_nvrtc.so", "libnvrtc.so.12", "libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"]),
        ("13.0", ["libcaffe2_nvrtc.so", "libnvrtc.so.13", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert [Path(candidate).name for candidate in nvrtc._candidates()] == wanted


# -- the driver


DEVICE = torch.device("cuda", 3)
IMAGE = b"\x7fELF\0image, longer than its first zero"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Replaces the driver's library by functions that run kernels compiled for the host."""
    library = host_library(800)
    library.driver_stream.restype = ctypes.c_void_p
    opened = {"libcuda.so.1": library}
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: opened[name])
    stream = 0x7000_0000_0000_5000
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream + device.index))
    return library


def test_a_module_launches_on_torchs_stream_in_torchs_context(driver: ctypes.CDLL) -> None:
    module = nvrtc.DriverModule(IMAGE, DEVICE, kernel_names(SOURCE.read_text()))
    kernels = DeviceKernels(module)
    values, largest = torch.tensor([1.0, -4.0, 2.0]), torch.zeros(1, dtype=torch.int32)
    kernels.max_abs_into(values, largest)
    assert largest.view(torch.float32).item() == 4.0
    assert driver.driver_stream() == 0x7000_0000_0000_5003
    assert driver.driver_depth() == 0, "a context remains on the stack"
    # An update with twenty arguments of every kind, compared with the host's loop.
    results = []
    for kernel in (True, False):
        param, grad, out = torch.full((700,), 3.0), torch.linspace(-1, 1, 700), torch.zeros(700).bfloat16()
        optimizer = Adam([param], lr=0.1, weight_decay=0.1)
        buffers, coefficients = optimizer._advance(optimizer.param_groups[0], param)
        scalars = [v if isinstance(v, np.uint32) else np.float32(v) for v in (0.5, *coefficients)]
        if kernel:
            kernels.update("adam", [param, *buffers], grad, out, None, scalars)
        else:
            optimizer._update_on_cpu([param, *buffers, out], grad, scalars)
        results.append([param, *buffers, out])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))  # type: ignore[arg-type]


def test_refusals_of_the_driver_are_named(driver: ctypes.CDLL) -> None:
    with pytest.raises(KernelError, match=r"cuModuleLoadData on cuda:3: invalid argument \(1\)"):
        nvrtc.DriverModule(b"not an image of the driver", DEVICE, [])
    with pytest.raises(KernelError, match=r"cuModuleGetFunction on cuda:3: named symbol not found \(500\)"):
        nvrtc.DriverModule(IMAGE, DEVICE, ["adam", "missing"])
    with pytest.raises(KernelError, match=r"cuDeviceGet on cuda:9"):
        nvrtc.DriverModule(IMAGE, torch.device("cuda", 9), [])
    assert driver.driver_depth() == 0


# -- without kernels


@pytest.fixture
def messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> Callable[[], list[str]]:
    """Returns a function for the logged warnings; caches of compiled kernels and logged lines start empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device_kernels, "_compiled", {})
    monkeypatch.setattr("zeroaccel.logs._seen", set())
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    caplog.set_level(logging.WARNING, "zeroaccel")
    return lambda: caplog.messages


@pytest.mark.parametrize(("status", "is_old"), [(222, True), (209, True), (1, False)])
def test_an_old_driver_is_named_with_a_remedy(status: int, is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    module = object.__new__(nvrtc.DriverModule)
    module._device = torch.device("cuda", 3)
    module._driver = SimpleNamespace(cuModuleLoadData=lambda: status, cuGetErrorString=lambda status, words: None)
    with pytest.raises(KernelError, match=rf"cuModuleLoadData on cuda:3:  \({status}\)") as raised:
        module._call("cuModuleLoadData")
    said = "driver for CUDA 13.0: update the driver, or install a torch for the CUDA that nvidia-smi shows"
    assert str(raised.value).endswith(said) == is_old


def test_a_missing_compiler_is_named_once(messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["libnot-there.so"]))
    assert kernels_for(CUDA) is kernels_for(CUDA) is None
    assert len(messages()) == 1
    assert messages()[0].startswith("cuda:0: zeroaccel's kernels are not available")
    assert "libnvrtc was not found" in messages()[0]


class Compiler:
    """An `Nvrtc` that fails, or returns an image that no driver can load."""

    def __init__(self, failure: str | None) -> None:
        self._failure = failure
        self.compiled = 0

    def facts(self) -> tuple[str, ...]:
        return ("NVRTC of a test",)

    def target(self, capability: tuple[int, int]) -> str:
        return f"sm_{capability[0]}{capability[1]}"

    def compile(self, source: str, name: str, target: str) -> bytes:
        self.compiled += 1
        if self._failure is not None:
            raise KernelError(self._failure)
        return b"image"


def test_a_failure_to_compile_is_named_once(messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler("NVRTC for sm_80: device_kernels.cu(1): error")
    monkeypatch.setattr(device_kernels, "open_nvrtc", lambda: compiler)
    assert kernels_for(CUDA) is kernels_for(CUDA) is None
    assert compiler.compiled == 1
    assert len(messages()) == 1
    assert messages()[0].endswith("device_kernels.cu(1): error")


def test_a_driver_that_is_missing_is_named(messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    monkeypatch.setattr(device_kernels, "open_nvrtc", lambda: Compiler(None))
    assert kernels_for(CUDA) is None
    assert "the driver's library" in messages()[0]


def test_a_driver_that_torch_cannot_start_is_named(
    messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nMore")

    monkeypatch.setattr(device_kernels, "open_nvrtc", lambda: Compiler(None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    assert kernels_for(CUDA) is None
    assert messages()[0].endswith(": Found no NVIDIA driver on your system.")


@pytest.mark.parametrize(("built", "version", "words"), [("hip", "6.4", "for ROCm"), ("cuda", None, "without CUDA")])
def test_another_build_of_torch_is_named(
    built: str, version: str | None, words: str, messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, built, version)
    assert kernels_for(CUDA) is None
    assert messages()[0].endswith(f"this torch is built {words}")


def test_devices_are_compiled_for_once_each(messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, loaded = Compiler(None), []

    class Module:
        def __init__(self, image: bytes, device: torch.device, names: list[str]) -> None:
            assert "adam" in names
            loaded.append((image, device))

    monkeypatch.setattr(device_kernels, "open_nvrtc", lambda: compiler)
    monkeypatch.setattr(device_kernels, "DriverModule", Module)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    first, second = kernels_for(CUDA), kernels_for(torch.device("cuda"))
    assert isinstance(first, DeviceKernels)
    assert kernels_for(CUDA) is first
    assert kernels_for(torch.device("cuda", 1)) is second is not first
    assert loaded == [(b"image", CUDA), (b"image", torch.device("cuda", 1))]
    assert messages() == []
    assert kernels_for(torch.device("cpu")) is None
    assert compiler.compiled == 1  # the second device of this kind loads the first one's image
