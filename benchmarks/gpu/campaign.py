"""The campaign: stages in two calls, ordered by the value of their figures for the next changes.

A call has a limit, and so has each of its stages; `__main__.py` runs them. A stage is a part (`parts.py`): a function
of a `Run` that adds each figure at once.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parts import Run, device_milliseconds, kernels, machine, milliseconds, on_two_ranks, train_largest, verdicts
from plans import PLANS, SIZES, plan
from workloads import Workload

__all__ = ["CALLS", "STAGES", "Call"]

_HOST = {"device": "cpu"}
_ROUNDS = 2


def _numel(run: Run, large: int) -> int:
    return large if run.size == "large" else 1 << 16


def _thread_counts() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    return sorted({max(1, cores // 2), max(1, cores - 2), cores})


# -- call 1


def facts(run: Run) -> None:
    """The machine: its memory and threads, both directions of the bus, page-locking, and file systems."""
    from zeroaccel.offload import host_buffers, page_locked

    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    note = f"transparent huge pages: {huge.read_text().strip()}" if huge.exists() else ""
    run.add("free host memory", page_locked.free_nbytes() / 1e9, "GB", note=note)
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    note = f"threads of the first core: {siblings.read_text().strip()}" if siblings.exists() else ""
    run.add("threads", len(os.sched_getaffinity(0)), note=note)
    machine(run)
    numel, before = _numel(run, 128_000_000), torch.get_num_threads()
    target, left, right = torch.zeros(numel), torch.ones(numel), torch.ones(numel)
    for threads in _thread_counts():
        torch.set_num_threads(threads)
        rate = 12 * numel / milliseconds(lambda: torch.add(left, right, alpha=0.5, out=target)) / 1e6
        run.add(f"triad in host memory, {threads} threads", rate, "GB/s")
    torch.set_num_threads(before)
    _both_directions(run)
    for prefaulted in (False, True):
        nbytes = _numel(run, 8 << 30)
        kind = "written before" if prefaulted else "as mapped"
        faulted, locked = _locking_seconds(nbytes, prefaulted)
        run.add(f"locking memory, {kind}", 1e9 * (faulted + locked) / nbytes, "s/GB", note=f"writing: {faulted:.2f} s")
    begun = time.perf_counter()
    slab = host_buffers.aligned_bytes(host_buffers.aligned_nbytes(nbytes), pinned=True)
    run.add("locking memory, as an engine does", 1e9 * (time.perf_counter() - begun) / nbytes, "s/GB")
    note = f"of {nbytes / 1e9:.1f} GB; less: see the warning in the log"
    run.add("page-locked", page_locked.locked_nbytes() / 1e9, "GB", note=note)
    del slab
    for name, folder in _file_systems().items():
        _file_speed(run, name, folder)


def _both_directions(run: Run) -> None:
    nbytes = _numel(run, 1 << 28)
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    hosts[0].zero_()

    def copies() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    run.add("both directions of the bus at once", 2 * nbytes / milliseconds(copies) / 1e6, "GB/s")


def _locking_seconds(nbytes: int, prefaulted: bool) -> tuple[float, float]:
    """Returns the seconds of writing pages, by all threads, and of locking them."""
    from zeroaccel.offload import page_locked

    memory = page_locked.mapped_bytes(nbytes, pinned=False)
    begun = time.perf_counter()
    if prefaulted:
        memory.zero_()
    written = time.perf_counter()
    reason = page_locked.register_pages(memory.data_ptr(), nbytes)
    ended = time.perf_counter()
    if reason:
        raise RuntimeError(reason)
    page_locked.unregister_pages(memory.data_ptr())
    return written - begun, ended - written


def _file_systems() -> dict[str, str]:
    return {"disk": tempfile.gettempdir(), "memory file system": "/dev/shm"}


def _has_room(run: Run, name: str, folder: str, nbytes: float) -> bool:
    """Returns True if a folder has room for files of this size; skips the figure if not."""
    free = shutil.disk_usage(folder).free
    if free < 1.1 * nbytes:
        run.skip(name, f"{folder} has room for {free / 1e9:.1f} GB, not for {nbytes / 1e9:.1f}")
    return free >= 1.1 * nbytes


def _file_speed(run: Run, name: str, folder: str) -> None:
    if not _has_room(run, f"writing and synchronizing a file, {name}", folder, _numel(run, 1 << 30)):
        return
    content = os.urandom(1 << 20) * (_numel(run, 1 << 30) >> 20 or 1)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        begun = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - begun
    run.add(f"writing and synchronizing a file, {name}", len(content) / seconds / 1e9, "GB/s", note=folder)


def host_update(run: Run) -> None:
    """The update of 2e8 elements in host memory: moments, threads, squares, and masters as residuals."""
    from zeroaccel.ops import Adam, dispatch, residual
    from zeroaccel.ops.reductions import max_abs, norm_exponent, square_sums

    numel = _numel(run, 200_000_000)
    master = torch.randn(numel)
    grad, out = master.bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    residuals, ties = torch.zeros(numel, dtype=torch.int16), torch.zeros(residual.ties_nbytes(numel), dtype=torch.uint8)
    try:
        for threads in _thread_counts():
            dispatch.use_threads(threads)
            for kind, nbytes in (("fp32", 28.0), ("bf16", 20.0), ("int8", 16.125)):
                optimizer = Adam([master], moments_dtype=kind)

                def step(optimizer: Adam = optimizer) -> None:
                    optimizer.step_shard(optimizer.param_groups[0], master, grad, grad_scale=0.5, out=out)

                found = milliseconds(step, 3)
                note = f"{nbytes * numel / found / 1e6:.0f} GB/s"
                run.add(f"AdamW, {kind} moments, {threads} threads", found * 1e9 / numel, "ms per 1e9", note=note)
            exponent = norm_exponent(max_abs(grad))
            calls: dict[str, Callable[[], object]] = {
                "largest magnitude": lambda: max_abs(grad),
                "sums of squares": lambda exponent=exponent: square_sums(grad, exponent),  # type: ignore[misc]
                "masters from residuals": lambda: residual.join(out, residuals, ties, master),
                "residuals of masters": lambda: residual.split(master, residuals, ties),
            }
            for name, call in calls.items():
                run.add(f"{name}, {threads} threads", milliseconds(call, 3) * 1e9 / numel, "ms per 1e9")
    finally:
        dispatch.use_threads(None)


_CORES = {**_HOST, "ratio": 1.0}
_UPDATES: Mapping[str, dict[str, Any]] = {
    "stage 2, on the device": plan(2),
    "optimizer on host": plan(2, offload_optimizer=_CORES),
    "optimizer on host, in step()": plan(2, offload_optimizer={**_CORES, "update_during": "step"}),
    # Early updates are of use in steps that do not clip.
    "optimizer on host, in the backward": {
        **plan(2, offload_optimizer={**_CORES, "update_during": "backward"}),
        "gradient_clipping": 1e6,
    },
    "half of the optimizer on host": plan(2, offload_optimizer={**_HOST, "ratio": 0.5}),
}


def host_training(run: Run) -> None:
    """A step with the optimizer on the host, by its phases and overlaps, beside the device's and DeepSpeed's."""
    from contenders_on_gpu import deepspeed_step

    for name, config in _UPDATES.items():
        work = Workload(name, run.size, config)
        work.step()
        run.add(f"step, {name}", milliseconds(work.step, 4), "ms")
        run.add(f"forward and backward, {name}", milliseconds(work.forward_backward, 2), "ms")
        with tempfile.TemporaryDirectory() as folder, work.engine.record_trace(f"{folder}/trace.json") as recorded:
            for _ in range(2):
                work.step()
        for phase, seconds in recorded.result.mean_split(rank=0).items():
            run.add(f"{phase}, {name}", 1e3 * seconds, "ms")
        work.close()
    try:
        step = deepspeed_step(SIZES[run.size], _UPDATES["optimizer on host"])
        run.add("step, DeepSpeed, optimizer on host", milliseconds(step, 4), "ms")
    except ImportError:
        run.skip("DeepSpeed, optimizer on host", "DeepSpeed is not installed")


def seven_billion(run: Run) -> None:
    """7e9 parameters with ordinary float32 states in 32 GB of device memory, everything else on the host."""
    train_largest(run, ("7B, float32 states", "1B, float32 states"))


def contenders(run: Run) -> None:
    """Ours, plain torch, FSDP2 and DeepSpeed in turns on this card, eager and with compiled blocks."""
    from contenders_on_gpu import deepspeed_step, fsdp2_step, torch_step

    size = SIZES[run.size]
    makers: dict[str, Callable[[bool], tuple[Callable[[], object], Callable[[], None]]]] = {
        "zeroaccel, stage 2": lambda compiles: _own("stage 2", run.size, compiles),
        "plain torch, bf16 states": lambda compiles: (torch_step(size, compiles=compiles), gc.collect),
        "zeroaccel, stage 3": lambda compiles: _own("stage 3", run.size, compiles),
        "FSDP2": lambda compiles: (fsdp2_step(size, compiles=compiles), gc.collect),
        "DeepSpeed, stage 2": lambda compiles: (deepspeed_step(size, PLANS["stage 2"], compiles=compiles), gc.collect),
    }
    found: dict[str, list[float]] = {}
    for turn in range(_ROUNDS):
        for compiles in (False, True):
            for name, make in list(makers.items()):
                full = f"{name}, {'compiled' if compiles else 'eager'}"
                try:
                    step, close = make(compiles)
                    step()
                    found.setdefault(full, []).append(milliseconds(step, 4))
                except ImportError:
                    run.skip(name, f"{name.partition(',')[0]} is not installed")
                    del makers[name]
                    continue
                except Exception as error:  # of a compiler, say; the others are still of use
                    traceback.print_exc()
                    run.skip(full, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}")
                    continue
                run.add(f"{full}, turn {turn + 1}", found[full][-1], "ms", key=f"{name.removeprefix('zeroaccel, ')}/ms")
                close()
                del step, close
                gc.collect()
                torch.cuda.empty_cache()
    for full, times in found.items():
        ours = found.get(f"zeroaccel, stage 2, {full.rpartition(' ')[2]}")
        note = f"zeroaccel, stage 2: {statistics.median(ours) / statistics.median(times):.2f}x" if ours else ""
        run.add(f"{full}, median of the turns", statistics.median(times), "ms", note=note)


def _own(name: str, size: str, compiles: bool) -> tuple[Callable[[], object], Callable[[], None]]:
    work = Workload(name, size, compiles=compiles)
    return work.step, work.close


# -- call 2


def largest_int8(run: Run) -> None:
    """The largest decoder in 32 GB of device memory with 8-bit moments and the rest on the host."""
    train_largest(
        run, ("13B, residual masters, int8 moments", "11B, int8 moments", "7B, int8 moments", "1B, int8 moments")
    )


def more_kernels(run: Run) -> None:
    """The kernels by events; those of quantized bases and changed weights; and the host's time of a launch."""
    from zeroaccel.comm.level_codes import MXFP4, NF4, decode
    from zeroaccel.comm.quantized import FP8, dequantize, quantize
    from zeroaccel.ops.changed import mark_changed

    kernels(run)
    numel = _numel(run, 1 << 27)
    per = 1e9 / numel
    values, out = (torch.zeros(numel, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    code = torch.zeros(FP8.nbytes(numel), dtype=torch.uint8, device="cuda")
    bits = torch.zeros(numel // 8, dtype=torch.uint8, device="cuda")
    codes = {
        name: torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device="cuda")
        for name, codec in (("nf4", NF4), ("mxfp4", MXFP4))
    }
    calls: dict[str, Callable[[], object]] = {
        "quantize e4m3": lambda: quantize(values, FP8, code),
        "dequantize e4m3": lambda: dequantize(code, FP8, out),
        "decode nf4": lambda: decode(codes["nf4"], NF4, out),
        "decode mxfp4": lambda: decode(codes["mxfp4"], MXFP4, out),
        "mark changed weights": lambda: mark_changed(values, out, bits),
    }
    for name, call in calls.items():
        run.add(name, per * device_milliseconds(call), "ms for 1e9")


def two_ranks_more(run: Run) -> None:
    """Two ranks on this device: gathers in e4m3, and 32 experts over two ranks."""
    for name, verdict in verdicts(on_two_ranks(run, "experts_on_two_ranks.py", 29559)):
        try:
            run.add(name, float(verdict), "ms" if "ms" in name else "")
        except ValueError:
            run.skip(name, verdict)


def files_and_states(run: Run) -> None:
    """States moved to the host and back, twice, and a checkpoint to a disk and to memory."""
    work = Workload("stage 2", run.size)
    work.step()
    for turn in range(2):
        for name, call in (("to the host", work.engine.offload_states), ("back", work.engine.reload_states)):
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize()
            run.add(f"states {name}, turn {turn + 1}", time.perf_counter() - begun, "s")
    for name, folder in _file_systems().items():
        if not _has_room(run, f"checkpoint, {name}", folder, 14.0 * sum(p.numel() for p in work.engine.parameters())):
            continue
        with tempfile.TemporaryDirectory(dir=folder) as place:
            begun = time.perf_counter()
            work.engine.save_checkpoint(place)
            seconds = time.perf_counter() - begun
            nbytes = float(sum(file.stat().st_size for file in Path(place).rglob("*") if file.is_file()))
            note = f"{nbytes / 1e9:.1f} GB in {seconds:.1f} s"
            run.add(f"checkpoint, {name}", nbytes / seconds / 1e9, "GB/s", note=note)
    work.close()


@dataclass(frozen=True)
class Call:
    """Stages that one loan of a device runs.

    Attributes:
        seconds: limit of the call.
        stages: name of a stage -> its limit in seconds.
    """

    seconds: float
    stages: Mapping[str, float]


CALLS = {
    1: Call(500, {"facts": 45, "host_update": 65, "host_training": 115, "seven_billion": 155, "contenders": 100}),
    2: Call(300, {"largest_int8": 140, "more_kernels": 40, "two_ranks_more": 60, "files_and_states": 60}),
}
"""By number."""

STAGES: dict[str, Callable[[Run], None]] = {
    stage.__name__: stage
    for stage in (
        *(facts, host_update, host_training, seven_billion, contenders),
        *(largest_int8, more_kernels, two_ranks_more, files_and_states),
    )
}
"""By name."""
