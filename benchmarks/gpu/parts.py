"""The parts of the GPU benchmarks, each of at most ten minutes, the most informative first.

A part is a function of a `Run`. It adds each `Figure` immediately, so that a later failure does not lose it. If a part
lacks its tools (an interpreter with DeepSpeed, a sanitizer), the note of a figure says so.
"""

from __future__ import annotations

import collections
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from figures import Figure
from plans import PLANS, SIZES
from torch import Tensor
from workloads import Workload

ROOT = Path(__file__).resolve().parents[2]


class Run:
    """A running part.

    Args:
        size: size of the workloads, a name in `SIZES`.
        seconds: time limit of the part.
        report: function that gets each figure.
        predictions: predictions by "plan/quantity".
    """

    def __init__(
        self, size: str, seconds: float, report: Callable[[Figure], None], predictions: dict[str, float]
    ) -> None:
        self.size = size
        self.seconds = seconds
        self._report = report
        self._predictions = predictions

    def add(self, name: str, value: float | None, unit: str = "", *, key: str = "", note: str = "") -> None:
        """Adds a figure; `key` names its prediction."""
        self._report(Figure(name, value, unit, self._predictions.get(key), note))

    def skip(self, name: str, why: str) -> None:
        """Adds a figure that could not be read."""
        self.add(name, None, note=f"skipped: {why}")


def device_milliseconds(call: Callable[[], object], count: int = 20) -> float:
    """Returns the device's time of a call, the mean of `count` in a row, without the host's part of each."""
    call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / count


def milliseconds(call: Callable[[], object], count: int = 5) -> float:
    """Returns the median time of a call, synchronizing the device before and after."""
    call()
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return sorted(times)[count // 2] * 1e3


# -- one process


def machine(run: Run) -> None:
    """Bandwidth of the device, its link and its memory: the upper bounds for all other parts."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    versions = (
        f"{properties.name}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}"
    )
    run.add("device memory", properties.total_memory / 2**30, "GiB", note=versions)
    run.add("processors", os.cpu_count(), "cores")
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    run.add("copy on the device", 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6, "GB/s")
    device = source[: 1 << 28]
    for pinned in (True, False):
        host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=pinned)
        kind = "pinned" if pinned else "pageable"

        def to_device(host: Tensor = host) -> None:
            device.copy_(host, non_blocking=True)

        def to_host(host: Tensor = host) -> None:
            host.copy_(device, non_blocking=True)

        run.add(f"{kind} memory to the device", host.numel() / milliseconds(to_device) / 1e6, "GB/s")
        run.add(f"device to {kind} memory", host.numel() / milliseconds(to_host) / 1e6, "GB/s")


def start(run: Run) -> None:
    """The first minutes: time of each start phase and of the first steps, and the devices in use."""
    from zeroaccel.ops.cupy_kernels import KernelError, open_cupy

    begun = time.perf_counter()

    def passed(name: str) -> None:
        nonlocal begun
        torch.cuda.synchronize()
        now = time.perf_counter()
        run.add(name, now - begun, "s")
        begun = now

    # Not device 0: a thread that does not select a device would then use a second one.
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    passed("a context")
    try:
        open_cupy()
        passed("importing CuPy")
        launch_step_kernels(device)
        passed("kernels of a step, compiled or from CuPy's cache")
        run.add("kernels of a step from CuPy's cache, in a new process", _seconds_from_cache(), "s")
    except KernelError as error:
        run.skip("kernels", str(error))
    begun = time.perf_counter()
    work = Workload("stage 3, both on host", run.size)
    passed("initialize")
    for name in ("first", "second", "third"):
        work.step()
        passed(f"{name} step")
    with tempfile.TemporaryDirectory() as folder:
        work.engine.save_checkpoint(folder)
    passed("checkpoint")
    used = _devices_used()
    if used is None or torch.cuda.device_count() == 1:
        run.skip("devices with memory of this process", "one device, or no nvidia-smi that sees this process")
    else:
        run.add("devices with memory of this process", used, "of 1")
    work.close()


def launch_step_kernels(device: torch.device) -> None:
    """Launches the kernels of a step once: norm, decisions and AdamW of bf16 gradients."""
    from zeroaccel.ops.device_kernels import compile_kernels

    kernels = compile_kernels(device)
    grad, largest = torch.ones(8, dtype=torch.bfloat16, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    kernels.max_abs_into(grad, largest)
    kernels.square_sums_into(grad, largest, torch.zeros(2, dtype=torch.int64, device=device))
    state = [torch.ones(8, device=device) for _ in range(3)]
    scalars = [np.float32(1), np.uint32(1), *(np.float32(value) for value in (1, 0, 0.1, 0.9, 0.1, 1, 1e-8, -0.1))]
    kernels.update("adam", state, grad, torch.empty_like(grad), None, scalars)


def _seconds_from_cache() -> float:
    """Returns the time in which a process that has imported CuPy gets the kernels that another one has compiled."""
    program = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(ROOT)]}\n"
        "import time, torch\n"
        "from parts import launch_step_kernels\n"
        "from zeroaccel.ops.cupy_kernels import open_cupy\n"
        "device = torch.device('cuda', torch.cuda.device_count() - 1)\n"
        "torch.zeros(1, device=device)\n"
        "open_cupy()\n"
        "begun = time.perf_counter()\n"
        "launch_step_kernels(device)\n"
        "print(time.perf_counter() - begun)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(found.stdout.splitlines()[-1])


def host_microseconds(call: Callable[[], object], count: int = 200) -> float:
    """Returns the host's time of one call, without waiting for the device; so few that its queue does not fill."""
    call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - begun
    torch.cuda.synchronize()
    return seconds / count * 1e6


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _devices_used() -> int | None:
    """Returns the number of devices on which nvidia-smi shows memory of this process, or None if it shows none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    devices = {line.split(",")[1].strip() for line in lines if line.split(",")[0].strip() == str(os.getpid())}
    return len(devices) or None


def promise(run: Run) -> None:
    """README's claim: equal losses, gradient norms and weights at every stage and place, with AdamW and with SGD."""
    from two_ranks import EXACT, results, with_sgd

    for optimizer, change in (("AdamW", dict), ("SGD with momentum", with_sgd)):
        first = None
        for name, config in EXACT.items():
            found = results(change(config))
            first = first or found
            run.add(f"{optimizer}, {name}", float(found == first), "", note="" if found == first else f"{found}")


def tests(run: Run) -> None:
    """tests/gpu: the promise between stages, the bits of the kernels, pinned memory."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "--tb",
        "short",
        "-rf",
    ]
    command += ["-W", "default"]  # this machine's libraries may be newer and have unknown warnings
    begun = time.perf_counter()
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=run.seconds)
    print(found.stdout[-6000:], found.stderr[-2000:])
    last = found.stdout.strip().splitlines()[-1] if found.stdout.strip() else "no output"
    run.add("tests/gpu", time.perf_counter() - begun, "s", note=f"exit {found.returncode}: {last}")


def kernels(run: Run) -> None:
    """The kernels of a step beside torch's fused AdamW and norm, in milliseconds for 1e9 elements."""
    from zeroaccel.comm.quantized import INT4, INT8, dequantize, dequantize_add, quantize
    from zeroaccel.ops import Adam
    from zeroaccel.ops.reductions import max_abs_into, square_sums_into

    numel = 200_000_000 if run.size == "large" else 20_000_000
    per = 1e9 / numel
    master = torch.randn(numel, device="cuda")
    grad, out = master.bfloat16(), torch.empty(numel, dtype=torch.bfloat16, device="cuda")
    control = torch.tensor([0.5, 1.0], device="cuda")
    for kind in ("fp32", "bf16", "int8"):
        optimizer = Adam([master], moments_dtype=kind)
        group = optimizer.param_groups[0]

        def step(optimizer: Adam = optimizer, group: dict[str, object] = group) -> None:
            optimizer.step_shard(group, master, grad, grad_scale=control, out=out)

        run.add(
            f"AdamW, {kind} moments, bf16 gradient", per * device_milliseconds(step), "ms", key=f"kernels/adam {kind}"
        )
        del optimizer
    param = torch.nn.Parameter(master.clone())
    param.grad = grad.float()
    fused = torch.optim.AdamW([param], fused=True)
    run.add("torch's fused AdamW, fp32 gradient", per * device_milliseconds(fused.step), "ms")
    del param, fused
    largest = torch.zeros(1, dtype=torch.int32, device="cuda")
    sums = torch.zeros(2, dtype=torch.int64, device="cuda")
    found = per * device_milliseconds(lambda: max_abs_into(grad, largest))
    run.add("largest magnitude, bf16", found, "ms", key="kernels/max")
    run.add(
        "sums of squares, bf16",
        per * device_milliseconds(lambda: square_sums_into(grad, largest, sums)),
        "ms",
        key="kernels/squares",
    )
    norm = device_milliseconds(lambda: torch.linalg.vector_norm(grad, dtype=torch.float32))
    run.add("torch's norm, bf16", per * norm, "ms")
    tiny = grad[:4096]
    host = host_microseconds(lambda: max_abs_into(tiny, largest))
    run.add("host time of a launch with 4 arguments", host, "us")
    optimizer = Adam([master[:4096].clone()])
    group = optimizer.param_groups[0]
    host = host_microseconds(
        lambda: optimizer.step_shard(group, group["params"][0], tiny, grad_scale=control, out=out[:4096])
    )
    run.add("host time of an AdamW step, a launch with 20 arguments", host, "us")
    total = torch.zeros(numel, device="cuda")
    for codec, name in ((INT8, "int8"), (INT4, "int4")):
        code = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device="cuda")
        calls: dict[str, Callable[[], None]] = {
            "quantize": lambda codec=codec, code=code: quantize(grad, codec, code),  # type: ignore[misc]
            "dequantize": lambda codec=codec, code=code: dequantize(code, codec, out),  # type: ignore[misc]
            "dequantize_add": lambda codec=codec, code=code: dequantize_add(code, codec, total),  # type: ignore[misc]
        }
        for call, function in calls.items():
            run.add(f"{call} {name}", per * device_milliseconds(function), "ms", key=f"kernels/{call} {name}")


def waits(run: Run) -> None:
    """Calls of one step at which the host waits: those that torch's debug mode finds, and waits for events."""
    for name in PLANS:
        work = Workload(name, run.size)
        for _ in range(3):
            work.step()
        torch.cuda.synchronize()
        places = _waits_of(work.step)
        note = ", ".join(f"{count} x {place}" for place, count in places.most_common(4))
        run.add(f"waits of the host, {name}", sum(places.values()), "per step", key=f"{name}/waits", note=note)
        work.close()


def _waits_of(step: Callable[[], object]) -> collections.Counter[str]:
    """Returns how often the host waits in a call, by file and line."""
    places: collections.Counter[str] = collections.Counter()
    synchronize = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        caller = sys._getframe(1)
        places[f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"] += 1
        synchronize(event)

    torch.cuda.Event.synchronize = counted  # the debug mode does not find it
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.Event.synchronize = synchronize
    places.update(f"{Path(wait.filename).name}:{wait.lineno}" for wait in seen if "synchron" in str(wait.message))
    return places


def overlap(run: Run) -> None:
    """Time of a step, and the part of the copies that overlaps with computation."""
    for name in PLANS:
        work = Workload(name, run.size)
        for _ in range(3):
            work.step()
        run.add(f"step, {name}", milliseconds(work.step), "ms", key=f"{name}/ms")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work.step()
            torch.cuda.synchronize()
        spans: dict[str, list[tuple[float, float]]] = {"copies": [], "kernels": []}
        for event in profile.events():
            is_copy = "HtoD" in event.name or "DtoH" in event.name
            spans["copies" if is_copy else "kernels"].append((event.time_range.start, event.time_range.end))
        copies, kernels_time, both = (
            union_ms(intervals) for intervals in (*spans.values(), [*spans["copies"], *spans["kernels"]])
        )
        run.add(f"kernels, {name}", kernels_time, "ms", note=f"{len(spans['kernels'])} launches")
        run.add(f"copies, {name}", copies, "ms", note=f"{copies + kernels_time - both:.1f} ms of it beside kernels")
        work.close()


def union_ms(spans: Sequence[tuple[float, float]]) -> float:
    """Returns the length in milliseconds of the union of spans in microseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


def memory(run: Run) -> None:
    """Peaks of the caching allocator, beside the stream model's."""
    for name in PLANS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work = Workload(name, run.size)
        for _ in range(4):
            work.step()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        allocated, reserved = (stats[f"{kind}_bytes.all.peak"] / 2**30 for kind in ("allocated", "reserved"))
        note = f"reserved {reserved:.2f} GiB, {stats['num_alloc_retries']} retries"
        run.add(f"peak, {name}", allocated, "GiB", key=f"{name}/peak GiB", note=note)
        work.close()


# -- several processes


def ranks(run: Run) -> None:
    """Two ranks over NCCL on this device: equal bits with all stages, offload and the exact parts of ZeRO++."""
    text = on_two_ranks(run, "two_ranks.py", 29555)
    for name, verdict in verdicts(text):
        run.add(name, float(verdict == "same"), "", note=verdict)
    construction, _, steps = text.partition("STEPS BEGIN")
    run.add("communicators made at construction", construction.count("Init COMPLETE"))
    # Only the first plan counts: later plans create further groups.
    run.add("communicators made in steps", steps.partition("STEPS END")[0].count("Init COMPLETE"), "of 0")


def meshes(run: Run) -> None:
    """Two ranks over NCCL on this device: the largest relative difference of losses from those of a plain loop."""
    for name, verdict in verdicts(on_two_ranks(run, "mesh_ranks.py", 29557)):
        try:
            run.add(name, float(verdict))
        except ValueError:
            run.skip(name, verdict)


def verdicts(text: str) -> list[tuple[str, str]]:
    """Returns name and result of each line that begins with FIGURE."""
    lines = [line.removeprefix("FIGURE ") for line in text.splitlines() if line.startswith("FIGURE ")]
    return [(name, verdict) for name, _, verdict in (line.partition(": ") for line in lines)]


def on_two_ranks(run: Run, script: str, port: int) -> str:
    """Runs two ranks on this device; adds how they end or why they cannot run, and returns the output of rank 0."""
    # NCCL allows two ranks on one device if their host names differ; they communicate over lo.
    environment = {
        **os.environ,
        **{"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        **{"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
        **{"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"},
        **{"NCCL_NVLS_ENABLE": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "MASTER_PORT": str(port)},
    }
    path = str(Path(__file__).with_name(script))
    with tempfile.TemporaryDirectory() as folder:
        logs = [open(Path(folder, f"rank{rank}"), "w+") for rank in range(2)]  # noqa: SIM115
        started = [
            subprocess.Popen(
                [sys.executable, path],
                env={**environment, "RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"},
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + 0.9 * run.seconds
        for process in started:
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
            log.close()
    print(texts[0][-20000:])
    if "Duplicate GPU" in texts[0]:
        run.skip("two ranks on one device", "this NCCL refuses them (Duplicate GPU)")
    else:
        run.add("ranks that ended well", sum(process.returncode == 0 for process in started), "of 2")
    return texts[0]


def sanitizer(run: Run) -> None:
    """Torch's check of stream order around each plan; unlike the stream model, it does not check host memory."""
    script = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]\n"
        "from workloads import PLANS, Workload\n"
        "for name in PLANS:\n"
        "    work = Workload(name, 'small')\n"
        "    [work.step() for _ in range(3)]\n"
        "    work.close()\n"
        "    print('FINE', name, flush=True)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=0.5 * run.seconds,
    )
    complaints = found.stderr.count("CSAN detected")
    fine = found.stdout.count("FINE")
    run.add("complaints of torch's sanitizer", complaints, "", note=f"{fine} of {len(PLANS)} plans ran through")
    memcheck = shutil.which("compute-sanitizer")
    if memcheck is None:
        run.skip("memory errors of the kernels", "no compute-sanitizer on this machine")
        return
    command = [memcheck, "--tool", "memcheck", sys.executable, "-m", "pytest", "tests/gpu", "-q", "-k", "kernels"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=0.45 * run.seconds)
    summary = [line for line in found.stdout.splitlines() if "ERROR SUMMARY" in line]
    errors = float(summary[-1].split()[3]) if summary else None
    run.add("memory errors of the kernels", errors, "", note=summary[-1] if summary else found.stdout[-200:])


def side_by_side(run: Run) -> None:
    """The same step by plain torch with fused AdamW, FSDP2, and DeepSpeed where it is installed; ratios to ours."""
    from contenders_on_gpu import deepspeed_step, fsdp2_step, torch_step

    ours = {}
    for name in PLANS:
        work = Workload(name, run.size)
        ours[name] = milliseconds(work.step)
        work.close()
    plain = milliseconds(torch_step(SIZES[run.size]))
    run.add("plain torch, fused AdamW", plain, "ms", note=f"ours, stage 2: {ours['stage 2'] / plain:.2f}x")
    sharded = milliseconds(fsdp2_step(SIZES[run.size]))
    run.add("FSDP2", sharded, "ms", note=f"ours, stage 3: {ours['stage 3'] / sharded:.2f}x")
    for name in ("stage 2", "stage 2, optimizer on host", "stage 3, both on host"):
        try:
            theirs = milliseconds(deepspeed_step(SIZES[run.size], PLANS[name]))
        except ImportError:
            run.skip(f"DeepSpeed, {name}", "DeepSpeed is not installed")
            continue
        run.add(f"DeepSpeed, {name}", theirs, "ms", note=f"ours: {ours[name] / theirs:.2f}x")


def largest(run: Run) -> None:
    """The largest decoder that trains in 32 GB of device memory, with optimizer and parameters on the host."""
    from largest_model import MODELS

    train_largest(run, [name for name in MODELS if "residual masters, bf16" in name])


def train_largest(run: Run, names: Sequence[str]) -> None:
    """Trains the first of these models that the host's memory holds and the engine accepts."""
    from host_memory import grown_nbytes
    from largest_model import MODELS, host_nbytes, train

    from zeroaccel.errors import ConfigError

    deadline = time.monotonic() + 0.9 * run.seconds
    free = grown_nbytes(int(max(host_nbytes(MODELS[name]) for name in names) / 0.95))
    for name in names:
        needed = host_nbytes(MODELS[name])
        if needed > 0.95 * free:
            run.skip(name, f"{needed / 1e9:.0f} GB of host memory, {free / 1e9:.0f} free")
            continue
        begun = time.perf_counter()

        def passed(phase: str, name: str = name) -> None:
            nonlocal begun
            now = time.perf_counter()
            run.add(f"{name}, {phase}", now - begun, "s")
            begun = now

        try:
            for found in train(MODELS[name], deadline, passed):
                wanted = needed / found.numel
                note = (
                    f"{found.numel / 1e9:.1f}e9 parameters, step {found.seconds:.2f} s, loss {found.losses[0]:.3f} to"
                    f" {found.losses[-1]:.3f}, peak {found.peak_nbytes / 1e9:.1f} GB of 32, host"
                    f" {found.host_nbytes / found.numel:.2f} bytes per parameter ({wanted:.2f} expected),"
                    f" {found.locked_nbytes / 1e9:.1f} GB page-locked"
                )
                run.add(f"{name}, batch {found.batch}", found.teraflops, "TFLOPS by 6 N T", note=note)
        except ConfigError as error:
            run.skip(name, str(error).replace("\n", " "))
            continue
        return


PARTS: dict[str, Callable[[Run], None]] = {
    measure.__name__: measure
    for measure in (
        *(machine, start, tests, promise, kernels, waits, overlap, memory),
        *(ranks, meshes, sanitizer, side_by_side, largest),
    )
}
"""Parts by name, in order."""
