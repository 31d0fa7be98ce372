"""The kernels by CuPy: their instructions, their launches, and each reason to do without them.

The stand-in for CuPy is `tests/cuda_model/fake_cupy.py`; the last tests hold it against CuPy, where that is installed.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda_model.fake_cupy import FakeCupy, Function, Launch
from tests.support import nvrtc
from tests.unit.ops.kernels_on_host import host_kernels, host_library, run_on_host
from tests.unit.ops.test_device_kernels import assert_same, random, spread
from zeroaccel.comm import quantized
from zeroaccel.logs import logger
from zeroaccel.ops import Adam, cupy_kernels, device_kernels, reductions
from zeroaccel.ops.cupy_kernels import OPTIONS, KernelError, KernelModule, kernel_names, open_cupy, with_constants
from zeroaccel.ops.device_kernels import MANY, SOURCE, DeviceKernels, kernels_for, load_kernels

CUDA = torch.device("cuda", 0)
ARCHITECTURES = [80, 100, *(pytest.param(each, marks=pytest.mark.slow) for each in (70, 75, 86, 89, 90, 120))]
# CuPy appends these to a program's options, besides the architecture; the compiler follows the last of two.
OF_CUPY = ("-ftz=true", "--device-as-default-execution-space")


# -- instructions


def body_of(ptx: str, kernel: str) -> str:
    found = re.search(rf"\.entry {kernel}\((.*?)^\}}", ptx, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{kernel} is not in the PTX"
    return found[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ptx_rounds_each_operation_once(architecture: int) -> None:
    if architecture not in nvrtc.architectures():
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    source = SOURCE.read_text()
    ptx = nvrtc.compile_ptx(source, [*OPTIONS, *OF_CUPY, f"-arch=compute_{architecture}"])
    # Divisions and roots are single PTX instructions, which the driver expands with correct rounding.
    # The squares of the norm have one that is written so, in float64, which rounds their sum once.
    assert ptx.count("fma.rn.f64") == body_of(ptx, "square_sums").count("fma.rn.f64") > 0
    ptx = ptx.replace("fma.rn.f64", "")
    contracted_or_rough = [r"\bfma\.", r"\bmad\.(rn|rz|f)", r"\.ftz", r"\.approx", r"\.full", r"\bmul\.f(32|64)"]
    assert [pattern for pattern in contracted_or_rough if re.search(pattern, ptx)] == []
    assert re.findall(r"\b(?:add|sub)\.f(?:32|64)", ptx) == []  # the compiler may contract them without .rn
    for kernel in kernel_names(source):
        body_of(ptx, kernel)
    for kernel in ("adam", "adam_blocks", "adagrad"):
        assert "div.rn.f32" in body_of(ptx, kernel)
        assert "sqrt.rn.f32" in body_of(ptx, kernel)
    for kernel in ("adam", "adam_blocks", "lion", "sgd", "square_sums", "encode"):
        assert "ld.global.v4.u32" in body_of(ptx, kernel), "no load of four elements at once"
    assert "div.rn.f64" in body_of(ptx, "finalize")
    assert "sqrt.rn.f64" in body_of(ptx, "finalize")
    assert ("redux.sync" in ptx) == (architecture >= 80)


def test_the_options_that_cupy_adds_flush_subnormal_numbers_in_other_sources() -> None:
    """So the test above would see it."""
    plain = 'extern "C" __global__ void f(float* a) { a[0] = __fadd_rn(a[1], a[2]); }'
    assert "add.rn.f32" in nvrtc.compile_ptx(plain, OPTIONS)
    assert "add.rn.ftz.f32" in nvrtc.compile_ptx(plain, [*OPTIONS, *OF_CUPY])


# Values of FIXED parameters: bf16, with fp32 moments, and int8 codes.
CONSTANTS = {"adam": (1, 0, 1), "lion": (1, 0, 1), "encode": (1, 127, 512), "decode": (1, 127, 512, 0), "max_abs": (1,)}


# -- launches


DEVICE = torch.device("cuda", 3)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces torch's streams and devices; returns the current device of this thread, then those before."""
    devices = [3]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        devices.insert(0, device.index)
        yield
        devices.pop(0)

    stream = 0x7000_0000_0000_5000
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream + device.index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    return devices


@pytest.mark.parametrize("thread_device", [3, 0])
def test_launches_use_torchs_stream_and_device(thread_device: int, current: list[int]) -> None:
    current[0] = thread_device
    seen = []

    def run(launch: Launch) -> None:
        seen.append((launch.name, launch.block, launch.stream, current[0]))
        run_on_host(host_library(800), launch)

    kernels = DeviceKernels(KernelModule(FakeCupy(run), SOURCE.read_text(), DEVICE))
    values, largest = torch.tensor([1.0, -4.0, 2.0]), torch.zeros(1, dtype=torch.int32)
    kernels.max_abs_into(values, largest)
    assert largest.view(torch.float32).item() == 4.0
    assert seen == [("max_abs", (256, 1, 1), 0x7000_0000_0000_5003, 3)]
    assert current == [thread_device]
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


_OTHER = "install another release of CuPy, pip install 'zeroaccel[cuda13]' --upgrade, and report the text if it remains"


@pytest.mark.parametrize(
    ("fails", "said", "fix"),
    [
        ({"compile": RuntimeError("kernels.cu(2): error")}, r"on cuda:3: RuntimeError: kernels.cu\(2\)", _OTHER),
        (
            {"compile": RuntimeError('Failure finding "libnvrtc.so.13 or libnvrtc.so.12"')},
            "Failure finding",
            "CuPy finds no compiler: pip install 'cupy-cuda13x[ctk]'",
        ),
        (
            {"compile": RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: too new")},
            "UNSUPPORTED_PTX_VERSION",
            "the driver is too old for CUDA 13.0: update it",
        ),
        (
            {"compile": PermissionError(13, "Permission denied", "/cache/ab.cubin")},
            "Permission denied: '/cache/ab.cubin'",
            "set CUPY_CACHE_DIR to a folder that only you can write to",
        ),
        (
            {"max_abs": RuntimeError("CUDA_ERROR_NOT_FOUND: named symbol")},
            "on cuda:3: RuntimeError: CUDA_ERROR_NOT",
            _OTHER,
        ),
        ({"launch": RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")}, "max_abs on cuda:3: RuntimeError: CUDA_E", ""),
    ],
)
@pytest.mark.usefixtures("current")
def test_refusals_are_named_with_a_remedy(
    fails: dict[str, Exception], said: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def load_and_launch() -> None:
        module = KernelModule(FakeCupy(fails=fails), SOURCE.read_text(), DEVICE)
        DeviceKernels(module).max_abs_into(torch.zeros(3), torch.zeros(1, dtype=torch.int32))

    with pytest.raises(KernelError, match=said) as raised:
        load_and_launch()
    assert raised.value.fix == fix
    assert str(raised.value).endswith(fix)


def _adam(kernels: DeviceKernels) -> list[torch.Tensor]:
    moments = torch.rand(2, 5003, generator=random(1)).bfloat16()
    state, out = [torch.linspace(-1, 1, 5003), *moments.clone()], torch.zeros(5003).bfloat16()
    scalars = [
        np.float32(0.5),
        np.uint32(7),
        *(np.float32(value) for value in (0.9, 0.1, 0.1, 0.9, 0.1, 1, 1e-8, -0.1)),
    ]
    kernels.update("adam", state, torch.linspace(1, -2, 5003).bfloat16(), out, None, scalars)
    return [*state, out]


def _encode(kernels: DeviceKernels) -> list[torch.Tensor]:
    codes = torch.full((3, quantized.INT8.nbytes(4000)), 7, dtype=torch.uint8)
    kernels.encode(spread(12_000, 3).bfloat16().view(3, 4000), codes, quantized.INT8.format)
    return [codes]


def _decode(kernels: DeviceKernels) -> list[torch.Tensor]:
    codes = torch.randint(0, 60, (2, quantized.INT4.nbytes(4000)), dtype=torch.uint8, generator=random(2))
    out = torch.zeros(2, 4000)
    kernels.decode(codes, out, quantized.INT4.format)
    return [out]


def _square_sums(kernels: DeviceKernels) -> list[torch.Tensor]:
    values, largest, sums = spread(5003, 4).half(), torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    kernels.max_abs_into(values, largest)
    kernels.square_sums_into(values, largest, sums)
    return [largest, sums]


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize(
    ("launch", "name", "constants"),
    [
        (_adam, "adam", "grad_kind = 1; moment_kind = 1; out_kind = 1;"),
        (_encode, "encode", "kind = 1; levels = 127; block = 512;"),
        (_decode, "decode", "kind = 0; levels = 7; block = 256; adds = 0;"),
        (_square_sums, "square_sums", "kind = 2;"),
    ],
)
def test_a_kernel_is_compiled_for_the_constants_of_its_launch(
    launch: Callable[[DeviceKernels], list[torch.Tensor]], name: str, constants: str
) -> None:
    """Its source has this kernel alone, and it gives the bits of the whole file's."""
    cupy = FakeCupy(lambda one: run_on_host(host_library(800, cupy.sources[-1]), one))
    kernels = DeviceKernels(KernelModule(cupy, SOURCE.read_text(), DEVICE))
    assert kernel_names(cupy.sources[0]) == ["mark_changed", "write_facts", "largest_of_facts", "finalize"]
    assert_same(launch(kernels), launch(host_kernels()))
    assert kernel_names(cupy.sources[-1]) == [name]
    assert f"{{ {constants}" in cupy.sources[-1]
    compiled = len(cupy.sources)
    cupy.run = lambda one: None
    launch(kernels)
    assert len(cupy.sources) == compiled


def _norms() -> None:
    values, largest, sums = (
        torch.ones(9).bfloat16(),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
    )
    reductions.max_abs_into(values, largest)
    reductions.square_sums_into(values, largest, sums)


def _sums_of_codes() -> None:
    values, numel = torch.ones(2, 700).bfloat16(), quantized.INT4.nbytes(700)
    codes = torch.zeros(2, numel, dtype=torch.uint8)
    quantized.quantize_rows(values, quantized.INT4, codes)
    quantized.sum_rows(codes.view(2, 1, numel), quantized.INT4, values, 0, torch.empty(1, 700))


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize(
    ("load", "launch"),
    [
        (lambda device: reductions.load_kernels_of_norms([torch.bfloat16], device), _norms),
        (lambda device: quantized.load_kernels_of_sums(quantized.INT4, device), _sums_of_codes),
    ],
)
def test_backward_loads_no_kernel(
    load: Callable[[torch.device], None], launch: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = FakeCupy(lambda one: run_on_host(host_library(800, cupy.sources[-1]), one))
    kernels = DeviceKernels(KernelModule(cupy, SOURCE.read_text(), DEVICE))
    for module in (reductions, quantized, device_kernels):
        monkeypatch.setattr(module, "kernels_for", lambda device: kernels)
    load(torch.device("cpu"))
    compiled = len(cupy.sources)
    cupy.run = lambda one: None
    launch()
    assert len(cupy.sources) == compiled > 1


def test_the_compiler_drops_the_decisions_about_constants() -> None:
    whole = nvrtc.compile_ptx(SOURCE.read_text(), [*OPTIONS, *OF_CUPY])
    for name, values in CONSTANTS.items():
        ptx = nvrtc.compile_ptx(with_constants(SOURCE.read_text(), {name: values}), [*OPTIONS, *OF_CUPY])
        assert ptx.count(".entry") == 1
        assert body_of(ptx, name).count(";") < 0.75 * body_of(whole, name).count(";")
        assert "v4.u32" in body_of(ptx, name), "no access to 16 bytes at once"


def test_the_stand_in_takes_what_cupy_takes() -> None:
    launches: list[Launch] = []
    function, stream = Function(FakeCupy(launches.append), "f"), SimpleNamespace(ptr=5)
    words = np.arange(MANY, dtype=np.uint64).view(device_kernels._STRUCTURE)
    function((2, 3), (4,), [None, np.uint64(7), np.float32(1.5), words], 0, stream)
    values = [bytes(8), np.uint64(7).tobytes(), np.float32(1.5).tobytes(), np.arange(MANY, dtype=np.uint64).tobytes()]
    assert launches == [Launch("f", (2, 3, 1), (4, 1, 1), values, 5)]
    for wrong in (7, torch.zeros(1), np.zeros(2)):
        with pytest.raises(TypeError, match="CuPy does not take"):
            function((1,), (1,), [wrong], 0, stream)


# -- without kernels


@pytest.fixture
def messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> Callable[[], list[str]]:
    """Returns a function for the logged warnings; CuPy counts as installed, and its folder is empty."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(device_kernels, "_compiled", {})
    monkeypatch.setattr("zeroaccel.logs._seen", set())
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(cupy_kernels, "installed_cupy", lambda: ["cupy-cuda12x"])
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    caplog.set_level(logging.WARNING, "zeroaccel")
    return lambda: caplog.messages


INSTALL = {
    "12.9": "pip install 'zeroaccel[cuda12]'",
    "13.0": "pip install 'zeroaccel[cuda13]'",
    "11.8": "pip install cupy-cuda11x",
}


@pytest.mark.parametrize("version", INSTALL)
def test_a_missing_cupy_is_named_once(
    version: str, messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(cupy_kernels, "find_spec", lambda name: None)
    assert kernels_for(CUDA) is kernels_for(CUDA) is None
    assert messages() == [
        "cuda:0: zeroaccel's kernels are not available; updates, norms and codes run as torch operations, with the same"
        f" results but several times the memory traffic: CuPy is not installed; {INSTALL[version]}"
    ]


def test_a_cupy_for_another_cuda_is_named(messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert kernels_for(CUDA) is None
    assert messages()[0].endswith(
        "CuPy 14.0 (fake) is built for CUDA 12, torch for CUDA 13.0; pip uninstall cupy-cuda12x, then"
        " pip install 'zeroaccel[cuda13]'"
    )


def test_an_old_cupy_is_named(messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(version="12.3.0"))
    assert kernels_for(CUDA) is None
    assert messages()[0].endswith("CuPy 12.3.0 is older than 13; pip install 'zeroaccel[cuda12]'")


def test_a_cupy_that_cannot_be_imported_is_named(
    messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "broken" / "cupy"
    folder.mkdir(parents=True)
    framed = "raise ImportError('====\\nFailed to import CuPy.\\n\\nOriginal error:\\n  libfoo.so: no file\\n====')"
    (folder / "__init__.py").write_text(framed)
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.syspath_prepend(str(folder.parent))
    assert kernels_for(CUDA) is None
    assert messages()[0].endswith(
        "CuPy cannot be imported: ImportError: libfoo.so: no file; pip uninstall cupy-cuda12x, then"
        " pip install 'zeroaccel[cuda12]'"
    )


@pytest.mark.parametrize("case", ["a file", "another user", "everyone", "read-only"])
def test_a_bad_folder_of_kernels_is_named(
    case: str, messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    if case == "a file":
        folder.touch()
        said = "File exists"
    else:
        folder.mkdir()
    if case == "another user":
        said = f"belongs to user {os.getuid()}, and you are user {os.getuid() + 1}"
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
    if case == "everyone":
        folder.chmod(0o777)
        said = "can be changed by every user of this machine"
    if case == "read-only":  # root may write anywhere
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        said = "cannot be written"
    assert kernels_for(CUDA) is None
    assert f"CuPy's folder of compiled kernels, {folder}" in messages()[0]
    assert f"{said}; set CUPY_CACHE_DIR to a folder that only you can write to" in messages()[0]


@pytest.mark.usefixtures("messages")
def test_a_new_folder_of_kernels_belongs_to_the_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, variable in ((tmp_path / "kernels", str(tmp_path / "kernels")), (tmp_path / ".cupy/kernel_cache", "")):
        monkeypatch.setenv("CUPY_CACHE_DIR", variable)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert isinstance(open_cupy(), FakeCupy)
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_driver_that_torch_cannot_start_is_named(
    messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nMore")

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


def test_devices_are_compiled_for_once_each(
    messages: Callable[[], list[str]], current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    current[0] = 1
    first, second = kernels_for(CUDA), kernels_for(torch.device("cuda"))
    assert isinstance(first, DeviceKernels)
    assert kernels_for(CUDA) is first
    assert kernels_for(torch.device("cuda", 1)) is second is not first
    assert messages() == []
    assert kernels_for(torch.device("cpu")) is None
    assert len(cupy.sources) == 2


def test_a_kernel_that_does_not_load_at_the_start_is_named_and_none_is_used(
    messages: Callable[[], list[str]], current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    current[0] = 0
    monkeypatch.setitem(
        sys.modules, "cupy", FakeCupy(fails={"max_abs": OSError(28, "No space left", "/cache/a.cubin")})
    )

    def launch() -> None:
        kernels = kernels_for(CUDA)
        assert kernels is not None
        kernels.max_abs_into(torch.zeros(3), torch.zeros(1, dtype=torch.int32))

    for _ in range(2):
        load_kernels(CUDA, launch)
    load_kernels(torch.device("cpu"), launch)
    assert kernels_for(CUDA) is None
    assert messages() == [
        "cuda:0: zeroaccel's kernels are not available; updates, norms and codes run as torch operations, with the same"
        " results but several times the memory traffic: CuPy 14.0 (fake) on cuda:0: OSError: [Errno 28] No space left:"
        " '/cache/a.cubin'; set CUPY_CACHE_DIR to a folder that only you can write to"
    ]


_ON_CPU = """
import sys
import torch
import zeroaccel

model = torch.nn.Linear(8, 8)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
engine, *_ = zeroaccel.initialize(model=model, config=config)
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
print("steps:", engine.global_steps)
offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
engine, *_ = zeroaccel.initialize(model=torch.nn.Linear(8, 8), config={**config, "zero_optimization": offload})
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
assert "cupy" not in sys.modules
assert "torch._dynamo" not in sys.modules  # its import takes longer than the rest of the start
"""


def test_training_on_a_cpu_imports_neither_cupy_nor_the_compiler_of_torch(tmp_path: Path) -> None:
    # A process of its own: those of `run_job` have imported the compiler with transformers.
    done = subprocess.run([sys.executable, "-c", _ON_CPU], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "steps: 1" in done.stdout


# -- CuPy itself


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed (pip install cupy-cuda12x)", exc_type=ImportError)


def _names(signature: str) -> list[str]:
    """Returns the parameters of a signature in the words of Cython."""
    parts = signature.partition("(")[2].rpartition(")")[0].replace("()", "").split(",")
    return [part.partition("=")[0].split()[-1] for part in parts if part.strip() != "*"]


def test_the_stand_in_has_the_signatures_of_cupy(cupy: Any) -> None:
    documented = _names(cupy.RawModule.__doc__.splitlines()[0])
    assert documented == list(inspect.signature(FakeCupy.RawModule).parameters)[1:]
    assert _names(cupy.RawModule.get_function.__doc__.splitlines()[0]) == ["self", "name"]
    assert "kernel" in dir(cupy.RawKernel)
    assert cupy.cuda.runtime.runtimeGetVersion() // 1000 in (12, 13)
    cupy.RawModule(code="", options=OPTIONS, backend="nvrtc")  # compiles later


def test_cupys_launch_takes_the_arguments_of_ours(cupy: Any) -> None:
    """A function of no module: its launch packs the arguments, and ends at the driver."""
    function = cupy.cuda.function.Function.__new__(cupy.cuda.function.Function)
    words = np.zeros(MANY, np.uint64).view(device_kernels._STRUCTURE)
    arguments = [None, np.uint64(1), np.float32(1), np.float64(1), np.int32(1), np.uint32(1), np.int64(1), words]
    stream = SimpleNamespace(ptr=5)
    with pytest.raises(RuntimeError, match=r"cuda|CUDA"):
        function((1, 2), (256,), arguments, 0, stream)
    for grid, values, place in (([1], [], stream), ((1,), [np.zeros(2)], stream), ((1,), [torch.zeros(1)], stream)):
        with pytest.raises((TypeError, ValueError)):
            function(grid, (1,), values, 0, place)
    with pytest.raises(AttributeError, match="ptr"):
        function((1,), (1,), [], 0, SimpleNamespace())


@pytest.fixture
def compiled(cupy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """Returns the options of each program that CuPy compiles, to machine code that it need not load."""
    compiler, seen = cupy.cuda.compiler, []

    class Program:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            pass

        def compile(self, options: tuple[str, ...], log_stream: Any = None) -> tuple[bytes, None]:
            seen.append(options)
            return b"machine code", None

    monkeypatch.setattr(compiler, "_NVRTCProgram", Program)
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: ("-arch=sm_90", "cubin"))
    module = SimpleNamespace(load=lambda image: None, _set_mapping=lambda mapping: None)
    monkeypatch.setattr(compiler, "function", SimpleNamespace(Module=lambda: module))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    if hasattr(compiler, "_DiskKernelCacheBackend"):  # since 14, which reads the variable when it is imported
        monkeypatch.setattr(compiler, "_kernel_cache_backend", compiler._DiskKernelCacheBackend())
    return seen


def test_cupy_adds_only_options_that_these_tests_know(cupy: Any, compiled: list[tuple[str, ...]]) -> None:
    cupy.cuda.compiler._compile_module_with_cache("", OPTIONS, arch="90")
    [*_, options] = compiled  # CuPy compiles an empty program first, for the hash of its own headers
    assert options[: len(OPTIONS)] == OPTIONS
    assert {option for option in options[len(OPTIONS) :] if not option.startswith("-arch")} <= set(OF_CUPY)


def test_cupy_compiles_a_damaged_kernel_again(cupy: Any, compiled: list[tuple[str, ...]], tmp_path: Path) -> None:
    def count() -> int:
        before = len(compiled)
        cupy.cuda.compiler._compile_module_with_cache("// source", OPTIONS, arch="90")
        return len(compiled) - before

    assert count() > 0
    assert count() == 0
    [file] = (tmp_path / "kernels").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert count() == 1
    assert count() == 0
