"""Measures time and memory of saving, loading and converting checkpoints, compared with DeepSpeed.

    python benchmarks/checkpoint.py FOLDER [--ranks 2] [--layers 8] [--deepspeed-python PYTHON] [--json FILE]

Starts its own ranks (CPU, gloo, stage 3, bf16, AdamW). Each round runs every variant, and the table shows medians,
because the speed of a disk varies. "plain" is the lower bound of a save on this disk: each rank writes the bytes of
its file with one write and one fsync. "copy" is the lower bound of a conversion: a program reads a file of the same
size and writes it in pieces of 4 MiB, with one fsync. Memory is the proportional set size without the page cache
(Pss_Anon and Pss_Shmem of /proc/PID/smaps_rollup), sampled every 10 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 3
WIDTH = 1024
ROWS = 256
COPY = """
import os, sys
with open(sys.argv[1], "rb", buffering=0) as source, open(sys.argv[2], "wb", buffering=0) as target:
    while data := source.read(1 << 22):
        target.write(data)
    os.fsync(target.fileno())
"""


def main() -> None:
    """Runs all measurements, prints a table, and optionally writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--loads", type=int, nargs="*", default=[1, 3, 4])
    parser.add_argument("--parts", nargs="*", default=["save", "stall", "loads", "convert"])
    parser.add_argument("--deepspeed-python", help="interpreter that has DeepSpeed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-does", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_does:
        print(json.dumps(as_deepspeed_rank(options) if options.rank_does == "deepspeed" else as_rank(options)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"layers": options.layers, "ranks": options.ranks, "rounds": ROUNDS}
    parts: dict[str, Callable[[], Any]] = {
        "save": lambda: start_ranks(options, options.ranks, "save"),
        "stall": lambda: start_ranks(options, options.ranks, "stall"),
        "loads": lambda: {count: start_ranks(options, count, "load") for count in options.loads},
        "convert": lambda: convert(options),
    }
    for name, measure in parts.items():
        if name in options.parts or name == "save":  # the others load its checkpoint
            report[name] = measure()
            if name == "stall":
                report[name]["share_of_save"] = report[name]["seconds"] / report["save"]["save_seconds"]
            report["load_average"] = os.getloadavg()[0]
            print(json.dumps({name: report[name]}, indent=2), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=2) + "\n")
    shutil.rmtree(options.folder)


def convert(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and memory of conversions to one safetensors file, and of a copy of that file."""
    folder, out = options.folder, options.folder / "out"
    contenders = {
        "zeroaccel": [sys.executable, str(folder / "zero_to_fp32.py"), "-t", "round0", str(folder), str(out / "a")]
    }
    if options.deepspeed_python:
        theirs = folder / "deepspeed"
        start_ranks(options, options.ranks, "deepspeed", options.deepspeed_python)
        script = str(theirs / "zero_to_fp32.py")
        contenders["deepspeed"] = [
            options.deepspeed_python,
            script,
            str(theirs),
            str(out / "b"),
            "--safe_serialization",
        ]
        ours = [sys.executable, "-m", "zeroaccel.cli", "zero-to-fp32", str(theirs), str(out / "c")]
        contenders["zeroaccel, DeepSpeed's checkpoint"] = ours
    measured: dict[str, list[tuple[float, int]]] = {name: [] for name in [*contenders, "copy"]}
    nbytes = 0
    for _ in range(ROUNDS + 1):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for name, command in contenders.items():
            measured[name].append(watched(command))
        made = out / "a" / "model.safetensors"
        nbytes = made.stat().st_size
        measured["copy"].append(watched([sys.executable, "-c", COPY, str(made), str(out / "copy")]))
    rows = {
        name: {
            "seconds": statistics.median(seconds for seconds, _ in taken[1:]),
            "peak_nbytes": max(peak for _, peak in taken),
        }
        for name, taken in measured.items()
    }
    for row in rows.values():
        row["speed_of_copy"] = rows["copy"]["seconds"] / row["seconds"]
    return {"output_nbytes": nbytes, **rows}


def watched(command: list[str]) -> tuple[float, int]:
    """Runs a program; returns (seconds, peak of its private memory in bytes)."""
    os.sync()
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(OSError):  # it may end during the read
            peak = max(peak, private_nbytes(process.pid))
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return time.perf_counter() - begin, peak


def private_nbytes(pid: int) -> int:
    """Returns the memory of a process without the page cache, in bytes; shared pages count in proportion."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in rollup if line.startswith(("Pss_Anon", "Pss_Shmem")))


def as_deepspeed_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Saves the same model with DeepSpeed."""
    import deepspeed
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(options.layers)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()
    begin = time.perf_counter()
    engine.save_checkpoint(str(options.folder / "deepspeed"))
    return {"save_seconds": time.perf_counter() - begin}


def start_ranks(options: argparse.Namespace, count: int, task: str, python: str = sys.executable) -> Any:
    """Runs a task on `count` ranks and returns the figures of rank 0."""
    words = [python, __file__, str(options.folder), "--layers", str(options.layers), "--rank-does", task]
    return start(words, count)


def start(command: list[str], count: int) -> Any:
    """Runs `command` on `count` ranks and returns the last line of rank 0, parsed as JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job["OMP_NUM_THREADS"] = max(1, (os.cpu_count() or 1) // count)
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdout=subprocess.PIPE,
        )
        for rank in range(count)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{' '.join(command)} failed on {count} ranks")
    return json.loads(outputs[0].splitlines()[-1])


def as_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Runs a task as one rank."""
    import torch
    from torch import nn

    import zeroaccel

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(options.layers)]
    beside = options.rank_does == "stall"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "checkpoint": {"async_save": beside, "staging_nbytes": 4 << 30},
    }
    engine, *_ = zeroaccel.initialize(nn.Sequential(*blocks), config=config)

    def forward_and_backward() -> None:
        engine.backward(engine(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean())

    if options.rank_does == "load":
        seconds = timed(engine, lambda: engine.load_checkpoint(options.folder, tag="round0"))
        read = engine.loaded
        return {
            "seconds": seconds,
            "kept_nbytes": read.requested_nbytes,
            "read_share": read.read_nbytes / read.requested_nbytes,
        }
    forward_and_backward()
    engine.step()
    if beside:
        return {
            "seconds": statistics.median(held_up(engine, options.folder, forward_and_backward) for _ in range(ROUNDS))
        }
    saves, plains, nbytes = [], [], 0
    for index in range(ROUNDS + 1):  # the first is for warming up
        tag = f"round{index}"
        saves.append(timed(engine, lambda tag=tag: engine.save_checkpoint(options.folder, tag=tag)))  # type: ignore[misc]
        file = next((options.folder / tag).glob(f"rank{engine.collectives.rank:05d}*"))
        content = file.read_bytes()
        nbytes = len(content)
        plains.append(timed(engine, lambda path=file, content=content: write_plainly(path, content)))  # type: ignore[misc]
        engine.collectives.barrier("looked at")
        if index and engine.collectives.rank == 0:
            shutil.rmtree(options.folder / tag)
    save, plain = statistics.median(saves[1:]), statistics.median(plains[1:])
    return {"file_nbytes": nbytes, "save_seconds": save, "plain_seconds": plain, "speed_of_plain": plain / save}


def held_up(engine: Any, folder: Path, forward_and_backward: Callable[[], None]) -> float:
    """Returns the seconds for which a background save blocks the main thread: its call, and before an update."""
    from zeroaccel.checkpoint.checkpointer import BackgroundSave

    call = timed(engine, lambda: engine.save_checkpoint(folder, tag="beside"))
    forward_and_backward()
    saving: BackgroundSave = engine.checkpointer._saving
    begin = time.perf_counter()
    saving.wait_copied()
    wait = time.perf_counter() - begin
    engine.step()
    engine.wait_for_checkpoint()
    return call + wait


def timed(engine: Any, call: Callable[[], object]) -> float:
    """Returns the seconds until every rank has finished."""
    engine.collectives.barrier("begin")
    begin = time.perf_counter()
    call()
    engine.collectives.barrier("end")
    return time.perf_counter() - begin


def write_plainly(path: Path, content: bytes) -> None:
    """Writes a file with one write and one fsync."""
    target = path.with_name(path.name + ".plain")
    with open(target, "wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    target.unlink()


if __name__ == "__main__":
    main()
